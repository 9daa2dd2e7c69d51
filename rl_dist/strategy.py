"""How a module is trained on the ranks of a world: one interface for every way.

    strategy = Strategy(StrategyConfig(mode="ddp"), world)
    module = strategy.wrap(module.to(world.device))
    for part, last in parts:  # one, or several whose gradients add up
        with strategy.accumulating(last):
            strategy.backward(loss_of(module(part)))
    grad_norm, stepped = strategy.step(optimizer, max_grad_norm=0.5)

The mean over ranks of the losses is what is differentiated; all ranks step together, or none does.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from rl_dist.data_parallel import DataParallel, check_devices
from rl_dist.loaders import SharedLoader, shared_loader
from rl_dist.precision import PRECISIONS, autocast, autocast_dtype, check_precision, loss_scaler, set_cuda_math
from rl_dist.sections import section
from rl_dist.world import UserError, World

if TYPE_CHECKING:
    from rl_dist.sharding import Shards

MODES = ("default", "none", "dp", "ddp", "hybrid", "auto")
HYBRID_FORMS = ("shard", "pipeline")
COMPRESSIONS = {"none": allreduce_hook, "bf16": bf16_compress_hook}
GRADIENT_BYTES_LOGGED = "gradients of %d bytes"
logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class StrategyConfig:
    """How gradients come together: StrategyConfig(mode="ddp").

    Args:
        mode: none (one rank only), dp (one process, several GPUs, see `rl_dist.data_parallel`), ddp, hybrid (see
            `rl_dist.sharding`), or default: none on one rank, ddp on several. auto stands for the one that
            `rl_dist.strategy_choice` finds.
        device_ids: GPUs of mode dp, the world's device first.
        batch_axes: where the inputs of forward have their batch, for mode dp; the last counts for all that follow,
            the first for the outputs.
        bucket_mb: of DistributedDataParallel's reductions; 0: one bucket for everything, the quickest for small
            models, where latency is what a reduction costs.
        static_graph: the same parameters take part in every step.
        gradient_as_bucket_view: gradients live in the buckets, which saves a copy of them.
        find_unused_parameters: some parameters may take no part in a step; costs a walk over the graph.
        hybrid_form: of mode hybrid. shard: parameters sharded over ranks; pipeline: two stages on pairs of ranks.
        shard_size: ranks that share one copy of gradients and optimizer state in mode hybrid; 0: those of a machine.
        gradient_compression: none, or bf16: gradients travel as bf16, half the bytes, rounded to 8 bits (ddp only).
        precision: see `rl_dist.precision`; forward passes must be inside `Strategy.autocast`.
        cudnn_autotune: cuDNN tries its algorithms for convolutions and keeps the fastest; for sizes that stay the same.

    Raises:
        UserError: unknown mode, or a size that cannot be.
    """

    mode: str = "default"
    device_ids: tuple[int, ...] = ()
    batch_axes: tuple[int, ...] = (0,)
    bucket_mb: float = 0.0
    static_graph: bool = False
    gradient_as_bucket_view: bool = True
    find_unused_parameters: bool = False
    hybrid_form: str = "shard"
    shard_size: int = 0
    gradient_compression: str = "none"
    precision: str = "auto"
    cudnn_autotune: bool = False

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise UserError(f"strategy must be one of {', '.join(MODES)}, got {self.mode!r}")
        if self.gradient_compression not in COMPRESSIONS:
            known = ", ".join(COMPRESSIONS)
            raise UserError(f"gradient_compression must be one of {known}, got {self.gradient_compression!r}")
        if self.precision not in PRECISIONS:
            raise UserError(f"precision must be one of {', '.join(PRECISIONS)}, got {self.precision!r}")
        if not 0 <= self.bucket_mb <= 10_000:
            raise UserError(f"bucket_mb must be 0..10000, got {self.bucket_mb}: 0 is one bucket")
        if self.shard_size < 0:
            raise UserError(f"shard_size must be at least 0, got {self.shard_size}: 0 is all ranks of a machine")
        if self.hybrid_form not in HYBRID_FORMS:
            raise UserError(f"hybrid_form must be one of {', '.join(HYBRID_FORMS)}, got {self.hybrid_form!r}")

    @property
    def pipelined(self) -> bool:
        """Whether ranks train in pairs, one stage each."""
        return self.mode == "hybrid" and self.hybrid_form == "pipeline"

    def resolve(self, num_ranks: int) -> str:
        """The mode on so many ranks: what default means there.

        Raises:
            UserError: it cannot be on this number of ranks; names the cure.
        """
        if self.mode == "dp" and num_ranks > 1:
            raise UserError(f"strategy dp works in one process, got {num_ranks} ranks; use ddp, or leave it out")
        if self.mode == "none" and num_ranks > 1:
            raise UserError(f"strategy none works with one rank only, got {num_ranks}; use ddp, or leave it out")
        if self.pipelined and num_ranks % 2:
            raise UserError(
                f"hybrid_form pipeline works on pairs of ranks, got {num_ranks}; use an even number, or --strategy ddp"
            )
        if self.mode == "hybrid" and not self.pipelined:
            resolve_shard_size(self.shard_size, num_ranks)
        mode = ("ddp" if num_ranks > 1 else "none") if self.mode == "default" else self.mode
        if self.gradient_compression != "none" and mode not in ("ddp", "auto"):
            raise UserError(
                f"gradient_compression {self.gradient_compression} works with strategy ddp, not {mode}: "
                "use --gradient_compression none"
            )
        if self.precision == "fp16" and mode == "hybrid":
            raise UserError("precision fp16 scales losses, which strategy hybrid cannot: use bf16, or --strategy ddp")
        return mode


def resolve_shard_size(shard_size: int, num_ranks: int) -> int:
    """How many ranks share one copy in mode hybrid; 0 takes those of this machine.

    Raises:
        UserError: it does not divide the ranks, or there is nothing to share out.
    """
    if num_ranks == 1:
        raise UserError("strategy hybrid shares out over several ranks, got 1; start more, or use --strategy none")
    size = shard_size or int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
    fitting = ", ".join(str(n) for n in range(2, num_ranks + 1) if num_ranks % n == 0)
    if size == 1:
        why = "shard_size 1" if shard_size else "one rank on this machine"
        raise UserError(f"strategy hybrid with {why} is ddp: use --strategy ddp, or --shard_size {fitting}")
    if num_ranks % size:
        raise UserError(f"shard_size {size} does not divide {num_ranks} ranks; use --shard_size {fitting}")
    return size


class Strategy:
    """One way of training modules on the ranks of a world.

        strategy = Strategy(StrategyConfig(mode="ddp"), world)

    Raises:
        UserError: it cannot work here.
    """

    def __init__(self, config: StrategyConfig, world: World) -> None:
        self.config, self.world = config, world
        self.mode = config.resolve(world.size)
        if self.mode == "auto":
            raise UserError("strategy auto has to be measured first, see rl_dist.strategy_choice; or name a mode")
        if self.mode == "dp":
            check_devices(world.device.type, len(config.device_ids), world.size)
        device_type = world.device.type
        check_precision(config.precision, device_type)
        if config.cudnn_autotune and device_type != "cuda":
            raise UserError("cudnn_autotune does nothing without a GPU: leave it out")
        if device_type == "cuda":
            set_cuda_math(config.precision, config.cudnn_autotune)
        self.scaler = loss_scaler(config.precision, device_type)
        self.overflowed = False  # the last step was skipped, and the loss scale may be the only reason
        self.module: nn.Module | None = None  # as wrapped last
        self.parameters: list[nn.Parameter] = []  # what an optimizer steps: shards in mode hybrid
        self.shards: Shards | None = None
        sharded = self.mode == "hybrid" and not config.pipelined
        self.shard_size = resolve_shard_size(config.shard_size, world.size) if sharded else 1
        self.gradient_bytes = self.steps = self.skipped = 0

    def wrap(self, module: nn.Module) -> nn.Module:
        """The module whose forward trains it; it must be on the world's device.

        Only a loss computed through the returned module's `forward` is reduced; calling the inner
        module directly trains replicas apart without any error.

        Raises:
            UserError: it cannot be trained in this way.
        """
        if self.config.pipelined:
            raise UserError("hybrid_form pipeline trains the cascaded policy only: use hybrid_form shard, or ddp")
        self.gradient_bytes = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
        logger.info(GRADIENT_BYTES_LOGGED, self.gradient_bytes)
        self.module = self._wrapped(module)
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        if self.mode == "hybrid":
            from rl_dist.sharding import Shards  # a second to import

            self.shards = Shards(module, self.shard_size, self.world)
            self.parameters = self.shards.parameters
        return self.module

    def _wrapped(self, module: nn.Module) -> nn.Module:
        if self.mode == "dp":
            return DataParallel(module, self.config.device_ids, self.config.batch_axes)
        return self._with_ddp(module) if self.mode == "ddp" else module

    def _with_ddp(self, module: nn.Module) -> nn.Module:
        config, device = self.config, self.world.device
        with self.world.waiting("start of DistributedDataParallel"), warnings.catch_warnings():
            # Newer torch wants another name, which 2.10 does not know.
            warnings.filterwarnings("ignore", message=".*broadcast_buffers", category=FutureWarning)
            wrapped = DistributedDataParallel(
                module,
                device_ids=[device.index] if device.type == "cuda" else None,
                broadcast_buffers=False,  # buffers are merged over ranks by their owner, not overwritten
                gradient_as_bucket_view=config.gradient_as_bucket_view,
                static_graph=config.static_graph,
                find_unused_parameters=config.find_unused_parameters,
                bucket_cap_mb=config.bucket_mb or math.ceil(self.gradient_bytes / 2**20) + 1,
            )
        hook = COMPRESSIONS[config.gradient_compression]
        # A lambda, because torch refuses the types of ours.
        wrapped.register_comm_hook(self.world, lambda world, bucket: _reduce(world, bucket, hook))
        return wrapped

    @contextmanager
    def accumulating(self, last: bool = True) -> Iterator[None]:
        """Around forward and backward of a part of a step; the last one reduces."""
        if self.shards:
            self.shards.accumulate(last)
        silent = isinstance(self.module, DistributedDataParallel) and not last
        with self.module.no_sync() if silent else nullcontext():  # type: ignore[union-attr, operator]
            yield

    def autocast(self) -> AbstractContextManager[None]:
        """Around a module's forward pass: matrix products in the strategy's precision."""
        return autocast(autocast_dtype(self.config.precision), self.world.device)

    @section("backward")
    def backward(self, loss: Tensor) -> None:
        """Add the gradient of this rank's loss, reduced over ranks.

        A loss that is not finite spoils the gradient, which tells the other ranks.
        """
        one = torch.ones_like(loss)
        with self.world.reducing():
            scaled = self.scaler.scale(loss) if self.scaler else loss
            scaled.backward(torch.where(torch.isfinite(loss), one, one * torch.nan))

    @section("optimizer")
    def step(self, optimizer: torch.optim.Optimizer, max_grad_norm: float = math.inf) -> tuple[Tensor, bool]:
        """Clip the reduced gradient and step, if it is finite: on all ranks, or on none.

        A loss scale that was too large falls, which `overflowed` tells.

        Returns:
            The norm of the reduced gradient before clipping, and whether the step was taken.

        Raises:
            UserError: the optimizer steps other parameters than `parameters`.
        """
        self._check_optimizer(optimizer)
        if isinstance(self.module, DistributedDataParallel) and not self.steps + self.skipped:
            with self.world.waiting("order of gradients"):  # else in the next forward, where nobody would look for it
                self.module.reducer._rebuild_buckets()
        if self.scaler:
            self.scaler.unscale_(optimizer)
        clip = self.shards.clip if self.shards else partial(nn.utils.clip_grad_norm_, self.parameters)
        grad_norm = clip(max_grad_norm)
        stepped = bool(torch.isfinite(grad_norm))  # the reduced norm: all ranks see the same
        if stepped:
            optimizer.step()
        if self.shards:
            self.shards.make_whole()
        if self.scaler:
            self.overflowed = not stepped and self.scaler.get_scale() > 1.0
            self.scaler.update()
        self.steps += stepped
        self.skipped += not stepped
        return grad_norm, stepped

    def _check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer of the module's own parameters would change nothing where shards have taken their place."""
        if not self.shards:
            return
        known = {id(parameter) for parameter in self.parameters}
        if any(id(parameter) not in known for group in optimizer.param_groups for parameter in group["params"]):
            raise UserError(
                "the optimizer holds parameters that strategy hybrid has replaced by shards: "
                "make it of strategy.parameters, after wrap"
            )

    def module_state(self) -> dict[str, Tensor]:
        """The whole `state_dict` of the module given to `wrap`.

        It is the same in every mode; all ranks must call.
        """
        return self.shards.module_state() if self.shards else self._inner.state_dict()

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The whole `state_dict` of an optimizer of `parameters`.

        It is the same in every mode; all ranks must call.
        """
        return self.shards.optimizer_state(optimizer) if self.shards else optimizer.state_dict()

    def load(
        self, weights: dict[str, Tensor], optimizer: torch.optim.Optimizer, optimizer_state: dict[str, Any]
    ) -> None:
        """Go on from whole states, saved in whatever mode by however many ranks."""
        if self.shards:
            self.shards.load(weights, optimizer, optimizer_state)
        else:
            self._inner.load_state_dict(weights)
            optimizer.load_state_dict(optimizer_state)

    @property
    def _inner(self) -> nn.Module:
        assert self.module is not None, "nothing was wrapped"
        if isinstance(self.module, DataParallel):
            return self.module.inner
        return self.module.module if isinstance(self.module, DistributedDataParallel) else self.module

    def loader(self, loader: DataLoader, *, training: bool = True, seed: int = 0) -> SharedLoader:
        """This rank's share of a DataLoader whose batch size is the total over ranks.

        Training: shuffled if `loader` shuffles, by `seed` and the number given to `set_epoch`; batch k holds the same
        samples on any number of ranks, and the incomplete last one is left out. Evaluation: in order, every sample
        once, without padding. Memory is pinned for CUDA; worker processes persist.

        Raises:
            UserError: the dataset has no length, the loader a sampler of its own, or the batch does not divide.
        """
        return shared_loader(loader, self.world, training=training, seed=seed)

    def synchronize(self) -> None:
        """Wait until every rank's device has done what was asked of it."""
        with self.world.waiting("synchronize"):
            if self.world.size > 1:
                dist.barrier()

    def stats(self) -> dict[str, Any]:
        """What was wrapped and how often it stepped."""
        return {
            "mode": self.mode,
            "ranks": self.world.size,
            "parameters": sum(p.numel() for p in self.parameters),
            "gradient_bytes": self.gradient_bytes,
            "steps": self.steps,
            "skipped_steps": self.skipped,
            **(self.shards.facts() if self.shards else {}),
        }

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs: the loss scale of fp16."""
        return {"loss_scaler": self.scaler.state_dict()} if self.scaler else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`; nothing of it need be there."""
        if self.scaler and "loss_scaler" in state:
            self.scaler.load_state_dict(state["loss_scaler"])

    def close(self) -> None:
        """Let go of the module; the world stays open."""
        self.module, self.parameters, self.shards = None, [], None


def _reduce(world: World, bucket: dist.GradBucket, hook: Any) -> torch.futures.Future[torch.Tensor]:
    """The mean over all ranks, by one of torch's hooks; the world learns when waiting begins."""
    world.gradients_ready()
    return hook(None, bucket)  # None: all ranks


def parameter_hash(module: nn.Module) -> str:
    """SHA-256 over the bytes of all parameters in order, wrapped or not."""
    return tensor_hash(*module.parameters())


def tensor_hash(*tensors: torch.Tensor) -> str:
    """SHA-256 over the bytes of tensors, one after the other."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(_raw(tensor))
    return digest.hexdigest()


def _raw(tensor: torch.Tensor) -> memoryview:
    copied = tensor.detach().to("cpu", copy=True)  # numpy pins storage for good, and whole parameters are freed
    return copied.contiguous().reshape(-1).view(torch.uint8).numpy().data
