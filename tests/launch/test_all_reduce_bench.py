"""Timing reductions: real ranks, verified sums, and an end whatever a rank does."""

import os
import signal
import threading
from contextlib import suppress

import psutil
import pytest
from train_runs import lives, wait_until

from rl_dist.launch.bench import BenchError, time_reductions


@pytest.mark.slow  # as tests/setup_check/ does by default
def test_every_size_is_timed_on_as_many_ranks_as_asked():
    found = time_reductions(2, [4, 1024, 2**20])
    assert (found.num_ranks, found.backend, list(found.gradients_s)) == (
        2,
        "gloo",
        [4, 1024, 2**20],
    )
    assert all(1e-6 < seconds < 5.0 for seconds in (*found.gradients_s.values(), found.small_s))


def jobs():
    """The processes of ours that start ranks to measure."""
    found = []
    for process in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # it has just ended
            if "launch.bench" in " ".join(process.cmdline()):
                found.append(process)
    return found


def test_an_error_of_the_caller_meanwhile_ends_the_ranks():
    def fail():
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        time_reductions(2, [4], meanwhile=fail)
    wait_until(lambda: not jobs())


@pytest.mark.slow
def test_a_failure_of_the_backend_is_reported_in_its_words(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no_such_interface")
    with pytest.raises(BenchError, match="failed with code 1: .*RuntimeError.*no_such_interface"):
        time_reductions(2, [4])


def stop_one_rank(seen):
    """Stop (SIGSTOP) the first rank of ours that appears, and remember all processes of the job."""

    def ranks():
        family = [q for p in jobs() for q in p.children(recursive=True)]
        seen[:] = [*jobs(), *family]
        return [p for p in family if "spawn_main" in " ".join(p.cmdline())]

    os.kill(wait_until(ranks)[0].pid, signal.SIGSTOP)


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_measurement_with_an_error_and_leaves_no_process():
    seen: list[psutil.Process] = []
    stopper = threading.Thread(target=stop_one_rank, args=(seen,))
    stopper.start()
    with pytest.raises(BenchError, match=r"2 cpu ranks did not end within 25 s"):
        time_reductions(2, [4], timeout_s=25)
    stopper.join()
    assert seen
    wait_until(lambda: not any(lives(process.pid) for process in seen))
