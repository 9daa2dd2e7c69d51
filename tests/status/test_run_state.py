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

import pytest
import torch

from rl_dist.checkpoint.folder import save_checkpoint
from rl_dist.checkpoint.run_lock import hold
from rl_dist.status import run_state
from rl_dist.status.command import describe, one_line
from rl_dist.status.run_state import NoRunError, newest_run, read_run

RANK = {"pid": 7, "host": "h", "device": "cpu", "memory_peak_gib": 0.5}
STATE = {
    "version": 1, "launcher_pid": 1, "host": "h", "started": 1.0, "updated": 2.0, "restarts": 0,
    "num_ranks": 2, "ranks": [RANK | {"rank": 0}, RANK | {"rank": 1}], "strategy": "ddp",
    "precision": "fp32", "phase": "training", "iteration": 3, "global_step": 30, "episodes": 3,
    "target": 100, "unit": "episodes", "checkpoint": None, "gradient_bytes": 8, "exit": None,
}  # fmt: skip


def record(iteration, **changes):
    """Ten steps and one episode an iteration, a tenth of a second each."""
    return {
        "iteration": iteration, "global_step": 10 * iteration, "episode/total": iteration,
        "episode/return": None, "episode/count": 0, "time/sps": 100.0,
        "ranks": [{"rank": 0}, {"rank": 1}],
    } | changes  # fmt: skip


def message(minute, rank, level="WARNING"):
    found = {"time": f"2026-01-31 12:{minute}:00,001", "level": level, "rank": rank}
    return found | {"text": f"number {minute}"}


class Run:
    """A run directory of one's own making."""

    def __init__(self, path, **train):
        self.path = path
        path.mkdir()
        self.config = {
            "launch": {"strategy": "default"},
            "train": {"num_episodes": 100, "total_steps": 0} | train,
            "task": {"env": "Recall-v0"},
        }
        self.write("config.json", json.dumps(self.config))

    def write(self, name, text, age_s=0.0):
        file = self.path / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        self.age(name, age_s)

    def age(self, name, age_s):
        at = time.time() - age_s
        os.utime(self.path / name, (at, at))

    def metrics(self, *records, end="", age_s=0.0):
        self.write("metrics.jsonl", "".join(json.dumps(one) + "\n" for one in records) + end, age_s)

    def state(self, phase="training", code=None, error="", **changes):
        ended = None if code is None else {"code": code, "signal": None, "error": error}
        self.write("state.json", json.dumps(STATE | {"phase": phase, "exit": ended} | changes))

    def logs(self, *messages):
        for rank in {one["rank"] for one in messages}:
            lines = [json.dumps(one) + "\n" for one in messages if one["rank"] == rank]
            self.write(f"logs/rank_{rank}.jsonl", "".join(lines))

    def summary(self, iteration):
        self.write("summary.json", json.dumps({"iteration": iteration}))

    def save(self, iteration):
        folder = self.path / "checkpoints"
        return save_checkpoint(folder, {"x": torch.zeros(3)}, iteration=iteration, keep=5)

    def read(self):
        return read_run(self.path)

    def how(self):
        found = self.read()
        return found.state, found.reason


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path / "run")


def test_a_run_whose_lock_is_held_is_running_and_has_its_figures(run):
    use = {"cpu/percent": 90.0, "ram/used_gib": 0.5, "gpu/power_w": None, "time/idle_share": 0.2}
    ranks = [{"rank": 0} | use, {"rank": 1} | use | {"cpu/percent": 50.0}]
    no_sample = [{"rank": 0, "cpu/percent": None, "time/idle_share": 0.4}]
    no_sample.append({"rank": 1, "time/idle_share": 0.2})
    run.metrics(
        record(1, **{"episode/return": 1.0, "episode/count": 3, "valid/return": 0.25}),
        record(2, **{"episode/return": 5.0, "episode/count": 1, "time/sps": 50.0}, ranks=ranks),
        record(3, ranks=no_sample),
    )
    run.state()
    with hold(run.path / "config.json"):
        found = run.read()
    assert (found.state, found.reason, found.phase) == ("running", "", "training")
    assert not found.over
    assert (found.env, found.strategy, found.device) == ("Recall-v0", "ddp", "cpu")
    assert found.num_ranks == 2
    assert (found.iteration, found.global_step) == (3, 30)
    assert (found.done, found.total, found.unit) == (3, 100, "episodes")
    assert found.steps_per_s == 100 and found.iteration_s == pytest.approx(0.1)
    assert found.eta_s == pytest.approx(97 * 0.1)
    assert found.last_return == 5 and found.mean_return == pytest.approx((3 * 1 + 5) / 4)
    assert found.validation == {"valid/return": 0.25}
    shown = [(one["cpu/percent"], one["ram/used_gib"], one["time/idle_share"]) for one in found.use]
    assert shown == [(90, 0.5, pytest.approx(0.3)), (50, 0.5, pytest.approx(0.2))]
    assert "gpu/power_w" not in found.use[0]
    assert found.checkpoint is None and not found.messages and not found.notes
    assert json.loads(found.to_json())["use"][1]["cpu/percent"] == 50.0


