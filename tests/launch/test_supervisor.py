"""However a supervised process dies, its supervisor prints it and leaves nobody behind."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from train_runs import PATIENCE_S, RECALL, REPO, lives, records, start_training, wait_until
from train_runs import start as start_python

from rl_dist.process_group import process_ends
from rl_dist.process_group.process_ends import SAME_KEYPRESS_S

SUPERVISED = """
import os, signal, sys, threading, time
from rl_dist.launch import supervisor
from rl_dist.process_group.process_ends import leave, report
from rl_dist.launch.supervisor import supervise
supervisor.EXIT_GRACE_S, supervisor.LAST_WORD_S = 1.0, 1.0
supervise()
print(os.getpid(), flush=True)
"""


def start(code, before=""):
    """Start a supervised program, which does `before` first; and the process that runs `code`."""
    program = SUPERVISED.replace("print(os", f"{before}print(os") + code
    job = start_python("-c", program, cwd=REPO)
    return job, int(job.stdout.readline())


def end_of(job):
    """The exit code of a program, and what it wrote to stderr."""
    _, stderr = job.communicate(timeout=PATIENCE_S)
    return job.returncode, stderr


def has_got(pid, signum):
    """Whether a signal that a process blocks has come."""
    (pending,) = [line for line in proc_status(pid) if line.startswith("ShdPnd:")]
    return int(pending.split()[1], 16) >> (signum - 1) & 1


def proc_status(pid):
    return Path(f"/proc/{pid}/status").read_text().splitlines()


@pytest.mark.parametrize(
    ("code", "exit_code", "words"),
    [
        ("os._exit(77)", 1, "ended with code 77"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 1, "SIGKILL"),
        ("report(run_dir='tests'); os.abort()", 1, "SIGABRT"),
        ("os.closerange(0, 256); os._exit(0)", 1, "ended with code 0"),
        ("sys.exit(3)", 3, ""),
        ("1 / 0", 1, "ZeroDivisionError"),
        ("os.closerange(3, 256); leave(5)", 5, ""),
        ("report(exit_code=0); os.abort()", 0, ""),  # it had ended: only its teardown failed
        # not its child's word
        ("if os.fork() == 0: sys.exit(0)\nos.wait(); os._exit(0)", 1, "ended with code 0"),
    ],
)
def test_a_death_without_a_report_is_a_failure_whatever_its_code(code, exit_code, words):
    job, _ = start(code)
    ended, stderr = end_of(job)
    assert ended == exit_code
    if words:
        assert words in stderr.splitlines()[-1]
    else:
        assert stderr == ""


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_a_stop_signal_is_passed_on(signum):
    handle = f"signal.signal({signum}, lambda *_: leave({128 + signum}))\n"
    job, _ = start("while True: time.sleep(0.01)", before=handle)
    job.send_signal(signum)
    assert end_of(job) == (128 + signum, "")


def test_ctrl_z_and_fg_are_no_stop_signal():
    job, _ = start("time.sleep(1000)")
    for signum in (signal.SIGSTOP, signal.SIGCONT):
        job.send_signal(signum)
        time.sleep(0.1)  # several looks of the supervisor
    job.terminate()
    assert end_of(job) == (128 + signal.SIGTERM, "stopped by SIGTERM\n")


def test_ctrl_c_ends_an_import_that_swallows_it_and_afterwards_is_an_exception_again():
    ready = "print('ready', flush=True)"
    swallow = f"try: {ready}; time.sleep(60)\nexcept KeyboardInterrupt: pass\nos._exit(5)"
    handle = (
        "supervisor.imports_done()\ntry: {}; time.sleep(60)\nexcept KeyboardInterrupt: leave(7)"
    )
    handle = handle.format(ready)
    for code, exit_code in ((swallow, 130), (handle, 7)):
        job, child = start(code)
        assert job.stdout.readline().strip() == "ready"
        job.send_signal(signal.SIGINT)  # the whole group would get it twice, also while it leaves
        ended, stderr = end_of(job)
        assert ended == exit_code and "Traceback" not in stderr
        assert not psutil.pid_exists(child)


def test_a_second_stop_signal_ends_even_a_process_that_ignores_it():
    ignore = "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])\n"
    job, child = start("time.sleep(1000)", before=ignore)
    job.terminate()
    wait_until(lambda: has_got(child, signal.SIGTERM), job)
    time.sleep(1.2 * SAME_KEYPRESS_S)
    assert job.poll() is None
    job.send_signal(signal.SIGINT)
    assert end_of(job)[0] == 128 + signal.SIGTERM
    assert not psutil.pid_exists(child)


def test_a_sigterm_after_a_warning_signal_lets_it_save():
    """Schedulers announce an end by USR1 before they ask for it by TERM."""
    handle = "signal.signal(10, lambda *_: print('warned', flush=True))\n"
    handle += "signal.signal(15, lambda *_: leave(143))\n"
    job, _ = start("while True: time.sleep(0.01)", before=handle)
    job.send_signal(signal.SIGUSR1)
    assert job.stdout.readline() == "warned\n"
    time.sleep(1.2 * SAME_KEYPRESS_S)
    job.terminate()
    assert end_of(job)[0] == 143


def test_a_thread_that_never_ends_keeps_nobody_waiting():
    job, child = start(
        "threading.Thread(target=time.sleep, args=(1000,)).start(); report(exit_code=0)"
    )
    assert end_of(job)[0] == 0
    assert not psutil.pid_exists(child)


def test_nothing_outlives_a_killed_supervisor():
    job, child = start("time.sleep(1000)")
    job.kill()
    job.wait()
    wait_until(lambda: not lives(child))


def test_the_supervisor_of_a_training_loads_no_torch():
    job = start_python("train_distributed.py", "--help", cwd=REPO)
    loaded = ""
    while job.poll() is None:
        loaded = Path(f"/proc/{job.pid}/maps").read_text() or loaded
        time.sleep(0.02)
    assert end_of(job)[0] == 0
    assert "libpython" in loaded or "python3" in loaded
    assert "torch" not in loaded and "numpy" not in loaded


DYING = [*RECALL, "--env", "dying_envs:Dying-v0", "--num_steps", 8, "--total_steps", 320]
DYING += ["--checkpoint_every", 1, "--eval_episodes", 2]


def test_one_rank_that_dies_leaves_a_line_an_event_and_a_run_to_go_on_with(tmp_path, monkeypatch):
    monkeypatch.setenv("DIE", "0")
    flags = [*DYING, "--run_dir", tmp_path / "run", "--on_event", f"cat >> {tmp_path}/events"]
    ended, stderr = end_of(start_training(*flags))
    assert ended == 1, stderr
    (line,) = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert f"--resume {tmp_path / 'run'}" in line and "Traceback" not in stderr
    assert json.loads((tmp_path / "events").read_text())["event"] == "failed"
    assert records(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "victim", "way"), [(1, 0, "0"), (2, 0, "0"), (2, 1, "77"), (3, 0, "SIGSEGV")]
)
def test_with_restarts_a_rank_that_dies_costs_nothing(ranks, victim, way, tmp_path, monkeypatch):
    monkeypatch.setenv("DIE", way)
    monkeypatch.setenv("DIE_RANK", str(victim))
    sizes = ["--num_envs", 12, "--batch_size", 12, "--num_gpus", ranks, "--total_steps", 960]
    job = start_training(*DYING, *sizes, "--run_dir", tmp_path, "--max_restarts", 1)
    ended, stderr = end_of(job)
    assert ended == 0, stderr
    assert f"rank {victim} (process" in stderr and "restart 1 of 1" in stderr, stderr
    assert [line["iteration"] for line in records(tmp_path)] == list(range(1, 11))


def test_it_runs_with_closed_outputs(tmp_path):
    code = "from rl_dist.errors import outlive_readers; outlive_readers(); print(1, flush=True)"
    opened = "' '.join(os.readlink(f'/proc/self/fd/{n}') for n in (1, 2))"
    program = SUPERVISED.replace("print(os.getpid(), flush=True)", code)
    program += f"open({str(tmp_path / 'fds')!r}, 'w').write({opened})"
    closing = ["sh", "-c", 'exec "$0" -c "$1" >&- 2>&-', sys.executable, program]
    assert subprocess.run(closing, cwd=REPO, timeout=PATIENCE_S).returncode == 0
    assert (tmp_path / "fds").read_text() == "/dev/null /dev/null"


NO_FORK = "def fails(*_): raise OSError(11, 'no more processes')\nos.fork = fails\n"
# as in some containers
NO_MEMFD = "def fails(*_): raise OSError(1, 'forbidden')\nos.memfd_create = fails\n"


@pytest.mark.parametrize(
    ("before", "exit_code", "words"),
    [(NO_FORK, 1, "no more processes"), (NO_MEMFD, 0, "")],
)
def test_what_the_system_refuses_is_done_without_or_is_one_line(before, exit_code, words):
    code = SUPERVISED.replace("supervise()\n", f"{before}supervise()\n")
    job = start_python("-c", code, cwd=REPO)
    ended, err = end_of(job)
    assert (ended, len(err.splitlines())) == (exit_code, exit_code) and words in err


def test_who_presses_ctrl_c_quickly_insists(monkeypatch):
    now = [10.0]
    monkeypatch.setattr(process_ends, "time", SimpleNamespace(monotonic=lambda: now[0]))
    relay = process_ends.StopFlag()
    for pressed in range(3):
        for _ in range(2):  # from the terminal, and passed on
            relay.count(signal.SIGINT)
        now[0] += 0.6 * SAME_KEYPRESS_S
        assert relay.insists == (pressed == 2)
