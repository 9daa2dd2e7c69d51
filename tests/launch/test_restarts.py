"""Ranks die: the job names them and ends, or starts again and ends as if nothing had happened."""

import json
import os
import re
import signal
import stat
import sys

import pytest
from tensorboard_readers import seen
from train_runs import (
    RECALL,
    REPO,
    assert_nobody_left,
    records,
    session,
    start,
    start_training,
    train_here,
    wait_until,
)

from rl_dist.checkpoint.store import latest_checkpoint, load_checkpoint
from rl_dist.resume_check import differences, result_of

SIZES = [*RECALL, "--eval_episodes", "2", "--validate_every", "0", "--num_gpus", "2"]
SIX = [*SIZES, "--total_steps", 6 * 64, "--checkpoint_every", "2", "--keep_checkpoints", "100"]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1")
DYING = REPO / "tests/dying_training.py"
PATIENCE_S = 300  # whole runs on a busy machine
pytestmark = [
    pytest.mark.timeout(3 * PATIENCE_S),
    pytest.mark.skipif(sys.platform != "linux", reason="asks Linux which processes are left"),
]


def end_of(job, code=0):
    """The stderr of a job that ends with this code and leaves nobody behind."""
    out, err = job.communicate(timeout=PATIENCE_S)
    assert job.returncode == code, out + err
    assert_nobody_left(job.pid)
    return err


def dying(monkeypatch, die, *flags, before=(), folder=None):
    """Start a training in which a rank ends; with a folder it says `here` and waits for `go`."""
    monkeypatch.setenv("DIE", die)
    if folder:
        monkeypatch.setenv("DIE_FOLDER", str(folder))
    job = start(*before, DYING, *flags)
    if folder:
        wait_until((folder / "here").exists, job, PATIENCE_S)
    return job


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """A run in which nobody dies."""
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert train_here(monkeypatch, *SIX, "--run_dir", run_dir) == 0
    return run_dir


def assert_as_if_nothing_had_happened(run_dir, reference):
    assert differences(result_of(run_dir), result_of(reference)) == []
    found = []
    for folder in (run_dir, reference):
        summary = json.loads((folder / "summary.json").read_text())
        config = json.loads(load_checkpoint(latest_checkpoint(folder))["config"])
        del summary["scaling"], config["launch"]  # of times; and what may differ
        names = {path.name for path in (folder / "checkpoints").iterdir()}
        tags = [seen(folder, tag) for tag in ("loss/policy", "rank_1/episode/count")]
        found.append((summary, config, names, tags))
    assert found[0] == found[1] and [len(steps) for steps in found[0][3]] == [6, 6]


def test_a_rank_that_is_killed_costs_a_line_and_an_event_and_the_end_is_the_same_bit_for_bit(
    tmp_path, monkeypatch, reference
):
    run_dir, temporary = tmp_path / "run", tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    note = f"cat >> {tmp_path}/events; echo >> {tmp_path}/events"
    flags = [*SIX, "--run_dir", run_dir, "--max_restarts", "2", "--on_event", note]
    flags += ["--env_workers", "auto"]
    job = dying(monkeypatch, "update 1 3 SIGKILL", *flags, folder=tmp_path)
    # while two ranks train, nobody listens beyond loopback, nor can anybody else join them
    processes = session(job.pid)
    sockets = [one for process in processes for one in process.net_connections("inet")]
    addresses = {one.laddr.ip for one in sockets if one.laddr and not one.raddr}
    assert len(processes) >= 3 and addresses and addresses <= {"127.0.0.1", "::1"}
    modes = [stat.S_IMODE(path.stat().st_mode) for path in temporary.glob("rl_dist_*")]
    assert modes == [0o700]
    (tmp_path / "go").touch()
    err = end_of(job)
    assert not list(temporary.glob("rl_dist_*"))
    died = (
        r"rank 1 \(process \d+\) was ended by SIGKILL: restart 1 of 2, continuing from iteration 2"
    )
    assert len(re.findall(f"^{died}$", err, re.MULTILINE)) == 1, err
    assert "Traceback" not in err and "error" not in err, err
    events = [json.loads(line) for line in (tmp_path / "events").read_text().split("\n") if line]
    assert [event["event"] for event in events] == ["restarted", "finished"]
    assert [events[0][name] for name in ("restart", "rank", "iteration")] == [1, 1, 2]
    assert "SIGKILL" in events[0]["message"] and events[0]["run_dir"] == str(run_dir)
    assert (events[1]["exit_code"], events[1]["restarts"]) == (0, 1)
    assert_as_if_nothing_had_happened(run_dir, reference)
    config = json.loads(load_checkpoint(latest_checkpoint(run_dir))["config"])
    assert config["task"]["env_workers"] >= 0  # auto, measured before the restart


