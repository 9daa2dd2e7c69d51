"""The job of a run out of its directory, sound, torn, foreign and older ones."""

import json

import pytest

from rl_dist.errors import UserError
from rl_dist.speedup import command as speedup
from rl_dist.speedup.job_of_run import budget_of, flags_of_run

CONFIG = {
    "launch": {"num_gpus": 2, "on_event": ""},
    "train": {"num_envs": 0, "normalize_obs": True},
    "ppo": {"target_kl": None},
    "task": {"env": "Recall-v0", "env_kwargs": ""},
    "data": {"data": "simulated"},
    "market": {"num_worlds": 4},
    "trading": {"fee_bps": 10.0},
}


def write_run(folder, config, metrics='{"torn'):
    folder.mkdir(exist_ok=True)
    text = config if isinstance(config, bytes) else json.dumps(config).encode()
    (folder / "config.json").write_bytes(text)
    (folder / "metrics.jsonl").write_text(metrics)
    return folder


def test_flags_of_a_run_leave_out_what_cannot_take_effect(tmp_path):
    flags = flags_of_run(write_run(tmp_path / "gym", CONFIG))
    own = ["--num_envs=0", "--normalize_obs=True"]
    assert flags == ["--num_gpus=2", *own, "--target_kl=none", "--env=Recall-v0"]
    trading = CONFIG | {
        "task": {"env": "StockTrading-v0", "vectorization": "auto"},
        "data": {"data": "prices.csv"},
    }
    flags = flags_of_run(write_run(tmp_path / "trading", trading))
    assert flags[-3:] == ["--env=StockTrading-v0", "--data=prices.csv", "--fee_bps=10.0"]

    older = {name: CONFIG[name] for name in ("train", "task")}
    assert flags_of_run(write_run(tmp_path / "older", older)) == [*own, "--env=Recall-v0"]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (b'{"train": {', "config.json is damaged"),
        (b"\xff", "config.json is damaged"),
        ([1, 2], "config.json is no configuration of a run"),
        ({"train": 5, "task": {}}, "config.json is no configuration of a run"),
        ({"train": {}}, "config.json is no configuration of a run"),
        (CONFIG | {"task": {}}, "config.json is no configuration of a run"),
        (CONFIG | {"train": {"num_episodes": "many"}}, "must be a whole number from 0, got 'many'"),
    ],
)
def test_what_is_no_run_of_this_version_is_reported_at_once(config, words, tmp_path, capsys):
    run_dir = write_run(tmp_path / "run", config)
    assert speedup.main([str(run_dir)]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("error: ") and err.count("\n") == 1
    assert words in err and str(run_dir) in err


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(UserError, match="config.json"):
        flags_of_run(tmp_path)


def test_the_budget_is_what_is_given_or_what_the_run_has(tmp_path):
    run_dir = write_run(tmp_path, CONFIG | {"train": {"num_episodes": 70, "total_steps": 9000}})
    assert budget_of(run_dir, None, 0) == (70, 9000)
    assert budget_of(run_dir, 80, 0) == (80, 0)
    assert budget_of(run_dir, None, 100) == (70, 100)
    assert budget_of(None, None, 0) == (5000, 0)
