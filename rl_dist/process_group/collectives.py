"""Exchange numbers, tensors and JSON between ranks; nothing is ever pickled.

Every rank must make the same calls in the same order. All calls work with gloo and NCCL: tensors
are sent from `world.device`, and each result is moved to the device that its function documents. A
single rank sends nothing and does not wait for the GPU. The time of the calls counts as
`world.sync_seconds`.
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl_dist.errors import UserError
from rl_dist.process_group.world import World

# Data is gathered in chunks. Gloo copies received data in its own thread. If a copy has more than
# 32,768 elements (ATen's grain size), that thread opens a second OpenMP team and keeps it. libgomp
# then no longer spins between parallel regions of the training, and iterations took twice as long.
GATHER_WORDS = 16_384  # number of 8-byte words in each later chunk
# Number of words in the first chunk, which starts with the length. Most data fits into it.
FIRST_WORDS = 512


class DesyncError(UserError):
    """Error: values that must be equal on all ranks differ."""

    def __init__(self, message: str) -> None:
        super().__init__(message, exit_code=1)


def all_reduce_sum(values: Mapping[str, float | Tensor], world: World) -> dict[str, Tensor]:
    """Sum named numbers and tensors over all ranks in one float64 all-reduce.

    A checksum of names and shapes is summed as well. If names or shapes differ between ranks, the
    call raises a CollectiveError or DesyncError instead of adding unrelated numbers.

    Returns:
        float64 tensors with the shapes and devices of `values`.
    """
    tensors = {name: torch.as_tensor(values[name]).detach() for name in sorted(values)}
    if world.size == 1:
        return {name: tensor.double() for name, tensor in tensors.items()}
    layout = [(name, list(tensor.shape)) for name, tensor in tensors.items()]
    # below 2**20, so that float64 sums its square without rounding
    checksum = float(zlib.crc32(json.dumps(layout).encode()) % 2**20)
    head = torch.tensor([checksum, checksum**2], dtype=torch.float64, device=world.device)
    flat = [tensor.to(world.device, torch.float64).reshape(-1) for tensor in tensors.values()]
    packed = torch.cat([head, *flat])
    listed = ", ".join(f"{name}{shape or ''}" for name, shape in layout)
    with world.waiting(f"sum of {listed}"):
        dist.all_reduce(packed)
        sums = packed[:2].tolist()
    # both sums match only if all ranks have the same checksum
    if sums != [checksum * world.size, checksum**2 * world.size]:
        raise DesyncError(
            f"rank {world.rank} sums {listed}; another rank has other names or shapes"
        )
    parts = packed[2:].split([tensor.numel() for tensor in flat])
    return {
        name: part.reshape(tensor.shape).to(tensor.device)
        for (name, tensor), part in zip(tensors.items(), parts, strict=True)
    }


def gather_dicts(tensors: Mapping[str, Tensor], world: World) -> dict[str, Tensor] | None:
    """Concatenate each named tensor [B, ...] over all ranks, in rank order.

    Returns:
        CPU tensors [sum of all B, ...] on rank 0, None on other ranks. B may differ by rank.

    Raises:
        DesyncError: the ranks passed different names, types or trailing shapes.
    """
    layout = {name: [str(tensor.dtype), *tensor.shape[1:]] for name, tensor in tensors.items()}
    lengths = {name: len(tensor) for name, tensor in tensors.items()}
    ranks = all_gather_json([layout, lengths], world)
    for rank, (other, _) in enumerate(ranks):
        if other != ranks[0][0]:
            raise DesyncError(f"rank {rank} gathers {other}, but rank 0 gathers {ranks[0][0]}")
    joined = {}
    for name in sorted(tensors):
        tensor = tensors[name]
        gathered = _gather_bytes(_as_bytes(tensor), world)
        parts = [
            raw.view(tensor.dtype).reshape(lengths_there[name], *tensor.shape[1:])
            for raw, (_, lengths_there) in zip(gathered, ranks, strict=True)
        ]
        joined[name] = torch.cat(parts)
    return joined if world.is_main_process else None


def all_gather_json(obj: Any, world: World) -> list[Any]:
    """Return the JSON-serialisable objects that the ranks passed, in rank order."""
    raw = torch.frombuffer(bytearray(json.dumps(obj).encode()), dtype=torch.uint8)
    return [json.loads(bytes(text.numpy())) for text in _gather_bytes(raw, world)]


def _gather_bytes(raw: Tensor, world: World) -> list[Tensor]:
    """Return the bytes that each rank passed, as CPU tensors in rank order."""
    if world.size == 1:
        return [raw]
    num_bytes = raw.numel()
    num_words = 1 + math.ceil(num_bytes / 8)  # the first word holds the length
    words = torch.zeros(max(FIRST_WORDS, num_words), dtype=torch.int64)
    words[0] = num_bytes
    words[1:].view(torch.uint8)[:num_bytes] = raw
    with world.waiting("gather of bytes"):
        parts = [_gather_words(words[:FIRST_WORDS], world)]
        lengths = parts[0][:, 0].tolist()
        longest = 1 + math.ceil(max(lengths) / 8)
        words = nn.functional.pad(words, (0, max(0, longest - len(words))))
        parts += [
            _gather_words(words[begin : begin + GATHER_WORDS], world)
            for begin in range(FIRST_WORDS, longest, GATHER_WORDS)
        ]
    rows = torch.cat(parts, dim=1)[:, 1:].contiguous().view(torch.uint8)  # [W, bytes]
    return [row[:length] for row, length in zip(rows, lengths, strict=True)]


def _gather_words(words: Tensor, world: World) -> Tensor:
    """Return the words [n] of all W ranks as a CPU tensor [W, n]."""
    words = words.to(world.device)
    gathered = [torch.empty_like(words) for _ in range(world.size)]
    dist.all_gather(gathered, words)
    return torch.stack(gathered).cpu()


def broadcast_bytes(data: bytes, source: int, world: World) -> bytes:
    """Return the data of rank `source` on every rank; other ranks pass b""."""
    if world.size == 1:
        return data
    raw = torch.zeros(all_reduce_max(len(data), world), dtype=torch.uint8)
    if world.rank == source:
        raw = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    raw = raw.to(world.device)
    with world.waiting("broadcast of bytes"):
        dist.broadcast(raw, src=source)
        return raw.cpu().numpy().tobytes()


def broadcast_from_rank0(tensor: Tensor) -> None:
    """Overwrite a tensor with its value on rank 0; every rank must call this."""
    local = tensor.detach()
    # NCCL sends nothing of a tensor with gaps in memory, and gloo sends the gaps, too
    dense = local.contiguous()
    dist.broadcast(dense, src=0)
    # write only if needed, because an expanded tensor is not writable
    if not torch.equal(dense, local):
        local.copy_(dense)


def all_reduce_max(value: int, world: World) -> int:
    """Return the maximum over all ranks, so that all of them take the same decision."""
    if world.size == 1:
        return value
    agreed = torch.tensor([value], dtype=torch.int64, device=world.device)
    with world.waiting("agreement on a number"):
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
        return int(agreed.item())


def check_in_sync(tensors: Mapping[str, Tensor], world: World) -> None:
    """Check by hashes that tensors are equal on all ranks.

    Raises:
        DesyncError: tensors differ; the error names them and the ranks that deviate from the most
            frequent values.
    """
    if world.size == 1:
        return
    hashes = all_gather_json({name: tensor_hash(t)[:16] for name, t in tensors.items()}, world)
    usual = max(hashes, key=hashes.count)  # in a tie the lowest rank wins
    if hashes.count(usual) == world.size:
        return
    differences = []
    for rank, local in enumerate(hashes):
        names = [name for name in usual | local if local.get(name) != usual.get(name)]
        if names:
            differences.append(
                f"rank {rank} in {', '.join(names[:3])} ({len(names)} of {len(usual)})"
            )
    raise DesyncError(
        f"the ranks drifted apart: {'; '.join(differences)} (against rank {hashes.index(usual)}); "
        "this state is not saved"
    )


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def parameter_hash(module: nn.Module) -> str:
    """Return the SHA-256 of all parameters of a module, which may be wrapped."""
    return tensor_hash(*module.parameters())


def tensor_hash(*tensors: Tensor) -> str:
    """Return the SHA-256 of the concatenated bytes of tensors."""
    digest = hashlib.sha256()
    for tensor in tensors:
        # Copy, because a numpy view would keep the memory of full parameters that FSDP frees.
        digest.update(_as_bytes(tensor.detach().to("cpu", copy=True)).numpy().data)
    return digest.hexdigest()