@pytest.mark.slow
@pytest.mark.parametrize(
    ("die", "says"),
    [
        ("rollout 0 3 SIGKILL", "SIGKILL: restart 1 of 1, continuing from iteration 2"),
        ("update 0 5 SIGSEGV", "SIGSEGV: restart 1 of 1, continuing from iteration 4"),
        ("checkpoint 0 4 SIGKILL", "SIGKILL: restart 1 of 1, continuing from iteration 2"),
        ("checkpoint 1 4 SIGKILL", "SIGKILL: restart 1 of 1, continuing from iteration 2"),
        ("update 1 1 SIGKILL", "SIGKILL: restart 1 of 1, continuing from iteration 0"),
        ("update 1 3 error", "RuntimeError: the roof .*1 of 1, continuing from iteration 2"),
        ("update 1 3 SIGKILL", ""),  # torchrun restarts it
    ],
)
def test_wherever_a_rank_dies_the_end_is_the_same(die, says, tmp_path, monkeypatch, reference):
    flags = [*SIX, "--run_dir", tmp_path / "run", *(["--max_restarts", "1"] if says else [])]
    err = end_of(dying(monkeypatch, die, *flags, before=() if says else TORCHRUN))
    if says:
        line = rf"^rank {die.split()[1]} .*{says}"
        assert len(re.findall(line, err, re.MULTILINE)) == 1, err
    assert_as_if_nothing_had_happened(tmp_path / "run", reference)


@pytest.mark.slow
def test_on_more_ranks_a_restart_ends_the_same_too(tmp_path, monkeypatch):
    sizes = ["--num_gpus", "3", "--num_envs", "12", "--batch_size", "12"]
    flags = [*SIX, *sizes, "--total_steps", 6 * 12 * 16]
    straight = start_training(*flags, "--run_dir", tmp_path / "straight")
    again = ["--run_dir", tmp_path / "run", "--max_restarts", "1"]
    job = dying(monkeypatch, "update 1 3 SIGKILL", *flags, *again)
    end_of(straight)
    assert "was ended by SIGKILL: restart 1 of 1, continuing from iteration 2" in end_of(job)
    assert_as_if_nothing_had_happened(tmp_path / "run", tmp_path / "straight")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("die", "restarts", "code", "says"),
    [
        ("checkpoint 1 2 SIGKILL", 0, 1, r"rank 1 \(process \d+\) was ended by SIGKILL"),
        ("update 1 3 mistake", 3, 2, "num_envs must be at least 1, got 0"),  # never restarted
    ],
)
def test_what_is_not_restarted_ends_the_job_with_one_line_and_event(
    die, restarts, code, says, tmp_path, monkeypatch
):
    flags = [*SIX, "--run_dir", tmp_path / "run", "--max_restarts", restarts]
    err = end_of(dying(monkeypatch, die, *flags, "--on_event", f"cat >> {tmp_path}/events"), code)
    (line,) = [line for line in err.splitlines() if not line.startswith("iteration ")]
    assert re.search(f"^error: {says}", line)
    event = json.loads((tmp_path / "events").read_text())
    assert [event[name] for name in ("event", "exit_code", "rank")] == ["failed", code, 1]


@pytest.mark.slow
@pytest.mark.parametrize("hanging", [False, True])
def test_a_killed_launcher_leaves_no_orphan_and_resume_auto_goes_on(
    hanging, tmp_path, monkeypatch, capsys
):
    run_dir = tmp_path / "run"
    flags = [*SIZES, "--total_steps", 10**9, "--checkpoint_every", "1", "--run_dir", run_dir]
    if hanging:
        job = dying(monkeypatch, "update 1 4 SIGKILL", *flags, folder=tmp_path)
    else:
        job = start_training(*flags)
        wait_until((run_dir / "checkpoints/iteration_00000004.pt").exists, job, PATIENCE_S)
    assert len(session(job.pid)) >= 3
    os.kill(job.pid, signal.SIGKILL)
    end_of(job, -signal.SIGKILL)
    saved = load_checkpoint(latest_checkpoint(run_dir))["iteration"]
    assert saved == 3 if hanging else saved >= 4
    more = [*flags, "--resume", "auto", "--num_gpus", "1", "--total_steps", (saved + 2) * 64]
    assert train_here(monkeypatch, *more) == 0, capsys.readouterr().err
    assert [line["iteration"] for line in records(run_dir)] == list(range(1, saved + 3))
