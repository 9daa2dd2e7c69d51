"""state.json: written whole and cheaply, read with care, right however a run goes on or ends."""

import json
import os
import signal
import time

import pytest
import torch
from train_runs import PATIENCE_S, RECALL, start_training, train_here, wait_until

from rl_dist.process_group.world import World
from rl_dist.telemetry import state_file
from rl_dist.telemetry.metrics import MetricsWriter
from rl_dist.telemetry.state_file import (
    StateFile,
    StateFileError,
    begin_state,
    open_state,
    read_state,
    record_exit,
    update_state,
)

RANKS = [{"rank": rank, "pid": 7 + rank, "host": "h", "device": "cpu"} for rank in range(2)]
BEGUN = {"num_ranks": 2, "strategy": "ddp", "precision": "fp32", "target": 100, "unit": "steps"}
TINY = [*RECALL, "--eval_episodes", 2, "--no-anneal_lr", "--checkpoint_every", 2]


@pytest.fixture
def run_dir(tmp_path):
    begin_state(tmp_path, **BEGUN)
    update_state(tmp_path, ranks=[state_file.RankEntry(**entry) for entry in RANKS])
    return tmp_path


def test_a_run_that_begins_says_who_where_and_what(run_dir):
    state = read_state(run_dir)
    assert {name: getattr(state, name) for name in BEGUN} == BEGUN
    assert (state.phase, state.exit, state.checkpoint) == ("starting", None, None)
    assert state.launcher_pid == os.getpid() and abs(state.started - time.time()) < 60
    assert [rank.pid for rank in state.ranks] == [7, 8]


def test_each_iteration_updates_counters_and_peaks(run_dir, cpu_world):
    writer = MetricsWriter(run_dir, cpu_world, 100, "steps")
    record = {"iteration": 3, "global_step": 30, "episode/total": 5}
    for used in (2.0, 1.0, None):
        ranks = [{"rank": 0, "ram/used_gib": used}, {"rank": 1, "gpu/memory_peak_gib": 3.0}]
        writer.write(record | {"ranks": ranks}, done=30)
    writer.close()
    state = read_state(run_dir)
    assert (state.phase, state.iteration, state.global_step) == ("training", 3, 30)
    assert [rank.memory_peak_gib for rank in state.ranks] == [2.0, 3.0] and state.episodes == 5


@pytest.fixture
def cpu_world():
    return World(rank=0, local_rank=0, size=2, device=torch.device("cpu"), backend="gloo")


def test_a_write_takes_under_a_millisecond_and_a_small_share_of_the_time(run_dir, monkeypatch):
    keeper, took = open_state(run_dir), []
    for _ in range(50):
        begun = time.perf_counter()
        keeper.update(phase="validation")
        took.append(time.perf_counter() - begun)
    assert min(took) < 1e-3
    written = []
    monkeypatch.setattr(StateFile, "write", lambda keeper: written.append(keeper.state.iteration))
    for iteration in range(1000):  # no time passes between them: the share is used up
        keeper.update(spare=True, iteration=iteration)
    assert len(written) < 100
    keeper.close()  # what was spared is written at the end
    assert written[-1] == 999


def test_a_disk_that_refuses_it_costs_one_line_and_no_training(run_dir, caplog, monkeypatch):
    keeper = open_state(run_dir)
    (run_dir / "state.json.tmp").mkdir()
    for iteration in range(3):
        keeper.update(iteration=iteration)
    assert len([line for line in caplog.messages if "state.json cannot be written" in line]) == 1
    assert read_state(run_dir).iteration == 0  # the last that was whole
    begin_state(run_dir / "nowhere", **BEGUN)
    record_exit(run_dir / "nowhere", os.getpid(), 1)


def test_a_directory_that_took_the_place_of_the_run_is_left_alone(run_dir):
    path = run_dir / "config.json"
    with path.open("wb") as file:
        keeper = StateFile(run_dir, read_state(run_dir), (path, file))
        path.unlink()
        keeper.update(iteration=5)
    assert read_state(run_dir).iteration == 0


