"""The job of a run out of its directory, sound, torn and foreign ones."""

import json

import pytest

from rl_dist.speedup import __main__ as speedup
from rl_dist.speedup.job_of_run import flags_of

CONFIG = {
    "launch": {"num_gpus": 2, "on_event": ""},
    "train": {"num_envs": 0, "normalize_obs": True},
    "ppo": {"target_kl": None},
    "task": {"env": "Recall-v0", "env_kwargs": ""},
    "data": {"data": "simulated"},
    "market": {"num_worlds": 4},
    "trading": {"fee_bps": 10.0},
}
OWN = ["--num_gpus=2", "--num_envs=0", "--normalize_obs=True", "--target_kl=none"]
TRADING = {"task": {"env": "StockTrading-v0"}, "data": {"data": "prices.csv"}}


@pytest.mark.parametrize(
    ("changes", "flags"),
    [
        ({}, ["--env=Recall-v0"]),
        (TRADING, ["--env=StockTrading-v0", "--data=prices.csv", "--fee_bps=10.0"]),
    ],
)
def test_flags_of_a_run_leave_out_what_cannot_take_effect(changes, flags):
    assert flags_of(CONFIG | changes) == OWN + flags


@pytest.mark.parametrize(
    "config",
    [
        b'{"train": {',
        b"\xff",
        [1, 2],
        {"train": 5, "task": {}},
        {"train": {}},
        CONFIG | {"task": {}},
        CONFIG | {"train": {"num_episodes": "many"}},
        None,
    ],
)
def test_what_is_no_run_of_this_version_is_reported_at_once(config, tmp_path, capsys):
    if config is not None:
        text = config if isinstance(config, bytes) else json.dumps(config).encode()
        (tmp_path / "config.json").write_bytes(text)
    assert speedup.main([str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("error: ") and err.count("\n") == 1
    assert "config.json" in err and str(tmp_path) in err
