"""Collective calls between ranks; nothing is ever pickled.

Every rank makes the same calls in the same order. All work with gloo and NCCL; tensors travel on
`world.device` and come back to where they were. A rank alone sends nothing, and waits for no GPU.
The time spent here is added to `world.sync_seconds`.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl_dist.errors import UserError

if TYPE_CHECKING:
    from rl_dist.process_group.world import World

# Gloo copies what it received in a thread of its own. A copy of more than 32,768 elements (ATen's
# grain size) opens a second OpenMP team there, for good; libgomp then stops spinning between the
# training thread's parallel regions, and every one of them sleeps in the kernel: iterations took
# twice as long. So gathers travel in chunks.
GATHER_WORDS = 16_384  # of 8 bytes
FIRST_WORDS = 512  # that travel with their number; few gatherings have more


class DesyncError(UserError):
    """Ranks that should hold or send the same thing do not."""

    def __init__(self, message: str) -> None:
        super().__init__(message, exit_code=1)


def all_reduce_sum(values: Mapping[str, float | Tensor], world: World) -> dict[str, Tensor]:
    """Sum named numbers and tensors over all ranks in one float64 all-reduce.

    A fingerprint of the layout travels along, so that ranks that disagree about names or shapes
    get a CollectiveError or DesyncError and not the sum of unrelated numbers.

    Returns:
        float64 tensors of the shapes that went in, each on the device its value came from.
    """
    tensors = {name: torch.as_tensor(values[name]).detach() for name in sorted(values)}
    if world.size == 1:
        return {name: tensor.double() for name, tensor in tensors.items()}
    layout = [(name, list(tensor.shape)) for name, tensor in tensors.items()]
    # the square and the sums of this number are exact in float64
    mark = float(zlib.crc32(json.dumps(layout).encode()) % 2**20)
    head = torch.full((2,), mark, dtype=torch.float64, device=world.device)
    head[1] *= mark
    flat = [tensor.to(world.device, torch.float64).reshape(-1) for tensor in tensors.values()]
    packed = torch.cat([head, *flat])
    words = [f"{name}{shape}" if shape else name for name, shape in layout]
    with world.waiting(f"sum of {', '.join(words)}"):
        dist.all_reduce(packed)
        sums, squares = packed[:2].tolist()
    # equal only if all marks are
    if (sums, squares) != (mark * world.size, mark * mark * world.size):
        raise DesyncError(
            f"rank {world.rank} sums {list(tensors)}, another rank sums other names or shapes"
        )
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
    own = [[name, str(tensors[name].dtype), list(tensors[name].shape)] for name in names]
    layouts = all_gather_json(own, world)
    alike = [[(name, dtype, shape[1:]) for name, dtype, shape in layout] for layout in layouts]
    for rank, layout in enumerate(alike):
        if layout != alike[0]:
            odd = [entry for entry in layout if entry not in alike[0]]
            raise DesyncError(f"rank {rank} gathers {odd or 'less'}, not what rank 0 gathers")
    if not names:
        return {} if world.is_main_process else None
    received = _gather_bytes(torch.cat([_as_bytes(tensors[name]) for name in names]), world)
    if received is None:
        return None
    rows: dict[str, list[Tensor]] = {name: [] for name in names}
    for raw, layout in zip(received, layouts, strict=True):
        for name, _, shape in layout:
            dtype = tensors[name].dtype
            end = torch.Size(shape).numel() * dtype.itemsize
            # the clone is aligned to its type
            rows[name].append(raw[:end].clone().view(dtype).reshape(shape))
            raw = raw[end:]
    return {name: torch.cat(rows[name]) for name in tensors}


def all_gather_json(obj: Any, world: World) -> list[Any]:
    """Return every rank's JSON-serialisable object, in rank order, on every rank."""
    raw = torch.frombuffer(bytearray(json.dumps(obj).encode()), dtype=torch.uint8)
    received = _gather_bytes(raw, world, everywhere=True)
    assert received is not None
    return [json.loads(bytes(text.numpy())) for text in received]


