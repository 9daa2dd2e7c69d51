"""The status command: every state of a run, every figure, every kind of damage, and following."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from contextlib import nullcontext

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from train_runs import PATIENCE_S, RECALL, REPO, only_error, records, start_training, wait_until

from rl_dist import status
from rl_dist.errors import UserError
from rl_dist.run_dir import RunDir
from rl_dist.status import describe, newest_run, read_status

RANKS = [{"rank": rank, "pid": 7, "host": "h", "device": "cpu"} for rank in range(2)]
STATE = {"num_ranks": 2, "ranks": RANKS, "strategy": "ddp", "precision": "fp32", "unit": "episodes"}
SAVED = {"path": "checkpoints/iteration_00000001.pt", "iteration": 1}


def record(iteration, **changes):
    """Ten steps and one episode an iteration, a tenth of a second each."""
    counters = {"iteration": iteration, "global_step": 10 * iteration, "episode/total": iteration}
    figures = {"episode/return": None, "episode/count": 0, "time/sps": 100.0}
    return counters | figures | {"ranks": [{"rank": 0}, {"rank": 1}]} | changes


class Run:
    """A run directory that a test fills."""

    def __init__(self, path):
        self.path = path
        self.write("config.json", json.dumps({"task": {"env": "Recall-v0"}}))
        self.state()

    def write(self, name, content, age_s=0.0):
        file = self.path / name
        file.parent.mkdir(exist_ok=True, parents=True)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        os.utime(file, (time.time() - age_s, time.time() - age_s))

    def metrics(self, *lines, age_s=0.0):
        self.write("metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines), age_s)

    def state(self, phase="training", code=None, error="", age_s=0.0, **changes):
        ended = None if code is None else {"code": code, "error": error}
        content = STATE | {"target": 100, "phase": phase, "exit": ended} | changes
        self.write("state.json", json.dumps(content), age_s)

    def log(self, rank, *lines):
        lines = (f"2026-01-31 12:{line[:2]}:00,001 {line[3:]}\n" for line in lines)
        self.write(f"logs/rank_{rank}.log", "".join(lines))

    def read(self, *, training=False):
        """Read the status; with `training`, while the run holds its lock."""
        with RunDir(self.path).hold() if training else nullcontext():
            return read_status(self.path)


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path / "run")


def test_a_run_whose_lock_is_held_is_running_and_has_its_figures(run, capsys):
    use = {"cpu/percent": 90.0, "ram/used_gib": 0.5, "gpu/power_w": None, "time/idle_share": 0.2}
    ranks = [{"rank": 0} | use, {"rank": 1} | use | {"cpu/percent": 50.0, "gpu/power_w": 250}]
    run.metrics(
        record(1, **{"episode/return": 1.0, "episode/count": 3, "valid/return": 0.25}),
        record(2, **{"episode/return": 5.0, "episode/count": 1, "time/sps": 50.0}, ranks=ranks),
        record(3, ranks=[{"rank": 0, "cpu/percent": None, "time/idle_share": 0.4}, {"rank": 1}]),
    )
    run.state(checkpoint=SAVED)
    run.log(0, "30 WARNING rank 0 a.module: slow", "31 INFO rank 0 a.module: a detail")
    with RunDir(run.path).hold():
        assert status.main([str(run.path), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert status.main([str(run.path)]) == 0
        text = capsys.readouterr().out
    expected = {
        "state": "running",
        "env": "Recall-v0",
        "num_ranks": 2,
        "iteration": 3,
        "done": 3,
        "total": 100,
        "steps_per_s": 100,
        "returns": {"episode/return": 5.0, "valid/return": 0.25},
        "checkpoint": "iteration_00000001.pt",
        "iteration_s": pytest.approx(0.1),
        "eta_s": pytest.approx(9.7),
    }
    assert found | expected == found
    shown = [(rank["cpu/percent"], rank.get("gpu/power_w")) for rank in found["use"]]
    assert shown == [(90, None), (50, 250)] and found["use"][0]["time/idle_share"] == 0.4
    assert [(m["level"], m["rank"], m["text"]) for m in found["messages"]] == [
        ("WARNING", "0", "slow")
    ]
    for part in (
        *("iteration 3, 3 of 100 episodes (3%)", "100.0 steps/s, 0.1 s an iteration"),
        "return 5, in validation 0.25",
        "CPU 50 % of a core, memory 0.50 GiB, 250 W, waits 20% of the time",
        "rank 0: slow",
    ):
        assert part in text
    run.state(unit="steps", target=1000)
    found = run.read(training=True)
    assert (found["done"], found["total"], found["eta_s"]) == (30, 1000, pytest.approx(9.7))


@pytest.mark.parametrize(
    ("locked", "phase", "changes", "state", "reason"),
    [
        (True, "starting", {}, "starting", ""),
        (True, "restarting", {"restarts": 2}, "restarting", "restart 2"),
        (True, "validation", {}, "running", "validation"),
        (True, "training", {}, "running", "may hang"),
        (False, "done", {"code": 0}, "finished", ""),
        (False, "stopped", {"code": 143}, "stopped", "--resume"),
        (False, "restarting", {"code": 143}, "stopped", "torchrun"),
        (False, "failed", {"code": 1, "error": "rank 1 failed"}, "failed", "rank 1 failed"),
        (False, "training", {}, "dead", "no checkpoint"),
        (False, "training", {"checkpoint": SAVED}, "dead", "--resume"),
    ],
)
def test_lock_phase_and_exit_give_the_state_and_the_exit_code(
    locked, phase, changes, state, reason, run, capsys
):
    run.state(phase, **changes)
    run.metrics(record(1), record(2), age_s=1000)
    found = run.read(training=locked)
    assert found["state"] == state and reason in found["reason"]
    if not locked:  # it is over: --follow has nothing to wait for
        for more in ([], ["--follow"]):
            assert status.main([str(run.path), *more]) == (state in ("failed", "dead"))
            assert state in capsys.readouterr().out
        run.write("summary.json", "{}")
        run.metrics(record(1), age_s=-1000)  # the clock was set back
        assert (run.read()["state"], run.read()["metrics_age_s"]) == ("finished", 0)


def test_looking_lets_the_lock_go_and_changes_nothing(run):
    run.metrics(record(1))
    before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}
    run.read()
    assert {path: path.stat().st_mtime_ns for path in run.path.rglob("*")} == before
    RunDir(run.path).hold(0).release()


def test_the_last_warnings_and_errors_of_all_ranks_come_in_their_order(run):
    for rank in (0, 1):
        run.log(rank, *(f"{10 + 2 * n + rank} ERROR rank {rank} m: {n}" for n in range(4)))
    found = [(m["rank"], m["text"]) for m in run.read()["messages"]]
    assert found == [("1", "1"), ("0", "2"), ("1", "2"), ("0", "3"), ("1", "3")]


def damaged(data, rng):
    """Bytes with a hole, foreign bytes or another value somewhere."""
    at, to = sorted(rng.choices(range(len(data) + 1), k=2))
    place = rng.choice([*re.finditer(rb"(?<=: )[^,{}\[\]]+", data), re.match(b"", data)])
    value = rng.choice([b"null", b"-1", b"1e999", b"NaN", b"[]", b"{}", b"[" * 3000, b"9" * 400])
    changes = (at, b"", to), (at, rng.randbytes(8), at), (place.start(), value, place.end())
    first, new, last = rng.choice(changes)
    return data[:first] + new + data[last:]


def test_whatever_is_wrecked_it_is_shown_or_refused_in_one_line(run):
    values = {"episode/return": 1.0, "episode/count": 2, "valid/return": 0.5}
    ranks = [{"rank": 0, "cpu/percent": 90.0, "time/idle_share": 0.2}, {"rank": 1}]
    run.metrics(*(record(n, **values, ranks=ranks) for n in range(1, 5)))
    run.log(1, "10 WARNING rank 1 m: first", "11 ERROR rank 1 m: second")
    run.state("failed", 1, "x", checkpoint=SAVED)
    names = ["config.json", "metrics.jsonl", "state.json", "logs/rank_1.log"]
    whole = {name: (run.path / name).read_bytes() for name in names}
    rng, refused = random.Random(1), 0
    for number in range(400):
        name = names[number % len(names)]
        (run.path / name).write_bytes(damaged(whole[name], rng))
        try:
            found = run.read(training=number % 3 == 1)
            assert all(text.isprintable() for text in describe(found).values())
            json.dumps(found, allow_nan=False)
        except UserError as error:
            assert name == "state.json" and "\n" not in str(error)
            refused += 1
        (run.path / name).write_bytes(whole[name])
    assert 10 < refused <= 100  # of 100 wrecked states


def test_without_a_directory_the_newest_run_is_meant(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Run(tmp_path / "runs" / "older").state(age_s=1000)
    newer = Run(tmp_path / "runs" / "newer")
    newer.state("done", 0, age_s=50)
    assert newest_run(tmp_path / "runs") == newer.path
    assert status.main([]) == 0 and "runs/newer" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ([], "runs/"),
        (["nowhere"], "nowhere"),
        (["empty"], "empty"),
        (["file"], "file"),
        (["run", "--every"], "--every"),
    ],
)
def test_what_is_no_run_and_bad_usage_is_one_line_and_code_2(
    argv, named, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    try:
        code = status.main(argv)
    except SystemExit as left:
        code = left.code
    assert code == 2 and named in only_error(capsys.readouterr().err)


def test_following_shows_each_change_until_the_end(run, capsys, monkeypatch):
    held = RunDir(run.path).hold()
    run.metrics(record(1))
    left = [2, 2, 3]

    def train_on(every_s):
        if not left:
            run.state("done", 0)
            held.release()
            return
        iteration = left.pop(0)
        run.metrics(*(record(number) for number in range(1, iteration + 1)))

    monkeypatch.setattr("time.sleep", train_on)
    assert status.main([str(run.path), "--follow"]) == 0
    lines = [line.split(" | ")[1:3] for line in capsys.readouterr().out.splitlines()]
    seen = [(state, progress.split(",")[0]) for state, progress in lines]
    running = [("running", f"iteration {number}") for number in (1, 2, 3)]
    assert seen == [*running, ("finished", "iteration 3")]


def test_neither_the_status_nor_the_package_loads_torch():
    code = "import sys, rl_dist, rl_dist.status; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPO).returncode == 0


@pytest.mark.slow
def test_a_real_run_is_watched_killed_and_found_dead(tmp_path):
    path = tmp_path / "run"
    flags = [*RECALL, "--total_steps", 10**8, "--num_gpus", 2, "--monitor_every", 0.05]
    flags += ["--validate_every", 0, "--checkpoint_every", 2]
    job = start_training(*flags, "--run_dir", path)
    try:
        wait_until((path / "state.json").exists, job)
        command = [sys.executable, "-m", "rl_dist.status", path, "--follow"]
        follower = subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, text=True)
        wait_until(lambda: read_status(path)["iteration"] >= 6 and read_status(path)["checkpoint"])
        found = read_status(path)
        assert [found[name] for name in ("state", "num_ranks", "strategy")] == ["running", 2, "ddp"]
        assert found["eta_s"] > 0 and found["steps_per_s"] > 0
    finally:
        os.killpg(job.pid, signal.SIGKILL)
        job.communicate()
    out, _ = follower.communicate(timeout=PATIENCE_S)
    assert follower.returncode == 1
    assert " | running | iteration " in out and " | dead: it ended during " in out
    tags = EventAccumulator(str(path)).Reload().Tags()["scalars"]
    for rank in (0, 1):
        entries = [line["ranks"][rank] for line in records(path)]
        assert any(entry["cpu/percent"] is not None for entry in entries[2:])
        assert all(0 <= entry["time/idle_share"] < 1 for entry in entries)
        assert f"rank_{rank}/cpu/percent" in tags
