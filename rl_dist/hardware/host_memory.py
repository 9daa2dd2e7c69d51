"""Memory that this process can have, within the limits of its container."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class HostMemory:
    """Bytes."""

    total: int
    available: int


def host_memory(root: Path = Path("/")) -> HostMemory:
    """What is there and what is free; `root` is where /proc and /sys are."""
    machine = psutil.virtual_memory()
    total, available = machine.total, machine.available
    for limit, used in _limits(root):
        if limit < machine.total:
            total, available = min(total, limit), min(available, max(0, limit - used))
    return HostMemory(total, available)


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """Limit and use of every control group that this process is in.

    Files that were read once (inactive_file) are no use: the kernel drops them when somebody wants memory.
    """
    for group, limit_file, use_file, cache in _groups(root):
        try:
            limit, used = ((group / name).read_text().strip() for name in (limit_file, use_file))
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            if limit.isdecimal():  # else "max"
                yield int(limit), max(0, int(used) - int(stat.get(cache, 0)))
        except (OSError, ValueError):  # not there, or not ours to read
            continue


def _groups(root: Path) -> Iterator[tuple[Path, str, str, str]]:
    """The folders of this process's groups and of those above, with their names of the same three things."""
    mount = root / "sys/fs/cgroup"
    version_2 = (mount, "memory.max", "memory.current", "inactive_file")
    version_1 = (mount / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    paths = {"": "/", "memory": "/"}  # in a container its own group is mounted at the top
    for line in lines:
        _, kinds, path = line.split(":", 2)
        paths |= {kind: path for kind in kinds.split(",") if kind in paths}
    for kind, (top, *names) in (("", version_2), ("memory", version_1)):
        own = Path(paths[kind].lstrip("/"))
        for folder in (own, *own.parents):
            yield (top / folder, *names)  # type: ignore[misc]


def available_cores() -> int:
    """CPU cores this process may use: its affinity, cut to the container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, round(int(quota) / int(period))))