def test_a_budget_of_steps_counts_steps(tmp_path):
    run = Run(tmp_path / "run", total_steps=1000)
    run.metrics(record(1), record(2))
    with hold(run.path / "config.json"):
        found = run.read()
    assert (found.done, found.total, found.unit) == (20, 1000, "steps")
    assert found.eta_s == pytest.approx(9.8)


def test_looking_lets_the_lock_go_and_changes_nothing(run):
    run.metrics(record(1))
    run.state()
    before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}
    run.read()
    assert {path: path.stat().st_mtime_ns for path in run.path.rglob("*")} == before
    hold(run.path / "config.json", patience_s=0).close()


@pytest.mark.parametrize(
    ("phase", "changes", "state", "reason"),
    [
        ("starting", {}, "starting", ""),
        ("restarting", {"restarts": 2}, "restarting", "restart 2"),
        ("validation", {}, "running", "it is in validation"),
        ("training", {}, "running", "no iteration has ended for 1000 s"),
        (None, {}, "running", "no iteration has ended for 1000 s"),
    ],
)
def test_a_locked_one_says_what_it_does(phase, changes, state, reason, run):
    if phase:
        run.state(phase, **changes)
    with hold(run.path / "config.json"):
        if phase in (None, "training"):
            assert run.how() == ("running", "in its first iteration")
        run.metrics(record(1), record(2), age_s=1000)
        found, said = run.how()
    assert found == state and said.startswith(reason)


@pytest.mark.parametrize(
    ("phase", "code", "error", "state", "reason"),
    [
        ("done", 0, "", "finished", ""),
        ("stopped", 143, "", "stopped", "--resume goes on"),
        ("stopped", 130, "stopped at once", "stopped", "stopped at once"),
        ("failed", 1, "rank 1 failed with X", "failed", "rank 1 failed with X"),
        ("training", None, "", "dead", "during training"),
    ],
)
def test_how_it_ended_is_in_its_state(phase, code, error, state, reason, run):
    run.metrics(record(1))
    run.state(phase, code, error)
    found, said = run.how()
    assert found == state and reason in said
    if state == "dead":
        assert "no checkpoint" in said
        run.save(1)
        assert "--resume goes on" in run.how()[1]


def test_with_its_summary_it_has_finished_unless_it_went_on_from_there(run):
    run.state("stopped", 143)
    run.metrics(record(1), record(2))
    run.summary(2)
    assert run.how() == ("finished", "") and run.read().eta_s is None
    run.metrics(end='{"iteration": 2, "glo')
    assert run.how() == ("finished", "")
    run.metrics(record(1), record(2), record(3))
    assert run.how()[0] == "stopped"


def test_a_run_of_an_older_version_has_a_state_as_well(run):
    """Without state.json: metrics, lock, summary and checkpoints say it."""
    run.metrics(record(1), record(2))
    assert run.how()[0] == "dead" and "has no checkpoint" in run.how()[1]
    run.save(1)
    assert run.how()[0] == "dead" and "--resume" in run.how()[1]
    run.save(2)
    found = run.read()
    assert (found.state, found.num_ranks, found.strategy) == ("stopped", 2, "default")
    run.summary(2)
    assert run.how() == ("finished", "")


def test_files_from_the_future_of_a_clock_set_back_are_read_as_new(run):
    run.state()
    run.metrics(record(1), record(2), age_s=-1000)
    assert run.how()[0] == "dead" and run.read().metrics_age_s == 0


def test_the_last_warnings_and_errors_of_all_ranks_come_in_their_order(run):
    run.logs(*(message(10 + 2 * n + rank, rank) for rank in (0, 1) for n in range(4)))
    found = [(one.rank, one.text) for one in run.read().messages]
    assert found == [(number % 2, f"number {number}") for number in range(13, 18)]


def test_the_newest_checkpoint_that_is_whole_is_named_and_damaged_ones_are_noted(run):
    for iteration in (9, 10):
        path = run.save(iteration)
    found = run.read()
    assert (found.checkpoint, found.checkpoint_checked, found.notes) == (path.name, True, [])
    assert 0 <= found.checkpoint_age_s < 100
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    found = run.read()
    assert found.checkpoint == "iteration_00000009.pt"
    assert len(found.notes) == 1 and "iteration_00000010.pt is damaged" in found.notes[0]


def test_a_large_checkpoint_is_not_read_for_this(run, monkeypatch):
    monkeypatch.setattr(run_state, "LARGE_BYTES", 10)
    path = run.save(1)
    data = path.read_bytes()
    path.write_bytes(data[:100] + b"not looked into" + data[115:])
    found = run.read()
    assert (found.checkpoint, found.checkpoint_checked) == (path.name, False)
    path.write_bytes(bytes(len(data)))
    found = run.read()
    assert found.checkpoint is None and path.name in found.notes[0]


GOOD = json.dumps(record(1))


