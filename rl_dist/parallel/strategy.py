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

import logging
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from rl_dist.errors import UserError
from rl_dist.parallel.config import COMPRESSIONS, HYBRID_FORMS, MODES, StrategyConfig, resolve_shard_size
from rl_dist.parallel.data_parallel import DataParallel, check_devices
from rl_dist.parallel.loaders import SharedLoader, shared_loader
from rl_dist.parallel.precision import autocast, autocast_dtype, loss_scaler, set_cuda_math
from rl_dist.process_group.hashes import parameter_hash, tensor_hash
from rl_dist.process_group.phases import section
from rl_dist.process_group.world import GROUP_TIMEOUT, World

if TYPE_CHECKING:
    from rl_dist.parallel.sharding import Shards

__all__ = [
    "COMPRESSIONS",
    "GRADIENT_BYTES_LOGGED",
    "HYBRID_FORMS",
    "MODES",
    "Strategy",
    "StrategyConfig",
    "parameter_hash",
    "resolve_shard_size",
    "tensor_hash",
]
GRADIENT_BYTES_LOGGED = "gradients of %d bytes"
logger = logging.getLogger(__name__)


class Strategy:
    """One way of training modules on the ranks of a world.

        strategy = Strategy(StrategyConfig(mode="ddp"), world)

    Raises:
        UserError: it cannot work here.
    """

    scheduled: Callable[..., Tensor] | None = None  # where forward and backward of a step have an order of their own

    def __init__(self, config: StrategyConfig, world: World) -> None:
        self.config, self.world = config, world
        self.mode = config.resolve(world.size)
        if self.mode == "auto":
            raise UserError("strategy auto has to be measured first, see rl_dist.parallel.choice; or name a mode")
        if self.mode == "dp":
            check_devices(world.device.type, len(config.device_ids), world.size)
        device_type = world.device.type
        config.check_device(device_type)
        if device_type == "cuda":
            set_cuda_math(config.precision, config.cudnn_autotune)
        self.scaler = loss_scaler(config.precision, device_type)
        self.overflowed = False  # the last step was skipped, and the loss scale may be the only reason
        self.module: nn.Module | None = None  # as wrapped last
        self.parameters: list[nn.Parameter] = []  # what an optimizer steps: shards in mode hybrid
        self.group: dist.ProcessGroup | None = None  # of gradients alone; None: the world's
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
        if isinstance(module, DistributedDataParallel | nn.DataParallel | DataParallel):
            raise UserError(f"wrap takes the bare module, got one in {type(module).__name__}: give its inner module")
        self.gradient_bytes = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
        logger.info(GRADIENT_BYTES_LOGGED, self.gradient_bytes)
        self.module = self._wrapped(module)
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        if self.mode == "hybrid":
            from rl_dist.parallel.sharding import Shards  # a second to import

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
            if config.backend and self.group is None:
                self.group = dist.new_group(backend=config.backend, timeout=GROUP_TIMEOUT)
            # Newer torch wants another name, which 2.10 does not know.
            warnings.filterwarnings("ignore", message=".*broadcast_buffers", category=FutureWarning)
            wrapped = OrderedDDP(
                module,
                device_ids=[device.index] if device.type == "cuda" else None,
                process_group=self.group,
                broadcast_buffers=False,  # buffers are merged over ranks by their owner, not overwritten
                gradient_as_bucket_view=config.gradient_as_bucket_view,
                static_graph=config.static_graph,
                find_unused_parameters=config.find_unused_parameters,
                bucket_cap_mb=config.bucket_mb or math.ceil(self.gradient_bytes / 2**20) + 1,
            )
        hook, group = COMPRESSIONS[config.gradient_compression], self.group
        # A lambda, because torch refuses the types of ours.
        wrapped.register_comm_hook(self.world, lambda world, bucket: _reduce(world, group, bucket, hook))
        return wrapped

    def end_update(self) -> None:
        """Make the module whole on every rank, once an update is done."""

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

    @contextmanager
    def reducing(self, loss: Tensor) -> Iterator[Tensor]:
        """Around `backward` of the loss that it gives: gradients are reduced over ranks.

        A loss that is not finite spoils the gradient, which tells the other ranks.
        """
        one = torch.ones_like(loss)
        with section("backward"), self.world.reducing():
            scaled = self.scaler.scale(loss) if self.scaler else loss
            yield scaled * torch.where(torch.isfinite(loss.detach()), one, one * torch.nan)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of this rank's loss, reduced over ranks; see `reducing`."""
        with self.reducing(loss) as scaled:
            scaled.backward()

    @section("optimizer")
    def step(self, optimizer: torch.optim.Optimizer, max_grad_norm: float = math.inf) -> tuple[Tensor, bool]:
        """Clip the reduced gradient and step, if it is finite: on all ranks, or on none.

        A loss scale that was too large falls, which `overflowed` tells.

        Returns:
            The norm of the reduced gradient before clipping, and whether the step was taken.

        Raises:
            UserError: the optimizer steps other parameters than `parameters`, or one of these was not used.
        """
        self._check_optimizer(optimizer)
        self._check_gradients(optimizer)
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

    def _check_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse what DistributedDataParallel would not reduce: buckets with a gap, parameters that it never saw."""
        if not isinstance(self.module, DistributedDataParallel):
            return
        gaps_are_fine = self.config.find_unused_parameters or self.config.static_graph
        if not gaps_are_fine and any(parameter.grad is None for parameter in self.parameters):
            named = self._inner.named_parameters()
            own = {id(parameter) for parameter in self.parameters}
            unused = [name for name, parameter in named if id(parameter) in own and parameter.grad is None]
            raise UserError(
                f"{len(unused)} parameter(s) took no part in this step, such as {unused[0]}: "
                "use StrategyConfig(find_unused_parameters=True), or freeze them with requires_grad_(False) before wrap"
            )
        known = {id(parameter) for parameter in self.parameters}
        for parameter in (each for group in optimizer.param_groups for each in group["params"]):
            if parameter.grad is not None and id(parameter) not in known:
                raise UserError(
                    f"the optimizer holds a parameter of shape {list(parameter.shape)} that was not there, or frozen, "
                    "when the module was wrapped: its gradient is not reduced; make it part of the module, then wrap"
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
        """Let go of the module and of a group that is its own; the world stays open.

        Over NCCL ranks may wait for each other here, watched as in any collective.
        """
        if self.group is not None and dist.is_initialized():  # else it went with the world
            nccl = self.config.backend == "nccl"
            with self.world.waiting("end of the gradients' group") if nccl else nullcontext():
                dist.destroy_process_group(self.group)
        self.module, self.parameters, self.shards, self.group = None, [], None, None


class OrderedDDP(DistributedDataParallel):
    """DistributedDataParallel whose buckets are the same in every step.

    Torch's own puts gradients elsewhere in its first step than in those after it. A gradient's place decides in which
    order gloo's ring adds the ranks, so that a resumed run would round its first step differently on three and more.
    Here alone stand parts of torch that it keeps to itself; `tests/test_ordered.py` tells when one changes.
    """

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        self.reducer._push_all_rebuilt_params()
        self.reducer._rebuild_buckets()  # what torch does after its first step; it does so once

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        """The last parameters first: about the order in which gradients become ready."""
        parameters, sparse = super()._build_params_for_reducer()
        way = 1 if self.find_unused_parameters else -1  # torch keeps its first buckets there, and turns them itself
        return parameters[::way], sparse[::way]


def _reduce(
    world: World, group: dist.ProcessGroup | None, bucket: dist.GradBucket, hook: Any
) -> torch.futures.Future[torch.Tensor]:
    """The mean over all ranks, by one of torch's hooks; the world learns when waiting begins."""
    world.gradients_ready()
    return hook(group, bucket)

