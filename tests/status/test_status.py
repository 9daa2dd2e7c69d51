"""The status command: states of a run, figures, damaged files, and --follow."""

import json
import random
import re
import subprocess
import sys

import pytest
from train_runs import REPO, only_error, run_here

from rl_dist import status
from rl_dist.errors import UserError
from rl_dist.run_dir import RunDir
from rl_dist.status import describe, read_status

RANKS = [{"rank": rank, "pid": 7, "host": "h", "device": "cpu"} for rank in range(2)]
STATE = {"num_ranks": 2, "ranks": RANKS, "strategy": "ddp", "precision": "fp32", "target": 100}
SAVED = {"path": "checkpoints/iteration_00000001.pt", "iteration": 1}


def record(iteration, **figures):
    """Return the metrics of an iteration: 10 steps and 1 episode in 0.1 s."""
    counters = {"iteration": iteration, "global_step": 10 * iteration, "episode/total": iteration}
    return counters | {"time/sps": 100.0, "episode/return": None, "ranks": []} | figures


class Run(RunDir):
    """A run directory with a config, whose other files the test writes."""

    def __init__(self, path):
        super().__init__(path)
        path.mkdir(parents=True)
        self.config_path.write_text('{"task": {"env": "Recall-v0"}}')
        self.set_state()

    def set_state(self, phase="training", **changes):
        content = STATE | {"unit": "episodes", "phase": phase} | changes
        self.state_path.write_text(json.dumps(content))


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path / "runs" / "run")


