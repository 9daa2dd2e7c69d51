"""Ranks that start, stop or fail give one clear message and leave no process."""

import multiprocessing
import os
import re
import signal
import sys
import time
from types import SimpleNamespace

import pytest
import rl_dist_ranks
from train_runs import PATIENCE_S, REPO, assert_nobody_left, start, wait_until

from rl_dist.errors import UserError
from rl_dist.launch.ranks import launch


@pytest.mark.parametrize(
    "way, victim, signals, code, saved",
    [
        ("", "group", ["SIGINT"], 130, "2"),
        # After the launcher is killed, each rank gets SIGTERM (15).
        ("", "launcher", ["SIGKILL"], -9, "15"),
        ("start", "launcher", ["SIGKILL"], -9, ""),
        ("evaluation", "rank 1", ["SIGTERM"], 143, ""),
        pytest.param("", "rank 1", ["SIGUSR1"], 138, "10", marks=pytest.mark.slow),
        pytest.param("hang", "group", ["SIGINT", "SIGTERM"], 130, "", marks=pytest.mark.slow),
    ],
)
def test_a_signal_to_any_process_ends_all_ranks_after_they_have_saved(
    way, victim, signals, code, saved, tmp_path
):
    job = start(REPO / "tests/rl_dist_ranks.py", "loop", tmp_path, way)
    pids = [tmp_path / f"pid_{rank}" for rank in range(2)]
    wait_until(lambda: all(path.exists() and path.read_text() for path in pids), job)
    targets = {"group": -job.pid, "launcher": job.pid, "rank 1": int(pids[1].read_text())}
    for name in signals:
        assert job.poll() is None
        os.kill(targets[victim], signal.Signals[name])
        time.sleep(0.0 if name == signals[-1] else 1.0)
    _, stderr = job.communicate(timeout=PATIENCE_S)
    assert_nobody_left(job.pid)
    assert job.returncode == code and "Traceback" not in stderr and "rror" not in stderr, stderr
    path = tmp_path / "saved"
    assert (path.read_text() if path.exists() else "") == saved


HANGS, ENDS = 0.0, 100.0  # patience of the launcher if a rank hangs, and if all ranks end


@pytest.mark.parametrize(
    "work, way, patience_s, code, says, tracebacks",
    [
        # Rank 0 reports a lost connection long before rank 1, the cause, fails.
        ("loop", "fail slowly", HANGS, 1, "rank 1 failed with RuntimeError: the roof", 0),
        ("loop", "mistake", ENDS, 2, "num_envs must be at least 1, got 0", 0),
        ("loop", "exit while others hang", HANGS, 1, "rank 1 .* ended with code 0", 0),
        ("fall_in_turn", "", ENDS, 1, "rank 1 .* ended with code 0", 0),
        ("fall_in_turn", "fail", ENDS, 1, "rank 1 failed with RuntimeError: the roof", 1),
        # Rank 0 ends first, because it waited for rank 1.
        ("hang_at_work", None, ENDS, 1, "rank 1: made no progress for .* in work", 0),
        pytest.param(
            *("loop", "fail while others hang", HANGS, 1, "rank 1 failed", 1),
            marks=pytest.mark.slow,
        ),
        pytest.param(*("end_slowly", None, ENDS, 1, "rank 0: too late", 0), marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_fails_or_dies_ends_the_job_and_is_named_in_one_line(
    work, way, patience_s, code, says, tracebacks, tmp_path, monkeypatch, capfd
):
    monkeypatch.setattr("rl_dist.launch.ranks.DEATH_GRACE_S", patience_s)
    function = getattr(rl_dist_ranks, work)
    arguments = (str(tmp_path),) if way is None else (str(tmp_path), way)
    # After a user's mistake (code 2) no rank is restarted, even if restarts are allowed.
    assert launch(function, arguments, num_ranks=2, max_restarts=code - 1) == code
    stderr = capfd.readouterr().err
    (line,) = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert re.search(says, line) and "restart" not in stderr
    assert stderr.count("Traceback (") == tracebacks
    assert not multiprocessing.active_children()


def test_a_halted_rank_is_named_by_a_rank_that_waited_for_it(tmp_path, monkeypatch, capfd):
    """The halted rank 2 reports nothing, and rank 0 only loses its connection to rank 1."""
    log = tmp_path / "logs/rank_0.log"

    def monotonic():
        """Return the time; for the launcher, it stands still until rank 0 has failed."""
        failed = log.exists() and "connection broke" in log.read_text()
        return time.monotonic() if failed else 0.0

    clock = SimpleNamespace(monotonic=monotonic, sleep=time.sleep)
    monkeypatch.setattr("rl_dist.launch.ranks.time", clock)
    assert launch(rl_dist_ranks.halt, (str(tmp_path),), num_ranks=3) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert re.match("error: rank 1: waited .* rank 2, which", line), line
    assert not multiprocessing.active_children()


def fail(error):
    raise error


@pytest.mark.parametrize(
    "function, argument, code, says",
    [
        (fail, UserError("too many cooks"), 2, "error: too many cooks\n"),
        (fail, UserError("no disk", exit_code=1), 1, "error: no disk\n"),
        (fail, ValueError("two\nlines"), 2, "error: two lines\n"),
        (fail, KeyError("lost"), 1, "Traceback"),
        (sys.exit, 0, 1, "SystemExit"),
        (int, 7, 7, ""),
    ],
)
def test_a_single_rank_runs_in_this_process_with_the_same_exit_codes(
    function, argument, code, says, capfd
):
    assert launch(function, (argument,), num_ranks=1) == code
    stderr = capfd.readouterr().err
    assert says in stderr and bool(says) == bool(stderr)


def fall():
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_single_rank_is_also_restarted_up_to_the_limit(capfd):
    assert launch(fall, (), num_ranks=1, max_restarts=1) == 1
    died = r"rank 0 \(process \d+\) was ended by SIGKILL"
    assert re.fullmatch(rf"{died}: restart 1 of 1\nerror: {died}\n", capfd.readouterr().err)
