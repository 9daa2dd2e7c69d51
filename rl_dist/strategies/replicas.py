"""Replicas of a module: DistributedDataParallel and DataParallel.

Private parts of torch are used here and nowhere else for this. They were checked with torch 2.11,
2.12 and 2.13; `tests/strategies/test_replicas.py` fails where another release has changed them.
"""

from __future__ import annotations

import inspect
import math
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
)
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel import scatter

from rl_dist.process_group.world import World
from rl_dist.strategies.config import StrategyConfig

HOOKS = {"none": allreduce_hook, "bf16": bf16_compress_hook}


class OrderedDDP(TorchDDP):
    """DistributedDataParallel that orders its buckets before the first step.

    Torch's own puts gradients elsewhere in its first step than in those after it. A gradient's
    place decides in which order gloo's ring adds the ranks, so that a resumed run would round its
    first step differently on three and more.
    """

    # without the wrapper that loads torch.compile
    _inside_ddp_forward = contextmanager(inspect.unwrap(TorchDDP._inside_ddp_forward))

    def __init__(self, module: nn.Module, **options: Any) -> None:
        with _compiler_settings():
            super().__init__(module, **options)
        # as torch does after its first step; it does so once
        self.reducer._push_all_rebuilt_params()
        self.reducer._rebuild_buckets()

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        """Put the last parameters first: about the order in which gradients become ready."""
        parameters, sparse = super()._build_params_for_reducer()
        # torch keeps its first buckets there, and turns them itself
        way = 1 if self.find_unused_parameters else -1
        return parameters[::way], sparse[::way]


@contextmanager
def _compiler_settings() -> Iterator[None]:
    """Answer DDP's questions to torch.compile by its defaults, if it is not loaded.

    Loading it takes as long as loading torch.
    """
    if "torch._dynamo" in sys.modules:
        yield
        return
    defaults = SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer")
    torch._dynamo = SimpleNamespace(utils=defaults)  # type: ignore[assignment]
    try:
        yield
    finally:
        del torch._dynamo


def with_ddp(module: nn.Module, num_bytes: int, config: StrategyConfig, world: World) -> OrderedDDP:
    """Wrap a module; all its gradients, `num_bytes` in all, travel in one bucket."""
    with world.waiting("start of DistributedDataParallel"), warnings.catch_warnings():
        # newer torch wants another name for it, which 2.11 does not know
        warnings.filterwarnings("ignore", message=".*broadcast_buffers", category=FutureWarning)
        wrapped = OrderedDDP(
            module,
            device_ids=[world.device.index] if world.device.type == "cuda" else None,
            broadcast_buffers=False,  # their owner merges them over ranks
            gradient_as_bucket_view=True,
            find_unused_parameters=config.find_unused_parameters,
            bucket_cap_mb=math.ceil(num_bytes / 2**20) + 1,
        )
    hook: Any = HOOKS[config.gradient_compression]

    # without annotations, for torch compares them with its own types
    def reduce(state, bucket):  # type: ignore[no-untyped-def]
        world.gradients_ready()
        return hook(None, bucket)

    wrapped.register_comm_hook(None, reduce)
    return wrapped


class DataParallel(nn.DataParallel):
    """torch.nn.DataParallel for a module that names the batch axis of each input.

    Torch cuts every input along the same axis. A recurrent module's inputs have their batch on
    different ones (steps are [L, N, ...], states [N, S, H]). The class constant BATCH_AXES of the
    module holds the axes; the first is that of the outputs, too. Forward takes tensors and returns
    one, or a tuple of them.
    """

    def __init__(self, module: nn.Module, device_ids: Sequence[int]) -> None:
        self.axes: Sequence[int] = getattr(module, "BATCH_AXES", ())
        super().__init__(module, list(device_ids), dim=self.axes[0] if self.axes else 0)

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        """Return the inputs of each GPU, and their keyword arguments: none."""
        axes = self.axes or (0,) * len(inputs)
        parts = [
            scatter(tensor, device_ids, axis) for tensor, axis in zip(inputs, axes, strict=True)
        ]
        return [*zip(*parts, strict=True)], [{}] * len(parts[0])

    def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> list[Any]:
        """Run the replicas in threads, with autocast's type, which torch forgets."""
        enabled = torch.is_autocast_enabled("cuda")
        dtype = torch.get_autocast_dtype("cuda")

        def run(replica: nn.Module, *parts: Tensor) -> Any:
            with torch.autocast("cuda", dtype, enabled=enabled):
                return replica(*parts)

        return super().parallel_apply([partial(run, r) for r in replicas], inputs, kwargs)
