"""What a run's directory tells about it: every state, every figure, every kind of wreck."""

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
from rl_dist.status.run_state import STARTING_S, NoRunError, newest_run, read_run

BEGAN = "2026-01-31 12:00:00,001 INFO rank {rank} train_distributed: Recall-v0, rank {rank} of 2 on cpu\n"
TRAINED = "2026-01-31 12:00:09,001 INFO rank {rank} train_distributed: trained to iteration 3, 30 steps\n"
FAILED = """2026-01-31 12:00:0{rank},001 ERROR rank {rank} rl_dist.launch.rank: rank {rank} failed
Traceback (most recent call last):
  File "x.py", line 1, in f
    raise ValueError
ValueError: of rank {rank}

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "x.py", line 2, in g
    f()
faults.EnvironmentFault: rank {rank} is to blame
"""
LONG_AGO_S = 10 * STARTING_S


def record(iteration, **changes):
    """Ten steps and one episode an iteration, a tenth of a second each."""
    return {
        "iteration": iteration, "global_step": 10 * iteration, "episode/total": iteration, "episode/return": None,
        "episode/count": 0, "time/sps": 100.0, "ranks": [{"rank": 0}, {"rank": 1}],
    } | changes  # fmt: skip


class Run:
    """A run directory of one's own making."""

    def __init__(self, path, **train):
        self.path = path
        path.mkdir()
        self.config = {
            "launch": {"strategy": "default", "max_restarts": 0},
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

    def logs(self, *texts, age_s=0.0):
        for rank, text in enumerate(texts):
            self.write(f"logs/rank_{rank}.log", text.replace("{rank}", str(rank)), age_s)

    def summary(self, iteration):
        self.write("summary.json", json.dumps({"iteration": iteration}))

    def config_is_old(self):
        self.age("config.json", LONG_AGO_S)

    def read(self):
        return read_run(self.path)

    def how(self):
        found = self.read()
        return found.state, found.reason


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path / "run")


def test_a_run_whose_lock_is_held_is_running_and_tells_its_figures(run):
    use = {"cpu/percent": 90.0, "ram/used_gib": 0.5, "gpu/power_w": None, "time/idle_share": 0.2}
    ranks = [{"rank": 0} | use, {"rank": 1} | use | {"cpu/percent": 50.0}]
    no_sample = [{"rank": 0, "cpu/percent": None, "time/idle_share": 0.4}, {"rank": 1, "time/idle_share": 0.2}]
    run.metrics(
        record(1, **{"episode/return": 1.0, "episode/count": 3, "valid/return": 0.25}),
        record(2, **{"episode/return": 5.0, "episode/count": 1, "time/sps": 50.0}, ranks=ranks),
        record(3, ranks=no_sample),
    )
    run.logs(BEGAN, BEGAN)
    with hold(run.path / "config.json"):
        found = run.read()
    assert (found.state, found.reason, found.over) == ("running", "", False)
    assert (found.env, found.strategy, found.device, found.num_ranks) == ("Recall-v0", "ddp", "cpu", 2)
    assert (found.iteration, found.global_step) == (3, 30)
    assert (found.done, found.total, found.unit) == (3, 100, "episodes")
    assert found.steps_per_s == 100 and found.iteration_s == pytest.approx((0.1 + 0.2) / 2)
    assert found.eta_s == pytest.approx(97 * 0.15)
    assert found.last_return == 5 and found.mean_return == pytest.approx((3 * 1 + 5) / 4)
    assert found.validation == {"valid/return": 0.25}
    assert found.use == [
        {"rank": 0, "cpu/percent": 90.0, "ram/used_gib": 0.5, "time/idle_share": pytest.approx(0.3)},
        {"rank": 1, "cpu/percent": 50.0, "ram/used_gib": 0.5, "time/idle_share": pytest.approx(0.2)},
    ]
    assert found.checkpoint is None and not found.messages and not found.notes
    assert json.loads(json.dumps(found.to_dict()))["use"][1]["cpu/percent"] == 50.0


def test_a_budget_of_steps_counts_steps(tmp_path):
    run = Run(tmp_path / "run", total_steps=1000)
    run.metrics(record(1), record(2))
    with hold(run.path / "config.json"):
        found = run.read()
    assert (found.done, found.total, found.unit) == (20, 1000, "steps")
    assert found.eta_s == pytest.approx(980 / 100)


