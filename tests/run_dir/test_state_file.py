"""state.json: atomic writes, checked reads, and a correct record of every exit."""

import json
import os
import signal
from contextlib import suppress

import pytest
from train_runs import PATIENCE_S, RECALL, start_training, train_here, wait_until

from rl_dist import run_dir
from rl_dist.errors import UserError
from rl_dist.run_dir import WORKING, RankEntry, RunDir
from rl_dist.telemetry.metrics import MetricsWriter

BEGUN = {"num_ranks": 2, "strategy": "ddp", "precision": "fp32", "target": 100, "unit": "steps"}
TINY = [*RECALL, "--eval_episodes=2", "--no-anneal_lr", "--checkpoint_every=2"]


@pytest.fixture
def run(tmp_path):
    run = RunDir(tmp_path)
    run.begin_state(**BEGUN)
    ranks = [RankEntry(rank=rank, pid=7 + rank, host="h", device="cpu") for rank in range(2)]
    run.update_state(ranks=ranks)
    return run


def test_records_update_the_counters_at_intervals_and_at_the_end(run):
    state = run.state()
    assert {name: getattr(state, name) for name in BEGUN} == BEGUN
    assert (state.phase, state.exit, state.launcher_pid) == ("starting", None, os.getpid())
    writer = MetricsWriter(run, 100, "steps")
    writer.update_state(phase="validation")
    seen = set()
    for iteration in range(1, 101):
        counters = {"iteration": iteration, "global_step": iteration, "episode/total": 5}
        writer.write(counters, done=iteration)
        seen.add(run.state().iteration)
    # The first record after a change of phase updates state.json immediately; later records update
    # it at most once in STATE_EVERY_S seconds.
    assert 1 in seen and len(seen) < 20
    writer.close()
    state = run.state()
    assert (state.phase, state.iteration, state.episodes) == ("training", 100, 5)
    assert [rank.pid for rank in state.ranks] == [7, 8]


@pytest.mark.parametrize(
    "before, code, signum, phase, name",
    [
        ("training", 0, 0, "done", None),
        ("training", 143, 0, "stopped", "SIGTERM"),
        ("training", 1, signal.SIGKILL, "failed", "SIGKILL"),
        ("training", 1, 40, "failed", None),  # a real-time signal, without a name
        # If the ranks stop before the death of the launcher is noticed, the run counts as stopped.
        ("stopped", 1, signal.SIGKILL, "stopped", "SIGKILL"),
    ],
)
def test_the_exit_is_recorded_once(run, before, code, signum, phase, name):
    run.update_state(phase=before)
    run.record_exit(os.getpid() + 1, 1)  # exits of other launchers are ignored
    run.record_exit(os.getpid(), code, "" if code == 143 else "first\n\x1b[31mline", signum)
    run.record_exit(os.getpid(), 2, "second")
    state = run.state()
    assert (state.phase, state.exit.code, state.exit.signal) == (phase, code, name)
    assert state.exit.error == (r"first \x1b[31mline" if code == 1 else "")


def test_the_exit_is_recorded_on_a_full_disk(small_disk):
    run = RunDir(small_disk("64k"))
    run.begin_state(**BEGUN)
    run.update_state(phase="saving")
    with suppress(OSError), (run.path / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    run.record_exit(os.getpid(), 1, "No space left on device")
    state = run.state()
    assert (state.phase, state.exit.error) == ("failed", "No space left on device")


DAMAGED = {
    "iteration": ["x", -1],
    "phase": ["flying"],
    "host": ["\x1b[2J"],
    "ranks": [[{"rank": 0}]],
    "checkpoint": [{"path": 1}],
    "exit": [{"code": 1, "signal": 9, "error": ""}],
}


def test_a_damaged_or_hostile_file_is_a_one_line_error(run):
    whole = run.state_path.read_text()
    contents = [whole[:100].encode(), b"", b"[" * 100_000, b"{}"]
    for name, values in DAMAGED.items():
        contents += [json.dumps(json.loads(whole) | {name: value}).encode() for value in values]
    for content in contents:
        run.state_path.write_bytes(content)
        # An update must not change a damaged file.
        run.update_state(iteration=1)
        with pytest.raises(UserError, match=r"state\.json") as raised:
            run.state()
        assert "\n" not in str(raised.value) and len(str(raised.value)) < 300
    run.state_path.unlink()
    assert run.state() is None


# ---- real runs


def test_the_state_follows_a_whole_run_and_a_resumed_one(tmp_path, monkeypatch):
    run, phases, replace_file = RunDir(tmp_path / "run"), [], run_dir.replace_file

    def watch(path, data):
        phases.append(json.loads(data)["phase"])
        replace_file(path, data)

    monkeypatch.setattr(run_dir, "replace_file", watch)
    flags = [*TINY, "--validate_every=2", "--total_steps=256", "--run_dir", run.path]
    assert train_here(*flags) == 0
    first = run.state()
    assert (first.phase, first.exit.code, first.iteration, first.target) == ("done", 0, 4, 256)
    assert first.checkpoint.iteration == 4 and (run.path / first.checkpoint.path).exists()
    assert first.gradient_bytes > 0
    expected = ["starting", "warm_up", "validation", "training", "saving", "evaluation", "done"]
    assert set(phases) == set(expected)
    assert train_here("--resume", run.path, "--total_steps=384") == 0
    state = run.state()
    assert (state.iteration, state.target, state.exit.code) == (6, 384, 0)
    assert state.started > first.started


@pytest.mark.parametrize(
    "victim, signum, phase, code",
    [
        ("rank", signal.SIGKILL, "failed", 1),
        ("launcher", signal.SIGKILL, "stopped", None),  # the ranks save, then stop
        ("launcher", signal.SIGTERM, "stopped", 143),
    ],
)
@pytest.mark.slow
def test_the_state_shows_that_a_run_of_several_ranks_was_killed(
    tmp_path, victim, signum, phase, code
):
    run = RunDir(tmp_path / "run")
    job = start_training(*TINY, "--num_gpus=2", "--total_steps", 10**8, "--run_dir", run.path)
    state = wait_until(lambda: (state := run.state()) and state.checkpoint and state, job)
    assert len({rank.pid for rank in state.ranks}) == 2 and state.phase in WORKING
    os.kill(state.ranks[1].pid if victim == "rank" else state.launcher_pid, signum)
    job.communicate(timeout=PATIENCE_S)
    ended = wait_until(lambda: run.state().phase == phase and run.state().exit)
    assert code in (None, ended.code)
