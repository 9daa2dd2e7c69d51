"""Collective calls between ranks; nothing is ever pickled.

Every rank makes the same calls in the same order. All work with gloo and NCCL, and with one rank;
tensors travel on `world.device` and come back to where they were. The time spent here is added to
`world.sync_seconds`.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rl_dist.errors import UserError
from rl_dist.process_group.hashes import tensor_hash
from rl_dist.process_group.world import World

# Gloo copies what it received in a thread of its own. A copy of more than 32,768 elements (ATen's grain size)
# opens a second OpenMP team there, for good; libgomp then stops spinning between the training thread's parallel
# regions, and every one of them sleeps in the kernel: iterations took twice as long. So gathers travel in parts.
GATHER_WORDS = 16_384  # of 8 bytes


class DesyncError(UserError):
    """Ranks that should hold or send the same thing do not."""

    def __init__(self, message: str) -> None:
        super().__init__(message, exit_code=1)


def sum_over_ranks(values: Mapping[str, float | Tensor], world: World) -> dict[str, Tensor]:
    """Sum named numbers and tensors over all ranks in one float64 all-reduce.

    The layout is by sorted name. Its fingerprint travels along, so that ranks that disagree about
    names or shapes get an error and not the sum of unrelated numbers.

    Returns:
        float64 tensors of the shapes that went in, each on the device its value came from.

    Raises:
        CollectiveError, DesyncError: the ranks passed different names or shapes.
    """
    tensors = {name: torch.as_tensor(values[name]).detach() for name in sorted(values)}
    layout = [(name, list(tensor.shape)) for name, tensor in tensors.items()]
    mark = float(zlib.crc32(json.dumps(layout).encode()) % 2**20)  # its square and sums are exact in float64
    head = torch.tensor([mark, mark * mark], dtype=torch.float64, device=world.device)
    flat = [tensor.to(world.device, torch.float64).reshape(-1) for tensor in tensors.values()]
    packed = torch.cat([head, *flat])
    told = [f"{name}{shape}" if shape else name for name, shape in layout]
    with world.waiting(f"sum of {', '.join(told)}"):
        dist.all_reduce(packed)
        sums, squares = packed[:2].tolist()
    if (sums, squares) != (mark * world.size, mark * mark * world.size):  # equal only if all marks are
        raise DesyncError(f"rank {world.rank} sums {list(tensors)}, another rank sums other names or shapes")
    parts = packed[2:].split([tensor.numel() for tensor in flat])
    return {
        name: part.reshape(tensor.shape).to(tensor.device)
        for (name, tensor), part in zip(tensors.items(), parts, strict=True)
    }


def gather_dicts(tensors: Mapping[str, Tensor], world: World) -> dict[str, Tensor] | None:
    """Concatenate named tensors [B, ...] in rank order, on the main process.

    Returns:
        CPU tensors [sum of all B, ...] on the main process, None elsewhere. B may differ by rank.

    Raises:
        DesyncError: the ranks passed different names, types or trailing shapes.
    """
    names = sorted(tensors)
    layouts = gather_json([[n, str(tensors[n].dtype), list(tensors[n].shape)] for n in names], world)
    for rank, layout in enumerate(layouts):
        for mine, theirs in zip(layouts[0], layout, strict=False):
            if mine[:2] != theirs[:2] or mine[2][1:] != theirs[2][1:]:
                raise DesyncError(f"rank {rank} gathers {theirs} where rank 0 gathers {mine}")
        if len(layout) != len(layouts[0]):
            raise DesyncError(f"rank {rank} gathers {len(layout)} tensors, rank 0 {len(layouts[0])}")
    if not names:
        return {} if world.main else None
    raw = torch.cat([_as_bytes(tensors[name]) for name in names])
    sizes = [sum(_num_bytes(tensors[e[0]].dtype, e[2]) for e in layout) for layout in layouts]
    received = _gather_bytes(raw, max(sizes), world, everywhere=False)
    if received is None:
        return None
    ranks = [_unpack(buffer, layout, tensors) for buffer, layout in zip(received, layouts, strict=True)]
    return {name: torch.cat([rank[name] for rank in ranks]) for name in tensors}


def gather_json(obj: Any, world: World) -> list[Any]:
    """Every rank's JSON-serialisable object, in rank order, on every rank."""
    raw = torch.frombuffer(bytearray(json.dumps(obj).encode()), dtype=torch.uint8)
    with world.waiting("gather of sizes"):
        size = torch.tensor([raw.numel()], device=world.device)
        sizes = [torch.empty_like(size) for _ in range(world.size)]
        dist.all_gather(sizes, size)
        lengths = [int(s) for s in sizes]
    received = _gather_bytes(raw, max(lengths), world, everywhere=True)
    assert received is not None
    return [json.loads(bytes(r[:n].numpy())) for r, n in zip(received, lengths, strict=True)]


def _gather_bytes(raw: Tensor, longest: int, world: World, *, everywhere: bool) -> list[Tensor] | None:
    """Every rank's bytes on the CPU, padded to the longest rank's; None where they do not arrive."""
    padded = torch.zeros(-(-longest // 8) * 8, dtype=torch.uint8)
    padded[: raw.numel()] = raw
    arrives = everywhere or world.main
    with world.waiting("gather of bytes"):
        words = padded.view(torch.int64).to(world.device)
        received = [torch.empty_like(words) for _ in range(world.size)] if arrives else None
        for first in range(0, words.numel(), GATHER_WORDS):
            part = words[first : first + GATHER_WORDS]
            places = [rank[first : first + GATHER_WORDS] for rank in received] if received else None
            if everywhere:
                dist.all_gather(places, part)
            else:
                dist.gather(part, places, dst=0)
        return [rank.cpu().view(torch.uint8) for rank in received] if received else None


def agree_max(value: int, world: World) -> int:
    """The largest of all ranks' integers: how ranks take a decision together."""
    agreed = torch.tensor([value], dtype=torch.int64, device=world.device)
    with world.waiting("agreement on a number"):
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
        return int(agreed.item())


def check_in_sync(tensors: Mapping[str, Tensor], world: World) -> None:
    """Compare by hash what must be equal on all ranks.

    Raises:
        DesyncError: names the ranks that differ from most (or from rank 0), and their tensors.
    """
    if world.size == 1:
        return
    hashes = gather_json(tensor_hash(*tensors.values()), world)
    usual = max(hashes, key=hashes.count)  # of several the first
    if hashes.count(usual) == world.size:
        return
    named = gather_json({name: tensor_hash(tensor) for name, tensor in tensors.items()}, world)  # all ranks know
    right, told = named[hashes.index(usual)], []
    for rank, own in enumerate(named):
        names = [name for name in right | own if own.get(name) != right.get(name)]
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            told.append(f"rank {rank} in {', '.join(names[:3])}{more}")
    raise DesyncError(
        f"the ranks drifted apart: {'; '.join(told)} (against rank {hashes.index(usual)}); "
        "no checkpoint is written of this"
    )


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _num_bytes(dtype: torch.dtype, shape: list[int]) -> int:
    return torch.Size(shape).numel() * torch.empty((), dtype=dtype).element_size()


def _unpack(raw: Tensor, layout: list[Any], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    tensors, first = {}, 0
    for name, _, shape in layout:
        last = first + _num_bytes(like[name].dtype, shape)
        tensors[name] = raw[first:last].clone().view(like[name].dtype).reshape(shape)  # clone: aligned
        first = last
    return tensors
