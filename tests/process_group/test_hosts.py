"""Hosts of one job: the same torch, the same code, clocks, cores."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from rl_dist.process_group.addresses import host_range
from rl_dist.process_group.join import code_version, difference, versions

HOSTS = ["host first", "host first", "host second"]


@pytest.mark.parametrize("name", ["torch", "Python", "numpy", "project", "module own_env"])
def test_a_host_with_another_version_is_named(name, tmp_path):
    (tmp_path / "own_env.py").write_text("")
    own = versions({"own_env": [tmp_path / "own_env.py"]})
    (words,) = (each for each in own if name in each)
    found = difference(HOSTS, [own, own, own | {words: "0.1"}])
    assert all(word in found for word in ("host second", "0.1", "host first", own[words]))
    assert difference(HOSTS, [own] * 3) == ""
    (tmp_path / "own_env.py").write_text("changed = True")
    assert "own_env" in difference(
        HOSTS, [own, own, versions({"own_env": [tmp_path / "own_env.py"]})]
    )


def test_the_version_of_the_code_follows_every_module(tmp_path, monkeypatch):
    monkeypatch.setattr("rl_dist.process_group.join.CODE", tmp_path)
    found = [code_version()]
    for name, text in (
        ("agents/new.py", ""),
        ("agents/new.py", "x = 1"),
        ("rl_dist/new.py", ""),
        ("train_distributed.py", ""),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        found.append(code_version())
    assert len(set(found)) == len(found)


@pytest.mark.parametrize(
    ("flags", "variable", "expected"),
    [
        (["--nnodes", "1:4"], "2", (1, 4)),
        (["--nnodes=3", "train.py"], "", (3, 3)),
        (["train.py"], "2:3", (2, 3)),
        (["--standalone"], "", (1, 1)),
    ],
)
def test_how_many_hosts_torchrun_may_take_is_read_off_its_command(
    flags, variable, expected, monkeypatch
):
    agent = subprocess.Popen([sys.executable, "-c", "input()", *flags], stdin=subprocess.PIPE)
    while not Path(f"/proc/{agent.pid}/cmdline").read_bytes():  # it is about to begin
        time.sleep(0.01)
    monkeypatch.setenv("PET_NNODES", variable)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert host_range(agent.pid) == (1, 1)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    assert host_range(agent.pid) == expected
    agent.communicate(b"\n")