def test_looking_lets_the_lock_go_and_changes_nothing(run):
    run.metrics(record(1))
    before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}
    run.read()
    assert {path: path.stat().st_mtime_ns for path in run.path.rglob("*")} == before
    hold(run.path / "config.json", patience_s=0).close()


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (lambda run: None, "in its first iteration"),
        (lambda run: run.metrics(record(1), record(2), age_s=1000), "no iteration has ended for 1000 s, and one takes"),
        (lambda run: run.logs(BEGAN + TRAINED), "it was asked to stop"),
        (lambda run: (run.logs(BEGAN + TRAINED), run.metrics(record(100))), "training is over, it is judged"),
    ],
)
def test_a_running_one_says_what_is_out_of_the_ordinary(prepare, reason, run):
    prepare(run)
    with hold(run.path / "config.json"):
        state, said = run.how()
    assert state == "running" and said.startswith(reason)


def test_with_its_summary_it_has_finished_unless_it_went_on_from_there(run):
    run.config_is_old()
    run.metrics(record(1), record(2))
    run.logs(BEGAN + TRAINED)
    run.summary(2)
    assert run.how() == ("finished", "") and run.read().eta_s is None
    run.metrics(record(1), record(2), record(3))
    run.logs(BEGAN + TRAINED + BEGAN)
    assert run.how()[0] == "dead"


def test_before_its_ranks_come_it_is_starting_for_a_while(run):
    assert run.how()[0] == "starting"
    run.config_is_old()
    assert run.how() == ("dead", "no rank has ever started; it has no checkpoint to go on from")


def test_files_from_the_future_of_a_clock_set_back_do_not_start_for_ever(run):
    run.age("config.json", -3)
    assert run.how()[0] == "starting" and "begun 0 s ago" in run.how()[1]
    run.age("config.json", -LONG_AGO_S)
    assert run.how()[0] == "dead"


def test_a_run_whose_configuration_is_newer_than_its_logs_starts_again_unless_it_has_finished(run):
    run.logs(BEGAN, age_s=5)
    assert run.how()[0] == "starting"  # its logs are of a life that left nothing
    run.metrics(record(1), age_s=5)  # resumed
    assert run.how()[0] == "starting"
    run.summary(1)
    run.age("summary.json", 5)
    assert run.how()[0] == "finished"


def test_a_finished_run_stays_so_when_its_last_metrics_are_torn(run):
    run.config_is_old()
    run.logs(BEGAN + TRAINED)
    run.summary(3)
    run.metrics(record(1), record(2), end='{"iteration": 3, "glo')
    assert run.how() == ("finished", "")
    run.metrics(end='{"iteration": 3, "glo')
    assert run.how() == ("finished", "")


def test_how_it_ended_is_told_by_the_logs_of_its_last_life(run):
    run.config_is_old()
    run.metrics(record(1))
    run.logs(BEGAN + TRAINED, BEGAN + TRAINED)
    assert run.how()[0] == "stopped"
    run.metrics(record(1), record(2, **{"episode/total": 100}))
    state, reason = run.how()
    assert state == "dead" and "while it was judged" in reason
    run.logs(BEGAN, BEGAN)
    state, reason = run.how()
    assert state == "dead" and "without a word" in reason and "no checkpoint" in reason
    save_checkpoint(run.path / "checkpoints", {"x": torch.zeros(3)}, iteration=1, keep=5)
    assert "--resume goes on from its checkpoint" in run.how()[1]
    run.logs(BEGAN + FAILED.replace("0{rank}", "05"), FAILED.replace("0{rank}", "04"))
    assert run.how() == ("failed", "rank 1, 2026-01-31 12:00:04,001: faults.EnvironmentFault: rank 1 is to blame")
    run.logs(BEGAN + FAILED + BEGAN, BEGAN + FAILED + BEGAN)  # begun again since
    assert run.how()[0] == "dead"
    assert [message.text for message in run.read().messages] == [
        "faults.EnvironmentFault: rank 0 is to blame", "faults.EnvironmentFault: rank 1 is to blame"
    ]  # fmt: skip


