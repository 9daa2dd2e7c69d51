"""Count the operators that torch executes, and those that would make the host wait for a GPU."""

from collections import Counter
from contextlib import contextmanager
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

READS = ("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select")


class Listener(TorchDispatchMode):
    """Calls a function with every operator, its arguments and its result."""

    def __init__(self, listen):
        super().__init__()
        self.listen = listen

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        self.listen(operator, args, result)
        return result


@contextmanager
def counted_reads():
    """Count the reads that would wait for a GPU, per operator or tensor method."""
    counts = Counter()

    def listen(operator, args, _):
        name = str(operator.overloadpacket)
        indices = args[1] if name in ("aten.index", "aten.index_put", "aten.index_put_") else ()
        masks = [index for index in indices if index is not None and index.dtype == torch.bool]
        counts[name] += name in READS or bool(masks)

    def counting(name):
        read = getattr(torch.Tensor, name)
        count = lambda *args: counts.update([name]) or read(*args)  # noqa: E731
        return mock.patch.object(torch.Tensor, name, count)

    with Listener(listen), counting("tolist"), counting("cpu"):
        yield counts


@contextmanager
def counted_operators():
    """Count the operators that compute or write something: neither views nor reserved memory."""
    counts = Counter()

    def memory(values):
        tensors = (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))
        return {tensor.untyped_storage().data_ptr() for tensor in tensors}

    def listen(operator, args, result):
        writes = operator._schema.is_mutable
        name = str(operator.overloadpacket)
        counts[name] += writes or ("empty" not in name and not memory(result) <= memory(args))

    with Listener(listen):
        yield counts
