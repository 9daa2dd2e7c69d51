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
    only_error,
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
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
DYING = REPO / "tests/dying_training.py"
PATIENCE_S = 300  # whole runs on a busy machine
pytestmark = [
    pytest.mark.timeout(3 * PATIENCE_S),
    pytest.mark.skipif(sys.platform != "linux", reason="asks Linux which processes are left"),
]


def without_progress(stderr):
    lines = stderr.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("iteration "))


def succeed(job):
    """The stdout and stderr of a job that ends well and leaves nobody behind."""
    out, err = job.communicate(timeout=PATIENCE_S)
    assert job.returncode == 0, err
    assert_nobody_left(job.pid)
    return out, err


def dying(monkeypatch, die, *flags, before=(), folder=None):
    """Start a training in which a rank ends."""
    monkeypatch.setenv("DIE", die)
    if folder:
        monkeypatch.setenv("DIE_FOLDER", str(folder))
    return start(*before, DYING, *flags)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """A run in which nobody dies."""
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert train_here(monkeypatch, *SIX, "--run_dir", run_dir) == 0
    return run_dir


@pytest.fixture(scope="module")
def restarted(tmp_path_factory):
    """A run whose rank 1 was killed in its third update; and what was seen just before."""
    folder = tmp_path_factory.mktemp("restarted")
    note = f"cat >> {folder}/events; echo $RL_EVENT >> {folder}/names"
    flags = [*SIX, "--run_dir", folder / "run", "--max_restarts", "2", "--on_event", note]
    flags += ["--precision", "auto"]
    (folder / "tmp").mkdir()
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("TMPDIR", str(folder / "tmp"))
        job = dying(monkeypatch, "update 1 3 SIGKILL", *flags, folder=folder)
    wait_until((folder / "here").exists, job, PATIENCE_S)
    looked = {"listening": listening(session(job.pid)), "modes": modes(folder / "tmp")}
    (folder / "go").touch()
    return folder, succeed(job)[1], looked


def listening(processes):
    """How many processes, and the addresses where they listen: IPv4 and IPv6, TCP and UDP."""
    sockets = [one for process in processes for one in process.net_connections("inet")]
    return len(processes), [one.laddr.ip for one in sockets if one.laddr and not one.raddr]


def modes(folder):
    """Name and permissions of what the job has put among the temporary files."""
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}


def assert_as_if_nothing_had_happened(run_dir, reference):
    assert differences(result_of(run_dir), result_of(reference)) == []
    summaries = [json.loads((one / "summary.json").read_text()) for one in (run_dir, reference)]
    for summary in summaries:
        del summary["scaling"]  # of times
    assert summaries[0] == summaries[1]
    folders = [run_dir / "checkpoints", reference / "checkpoints"]
    names = [{path.name for path in folder.iterdir()} for folder in folders]
    assert names[0] == names[1]
    states = [load_checkpoint(latest_checkpoint(one)) for one in (run_dir, reference)]
    configs = [json.loads(state["config"]) for state in states]
    for config in configs:
        del config["launch"], config["train"]["collective_timeout"]
    assert configs[0] == configs[1]
    for tag in ("loss/policy", "rank_1/episode/count"):
        assert seen(run_dir, tag) == seen(reference, tag) and len(seen(run_dir, tag)) == 6


def test_after_a_restart_a_run_ends_bit_for_bit_as_if_nothing_had_happened(restarted, reference):
    assert_as_if_nothing_had_happened(restarted[0] / "run", reference)
    config = json.loads(load_checkpoint(latest_checkpoint(restarted[0] / "run"))["config"])
    assert config["launch"]["precision"] == "fp32"  # what auto came to before the restart


def test_one_line_and_one_event_say_who_died_of_what_and_where_the_restart_goes_on(restarted):
    folder, err, _ = restarted
    died = r"rank 1 \(process \d+\) was ended by SIGKILL: restart 1 of 2, going on from iteration 2"
    assert len(re.findall(f"^{died}$", err, re.MULTILINE)) == 1, err
    assert "Traceback" not in err and "error" not in err, err
    assert (folder / "names").read_text() == "restarted\nfinished\n"
    first, end = json.JSONDecoder().raw_decode((folder / "events").read_text())
    assert (first["restart"], first["rank"], first["iteration"]) == (1, 1, 2)
    assert "SIGKILL" in first["message"] and first["run_dir"] == str(folder / "run")
    last = json.loads((folder / "events").read_text()[end:])
    assert (last["exit_code"], last["restarts"]) == (0, 1)


def test_while_two_ranks_train_nobody_listens_beyond_loopback(restarted):
    processes, addresses = restarted[2]["listening"]
    assert processes >= 3 and addresses  # the launcher and two ranks, over gloo
    assert set(addresses) <= {"127.0.0.1", "::1"}


