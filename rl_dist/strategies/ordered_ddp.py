"""DistributedDataParallel whose buckets are the same in every step.

Private parts of torch are used here and nowhere else for this. They were checked with torch 2.11,
2.12 and 2.13; `tests/strategies/test_ordered_ddp.py` fails where another release has changed them.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP


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
        # what torch does after its first step; it does so once
        self.reducer._push_all_rebuilt_params()
        self.reducer._rebuild_buckets()

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        """Give the last parameters first: about the order in which gradients become ready."""
        parameters, sparse = super()._build_params_for_reducer()
        # torch keeps its first buckets there, and turns them itself
        way = 1 if self.find_unused_parameters else -1
        return parameters[::way], sparse[::way]


@contextmanager
def _compiler_settings() -> Iterator[None]:
    """Answer what DDP asks torch.compile, by its defaults where it is not loaded.

    To load it takes as long as to load torch.
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
