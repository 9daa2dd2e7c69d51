"""Memory of a container is what its control groups leave, in both versions of the files."""

from types import SimpleNamespace

import psutil
import pytest

from rl_dist.machine import HostMemory, host_memory


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A machine of 10,000 bytes, 8,000 of them free."""
    monkeypatch.setattr(
        psutil, "virtual_memory", lambda: SimpleNamespace(total=10_000, available=8_000)
    )


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def be_in(root, *lines):
    write(root / "proc/self", cgroup="\n".join(lines))


def group_2(folder, limit, used, cached=0):
    stat = f"anon {used}\ninactive_file {cached}"
    write(folder, memory__max=limit, memory__current=used, memory__stat=stat)


def group_1(folder, limit, used, cached=0):
    files = {"memory__limit_in_bytes": limit, "memory__usage_in_bytes": used}
    write(folder, **files, memory__stat=f"inactive_file 7\ntotal_inactive_file {cached}")


def test_a_containers_own_group_is_mounted_at_the_top(tmp_path):
    group_2(tmp_path / "sys/fs/cgroup", 1000, 900, cached=500)
    assert host_memory(tmp_path) == HostMemory(1000, 600)  # files read once do not count as used
    be_in(tmp_path, "0::/")
    assert host_memory(tmp_path) == HostMemory(1000, 600)


def test_the_tightest_of_the_groups_above_counts(tmp_path):
    top = tmp_path / "sys/fs/cgroup"
    be_in(tmp_path, "0::/slice/job/step")
    group_2(top / "slice/job/step", "max", 100)
    group_2(top / "slice/job", 5000, 4900)  # shared with others
    group_2(top / "slice", 4000, 3000)
    group_2(top / "slice/other", 10, 10)
    assert host_memory(tmp_path) == HostMemory(4000, 100)


def test_the_files_of_version_1_are_read(tmp_path):
    be_in(tmp_path, "5:cpu,cpuacct:/elsewhere", "4:memory:/docker/abc", "0::/")
    group_1(tmp_path / "sys/fs/cgroup/memory/docker/abc", 3000, 2500, cached=400)
    group_1(tmp_path / "sys/fs/cgroup/memory", 2**63 - 4096, 9000)  # no limit
    assert host_memory(tmp_path) == HostMemory(3000, 900)


@pytest.mark.parametrize("limit", ["max", str(2**62), "none of ours"])
def test_no_limit_is_the_machines_own(limit, tmp_path):
    assert host_memory(tmp_path) == HostMemory(10_000, 8_000)  # no control groups
    group_2(tmp_path / "sys/fs/cgroup", limit, 900)
    assert host_memory(tmp_path) == HostMemory(10_000, 8_000)


def test_more_in_use_than_the_limit_leaves_nothing(tmp_path):
    group_2(tmp_path / "sys/fs/cgroup", 1000, 1200)
    assert host_memory(tmp_path) == HostMemory(1000, 0)
