"""The supervisor reports every death of its child and leaves no process behind."""

import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from train_runs import PATIENCE_S, REPO, lives, start, wait_until

from rl_dist.process_group import process_ends
from rl_dist.process_group.process_ends import SAME_KEYPRESS_S, StopFlag

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
SUPERVISED = """
import os, signal, sys, threading, time
from rl_dist.launch import supervisor
from rl_dist.process_group.process_ends import leave, report
supervisor.TEARDOWN_S, supervisor.LAST_WORD_S = 1.0, 1.0
supervisor.supervise()
{before_training}
supervisor.imports_done()
print(os.getpid(), flush=True)
"""


def supervise(code, before_training=""):
    """Start a supervisor; return its job and the process id of its child.

    The child runs `code`.
    """
    program = SUPERVISED.format(before_training=before_training) + code
    heard = partial(signal.signal, signal.SIGHUP, signal.SIG_DFL)  # nohup makes tests ignore it
    job = start("-c", program, cwd=REPO, preexec_fn=heard)
    return job, int(job.stdout.readline() or 0)


def end_of(job):
    """Wait for a program to end; return its exit code and stderr."""
    _, stderr = job.communicate(timeout=PATIENCE_S)
    return job.returncode, stderr


@pytest.mark.parametrize(
    "code, exit_code, says",
    [
        ("os._exit(77)", 1, "code 77"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 1, "SIGKILL"),
        ("report(run_dir='tests'); os.abort()", 1, "SIGABRT"),
        ("os.closerange(0, 256); os._exit(0)", 1, "code 0"),
        ("sys.exit(3)", 3, ""),
        ("1 / 0", 1, "ZeroDivisionError"),
        ("os.closerange(3, 256); leave(5)", 5, ""),
        # The child reported success before it died.
        ("report(exit_code=0); os.abort()", 0, ""),
        # If the child forks, the exit of the forked process is not a report of the child.
        ("if os.fork() == 0: sys.exit(0)\nos.wait(); os._exit(0)", 1, "code 0"),
        # A thread that never ends does not delay the exit.
        ("threading.Thread(target=time.sleep, args=(1000,)).start(); report(exit_code=0)", 0, ""),
    ],
)
def test_a_child_that_dies_without_a_report_has_failed_whatever_its_exit_code(
    code, exit_code, says
):
    job, child = supervise(code)
    ended, stderr = end_of(job)
    assert ended == exit_code and not psutil.pid_exists(child)
    assert says in stderr.splitlines()[-1] if says else stderr == ""


WAIT = "while True: time.sleep(0.01)"
LEAVE = "signal.signal({0}, lambda *_: leave(128 + {0}))\n"


@pytest.mark.parametrize(
    "signals, code, exit_code, says",
    [
        (["SIGTERM"], LEAVE.format(15), 143, ""),
        (["SIGHUP"], LEAVE.format(1), 129, ""),
        # Ctrl-Z stops the job and fg continues it.
        (["SIGSTOP", "SIGCONT", "SIGTERM"], "", 143, "SIGTERM"),
        # Some schedulers send USR1 as a warning before TERM.
        (["SIGUSR1", "SIGTERM"], f"{LEAVE.format(15)}signal.signal(10, lambda *_: 0)\n", 143, ""),
        # A second stop signal ends even a process that blocks stop signals.
        (["SIGTERM", "SIGINT"], "signal.pthread_sigmask(0, [2, 15])\n", 143, "SIGTERM"),
        (["SIGINT"], "signal.signal(2, signal.default_int_handler)\n", 130, "SIGINT"),
    ],
)
def test_stop_signals_are_passed_on_and_a_second_one_ends_it(signals, code, exit_code, says):
    job, child = supervise(code + "print('handles signals', flush=True)\n" + WAIT)
    assert job.stdout.readline() == "handles signals\n"
    for name in signals:
        assert job.poll() is None
        job.send_signal(signal.Signals[name])
        time.sleep(1.2 * SAME_KEYPRESS_S if name != signals[-1] else 0)
    ended, stderr = end_of(job)
    assert ended == exit_code and says in stderr and len(stderr.splitlines()) == bool(says)
    assert not psutil.pid_exists(child)


