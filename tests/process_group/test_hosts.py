"""Test that all ranks must have the same software, code and settings."""

from types import SimpleNamespace

import pytest

from rl_dist.errors import UserError
from rl_dist.process_group import collectives
from rl_dist.process_group.collectives import check_settings, software

TWO = SimpleNamespace(size=2, is_main_process=True)


@pytest.mark.parametrize("name", ["torch", "Python", "numpy", "project", "module own_env", "gamma"])
def test_a_host_with_another_version_or_setting_is_named(name, tmp_path, monkeypatch):
    file = tmp_path / "own_env.py"
    file.write_text("")
    facts = software({"own_env": [file]}) | {"gamma": 0.99}
    (key,) = (key for key in facts if name in key)
    other = ["second", facts | {key: "0.1"}]
    monkeypatch.setattr(collectives, "all_gather_json", lambda own, _: [own, ["second", own[1]]])
    check_settings({"gamma": 0.99}, TWO, {"own_env": [file]})
    monkeypatch.setattr(collectives, "all_gather_json", lambda own, _: [own, other])
    with pytest.raises(UserError, match="rank 1 on host second has .*'0.1'") as refusal:
        check_settings({"gamma": 0.99}, TWO, {"own_env": [file]})
    assert key in str(refusal.value) and repr(facts[key]) in str(refusal.value)


def test_every_module_changes_the_version_of_the_code(tmp_path, monkeypatch):
    monkeypatch.setattr(collectives, "CODE", tmp_path)
    versions = [software({})]
    for name, text in (
        ("agents/new.py", ""),
        ("agents/new.py", "x = 1"),
        ("rl_dist/new.py", ""),
        ("train_distributed.py", ""),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        assert software({}) not in versions
        versions.append(software({}))
