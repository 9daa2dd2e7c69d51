"""Hosts of one job: the same Python, torch, numpy and code."""

import pytest

from rl_dist.process_group import join
from rl_dist.process_group.join import code_version, difference, versions

HOSTS = ["host first", "host first", "host second"]


@pytest.mark.parametrize("name", ["torch", "Python", "numpy", "project", "module own_env"])
def test_a_host_with_another_version_is_named(name, tmp_path):
    file = tmp_path / "own_env.py"
    file.write_text("")
    same = versions({"own_env": [file]})
    (key,) = (key for key in same if name in key)
    line = difference(HOSTS, [same, same, same | {key: "0.1"}])
    assert all(word in line for word in ("host second", "0.1", "host first", same[key]))
    assert difference(HOSTS, [same] * 3) == ""
    file.write_text("changed = True")
    assert "own_env" in difference(HOSTS, [same, same, versions({"own_env": [file]})])


def test_the_version_of_the_code_follows_every_module(tmp_path, monkeypatch):
    monkeypatch.setattr(join, "CODE", tmp_path)
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
