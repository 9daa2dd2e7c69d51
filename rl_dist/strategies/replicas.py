"""Train replicas of a module with DistributedDataParallel or DataParallel.

This module uses private functions of torch. It was tested with torch 2.11, 2.12 and 2.13;
`tests/strategies/test_replicas.py` fails if another release changes these functions.
"""

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
    """DistributedDataParallel that orders its gradient buckets before the first step.

    Torch's class orders the buckets only after the first step. The position of a gradient in its
    bucket determines the order in which gloo's ring adds the values of the ranks. With three or
    more ranks, the first step after a resume would therefore be rounded differently from the same
    step of an uninterrupted run. This class avoids the difference.
    """

    # torch's method without its wrapper, because the wrapper would load torch.compile
    _inside_ddp_forward = contextmanager(inspect.unwrap(TorchDDP._inside_ddp_forward))

    def __init__(self, module: nn.Module, **options: Any) -> None:
        with _compiler_settings():
            super().__init__(module, **options)
        # Torch itself would make these two calls after the first step. It orders buckets only once.
        self.reducer._push_all_rebuilt_params()
        self.reducer._rebuild_buckets()

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        """Return the parameters in the order in which their gradients become ready.

        This is the reverse of their order in the module.
        """
        parameters, sparse = super()._build_params_for_reducer()
        # With find_unused_parameters, torch itself reverses the order and keeps its first buckets.
        step = 1 if self.find_unused_parameters else -1
        return parameters[::step], sparse[::step]


@contextmanager
def _compiler_settings() -> Iterator[None]:
    """Give DDP the default settings of torch.compile without loading torch.compile.

    Loading torch.compile takes as long as loading torch itself.
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
    """Wrap a module in DDP, and reduce all its gradients in one bucket.

    Args:
        num_bytes: total size of the gradients.
    """
    with world.waiting("start of DistributedDataParallel"), warnings.catch_warnings():
        # Newer torch warns that this argument was renamed; torch 2.11 does not know the new name.
        warnings.filterwarnings("ignore", message=".*broadcast_buffers", category=FutureWarning)
        wrapped = OrderedDDP(
            module,
            device_ids=[world.device.index] if world.device.type == "cuda" else None,
            broadcast_buffers=False,  # `fit` merges the buffers over ranks after each epoch
            gradient_as_bucket_view=True,
            find_unused_parameters=config.find_unused_parameters,
            bucket_cap_mb=math.ceil(num_bytes / 2**20) + 1,
        )
    hook: Any = HOOKS[config.gradient_compression]

    # This function has no annotations: torch would refuse them, because they differ from its types.
    def reduce(state, bucket):  # type: ignore[no-untyped-def]
        world.gradients_ready()
        return hook(None, bucket)

    wrapped.register_comm_hook(None, reduce)
    return wrapped


class DataParallel(nn.DataParallel):
    """DataParallel for modules whose inputs have different batch axes.

    torch.nn.DataParallel splits every input along the same axis. But the inputs of a recurrent
    module have different batch axes: sequences are [L, N, ...], states are [N, S, H]. The module's
    class constant BATCH_AXES lists the batch axis of each input. Outputs are concatenated along the
    first axis in this list. `forward` takes tensors and returns a tensor or a tuple of tensors.
    """

    def __init__(self, module: nn.Module, device_ids: Sequence[int]) -> None:
        self.axes: Sequence[int] = getattr(module, "BATCH_AXES", ())
        super().__init__(module, list(device_ids), dim=self.axes[0] if self.axes else 0)

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        """Return one tuple of inputs and one empty dict of keyword arguments per GPU."""
        axes = self.axes or (0,) * len(inputs)
        scattered = [
            scatter(tensor, device_ids, axis) for tensor, axis in zip(inputs, axes, strict=True)
        ]
        return [*zip(*scattered, strict=True)], [{}] * len(scattered[0])

    def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> list[Any]:
        """Run each replica in a thread, with the autocast dtype of this thread.

        Torch itself does not set this dtype in the new threads.
        """
        enabled = torch.is_autocast_enabled("cuda")
        dtype = torch.get_autocast_dtype("cuda")

        def run(replica: nn.Module, *parts: Tensor) -> Any:
            with torch.autocast("cuda", dtype, enabled=enabled):
                return replica(*parts)

        return super().parallel_apply([partial(run, r) for r in replicas], inputs, kwargs)