@pytest.mark.parametrize(
    ("name", "text", "note"),
    [
        ("metrics.jsonl", GOOD + '\n{"iteration": 2, "glob', "metrics.jsonl has 1 torn line"),
        ("metrics.jsonl", b"\x00\xff\n" + GOOD.encode() + b"\n[1]\n7\n{}\n", "4 torn line(s)"),
        ("summary.json", '{"iteration": ', "summary.json is torn"),
        ("state.json", json.dumps(STATE)[:50], "state.json is torn"),
        ("checkpoints/iteration_00000007.pt", b"", "is empty"),
    ],
)
def test_what_is_torn_is_noted_and_the_rest_is_shown(name, text, note, run):
    run.metrics(record(1))
    run.write(name, text)
    found = run.read()
    assert (found.iteration, found.num_ranks) == (1, 2)
    assert len(found.notes) == 1 and note in found.notes[0]


def test_records_of_strange_types_are_shown_as_far_as_they_go(run):
    strange = {"time/sps": "fast", "episode/return": [], "episode/total": None, "valid/return": {}}
    strange["ranks"] = [7, {}]
    run.metrics(record(1, **strange), record(2, **strange, **{"episode/count": True}))
    run.write("summary.json", "[]")
    run.write("logs/rank_0.jsonl", b'\xff\xfe\x00 no log\n{"rank": 0}\n')
    with hold(run.path / "config.json"):
        found = run.read()
    assert (found.state, found.iteration, found.done) == ("running", 2, 0)
    assert found.steps_per_s is found.last_return is found.eta_s is None
    assert found.use == [] and found.messages == []


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
    run.summary(4)
    run.state("failed", 1, "x")
    run.save(4)
    names = ["config.json", "metrics.jsonl", "summary.json", "state.json", "logs/rank_1.jsonl"]
    names.append("checkpoints/iteration_00000004.pt")
    whole = {name: (run.path / name).read_bytes() for name in names}
    rng, refused = random.Random(1), 0
    for trial in range(600):
        name = names[trial % len(names)]
        (run.path / name).write_bytes(wreck(whole[name], rng))
        try:
            with hold(run.path / "config.json") if trial % 4 == 1 else nullcontext():
                found = run.read()
            assert describe(found) and one_line(found).count("\n") == 0
            found.to_json()
        except NoRunError as error:
            assert name == "config.json" and "\n" not in str(error)
            refused += 1
        (run.path / name).write_bytes(whole[name])
    assert 10 < refused < 100  # of 100 wrecked configurations


def test_what_is_no_plain_file_holds_nothing_up(run):
    for name in ("metrics.jsonl", "summary.json", "state.json", "logs"):
        (run.path / name).mkdir()
    os.mkfifo(run.path / "logs" / "rank_0.jsonl")
    assert run.read().iteration == 0
    (run.path / "config.json").unlink()
    os.mkfifo(run.path / "config.json")
    with pytest.raises(NoRunError, match=r"config.json .*pipe"):
        run.read()


def test_only_the_end_of_a_long_file_is_read(run, monkeypatch):
    monkeypatch.setattr(run_state, "TAIL_BYTES", 2000)
    run.metrics(*(record(iteration) for iteration in range(1, 1001)))
    found = run.read()
    assert (found.iteration, found.notes, found.steps_per_s) == (1000, [], 100)


@pytest.mark.parametrize(
    "config",
    [
        '{"launch": {"strat',
        b"\xff\xfe\x00",
        "[1, 2]",
        '{"train": {"total_steps": 0}, "launch": {}}',
        '{"train": {"total_steps": 0, "num_episodes": "many"}, "launch": {}}',
        '{"train": {"total_steps": 0, "num_episodes": 5}}',
    ],
)
def test_a_foreign_or_torn_configuration_is_one_clear_line(config, run):
    run.write("config.json", config)
    with pytest.raises(NoRunError, match="how long to train") as raised:
        run.read()
    assert str(run.path) in str(raised.value) and "\n" not in str(raised.value)


def test_what_is_no_run_directory_says_what_to_give_instead(tmp_path):
    Run(tmp_path / "mine")
    (tmp_path / "empty").mkdir()
    refused = {
        tmp_path / "nowhere": "is not there: give a run directory",
        tmp_path / "empty": "has no config.json; give a run directory",
        tmp_path: "name one of its runs, such as .*mine",
        tmp_path / "mine" / "config.json": "is a file: give a run directory",
    }
    for path, match in refused.items():
        with pytest.raises(NoRunError, match=match):
            read_run(path)
    with pytest.raises(NoRunError, match="there is no run in"):
        newest_run(tmp_path / "empty")


def test_the_newest_run_is_the_one_that_was_written_to_last(tmp_path):
    older, newer = Run(tmp_path / "b"), Run(tmp_path / "a")
    older.age("config.json", 1000)
    newer.age("config.json", 50)
    assert newest_run(tmp_path) == newer.path
    older.metrics(record(1), age_s=10)
    assert newest_run(tmp_path) == older.path


def test_neither_the_status_nor_the_package_loads_torch():
    code = "import sys, rl_dist, rl_dist.status.command; sys.exit('torch' in sys.modules)"
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, cwd=Path(__file__).parents[2]).returncode == 0