@pytest.mark.parametrize("kind", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_it_is_never_written_through_what_lies_in_its_place(tmp_path, kind):
    for name in ("state.json", "state.json.tmp"):
        kind(tmp_path / name)
    begin_state(tmp_path, **BEGUN)
    assert read_state(tmp_path).num_ranks == 2 and not (tmp_path / "state.json").is_symlink()


@pytest.mark.parametrize(
    ("before", "code", "signum", "phase", "name"),
    [
        ("training", 0, None, "done", None),
        ("training", 143, None, "stopped", "SIGTERM"),
        ("training", 1, signal.SIGKILL, "failed", "SIGKILL"),
        # ranks that have stopped before the death of their launcher is seen stay stopped
        ("stopped", 1, signal.SIGKILL, "stopped", "SIGKILL"),
    ],
)
def test_the_exit_is_recorded_once(run_dir, before, code, signum, phase, name):
    update_state(run_dir, phase=before)
    record_exit(run_dir, os.getpid() + 1, 1)  # of another launcher
    record_exit(run_dir, os.getpid(), code, "first\n\x1b[31mline", signum)
    record_exit(run_dir, os.getpid(), 2, "second")
    state = read_state(run_dir)
    assert (state.phase, state.exit.code, state.exit.signal) == (phase, code, name)
    assert state.exit.error == (r"first \x1b[31mline" if code else "")


def wrecks(whole):
    """Contents that are no state.json of ours."""
    yield from (whole[:100].encode(), b"", b"\xff\xfe", b"[" * 100_000, b"[1]", b"{}")
    changes = {
        "iteration": ["x", -1, 1e300, None, True],
        "phase": ["flying", "\x1b[2J", 5],
        "host": ["\x1b[2J"],
        "ranks": [{}, [1], [{"rank": 0}]],
        "checkpoint": [5, {"path": 1}],
        "version": [2, "1"],
        "exit": [[], {"code": 1, "signal": 9, "error": ""}],
    }
    for name, values in changes.items():
        yield from (json.dumps(json.loads(whole) | {name: value}).encode() for value in values)


def test_a_torn_or_hostile_file_is_one_clear_line(run_dir):
    path = run_dir / "state.json"
    for content in list(wrecks(path.read_text())):
        path.write_bytes(content)
        with pytest.raises(StateFileError, match=r"state\.json") as raised:
            read_state(run_dir)
        assert "\n" not in str(raised.value) and len(str(raised.value)) < 300
        assert open_state(run_dir) is None
    path.unlink()
    assert read_state(run_dir) is None


# ---- real runs


def test_a_whole_run_a_resumed_one_and_a_failed_start(tmp_path, monkeypatch):
    run = tmp_path / "run"
    phases, write = [], StateFile.write

    def watch(keeper):
        phases.append(keeper.state.phase)
        write(keeper)

    monkeypatch.setattr(StateFile, "write", watch)
    flags = [*TINY, "--validate_every", 2]
    assert train_here(monkeypatch, *flags, "--total_steps", 256, "--run_dir", run) == 0
    first = read_state(run)
    assert (first.phase, first.exit.code, first.iteration, first.target) == ("done", 0, 4, 256)
    assert first.checkpoint.iteration == 4 and (run / first.checkpoint.path).exists()
    assert first.strategy == "none" and first.precision == "fp32" and first.gradient_bytes > 0
    expected = ["starting", "warm_up", "validation", "training", "saving", "evaluation", "done"]
    assert set(phases) == set(expected) and phases[0] == "starting" and phases[-1] == "done"
    phases.clear()
    assert train_here(monkeypatch, "--resume", run, "--total_steps", 384) == 0
    state = read_state(run)
    assert (state.iteration, state.target, state.exit.code) == (6, 384, 0)
    assert state.started > first.started and phases[0] == "starting" and "warm_up" not in phases
    # a start that fails leaves nothing
    assert train_here(monkeypatch, *TINY, "--hidden_size", 0, "--run_dir", tmp_path / "x") == 2
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("victim", ["rank", "launcher", "all", "stopped"])
@pytest.mark.slow
def test_a_run_of_several_ranks_that_is_killed_says_so(tmp_path, victim):
    run = tmp_path / "run"
    job = start_training(*TINY, "--num_gpus", 2, "--total_steps", 10**8, "--run_dir", run)
    try:
        wait_until(lambda: (keeper := open_state(run)) and keeper.state.checkpoint)
        state = read_state(run)
        assert len({rank.pid for rank in state.ranks}) == 2 and state.phase in state_file.WORKING
        if victim == "all":
            os.killpg(job.pid, signal.SIGKILL)
        elif victim == "stopped":
            os.kill(state.launcher_pid, signal.SIGTERM)
        else:
            pid = state.ranks[1].pid if victim == "rank" else state.launcher_pid
            os.kill(pid, signal.SIGKILL)
        job.communicate(timeout=PATIENCE_S)
        # ranks of a dead launcher still save
        phase = {"rank": "failed", "stopped": "stopped", "launcher": "stopped"}.get(victim)
        wait_until(lambda: not phase or read_state(run).phase == phase)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    ended = read_state(run)
    if victim == "all":
        assert ended.phase in state_file.WORKING and ended.exit is None
    elif victim == "rank":
        assert ended.exit.code == 1 and "SIGKILL" in ended.exit.error
    elif victim == "stopped":
        assert (ended.exit.code, ended.exit.signal) == (143, "SIGTERM")
        assert ended.checkpoint.iteration == ended.iteration