def test_a_run_that_may_restart_is_given_time_to(run):
    run.config["launch"]["max_restarts"] = 3
    run.write("config.json", json.dumps(run.config), age_s=LONG_AGO_S)
    run.metrics(record(1), age_s=LONG_AGO_S)
    run.logs(BEGAN + FAILED, age_s=1)
    assert run.how()[0] == "restarting" and not run.read().over
    run.age("logs/rank_0.log", LONG_AGO_S)
    assert run.how()[0] == "failed"
    run.logs(BEGAN + TRAINED)
    assert run.how()[0] == "stopped"


def test_the_last_warnings_and_errors_of_all_ranks_come_in_their_order(run):
    warning = "2026-01-31 12:{minute}:00,001 WARNING rank {rank} agents.trainer: number {minute}\n"
    run.logs(*("".join(warning.replace("{minute}", str(10 + 2 * n + rank)) for n in range(4)) for rank in (0, 1)))
    found = read_run(run.path, num_messages=3).messages
    assert [(one.rank, one.level, one.text) for one in found] == [
        (1, "WARNING", "number 15"), (0, "WARNING", "number 16"), (1, "WARNING", "number 17")
    ]  # fmt: skip
    assert read_run(run.path, num_messages=0).messages == []


def test_the_newest_checkpoint_that_is_whole_is_named_and_damaged_ones_are_noted(run):
    folder = run.path / "checkpoints"
    for iteration in (9, 10):
        save_checkpoint(folder, {"x": torch.zeros(3)}, iteration=iteration, keep=5)
    found = run.read()
    assert (found.checkpoint, found.checkpoint_checked, found.notes) == ("iteration_00000010.pt", True, [])
    assert 0 <= found.checkpoint_age_s < 100
    data = bytearray((folder / "iteration_00000010.pt").read_bytes())
    data[100] ^= 1
    (folder / "iteration_00000010.pt").write_bytes(data)
    found = run.read()
    assert found.checkpoint == "iteration_00000009.pt"
    (note,) = found.notes
    assert "iteration_00000010.pt is damaged" in note


def test_a_large_checkpoint_is_not_read_for_this(run, monkeypatch):
    monkeypatch.setattr(run_state, "LARGE_BYTES", 10)
    path = save_checkpoint(run.path / "checkpoints", {"x": torch.zeros(3)}, iteration=1, keep=5)
    data = path.read_bytes()
    path.write_bytes(data[:100] + b"not looked into" + data[115:])
    found = run.read()
    assert (found.checkpoint, found.checkpoint_checked) == (path.name, False)
    path.write_bytes(bytes(len(data)))
    found = run.read()
    assert found.checkpoint is None and path.name in found.notes[0]


@pytest.mark.parametrize(
    ("name", "text", "note"),
    [
        ("metrics.jsonl", json.dumps(record(1)) + '\n{"iteration": 2, "glob', "metrics.jsonl has 1 torn line(s)"),
        ("metrics.jsonl", b"\x00\xff\n" + json.dumps(record(1)).encode() + b"\n[1]\n7\n{}\n", "4 torn line(s)"),
        ("summary.json", '{"iteration": ', "summary.json is torn"),
        ("checkpoints/iteration_00000007.pt", b"", "is empty"),
    ],
)
def test_what_is_torn_is_noted_and_the_rest_is_told(name, text, note, run):
    run.metrics(record(1))
    run.write(name, text)
    found = run.read()
    assert found.iteration == 1 and len(found.notes) == 1 and note in found.notes[0]


def test_records_of_strange_types_are_told_as_far_as_they_go(run):
    strange = {"time/sps": "fast", "episode/return": [], "episode/total": None, "valid/return": {}, "ranks": [7, {}]}
    run.metrics(record(1, **strange), record(2, **strange, **{"episode/count": True}))
    run.write("summary.json", "[]")
    run.write("logs/rank_0.log", b"\xff\xfe\x00 no log\nTraceback\nError: x\n")
    run.write("logs/rank_x.log", "")
    with hold(run.path / "config.json"):
        found = run.read()
    assert (found.state, found.iteration, found.done) == ("running", 2, 0)
    assert found.steps_per_s is found.last_return is found.eta_s is None and found.use == [] and found.messages == []


def wreck(data, rng):
    """Bytes with a cut, a hole, foreign bytes or another value somewhere."""
    at, to = sorted(rng.choices(range(len(data) + 1), k=2))
    values = [b"null", b"-1", b"1e999", b"NaN", b"[]", b"{}", b'"x"', b"true", b"[" * 3000, b"9" * 400]
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


