"""Exchange numbers, tensors and JSON between ranks, and check that ranks agree.

Every rank must make the same calls in the same order. All functions work with gloo and NCCL:
tensors are sent from `world.device`, and each function documents the device of its result. With
only one rank, a call sends nothing and does not wait for the GPU. The time spent in the calls is
added to `world.sync_seconds`. No function uses pickle.
"""

import hashlib
import json
import platform
import socket
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl_dist.errors import UserError, refuse_restarts
from rl_dist.process_group.world import World

CODE = Path(__file__).parents[2]
PACKAGES = ("rl_dist", "agents", "envs")


def all_reduce_sum(values: Mapping[str, float | Tensor], world: World) -> dict[str, Tensor]:
    """Sum named numbers and tensors over all ranks in one float64 all-reduce.

    The ranks also sum a checksum of names and shapes. If names or shapes differ between ranks, the
    call raises a UserError instead of returning sums of unrelated numbers.

    Returns:
        float64 tensors with the shapes and devices of `values`.
    """
    tensors = {name: torch.as_tensor(values[name]).detach() for name in sorted(values)}
    if world.size == 1:
        return {name: tensor.double() for name, tensor in tensors.items()}
    listed = ", ".join(f"{name}{[*tensor.shape] or ''}" for name, tensor in tensors.items())
    checksum = float(zlib.crc32(listed.encode()))
    head = torch.tensor([checksum], dtype=torch.float64, device=world.device)
    flat = [tensor.to(world.device, torch.float64).reshape(-1) for tensor in tensors.values()]
    packed = torch.cat([head, *flat])
    with world.waiting(f"sum of {listed}"):
        dist.all_reduce(packed)
        checksums = packed[0].item()
    if checksums != checksum * world.size:
        raise UserError(
            f"rank {world.rank} sums {listed}; names or shapes of another rank differ", exit_code=1
        )
    sums = packed[1:].split([tensor.numel() for tensor in flat])
    return {
        name: part.reshape(tensor.shape).to(tensor.device)
        for (name, tensor), part in zip(tensors.items(), sums, strict=True)
    }


def gather_dicts(tensors: Mapping[str, Tensor], world: World) -> dict[str, Tensor] | None:
    """Concatenate each named tensor [B, ...] over all ranks, in rank order.

    Returns:
        On rank 0, CPU tensors [sum of all B, ...], where B may differ between ranks; None on
        other ranks.

    Raises:
        UserError: the ranks passed different names, types or trailing shapes.
    """
    layout = {name: [str(tensor.dtype), *tensor.shape[1:]] for name, tensor in tensors.items()}
    lengths = {name: len(tensor) for name, tensor in tensors.items()}
    layouts = all_gather_json([layout, lengths], world)
    for rank, (rank_layout, _) in enumerate(layouts):
        if rank_layout != layouts[0][0]:
            message = f"rank {rank} gathers {rank_layout}, but rank 0 gathers {layouts[0][0]}"
            raise UserError(message, exit_code=1)
    joined = {}
    for name in sorted(tensors):
        tensor = tensors[name]
        parts = _gather_bytes(as_bytes(tensor), world)
        total = sum(lengths_there[name] for _, lengths_there in layouts)
        joined[name] = torch.cat(parts).view(tensor.dtype).reshape(total, *tensor.shape[1:])
    return joined if world.is_main_process else None


def all_gather_json(obj: object, world: World) -> list[Any]:
    """Return the JSON-serialisable objects that all ranks passed, in rank order."""
    raw = torch.frombuffer(bytearray(json.dumps(obj).encode()), dtype=torch.uint8)
    return [json.loads(bytes(text.numpy())) for text in _gather_bytes(raw, world)]


def _gather_bytes(raw: Tensor, world: World) -> list[Tensor]:
    """Return the bytes that each rank passed, as CPU tensors in rank order."""
    if world.size == 1:
        return [raw]
    with world.waiting("gather of bytes"):
        return world.exchange_bytes(raw)


