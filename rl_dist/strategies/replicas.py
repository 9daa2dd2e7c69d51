"""Replicas of a module: DistributedDataParallel and DataParallel.

This module uses private parts of torch, which were checked with torch 2.11, 2.12 and 2.13.
`tests/strategies/test_replicas.py` fails if another release has changed them.
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

    torch's class orders them after the first step. The place of a gradient in its bucket
    decides in which order gloo's ring adds the ranks, so on three or more ranks a resumed run would
    round its first step differently from a run that was not interrupted.
    """

    # the method without the wrapper that loads torch.compile
    _inside_ddp_forward = contextmanager(inspect.unwrap(TorchDDP._inside_ddp_forward))

    def __init__(self, module: nn.Module, **options: Any) -> None:
        with _compiler_settings():
            super().__init__(module, **options)
        # torch does this once, after the first step
        self.reducer._push_all_rebuilt_params()
        self.reducer._rebuild_buckets()

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        """Put the last parameters first: their gradients are ready first."""
        parameters, sparse = super()._build_params_for_reducer()
        # with unused parameters torch keeps its first buckets, which it reverses itself
        step = 1 if self.find_unused_parameters else -1
        return parameters[::step], sparse[::step]


@contextmanager
def _compiler_settings() -> Iterator[None]:
    """Give DDP the default settings of torch.compile without loading torch.compile.

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
    """Wrap a module; all its gradients, together `num_bytes`, travel in one bucket."""
    with world.waiting("start of DistributedDataParallel"), warnings.catch_warnings():
        # newer torch warns of this name; torch 2.11 does not have the new one
        warnings.filterwarnings("ignore", message=".*broadcast_buffers", category=FutureWarning)
        wrapped = OrderedDDP(
            module,
            device_ids=[world.device.index] if world.device.type == "cuda" else None,
            broadcast_buffers=False,  # the owners of buffers merge them over ranks
            gradient_as_bucket_view=True,
            find_unused_parameters=config.find_unused_parameters,
            bucket_cap_mb=math.ceil(num_bytes / 2**20) + 1,
        )
    hook: Any = HOOKS[config.gradient_compression]

    # no annotations: torch would compare them with its types
    def reduce(state, bucket):  # type: ignore[no-untyped-def]
        world.gradients_ready()
        return hook(None, bucket)

    wrapped.register_comm_hook(None, reduce)
    return wrapped


class DataParallel(nn.DataParallel):
    """torch.nn.DataParallel for a module that names the batch axis of each input.

    Torch cuts every input along the same axis, but the inputs of a recurrent module have their
    batch on different axes: steps are [L, N, ...], states [N, S, H]. The class constant BATCH_AXES
    of a module holds the axes of its inputs; outputs have the first one. Forward takes tensors and
    returns a tensor or a tuple of tensors.
    """

    def __init__(self, module: nn.Module, device_ids: Sequence[int]) -> None:
        self.axes: Sequence[int] = getattr(module, "BATCH_AXES", ())
        super().__init__(module, list(device_ids), dim=self.axes[0] if self.axes else 0)

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        """Return the inputs of each GPU, and no keyword arguments."""
        axes = self.axes or (0,) * len(inputs)
        parts = [
            scatter(tensor, device_ids, axis) for tensor, axis in zip(inputs, axes, strict=True)
        ]
        return [*zip(*parts, strict=True)], [{}] * len(parts[0])

    def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> list[Any]:
        """Run the replicas in threads, to which torch does not pass autocast's type."""
        enabled = torch.is_autocast_enabled("cuda")
        dtype = torch.get_autocast_dtype("cuda")

        def run(replica: nn.Module, *parts: Tensor) -> Any:
            with torch.autocast("cuda", dtype, enabled=enabled):
                return replica(*parts)

        return super().parallel_apply([partial(run, r) for r in replicas], inputs, kwargs)
