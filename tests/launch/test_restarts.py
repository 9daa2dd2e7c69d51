"""If a rank dies, the job names it; a restarted job ends with the same result."""

import functools
import json
import os
import re
import signal
import stat
from types import SimpleNamespace

import pytest
from tensorboard_readers import scalars
from train_runs import (
    RECALL,
    REPO,
    end_of,
    iterations,
    records,
    session,
    start,
    train_here,
    wait_until,
)

from rl_dist.checkpoint.store import latest_checkpoint, load_checkpoint
from rl_dist.files import read_object
from rl_dist.resume_check import differences, result_of

SIZES = [*RECALL, "--num_envs=6", "--batch_size=6", "--eval_episodes=2", "--validate_every=0"]
SIX = [*SIZES, "--total_steps", 6 * 6 * 16, "--checkpoint_every=2", "--keep_checkpoints=100"]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1")
PATIENCE_S = 300  # enough for a whole run on a busy machine
pytestmark = pytest.mark.timeout(3 * PATIENCE_S)


def dying(monkeypatch, die, *flags, before=(), folder=None):
    """Start training in which one rank dies at the point that `die` describes.

    `die` holds the place, the rank, the iteration, and how the rank ends. With `folder`, this
    function returns when the rank is about to die; the rank then waits for the file `go` in that
    folder.
    """
    monkeypatch.setenv("DIE", die)
    if folder:
        monkeypatch.setenv("DIE_FOLDER", str(folder))
    job = start(*before, REPO / "tests/dying_training.py", *flags)
    if folder:
        wait_until((folder / "here").exists, job, PATIENCE_S)
    return job


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return a function that trains on `num_ranks` ranks without faults.

    The function returns the run directory. It trains only once for each number of ranks.
    """

    @functools.cache
    def run(num_ranks):
        run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
        assert train_here(*SIX, "--num_gpus", num_ranks, "--run_dir", run_dir) == 0
        return run_dir

    return run


def assert_as_if_nothing_had_happened(run_dir, reference):
    assert differences(result_of(run_dir), result_of(reference)) == []
    facts = []
    for folder in (run_dir, reference):
        summary = read_object(folder / "summary.json")
        # The entry `scaling` contains measured times, which differ between runs.
        summary.pop("scaling", None)
        names = {path.name for path in (folder / "checkpoints").iterdir()}
        facts.append((summary, names, scalars(folder)["loss/policy"]))
    assert facts[0] == facts[1]


@pytest.fixture(scope="module")
def restarted(tmp_path_factory):
    """Kill rank 1 of 2, which restarts; return facts about the job."""
    folder = tmp_path_factory.mktemp("restarted")
    run_dir, temporary = folder / "run", folder / "tmp"
    temporary.mkdir()
    note = f"cat >> {folder}/events; echo >> {folder}/events"
    flags = [*SIX, "--num_gpus=2", "--run_dir", run_dir, "--max_restarts=2", "--on_event", note]
    # With auto, the numbers of workers are timed only once, not again after the restart.
    flags += ["--env_workers=auto"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(temporary))
        job = dying(patch, "update 1 3 SIGKILL", *flags, folder=folder)
    sockets = [socket for p in session(job.pid) for socket in p.net_connections("inet")]
    modes = [stat.S_IMODE(path.stat().st_mode) for path in temporary.glob("rl_dist_*")]
    (folder / "go").touch()
    err = end_of(job)
    lines = (folder / "events").read_text().split("\n")
    return SimpleNamespace(
        run_dir=run_dir,
        sockets=sockets,
        modes=modes,
        err=err,
        events=[json.loads(line) for line in lines if line],
        left=[*temporary.glob("rl_dist_*")],
    )


def test_ranks_listen_only_on_loopback(restarted):
    sockets = restarted.sockets
    addresses = {socket.laddr.ip for socket in sockets if socket.laddr and not socket.raddr}
    assert addresses and addresses <= {"127.0.0.1", "::1"}


def test_the_folder_of_the_store_is_private_and_removed_at_the_end(restarted):
    assert restarted.modes == [0o700] and not restarted.left


def test_a_killed_rank_is_reported_in_one_line(restarted):
    line, err = r"rank 1 \(process \d+\) .*SIGKILL.*restart 1 of 2.*from iteration 2", restarted.err
    assert len(re.findall(line, err)) == 1 and "Traceback" not in err and "error" not in err, err


def test_a_restart_and_the_end_are_events(restarted):
    restart, end = restarted.events
    expected = {"event": "restarted", "restart": 1, "rank": 1, "iteration": 2}
    assert restart | expected | {"run_dir": str(restarted.run_dir)} == restart
    assert end | {"event": "finished", "exit_code": 0, "restarts": 1} == end


def test_a_restarted_run_ends_bit_for_bit_like_an_undisturbed_one(restarted, undisturbed):
    assert_as_if_nothing_had_happened(restarted.run_dir, undisturbed(2))


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks, die, says",
    [
        (1, "rollout 0 3 0", "code 0 .*from iteration 2"),
        (2, "update 0 5 SIGSEGV", "SIGSEGV.*from iteration 4"),
        (2, "checkpoint 0 4 SIGKILL", "SIGKILL.*from iteration 2"),
        (2, "checkpoint 1 4 77", "code 77 .*from iteration 2"),
        (2, "update 1 1 SIGKILL", "SIGKILL.*from iteration 0"),
        (2, "update 1 3 error", "RuntimeError: the roof.*from iteration 2"),
        (3, "update 1 3 SIGKILL", "SIGKILL.*from iteration 2"),
        # This case runs under torchrun, which restarts the rank.
        (2, "update 1 3 SIGKILL", ""),
    ],
)
def test_the_result_is_the_same_whenever_and_however_a_rank_dies(
    ranks, die, says, tmp_path, monkeypatch, undisturbed
):
    flags = [*SIX, "--run_dir", tmp_path]
    flags += ["--num_gpus", ranks, "--max_restarts=1"] if says else []
    err = end_of(dying(monkeypatch, die, *flags, before=() if says else TORCHRUN))
    if says:
        line = rf"^rank {die.split()[1]} .*{says}"
        assert len(re.findall(line, err, re.MULTILINE)) == 1, err
    assert_as_if_nothing_had_happened(tmp_path, undisturbed(ranks))


def test_a_dead_rank_without_restarts_ends_the_job_with_one_line_and_one_event(
    tmp_path, monkeypatch
):
    flags = [*SIX, "--run_dir", tmp_path / "run", "--on_event", f"cat >> {tmp_path}/events"]
    err = end_of(dying(monkeypatch, "rollout 0 3 0", *flags), 1)
    (line,) = [line for line in err.splitlines() if not line.startswith("iteration ")]
    assert re.search("^error: .*code 0 .*--resume", line)
    event = read_object(tmp_path / "events")
    assert [event[name] for name in ("event", "exit_code")] == ["failed", 1]
    assert len(records(tmp_path / "run")) == 2


@pytest.mark.slow
def test_a_killed_supervisor_leaves_no_orphan_and_resume_auto_continues(tmp_path, monkeypatch):
    run_dir = tmp_path / "run"
    flags = [*SIZES, "--checkpoint_every=1", "--run_dir", run_dir]
    endless = ["--num_gpus=2", "--total_steps", 10**9]
    # Rank 1 hangs, because it waits for a file `go` that never appears.
    job = dying(monkeypatch, "update 1 4 SIGKILL", *flags, *endless, folder=tmp_path)
    assert len(session(job.pid)) >= 4
    os.kill(job.pid, signal.SIGKILL)
    end_of(job, -signal.SIGKILL)
    assert load_checkpoint(latest_checkpoint(run_dir))["iteration"] == 3
    more = [*flags, "--resume=auto", "--num_gpus=1", "--total_steps", 5 * 6 * 16]
    assert train_here(*more) == 0
    assert iterations(run_dir) == list(range(1, 6))
