"""Memory limits of containers, from control groups of version 1 and 2."""

import os
from types import SimpleNamespace

import psutil
import pytest

from rl_dist import machine
from rl_dist.machine import CGROUPS, HostMemory, available_cores, host_memory

WHOLE = (10_000, 8_000)


@pytest.mark.parametrize(
    "cgroup, groups, expected",
    [
        ("0::/", {}, WHOLE),
        # A container sees its own group as the root. This group uses more memory than its limit.
        ("0::/its/name/outside", {"": (1000, 1200, 0)}, (1000, 0)),
        # The result is the smallest limit and the least free memory of a group and its parents:
        # other jobs in a parent may use that parent's memory.
        ("0::/slice/job/step",
         {"slice/job/step": ("max", 100, 0), "slice/job": (5000, 5000, 100),
          "slice": (4000, 3000, 0), "slice/other": (10, 10, 0)},
         (4000, 100)),
        # Inactive file cache does not count as used memory.
        ("5:cpu,cpuacct:/elsewhere\n4:memory:/docker/abc\n0::/",
         {"memory/docker/abc": (3000, 2500, 400), "memory": (2**63 - 4096, 9000, 0)},
         (3000, 900)),
    ],
)  # fmt: skip
def test_the_tightest_limit_counts(tmp_path, monkeypatch, cgroup, groups, expected):
    memory = SimpleNamespace(total=10_000, available=8_000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(cgroup)
    for group, (limit, used, cached) in groups.items():
        limit_file, use_file, cache = CGROUPS["memory" if group.startswith("memory") else ""]
        folder = tmp_path / "sys/fs/cgroup" / group
        folder.mkdir(parents=True, exist_ok=True)
        (folder / limit_file).write_text(f"{limit}\n")
        (folder / use_file).write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon {used}\n{cache} {cached}\n")
    assert host_memory() == HostMemory(*expected)


def test_missing_files_of_the_kernel_mean_no_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    assert host_memory().total == psutil.virtual_memory().total
    assert available_cores() == len(os.sched_getaffinity(0))
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    assert host_memory().available > 0
