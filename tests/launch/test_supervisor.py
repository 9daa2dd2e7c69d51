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
from rl_dist.process_group.process_ends import SAME_KEYPRESS_S, StopFlag

SUPERVISED = """
import os, signal, sys, threading, time
from rl_dist.launch import supervisor
from rl_dist.process_group.process_ends import leave, report
from rl_dist.launch.supervisor import supervise
supervisor.EXIT_GRACE_S, supervisor.LAST_WORD_S = 1.0, 1.0
{before}
supervise()
{handle}
print(os.getpid(), flush=True)
"""


def start(code, handle="", before=""):
    """Start a supervised program; and the process that runs `code`."""
    job = start_python("-c", SUPERVISED.format(before=before, handle=handle) + code, cwd=REPO)
    return job, int(job.stdout.readline() or 0)


def end_of(job):
    """The exit code of a program, and what it wrote to stderr."""
    _, stderr = job.communicate(timeout=PATIENCE_S)
    return job.returncode, stderr


def refused(call, why):
    return f"def fails(*_): raise OSError(1, '{why}')\nos.{call} = fails"


@pytest.mark.parametrize(
    ("code", "exit_code", "says"),
    [
        ("os._exit(77)", 1, "ended with code 77"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 1, "SIGKILL"),
        ("report(run_dir='tests'); os.abort()", 1, "SIGABRT"),
        ("os.closerange(0, 256); os._exit(0)", 1, "ended with code 0"),
        ("sys.exit(3)", 3, ""),
        ("1 / 0", 1, "ZeroDivisionError"),
        ("os.closerange(3, 256); leave(5)", 5, ""),
        ("report(exit_code=0); os.abort()", 0, ""),  # it had reported: only its teardown failed
        # the exit of its fork is not its own report
        ("if os.fork() == 0: sys.exit(0)\nos.wait(); os._exit(0)", 1, "ended with code 0"),
        # a thread that never ends keeps nobody waiting
        ("threading.Thread(target=time.sleep, args=(1000,)).start(); report(exit_code=0)", 0, ""),
    ],
)
def test_a_death_without_a_report_is_a_failure_whatever_its_code(code, exit_code, says):
    job, child = start(code)
    ended, stderr = end_of(job)
    assert ended == exit_code and not psutil.pid_exists(child)
    assert says in stderr.splitlines()[-1] if says else stderr == ""


@pytest.mark.parametrize(
    ("call", "exit_code", "says"),
    [("fork", 1, "no more processes"), ("memfd_create", 0, "")],  # as in some containers
)
def test_what_the_system_refuses_is_done_without_or_is_one_line(call, exit_code, says):
    job, _ = start("", before=refused(call, "no more processes"))
    ended, stderr = end_of(job)
    assert (ended, len(stderr.splitlines())) == (exit_code, exit_code) and says.strip() in stderr


WAIT = "while True: time.sleep(0.01)"
LEAVE = "signal.signal({0}, lambda *_: leave(128 + {0}))\n"


@pytest.mark.parametrize(
    ("signals", "handle", "code", "says"),
    [
        (["SIGTERM"], LEAVE.format(15), 143, ""),
        (["SIGHUP"], LEAVE.format(1), 129, ""),
        (["SIGSTOP", "SIGCONT", "SIGTERM"], "", 143, "stopped by SIGTERM\n"),  # Ctrl-Z and fg
        # schedulers announce an end by USR1 before they ask for it by TERM
        (
            ["SIGUSR1", "SIGTERM"],
            "signal.signal(10, lambda *_: None)\n" + LEAVE.format(15),
            143,
            "",
        ),
        # a second stop signal ends even a process that ignores it
        (
            ["SIGTERM", "SIGINT"],
            "signal.pthread_sigmask(signal.SIG_BLOCK, [2, 15])",
            143,
            "SIGTERM",
        ),
    ],
)
def test_stop_signals_are_passed_on_and_a_second_one_ends_it(signals, handle, code, says):
    job, child = start(WAIT, handle)
    for name in signals:
        assert job.poll() is None
        job.send_signal(signal.Signals[name])
        time.sleep(1.2 * SAME_KEYPRESS_S if name != signals[-1] else 0)
    ended, stderr = end_of(job)
    assert ended == code and says in stderr and bool(says) == bool(stderr)
    assert not psutil.pid_exists(child)


def test_ctrl_c_ends_an_import_that_swallows_it_and_afterwards_is_an_exception_again():
    sleep = "try: print('ready', flush=True); time.sleep(60)\nexcept KeyboardInterrupt: "
    swallow = f"{sleep}pass\nos._exit(5)"
    for code, exit_code in ((swallow, 130), (f"supervisor.imports_done()\n{sleep}leave(7)", 7)):
        job, child = start(code)
        assert job.stdout.readline().strip() == "ready"
        job.send_signal(signal.SIGINT)  # the whole group would get it twice, also while it leaves
        ended, stderr = end_of(job)
        assert ended == exit_code and "Traceback" not in stderr
        assert not psutil.pid_exists(child)


def test_nothing_outlives_a_killed_supervisor():
    job, child = start(WAIT)
    job.kill()
    job.wait()
    wait_until(lambda: not lives(child))


def test_the_supervisor_of_a_training_loads_no_torch():
    job = start_python("train_distributed.py", "--help", cwd=REPO)
    loaded = ""
    while job.poll() is None:
        loaded = Path(f"/proc/{job.pid}/maps").read_text() or loaded
        time.sleep(0.02)
    assert end_of(job)[0] == 0 and "python3" in loaded
    assert "torch" not in loaded and "numpy" not in loaded


DYING = [*RECALL, "--env", "dying_envs:Dying-v0", "--num_steps", 8, "--total_steps", 320]
DYING += ["--checkpoint_every", 1, "--eval_episodes", 2]


def test_one_rank_that_dies_leaves_a_line_an_event_and_a_run_to_resume(tmp_path, monkeypatch):
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
    handle = "from rl_dist.errors import outlive_readers; outlive_readers()"
    opened = "' '.join(os.readlink(f'/proc/self/fd/{n}') for n in (1, 2))"
    program = SUPERVISED.format(before="", handle=handle)
    program += f"open({str(tmp_path / 'fds')!r}, 'w').write({opened})"
    closing = ["sh", "-c", 'exec "$0" -c "$1" >&- 2>&-', sys.executable, program]
    assert subprocess.run(closing, cwd=REPO, timeout=PATIENCE_S).returncode == 0
    assert (tmp_path / "fds").read_text() == "/dev/null /dev/null"


def test_quick_presses_of_ctrl_c_insist(monkeypatch):
    now = [10.0]
    monkeypatch.setattr(process_ends, "time", SimpleNamespace(monotonic=lambda: now[0]))
    stop = StopFlag()
    for pressed in range(3):
        for _ in range(2):  # from the terminal, and passed on
            stop.count(signal.SIGINT)
        now[0] += 0.6 * SAME_KEYPRESS_S
        assert stop.insists == (pressed == 2)
