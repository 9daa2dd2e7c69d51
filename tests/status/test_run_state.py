"""What a run's directory says about it: every state, every figure, every kind of wreck."""

import json
import os
import random
import re
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from rl_dist import run_dir
from rl_dist.errors import UserError
from rl_dist.status import describe, newest_run, read_status

RANK = {"pid": 7, "host": "h", "device": "cpu", "memory_peak_gib": 0.5}
STATE = {
    "version": 1, "launcher_pid": 1, "host": "h", "started": 1.0, "updated": 2.0, "restarts": 0,
    "num_ranks": 2, "ranks": [RANK | {"rank": 0}, RANK | {"rank": 1}], "strategy": "ddp",
    "precision": "fp32", "phase": "training", "iteration": 3, "global_step": 30, "episodes": 3,
    "target": 100, "unit": "episodes", "checkpoint": None, "gradient_bytes": 8, "exit": None,
}  # fmt: skip
SAVED = {"path": "checkpoints/iteration_00000001.pt", "iteration": 1}


def record(iteration, **changes):
    """Ten steps and one episode an iteration, a tenth of a second each."""
    return {
        "iteration": iteration, "global_step": 10 * iteration, "episode/total": iteration,
        "episode/return": None, "episode/count": 0, "time/sps": 100.0,
        "ranks": [{"rank": 0}, {"rank": 1}],
    } | changes  # fmt: skip


def message(minute, rank, level="WARNING"):
    time = f"2026-01-31 12:{minute}:00,001"
    return {"time": time, "level": level, "rank": str(rank), "text": f"number {minute}"}


class Run:
    """A run directory of one's own making."""

    def __init__(self, path):
        self.path = path
        path.mkdir()
        self.write("config.json", json.dumps({"task": {"env": "Recall-v0"}}))
        self.state()

    def write(self, name, text, age_s=0.0):
        file = self.path / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        os.utime(file, (time.time() - age_s, time.time() - age_s))

    def metrics(self, *records, age_s=0.0):
        self.write("metrics.jsonl", "".join(json.dumps(one) + "\n" for one in records), age_s)

    def state(self, phase="training", code=None, error="", age_s=0.0, **changes):
        ended = None if code is None else {"code": code, "signal": None, "error": error}
        content = json.dumps(STATE | {"phase": phase, "exit": ended} | changes)
        self.write("state.json", content, age_s)

    def logs(self, *messages):
        for rank in {one["rank"] for one in messages}:
            lines = [
                f"{one['time']} {one['level']} rank {rank} some.module: {one['text']}\n"
                f"{one['time']} INFO rank {rank} some.module: a detail\n"
                for one in messages
                if one["rank"] == rank
            ]
            self.write(f"logs/rank_{rank}.log", "".join(lines))

    def read(self):
        return SimpleNamespace(**read_status(self.path))

    def training(self):
        """What is read while the run holds its lock."""
        with run_dir.RunDir(self.path).hold():
            return self.read()


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path / "run")


def test_a_run_whose_lock_is_held_is_running_and_has_its_figures(run):
    use = {"cpu/percent": 90.0, "ram/used_gib": 0.5, "gpu/power_w": None, "time/idle_share": 0.2}
    ranks = [{"rank": 0} | use, {"rank": 1} | use | {"cpu/percent": 50.0}]
    no_sample = [{"rank": 0, "cpu/percent": None, "time/idle_share": 0.4}, {"rank": 1}]
    run.metrics(
        record(1, **{"episode/return": 1.0, "episode/count": 3, "valid/return": 0.25}),
        record(2, **{"episode/return": 5.0, "episode/count": 1, "time/sps": 50.0}, ranks=ranks),
        record(3, ranks=no_sample),
    )
    run.state(checkpoint=SAVED)
    run.write(SAVED["path"], "", age_s=50)
    found = run.training()
    assert (found.state, found.reason, found.phase) == ("running", "", "training")
    assert (found.env, found.strategy, found.device) == ("Recall-v0", "ddp", "cpu")
    assert (found.num_ranks, found.iteration, found.global_step) == (2, 3, 30)
    assert (found.done, found.total, found.unit) == (3, 100, "episodes")
    assert found.steps_per_s == 100 and found.iteration_s == pytest.approx(0.1)
    assert found.eta_s == pytest.approx(97 * 0.1)
    assert found.last_return == 5 and found.mean_return == pytest.approx((3 * 1 + 5) / 4)
    assert found.validation == {"valid/return": 0.25}
    shown = [(one["cpu/percent"], one["ram/used_gib"], one["time/idle_share"]) for one in found.use]
    assert shown == [(90, 0.5, 0.4), (50, 0.5, 0.2)]
    assert "gpu/power_w" not in found.use[0] and not found.messages
    assert found.checkpoint == "iteration_00000001.pt"
    run.state(unit="steps", target=1000)
    found = run.training()
    assert (found.done, found.total, found.unit) == (30, 1000, "steps")
    assert found.eta_s == pytest.approx(9.7)


def test_looking_lets_the_lock_go_and_changes_nothing(run):
    run.metrics(record(1))
    before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}
    run.read()
    assert {path: path.stat().st_mtime_ns for path in run.path.rglob("*")} == before
    run_dir.RunDir(run.path).hold(0).release()


@pytest.mark.parametrize(
    ("phase", "changes", "state", "reason"),
    [
        ("starting", {}, "starting", ""),
        ("restarting", {"restarts": 2}, "restarting", "restart 2"),
        ("validation", {}, "running", "validation"),
        ("training", {}, "running", "no iteration has ended for 10"),
    ],
)
def test_a_locked_one_says_what_it_does(phase, changes, state, reason, run):
    run.state(phase, **changes)
    run.metrics(record(1), record(2), age_s=1000)
    found = run.training()
    assert found.state == state and reason in found.reason


