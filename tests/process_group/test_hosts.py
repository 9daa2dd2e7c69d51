"""Hosts of one job: the same torch, the same code."""

import pytest

from rl_dist.process_group.hosts import code_version, difference

FIRST = {"host": "first", "torch": "2.13.0", "code": "1234abcd"}


@pytest.mark.parametrize(("name", "value"), [("torch", "2.12.0"), ("code", "ffff0000")])
def test_a_host_with_another_version_is_named(name, value):
    other = FIRST | {"host": "second", name: value}
    found = difference([FIRST, FIRST, other])
    assert all(word in found for word in ("host second", value, "host first", FIRST[name]))
    assert difference([FIRST, FIRST | {"host": "second"}]) == ""


def test_the_version_of_the_code_follows_every_module(tmp_path, monkeypatch):
    monkeypatch.setattr("rl_dist.process_group.hosts.CODE", tmp_path)
    found = [code_version()]
    for name, text in (("agents/new.py", ""), ("agents/new.py", "x = 1"), ("rl_dist/new.py", "")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        found.append(code_version())
    assert len(set(found)) == len(found)