def _gather_bytes(raw: Tensor, world: World, *, everywhere: bool = False) -> list[Tensor] | None:
    """Return every rank's bytes on the CPU; None where they do not arrive."""
    if world.size == 1:
        return [raw]
    num_words = -(-raw.numel() // 8)
    words = torch.zeros(max(FIRST_WORDS, 1 + num_words), dtype=torch.int64)
    words[0] = raw.numel()
    words[1:].view(torch.uint8)[: raw.numel()] = raw
    arrives = everywhere or world.is_main_process
    with world.waiting("gather of bytes"):
        # the number of bytes and the first of them, in one call and one reading
        first = words[:FIRST_WORDS].to(world.device)
        places = [torch.empty_like(first) for _ in range(world.size)]
        dist.all_gather(places, first)
        firsts = torch.stack(places).cpu()  # [W, FIRST_WORDS]
        lengths = firsts[:, 0].tolist()

        # what does not fit in there
        longest = 1 - (-max(lengths) // 8)
        own = torch.zeros(max(longest - FIRST_WORDS, 0), dtype=torch.int64)
        own[: len(words) - FIRST_WORDS] = words[FIRST_WORDS:]
        own = own.to(world.device)
        rests = [torch.empty_like(own) for _ in range(world.size)] if arrives else None
        for begin in range(0, own.numel(), GATHER_WORDS):
            part = own[begin : begin + GATHER_WORDS]
            places = [rest[begin : begin + GATHER_WORDS] for rest in rests or ()]
            if everywhere:
                dist.all_gather(places, part)
            else:
                dist.gather(part, places or None, dst=0)
        if rests is None:
            return None
        rests = [rest.cpu() for rest in rests]
    whole = [torch.cat([head[1:], rest]) for head, rest in zip(firsts, rests, strict=True)]
    return [one.view(torch.uint8)[:length] for one, length in zip(whole, lengths, strict=True)]


def broadcast_bytes(data: bytes, source: int, world: World) -> bytes:
    """Return the bytes of rank `source` on every rank; the others pass none."""
    if world.size == 1:
        return data
    raw = torch.zeros(all_reduce_max(len(data), world), dtype=torch.uint8)
    if world.rank == source:
        raw = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    raw = raw.to(world.device)
    with world.waiting("broadcast of bytes"):
        dist.broadcast(raw, src=source)
        return raw.cpu().numpy().tobytes()


def all_reduce_max(value: int, world: World) -> int:
    """Return the largest of all ranks' integers: how ranks take a decision together."""
    if world.size == 1:
        return value
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
    hashes = all_gather_json(tensor_hash(*tensors.values()), world)
    usual = max(hashes, key=hashes.count)  # of several the first
    if hashes.count(usual) == world.size:
        return
    # all ranks know of the difference, and look for it together
    by_name = all_gather_json(
        {name: tensor_hash(tensor) for name, tensor in tensors.items()}, world
    )
    right = by_name[hashes.index(usual)]
    found = []
    for rank, own in enumerate(by_name):
        names = [name for name in right | own if own.get(name) != right.get(name)]
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            found.append(f"rank {rank} in {', '.join(names[:3])}{more}")
    raise DesyncError(
        f"the ranks drifted apart: {'; '.join(found)} (against rank {hashes.index(usual)}); "
        "no checkpoint is written of this"
    )


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def parameter_hash(module: nn.Module) -> str:
    """Return the SHA-256 of all parameters' bytes in order, wrapped or not."""
    return tensor_hash(*module.parameters())


def tensor_hash(*tensors: Tensor) -> str:
    """Return the SHA-256 of the bytes of tensors, one after the other."""
    digest = hashlib.sha256()
    for tensor in tensors:
        # a copy, for numpy pins storage for good, and whole parameters are freed
        digest.update(_as_bytes(tensor.detach().to("cpu", copy=True)).numpy().data)
    return digest.hexdigest()