def test_whatever_is_wrecked_it_is_told_or_refused_in_one_line(run):
    use = {"cpu/percent": 90.0, "gpu/power_w": None, "time/idle_share": 0.2}
    values = {"episode/return": 1.0, "episode/count": 2, "valid/return": 0.5}
    run.metrics(*(record(n, **values, ranks=[{"rank": 0} | use, {"rank": 1} | use]) for n in range(1, 5)))
    run.logs(BEGAN + FAILED + BEGAN + TRAINED, BEGAN + FAILED)
    run.summary(4)
    save_checkpoint(run.path / "checkpoints", {"x": torch.zeros(3)}, iteration=4, keep=5)
    names = ["config.json", "metrics.jsonl", "summary.json", "logs/rank_1.log", "checkpoints/iteration_00000004.pt"]
    whole = {name: (run.path / name).read_bytes() for name in names}
    rng, refused = random.Random(1), 0
    for trial in range(500):
        name = names[trial % len(names)]
        (run.path / name).write_bytes(wreck(whole[name], rng))
        try:
            with hold(run.path / "config.json") if trial % 2 else nullcontext():
                found = run.read()
            assert describe(found) and one_line(found).count("\n") == 0
            json.dumps(found.to_dict(), allow_nan=False)
        except NoRunError as error:
            assert name == "config.json" and "\n" not in str(error)
            refused += 1
        (run.path / name).write_bytes(whole[name])
    assert 10 < refused < 100  # of 100 wrecked configurations


def test_what_is_no_plain_file_holds_nothing_up(run):
    for name in ("metrics.jsonl", "summary.json"):
        (run.path / name).mkdir()
    (run.path / "logs").mkdir()
    os.mkfifo(run.path / "logs" / "rank_0.log")
    assert run.read().iteration == 0
    (run.path / "config.json").unlink()
    os.mkfifo(run.path / "config.json")
    with pytest.raises(NoRunError, match="config.json .*pipe"):
        run.read()


def test_only_the_end_of_a_long_file_is_read(run, monkeypatch):
    monkeypatch.setattr("rl_dist.telemetry.rank_logs.TAIL_BYTES", 2000)
    run.metrics(*(record(iteration) for iteration in range(1, 1001)))
    found = run.read()
    assert (found.iteration, found.notes, found.steps_per_s) == (1000, [], 100)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ('{"launch": {"strat', "torn or not ours"),
        ("", "torn or not ours"),
        (b"\xff\xfe\x00", "torn or not ours"),
        ("[1, 2]", "does not say how long to train"),
        ('{"train": {"total_steps": 0}, "launch": {}}', "does not say how long to train"),
        ('{"train": {"total_steps": 0, "num_episodes": "many"}, "launch": {}}', "does not say how long to train"),
        ('{"train": {"total_steps": 0, "num_episodes": 5}}', "does not say how long to train"),
    ],
)
def test_a_foreign_or_torn_configuration_is_one_clear_line(config, said, run):
    run.write("config.json", config)
    with pytest.raises(NoRunError, match=said) as raised:
        run.read()
    assert str(run.path) in str(raised.value) and "\n" not in str(raised.value)


def test_what_is_no_run_directory_says_what_to_give_instead(tmp_path):
    for path, said in (
        (tmp_path / "nowhere", "is not there: give a run directory"),
        (tmp_path, "has no config.json; give a run directory"),
    ):
        with pytest.raises(NoRunError, match=said):
            read_run(path)
    with pytest.raises(NoRunError, match="there is no run in"):
        newest_run(tmp_path)
    Run(tmp_path / "mine")
    with pytest.raises(NoRunError, match="it holds 1 run.s., such as .*mine: name one"):
        read_run(tmp_path)
    with pytest.raises(NoRunError, match="is a file: give a run directory"):
        read_run(tmp_path / "mine" / "config.json")


def test_the_newest_run_is_the_one_that_was_written_to_last(tmp_path):
    older, newer = Run(tmp_path / "b"), Run(tmp_path / "a")
    older.config_is_old()
    newer.age("config.json", 50)
    assert newest_run(tmp_path) == newer.path
    older.metrics(record(1), age_s=10)
    assert newest_run(tmp_path) == older.path


def test_neither_the_status_nor_the_package_loads_torch():
    code = "import sys, rl_dist, rl_dist.status; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2]).returncode == 0