def broadcast_bytes(data: bytes, source: int, world: World) -> bytes:
    """Send `data` of rank `source` to all ranks and return it; other ranks pass b""."""
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
    # Send a contiguous copy: NCCL cannot send a tensor that has gaps in memory, and gloo would send
    # the gaps, too.
    dense = local.contiguous()
    dist.broadcast(dense, src=0)
    # Write only if the values differ: an expanded tensor cannot be written.
    if not torch.equal(dense, local):
        local.copy_(dense)


def all_reduce_max(value: int, world: World) -> int:
    """Return the maximum over all ranks, so that all ranks make the same decision."""
    return max(all_gather_json(value, world))


def check_in_sync(tensors: Mapping[str, Tensor], world: World) -> None:
    """Check by hashes that tensors are equal on all ranks.

    Raises:
        UserError: tensors differ. The message names these tensors and the ranks whose values
            differ from the most frequent values.
    """
    if world.size == 1:
        return
    hashes = all_gather_json({name: tensor_hash(t)[:16] for name, t in tensors.items()}, world)
    majority = max(hashes, key=hashes.count)  # in a tie, those of the lowest rank
    if hashes.count(majority) == world.size:
        return
    differences = []
    for rank, local in enumerate(hashes):
        names = [name for name in majority | local if local.get(name) != majority.get(name)]
        if names:
            differences.append(f"rank {rank} differs in {', '.join(names[:3])}")
    message = f"the ranks drifted apart: {'; '.join(differences)}; this state is not saved"
    raise UserError(message, exit_code=1)


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, as a flat tensor on the CPU."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def parameter_hash(module: nn.Module) -> str:
    """Return the SHA-256 of all parameters of a module or wrapped module."""
    return tensor_hash(*module.parameters())


def tensor_hash(*tensors: Tensor) -> str:
    """Return the SHA-256 of the concatenated bytes of tensors."""
    digest = hashlib.sha256()
    for tensor in tensors:
        # Hash a copy: FSDP could not free the memory of a tensor that has a numpy view.
        digest.update(as_bytes(tensor.detach().to("cpu", copy=True)).numpy().data)
    return digest.hexdigest()


# ---- settings, software and devices


def check_settings(
    settings: Mapping[str, object],
    world: World,
    modules: Mapping[str, Sequence[Path]] = MappingProxyType({}),
) -> None:
    """Check that settings, software and code are equal on all ranks.

    Every rank must call this.

    Args:
        settings: values to compare in addition to the software, by name.
        modules: source files of the user's modules, by module name.

    Raises:
        UserError: a value differs. Every rank raises this error. The message shows all values
            of the first rank that differs from rank 0, and the hosts of both.
    """
    if world.size == 1:
        return
    host = socket.gethostname()
    (first_host, first), *others = all_gather_json([host, {**software(modules), **settings}], world)
    for rank, (host, values) in enumerate(others, 1):
        listed = [
            f"{name} {values.get(name)!r} (not {first.get(name)!r})"
            for name in first | values
            if values.get(name) != first.get(name)
        ]
        if listed:
            refuse_restarts()
            raise UserError(
                f"rank {rank} on host {host} has {', '.join(listed)}, unlike rank 0 on host "
                f"{first_host}: start all ranks with the same software, code, flags and data"
            )


def software(modules: Mapping[str, Sequence[Path]]) -> dict[str, str]:
    """Return the versions of Python, torch, numpy, this project and `modules`, by name."""
    our_files = [path for name in PACKAGES for path in (CODE / name).rglob("*.py")]
    our_files += CODE.glob("train_distributed.py")
    hashes = {f"module {name}, version": short_hash(files) for name, files in modules.items()}
    return hashes | {
        "Python": platform.python_version()[:4],
        "torch": torch.__version__,
        "numpy": np.__version__,
        "this project's code, version": short_hash(our_files),
    }


def short_hash(paths: Sequence[Path]) -> str:
    """Return a short hash of the contents and names of files."""
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(f"{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def devices_differ(world: World) -> bool:
    """Return True if ranks use different GPU or CPU models, which may round differently."""
    if world.device.type == "cuda":
        name = torch.cuda.get_device_name(world.device)
    else:
        name = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return len(set(all_gather_json(name, world))) > 1