def test_the_ranks_meet_in_a_directory_that_nobody_else_may_enter(restarted):
    folder, _, looked = restarted
    modes = looked["modes"].items()
    assert [mode for name, mode in modes if name.startswith("rl_dist_")] == [0o700]
    assert not [path for path in (folder / "tmp").iterdir() if path.name.startswith("rl_dist_")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("die", "expected"),
    [
        ("rollout 0 3 SIGKILL", "SIGKILL: restart 1 of 1, going on from iteration 2"),
        ("update 0 5 SIGSEGV", "SIGSEGV: restart 1 of 1, going on from iteration 4"),
        ("checkpoint 0 4 SIGKILL", "SIGKILL: restart 1 of 1, going on from iteration 2"),
        ("checkpoint 1 4 SIGKILL", "SIGKILL: restart 1 of 1, going on from iteration 2"),
        ("update 1 1 SIGKILL", "SIGKILL: restart 1 of 1, going on from iteration 0"),
        ("update 1 3 error", "RuntimeError: the roof .*1 of 1, going on from iteration 2"),
    ],
)
def test_wherever_a_rank_dies_the_end_is_the_same(die, expected, tmp_path, monkeypatch, reference):
    job = dying(monkeypatch, die, *SIX, "--run_dir", tmp_path / "run", "--max_restarts", "1")
    _, err = succeed(job)
    assert len(re.findall(rf"^rank {die.split()[1]} .*{expected}", err, re.MULTILINE)) == 1, err
    assert_as_if_nothing_had_happened(tmp_path / "run", reference)


@pytest.mark.slow
def test_on_more_ranks_a_restart_ends_the_same_too(tmp_path, monkeypatch):
    sizes = ["--num_gpus", "3", "--num_envs", "12", "--batch_size", "12"]
    sizes += ["--total_steps", 6 * 12 * 16]
    straight = start_training(*SIX, *sizes, "--run_dir", tmp_path / "straight")
    flags = [*SIX, *sizes, "--run_dir", tmp_path / "run", "--max_restarts", "1"]
    job = dying(monkeypatch, "update 1 3 SIGKILL", *flags)
    succeed(straight)
    _, err = succeed(job)
    assert "was ended by SIGKILL: restart 1 of 1, going on from iteration 2" in err
    assert_as_if_nothing_had_happened(tmp_path / "run", tmp_path / "straight")


@pytest.mark.slow
def test_without_restarts_a_death_ends_the_job_soon_and_names_the_rank(tmp_path, monkeypatch):
    flags = [*SIX, "--run_dir", tmp_path / "run", "--on_event", f"cat >> {tmp_path}/events"]
    job = dying(monkeypatch, "checkpoint 1 2 SIGKILL", *flags, folder=tmp_path)
    wait_until((tmp_path / "here").exists, job, PATIENCE_S)
    (tmp_path / "go").touch()
    _, err = job.communicate(timeout=60)
    assert job.returncode == 1
    died = r"error: rank 1 \(process \d+\) was ended by SIGKILL"
    assert re.search(died, only_error(without_progress(err)))
    assert_nobody_left(job.pid)
    event = json.loads((tmp_path / "events").read_text())
    assert (event["event"], event["exit_code"], event["rank"]) == ("failed", 1, 1)


@pytest.mark.slow
def test_a_users_mistake_is_never_restarted(tmp_path, monkeypatch):
    flags = [*SIX, "--run_dir", tmp_path / "run", "--max_restarts", "3"]
    job = dying(monkeypatch, "update 1 3 mistake", *flags)
    _, err = job.communicate(timeout=PATIENCE_S)
    assert job.returncode == 2
    assert only_error(without_progress(err)) == "error: num_envs must be at least 1, got 0"
    assert_nobody_left(job.pid)


@pytest.mark.slow
def test_torchrun_restarts_alike(tmp_path, monkeypatch, reference):
    flags = [*SIX, "--run_dir", tmp_path / "run"]
    job = dying(monkeypatch, "update 1 3 SIGKILL", *flags, before=(*TORCHRUN, "--max-restarts=1"))
    out, _ = succeed(job)
    assert out.count("going on from") == 1 and "iteration_00000002.pt" in out
    assert_as_if_nothing_had_happened(tmp_path / "run", reference)


@pytest.mark.slow
@pytest.mark.parametrize("hanging", [False, True])
def test_a_killed_launcher_leaves_no_orphan_and_resume_auto_goes_on(
    hanging, tmp_path, monkeypatch, capsys
):
    run_dir = tmp_path / "run"
    flags = [*SIZES, "--total_steps", 10**9, "--checkpoint_every", "1", "--run_dir", run_dir]
    job = dying(monkeypatch, f"update 1 {4 if hanging else 0} SIGKILL", *flags, folder=tmp_path)
    saved = run_dir / "checkpoints" / "iteration_00000004.pt"
    wait_until((tmp_path / "here" if hanging else saved).exists, job, PATIENCE_S)
    assert len(session(job.pid)) >= 3
    os.kill(job.pid, signal.SIGKILL)
    job.wait()
    assert_nobody_left(job.pid)
    job.communicate()
    saved = load_checkpoint(latest_checkpoint(run_dir))["iteration"]
    assert saved == 3 if hanging else saved >= 4
    more = [*flags, "--resume", "auto", "--num_gpus", "1", "--total_steps", (saved + 2) * 64]
    assert train_here(monkeypatch, *more) == 0, capsys.readouterr().err
    assert [line["iteration"] for line in records(run_dir)] == list(range(1, saved + 3))