def test_a_run_whose_lock_is_held_is_running_and_has_its_figures(run, monkeypatch, capsys):
    ranks = [{"rank": 0, "cpu/percent": 90.0, "gpu/power_w": None}, {"rank": 1, "cpu/percent": 50}]
    run.write_records(
        [
            record(1, **{"episode/return": 1.0, "valid/return": 0.25}, ranks=ranks),
            record(2, **{"episode/return": 5.0, "time/sps": 50.0}),
            record(3, ranks=[{"rank": 0, "cpu/percent": None, "time/idle_share": 0.4}]),
        ]
    )
    run.set_state(checkpoint=SAVED)
    before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}
    monkeypatch.chdir(run.path.parents[1])  # without a path, the newest run in runs/ is shown
    with run.hold():
        assert status.main(["--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert status.main([str(run.path)]) == 0
        text = capsys.readouterr().out
        assert {path: path.stat().st_mtime_ns for path in run.path.rglob("*")} == before
        run.set_state(unit="steps", target=1000)
        steps = read_status(run.path)
    expected = {
        "state": "running",
        "env": "Recall-v0",
        "num_ranks": 2,
        "iteration": 3,
        "done": 3,
        "total": 100,
        "steps_per_s": 100,
        "checkpoint": "iteration_00000001.pt",
        "returns": {"episode/return": 5.0, "valid/return": 0.25},
        "iteration_s": pytest.approx(0.1),
        "eta_s": pytest.approx(9.7),
    }
    used = [
        {"rank": 0, "pid": 7, "cpu/percent": 90, "time/idle_share": 0.4},
        {"rank": 1, "device": "cpu", "cpu/percent": 50},
    ]
    assert [rank | more for rank, more in zip(found["ranks"], used, strict=True)] == found["ranks"]
    assert found | expected == found
    for part in ("3 of 100 episodes", "100.0 steps/s", "valid/return 0.25", "cpu/percent 50"):
        assert part in text
    assert (steps["done"], steps["total"], steps["eta_s"]) == (30, 1000, pytest.approx(9.7))


@pytest.mark.parametrize(
    ("locked", "phase", "changes", "state", "reason"),
    [
        (True, "starting", {}, "starting", ""),
        (True, "restarting", {"restarts": 2}, "restarting", "restart 2"),
        (True, "validation", {}, "running", "validation"),
        (False, "done", {"exit": {"code": 0}}, "finished", ""),
        (False, "stopped", {"exit": {"code": 143}}, "stopped", "--resume"),
        (False, "restarting", {"exit": {"code": 143}}, "stopped", "torchrun"),
        (False, "failed", {"exit": {"code": 1, "error": "rank 1"}}, "failed", "rank 1"),
        (False, "training", {}, "dead", "no checkpoint"),
        (False, "training", {"checkpoint": SAVED}, "dead", "--resume"),
    ],
)
def test_lock_phase_and_exit_give_the_state_and_the_exit_code(
    locked, phase, changes, state, reason, run, capsys
):
    run.set_state(phase, **changes)
    if locked:
        run.hold()
    found = read_status(run.path)
    run.release()
    assert found["state"] == state and reason in found["reason"]
    if not locked:  # the run has ended, so --follow returns
        assert status.main([str(run.path), "--follow"]) == (state in ("failed", "dead"))
        assert f" | {state}" in capsys.readouterr().out
        run.write_summary({})
        assert read_status(run.path)["state"] == "finished"


def damaged(data, rng):
    """Return the bytes with a key, a value or a longer part replaced by odd ones."""
    at, to = rng.choice([*re.finditer(rb"[^,:{}\[\]]+", data)]).span()
    ends = [to, len(data), rng.randrange(at, len(data))]
    odd = [b"", b"null", b"-1", b"1e999", b"NaN", b"{}", b"[" * 3000, b"9" * 400, b"\x1b\xff"]
    return data[:at] + rng.choice(odd) + data[rng.choice(ends) :]


def test_whatever_is_wrecked_it_is_shown_or_refused_in_one_line(run):
    figures = {"episode/return": 1.0, "valid/return": 0.5}
    ranks = [{"rank": 0, "cpu/percent": 90.0, "time/idle_share": 0.2}, {"rank": 1}]
    run.write_records([record(n, **figures, ranks=ranks) for n in range(1, 5)])
    run.set_state("failed", exit={"code": 1, "error": "x"}, checkpoint=SAVED)
    paths = [run.config_path, run.metrics_path, run.state_path]
    whole = {path: path.read_bytes() for path in paths}
    rng, refused = random.Random(1), 0
    for number in range(300):
        path = paths[number % 3]
        path.write_bytes(damaged(whole[path], rng))
        try:
            found = read_status(run.path)
            assert all(text.isprintable() for text in describe(found).values())
            json.dumps(found, allow_nan=False)
        except UserError as error:
            assert path == run.state_path and "\n" not in str(error)
            refused += 1
        path.write_bytes(whole[path])
    assert 10 < refused <= 100  # 100 of the damaged files are state.json


@pytest.mark.parametrize("argv", [[], ["nowhere"], ["empty"], ["file"], ["empty", "--every"]])
def test_what_is_no_run_and_bad_usage_is_one_line_and_code_2(argv, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    assert run_here(status.main, argv, monkeypatch) == 2
    assert (argv or ["runs/"])[-1] in only_error(capsys.readouterr().err)


def test_following_shows_each_change_until_the_end(run, capsys, monkeypatch):
    run.hold()
    run.write_records([record(1)])
    left = [2, 2, 3]

    def train_on(every_s):
        if left:
            run.write_records([record(number) for number in range(1, left.pop(0) + 1)])
        else:
            run.set_state("done", exit={"code": 0})
            run.release()

    monkeypatch.setattr("time.sleep", train_on)
    assert status.main([str(run.path), "--follow"]) == 0
    lines = [line.split(" | ")[1:3] for line in capsys.readouterr().out.splitlines()]
    seen = [(state.split(":")[0], progress.split(",")[0]) for state, progress in lines]
    running = [("running", f"iteration {number}") for number in (1, 2, 3)]
    assert seen == [*running, ("finished", "iteration 3")]


def test_neither_the_status_nor_the_package_loads_torch():
    code = "import sys, rl_dist, rl_dist.status; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPO).returncode == 0