def test_ctrl_c_ends_even_an_import_that_catches_it():
    swallow = "try: print('ready', flush=True); time.sleep(1)\nexcept KeyboardInterrupt: pass"
    job = start("-c", SUPERVISED.format(before_training=swallow) + WAIT, cwd=REPO)
    assert job.stdout.readline() == "ready\n"
    job.send_signal(signal.SIGINT)
    ended, stderr = end_of(job)
    assert ended == 130 and len(stderr.splitlines()) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_the_shell_ignored_stops_the_program_before_it_trains(number):
    """A shell starts the command before `&` with SIGINT ignored."""
    wait = "print('ready', flush=True); time.sleep(1)"
    program = SUPERVISED.format(before_training=wait) + WAIT
    ignoring = partial(signal.signal, number, signal.SIG_IGN)
    job = start("-c", program, cwd=REPO, preexec_fn=ignoring)
    assert job.stdout.readline() == "ready\n"
    job.send_signal(number)
    ended, stderr = end_of(job)
    assert ended == 128 + number and number.name in stderr


ORPHAN = """
if os.fork() == 0:
    if orphan := os.fork(): print(orphan, flush=True)
    os._exit(0)
"""


def test_a_supervisor_that_inherits_orphans_leaves_no_zombies():
    """Process 1 of a container inherits all orphans, and so does a subreaper."""
    reaper = f"import ctypes; ctypes.CDLL(None).prctl({PR_SET_CHILD_SUBREAPER}, 1, 0, 0, 0)\n"
    job = start("-c", reaper + SUPERVISED.format(before_training="") + ORPHAN + WAIT, cwd=REPO)
    orphan = [int(job.stdout.readline()) for _ in range(2)][1]
    wait_until(lambda: not psutil.pid_exists(orphan), job)
    job.terminate()
    assert end_of(job)[0] == 143


def test_nothing_outlives_a_killed_supervisor():
    job, child = supervise(WAIT)
    job.kill()
    job.wait()
    wait_until(lambda: not lives(child))


def test_the_supervisor_of_a_training_loads_no_torch():
    job = start("train_distributed.py", "--help", cwd=REPO)
    loaded = ""
    while job.poll() is None:
        loaded = Path(f"/proc/{job.pid}/maps").read_text() or loaded
        time.sleep(0.02)
    assert end_of(job)[0] == 0 and "python3" in loaded
    assert "torch" not in loaded and "numpy" not in loaded


def test_the_supervisor_works_with_closed_stdout_and_stderr(tmp_path):
    opened = "' '.join(os.readlink(f'/proc/self/fd/{n}') for n in (1, 2))"
    outlive = "from rl_dist.errors import outlive_readers; outlive_readers()"
    program = SUPERVISED.format(before_training=outlive)
    program += f"open({str(tmp_path / 'fds')!r}, 'w').write({opened})"
    closing = ["sh", "-c", 'exec "$0" -c "$1" >&- 2>&-', sys.executable, program]
    assert subprocess.run(closing, cwd=REPO, timeout=PATIENCE_S).returncode == 0
    assert (tmp_path / "fds").read_text() == "/dev/null /dev/null"


def test_repeated_presses_of_ctrl_c_force_an_exit(monkeypatch):
    now = [10.0]
    monkeypatch.setattr(process_ends, "time", SimpleNamespace(monotonic=lambda: now[0]))
    stop = StopFlag()
    for pressed in range(3):
        for _ in range(2):  # Ctrl-C causes two signals: by the terminal and by the supervisor
            stop.count(signal.SIGINT)
        now[0] += 0.6 * SAME_KEYPRESS_S
        assert stop.insists == (pressed == 2)