@pytest.mark.parametrize(
    ("phase", "code", "error", "state", "reason"),
    [
        ("done", 0, "", "finished", ""),
        ("stopped", 143, "", "stopped", "--resume continues it"),
        ("restarting", 143, "", "stopped", "torchrun ended its ranks and did not"),
        ("failed", 1, "rank 1 failed with X", "failed", "rank 1 failed with X"),
        ("training", None, "", "dead", "during training"),
    ],
)
def test_how_it_ended_is_in_its_state(phase, code, error, state, reason, run):
    run.metrics(record(1))
    run.state(phase, code, error)
    found = run.read()
    assert found.state == state and reason in found.reason
    if state == "dead":
        assert "no checkpoint" in found.reason
        run.state(phase, checkpoint=SAVED)
        assert "--resume continues" in run.read().reason
    run.write("summary.json", "{}")
    assert run.read().state == "finished"


def test_files_from_the_future_of_a_clock_set_back_are_read_as_new(run):
    run.metrics(record(1), record(2), age_s=-1000)
    assert run.read().state == "dead" and run.read().metrics_age_s == 0


def test_the_last_warnings_and_errors_of_all_ranks_come_in_their_order(run):
    run.logs(*(message(10 + 2 * n + rank, rank) for rank in (0, 1) for n in range(4)))
    found = [(int(one["rank"]), one["text"]) for one in run.read().messages]
    assert found == [(number % 2, f"number {number}") for number in range(13, 18)]


def test_what_is_torn_or_of_strange_types_is_left_out_and_the_rest_is_shown(run):
    strange = {"time/sps": "fast", "episode/return": [], "episode/total": None, "valid/return": {}}
    strange["ranks"] = [7, {}]
    run.metrics(record(1), record(2, **strange, **{"episode/count": True}))
    with (run.path / "metrics.jsonl").open("ab") as file:
        file.write(b'[1]\n7\n{}\n\x00\xff\n{"iteration": 3, "glob')
    run.write("logs/rank_0.log", b'\xff\xfe\x00 no log\n{"rank": 0}\n')
    found = run.training()
    assert (found.state, found.iteration, found.done) == ("running", 2, 0)
    assert found.last_return is None and found.messages == []


def wreck(data, rng):
    """Bytes with a cut, a hole, foreign bytes or another value somewhere."""
    at, to = sorted(rng.choices(range(len(data) + 1), k=2))
    values = [b"null", b"-1", b"1e999", b"NaN", b"[]", b"{}", b'"x"', b"true"]
    values += [b"[" * 3000, b"9" * 400]
    kind = rng.randrange(4)
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + data[to:]
    if kind == 2:
        return data[:at] + rng.randbytes(8) + data[at:]
    places = list(re.finditer(rb"(?<=: )[^,{}\[\]]+", data))
    place = rng.choice(places) if places else None
    return data[: place.start()] + rng.choice(values) + data[place.end() :] if place else data[:at]


def test_whatever_is_wrecked_it_is_shown_or_refused_in_one_line(run):
    use = {"cpu/percent": 90.0, "gpu/power_w": None, "time/idle_share": 0.2}
    values = {"episode/return": 1.0, "episode/count": 2, "valid/return": 0.5}
    ranks = [{"rank": 0} | use, {"rank": 1} | use]
    run.metrics(*(record(n, **values, ranks=ranks) for n in range(1, 5)))
    run.logs(message(10, 1), message(11, 1, "ERROR"))
    run.state("failed", 1, "x", checkpoint=SAVED)
    names = ["config.json", "metrics.jsonl", "state.json", "logs/rank_1.log"]
    whole = {name: (run.path / name).read_bytes() for name in names}
    rng, refused = random.Random(1), 0
    for number in range(400):
        name = names[number % len(names)]
        (run.path / name).write_bytes(wreck(whole[name], rng))
        try:
            with run_dir.RunDir(run.path).hold() if number % 3 == 1 else nullcontext():
                found = run.read()
            assert all(text.isprintable() for _, text in describe(vars(found)))
            json.dumps(vars(found), allow_nan=False)
        except UserError as error:
            assert name == "state.json" and "\n" not in str(error)
            refused += 1
        (run.path / name).write_bytes(whole[name])
    assert 10 < refused <= 100  # of 100 wrecked states


def test_only_the_end_of_a_long_file_is_read(run, monkeypatch):
    monkeypatch.setattr(run_dir, "TAIL_BYTES", 2000)
    run.metrics(*(record(iteration) for iteration in range(1, 1001)))
    found = run.read()
    assert (found.iteration, found.steps_per_s) == (1000, 100)


def test_what_is_no_run_directory_is_one_line(run, tmp_path):
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "nowhere", tmp_path / "empty", run.path / "config.json"):
        with pytest.raises(UserError, match="has no state.json"):
            read_status(path)
    with pytest.raises(UserError, match="there is no run in"):
        newest_run(tmp_path / "empty")
    run.write("state.json", json.dumps(STATE)[:50])
    with pytest.raises(UserError, match="torn"):
        run.read()


def test_the_newest_run_is_the_one_that_was_written_to_last(tmp_path):
    older, newer = Run(tmp_path / "b"), Run(tmp_path / "a")
    older.state(age_s=1000)
    newer.state(age_s=50)
    assert newest_run(tmp_path) == newer.path


def test_neither_the_status_nor_the_package_loads_torch():
    code = "import sys, rl_dist, rl_dist.status; sys.exit('torch' in sys.modules)"
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, cwd=Path(__file__).parents[2]).returncode == 0
