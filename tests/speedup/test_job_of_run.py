"""The job of a run out of its directory, sound, torn, foreign and older ones."""

import json

import pytest

from rl_dist.errors import UnknownFlagError, UserError
from rl_dist.speedup import command as speedup
from rl_dist.speedup.job_of_run import blame_config, budget_of, flags_of_run, measured_of

CONFIG = {
    "launch": {"num_gpus": 2, "on_event": ""},
    "train": {"num_envs": 0, "normalize_obs": True},
    "ppo": {"target_kl": None},
    "task": {"env": "Recall-v0", "env_kwargs": ""},
    "data": {"data": "simulated"},
    "market": {"num_worlds": 4},
    "trading": {"fee_bps": 10.0},
}
TINY = {"num_envs": 4, "num_steps": 16, "bptt_steps": 8, "batch_size": 4}


def write_run(folder, config, records=(), torn='{"torn'):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    lines = [json.dumps(record) + "\n" for record in records]
    (folder / "metrics.jsonl").write_text("".join(lines) + torn)
    return folder


def test_flags_of_a_run_leave_out_what_cannot_take_effect(tmp_path):
    flags = flags_of_run(write_run(tmp_path / "gym", CONFIG))
    assert flags == [
        "--num_gpus=2",
        "--num_envs=0",
        "--normalize_obs=True",
        "--target_kl=none",
        "--env=Recall-v0",
    ]
    trading = CONFIG | {
        "task": {"env": "StockTrading-v0", "vectorization": "auto"},
        "data": {"data": "prices.csv"},
    }
    flags = flags_of_run(write_run(tmp_path / "trading", trading))
    assert flags[-3:] == ["--env=StockTrading-v0", "--data=prices.csv", "--fee_bps=10.0"]


def test_flags_of_an_older_run_without_later_sections_are_read(tmp_path):
    older = {name: CONFIG[name] for name in ("train", "task")}
    assert flags_of_run(write_run(tmp_path, older)) == [
        "--num_envs=0",
        "--normalize_obs=True",
        "--env=Recall-v0",
    ]


# ---- what is no run, or none of this version: one line that names the file, before anything is
# measured


@pytest.mark.parametrize(
    ("config", "metrics", "words"),
    [
        ('{"train": {', "", "config.json is damaged"),
        ("\xff", "", "config.json is damaged"),
        ("[1, 2]", "", "config.json is no configuration of a run"),
        ({"train": 5, "task": {}}, "", "config.json is no configuration of a run"),
        ({"train": {}}, "", "sections task and train"),
        (CONFIG | {"task": {}}, "", "config.json does not say which env"),
        (
            CONFIG | {"train": {"num_episodes": "many"}},
            "",
            "num_episodes must be a whole number from 1, got 'many'",
        ),
        (CONFIG, '{"iteration": 1}\na line\n', "metrics.jsonl is damaged"),
        (CONFIG, '{"iteration": 1}\n[2]\n', "metrics.jsonl is damaged: line 2 is no JSON object"),
    ],
)
def test_what_is_no_run_of_this_version_is_reported_at_once(
    config, metrics, words, tmp_path, capsys
):
    run_dir = write_run(tmp_path / "run", config, torn=metrics)
    if config == "\xff":
        (run_dir / "config.json").write_bytes(b"\xff")
    assert speedup.main([str(run_dir)]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("error: ") and err.count("\n") == 1
    assert words in err and str(run_dir) in err


def test_a_folder_that_is_no_run_is_told(tmp_path):
    with pytest.raises(UserError, match="is no run directory"):
        flags_of_run(tmp_path)


def test_a_flag_that_training_does_not_know_is_the_configurations_if_it_came_from_there(tmp_path):
    error = UnknownFlagError("unknown flag --frobnicate, see --help", "frobnicate")
    told = str(blame_config(error, tmp_path, ["--env=Recall-v0", "--frobnicate=3"]))
    assert "config.json" in told and str(tmp_path) in told and "frobnicate" in told
    assert blame_config(error, tmp_path, ["--env=Recall-v0"]) is error
    other = UserError("batch_size must be 1..10000000, got 0")
    assert blame_config(other, tmp_path, ["--batch_size=0"]) is other


# ---- how long and how fast


def record(ranks, rate):
    return {"ranks": [{}] * ranks, "time/sps": rate}


def test_a_runs_own_throughput_belongs_to_its_ranks_and_its_scaling(tmp_path):
    records = [record(2, rate) for rate in (1.0, 2.0, 500.0, 700.0, 600.0)] + [record(1, 300.0)]
    strong = write_run(tmp_path / "strong", CONFIG | {"train": {"scaling": "strong"}}, records)
    assert measured_of(strong) == {(2, "strong"): 600.0, (1, "strong"): 300.0, (1, "weak"): 300.0}
    weak = write_run(tmp_path / "weak", CONFIG | {"train": {"scaling": "weak"}}, records)
    # resumed on one rank, it has the totals of two
    assert measured_of(weak) == {(2, "weak"): 600.0}
    assert measured_of(None) == {}


def test_records_without_a_throughput_are_left_out(tmp_path):
    odd = [
        {"iteration": 1},
        {"ranks": None, "time/sps": 3.0},
        record(2, None),
        record(2, float("nan")),
        record(2, "x"),
    ]
    assert measured_of(write_run(tmp_path, CONFIG, odd)) == {}
    assert measured_of(write_run(tmp_path, CONFIG, [*odd, record(2, 400)])) == {
        (2, "strong"): 400.0
    }


def test_the_budget_is_what_is_given_or_what_the_run_has(tmp_path):
    run_dir = write_run(tmp_path, CONFIG | {"train": {"num_episodes": 70, "total_steps": 9000}})
    assert budget_of(run_dir, None, 0) == (70, 9000)
    assert budget_of(run_dir, 80, 0) == (80, 0)
    assert budget_of(run_dir, None, 100) == (70, 100)
    assert budget_of(None, None, 0) == (5000, 0)
