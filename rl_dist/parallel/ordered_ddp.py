"""DistributedDataParallel whose buckets are the same in every step.

Private parts of torch are used here and nowhere else for this. They were checked with torch 2.11,
2.12 and 2.13; `tests/parallel/test_ordered_ddp.py` fails where another release has changed them.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel


class OrderedDDP(DistributedDataParallel):
    """DistributedDataParallel that orders its buckets before the first step.

    Torch's own puts gradients elsewhere in its first step than in those after it. A gradient's
    place decides in which order gloo's ring adds the ranks, so that a resumed run would round its
    first step differently on three and more.
    """

    def __init__(self, module: nn.Module, **options: Any) -> None:
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
