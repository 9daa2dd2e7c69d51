"""A process that is supervised: however it dies, its supervisor tells, leaves, and leaves nobody behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from train_runs import records, start_training

from rl_dist.process_group.process_ends import ReportPage, StopRelay

REPO = Path(__file__).parents[2]
SUPERVISED = """
import os, signal, sys, threading, time
from rl_dist.launch import supervisor
from rl_dist.process_group.process_ends import leave, report
from rl_dist.launch.supervisor import supervise
supervisor.EXIT_GRACE_S, supervisor.LAST_WORD_S = 1.0, 1.0
supervise()
print(os.getpid(), flush=True)
"""


def start(code, **options):
    """Start a supervised program; returns it and the id of the process that runs `code`."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": REPO} | options
    job = subprocess.Popen([sys.executable, "-c", SUPERVISED + code], **options)
    return job, int(job.stdout.readline())


@pytest.mark.parametrize(
    ("code", "exit_code", "words"),
    [
        ("os._exit(0)", 1, "ended with code 0 and without a report"),
        ("os._exit(77)", 1, "ended with code 77"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 1, "SIGSEGV"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 1, "SIGKILL"),
        ("report(run_dir='tests'); os.abort()", 1, "SIGABRT"),
        ("os.closerange(0, 256); os._exit(0)", 1, "ended with code 0"),
        ("pass", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("1 / 0", 1, "ZeroDivisionError"),
        ("leave(5)", 5, ""),
        ("os.closerange(3, 256); leave(5)", 5, ""),
        ("report(exit_code=0); os.abort()", 0, ""),  # it had ended: only its teardown failed
        ("if os.fork() == 0: sys.exit(0)\nos.wait(); os._exit(0)", 1, "ended with code 0"),  # not its child's word
    ],
)
def test_a_death_without_a_report_is_a_failure_whatever_its_code(code, exit_code, words):
    job, _ = start(code)
    _, stderr = job.communicate(timeout=20)
    assert job.returncode == exit_code
    if words:
        assert words in stderr.splitlines()[-1]
    else:
        assert stderr == ""


def test_it_needs_no_file_however_short_files_must_be():
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))"
    found = subprocess.run([sys.executable, "-c", limit + SUPERVISED], cwd=REPO, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_stop_signal_is_passed_on(signum):
    job, _ = start(f"signal.signal({signum}, lambda *_: leave({128 + signum}))\nwhile True: time.sleep(0.01)")
    time.sleep(0.1)
    job.send_signal(signum)
    _, stderr = job.communicate(timeout=20)
    assert (job.returncode, stderr) == (128 + signum, "")


def test_before_anything_handles_it_a_stop_signal_simply_ends_it():
    job, _ = start("time.sleep(60)")
    job.terminate()
    _, stderr = job.communicate(timeout=20)
    assert job.returncode == 128 + signal.SIGTERM
    assert len(stderr.splitlines()) == 1 and "SIGTERM" in stderr


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_stop_signal_ends_even_a_process_that_ignores_it(second):
    job, child = start("signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])\ntime.sleep(60)")
    time.sleep(0.3)
    job.terminate()
    time.sleep(0.7)  # no longer the same key press
    assert job.poll() is None
    job.send_signal(second)
    job.communicate(timeout=20)
    assert job.returncode == 128 + signal.SIGTERM
    assert not psutil.pid_exists(child)


def test_a_sigterm_after_a_warning_signal_lets_it_save():
    """Schedulers announce an end by USR1 before they ask for it by TERM."""
    job, _ = start("signal.signal(10, lambda *_: None); signal.signal(15, lambda *_: leave(143))\ntime.sleep(60)")
    time.sleep(0.1)
    job.send_signal(signal.SIGUSR1)
    time.sleep(0.7)
    job.terminate()
    job.communicate(timeout=20)
    assert job.returncode == 143


def test_a_thread_that_never_ends_keeps_nobody_waiting():
    code = "threading.Thread(target=time.sleep, args=(60,)).start(); report(exit_code=0)"
    started_s = time.monotonic()
    job, child = start(code)
    job.communicate(timeout=30)
    assert job.returncode == 0 and time.monotonic() - started_s < 20
    assert not psutil.pid_exists(child)


def test_nothing_outlives_a_killed_supervisor():
    job, child = start("time.sleep(60)")
    job.kill()
    job.wait(timeout=10)
    deadline_s = time.monotonic() + 10
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_the_supervisor_of_a_training_loads_no_torch():
    command = [sys.executable, "train_distributed.py", "--help"]
    job = subprocess.Popen(command, cwd=REPO, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})
    loaded, deadline_s = "", time.monotonic() + 60
    while job.poll() is None and time.monotonic() < deadline_s:
        loaded = Path(f"/proc/{job.pid}/maps").read_text() or loaded
        time.sleep(0.02)
    assert job.returncode == 0
    assert "libpython" in loaded or "python3" in loaded
    assert "torch" not in loaded and "numpy" not in loaded


DYING = [
    *("--env", "dying_envs:Dying-v0", "--num_envs", 4, "--num_steps", 8, "--bptt_steps", 8, "--batch_size", 4),
    *("--hidden_size", 8, "--total_steps", 320, "--checkpoint_every", 1, "--eval_episodes", 2, "--device", "cpu"),
]


@pytest.mark.parametrize(
    "way", ["0", *(pytest.param(way, marks=pytest.mark.slow) for way in ("1", "77", "SIGSEGV", "SIGKILL"))]
)
def test_one_rank_that_dies_leaves_a_line_an_event_and_a_run_to_go_on_with(way, tmp_path, monkeypatch):
    monkeypatch.setenv("DIE", way)
    flags = [*DYING, "--run_dir", tmp_path / "run", "--on_event", f"cat >> {tmp_path}/events"]
    job = start_training(*flags)
    _, stderr = job.communicate(timeout=120)
    assert job.returncode == 1, stderr
    lines = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and f"--resume {tmp_path / 'run'}" in lines[0] and "Traceback" not in stderr
    assert json.loads((tmp_path / "events").read_text())["event"] == "failed"
    assert records(tmp_path / "run")


@pytest.mark.parametrize(
    ("ranks", "victim", "way"),
    [
        (1, 0, "0"),
        *(
            pytest.param(ranks, victim, way, marks=pytest.mark.slow)
            for ranks in (2, 3)
            for victim in (0, ranks - 1)
            for way in ("0", "77", "SIGSEGV")
        ),
    ],
)
def test_with_restarts_a_rank_that_dies_costs_nothing(ranks, victim, way, tmp_path, monkeypatch):
    monkeypatch.setenv("DIE", way)
    monkeypatch.setenv("DIE_RANK", str(victim))
    flags = [*DYING, "--num_envs", 12, "--batch_size", 12, "--num_gpus", ranks, "--total_steps", 960]
    job = start_training(*flags, "--run_dir", tmp_path, "--max_restarts", 1)
    _, stderr = job.communicate(timeout=120)
    assert job.returncode == 0 and f"rank {victim} (process" in stderr and "restart 1 of 1" in stderr, stderr
    assert [line["iteration"] for line in records(tmp_path)] == list(range(1, 11))


def test_an_event_is_sent_though_nobody_reads_what_is_said(tmp_path):
    command = f"cat > {tmp_path}/event"
    job, _ = start(f"report(run_dir={str(tmp_path)!r}, on_event={command!r}); time.sleep(0.5); os._exit(0)")
    job.stderr.close()
    assert job.wait(timeout=30) == 1
    assert json.loads((tmp_path / "event").read_text())["event"] == "failed"


def test_it_runs_with_closed_outputs(tmp_path):
    code = "from rl_dist.errors import outlive_readers; outlive_readers(); print(1, flush=True)"
    opened = "' '.join(os.readlink(f'/proc/self/fd/{n}') for n in (1, 2))"
    program = SUPERVISED.replace("print(os.getpid(), flush=True)", code)
    program += f"open({str(tmp_path / 'fds')!r}, 'w').write({opened})"
    job = subprocess.run(["sh", "-c", 'exec "$0" -c "$1" >&- 2>&-', sys.executable, program], cwd=REPO, timeout=60)
    assert job.returncode == 0
    assert (tmp_path / "fds").read_text() == "/dev/null /dev/null"


@pytest.mark.parametrize(
    ("broken", "exit_code", "words"),
    [
        ("def fails(*_): raise OSError(11, 'no more processes')\nos.fork = fails", 1, "no more processes"),
        ("def fails(*_): raise OSError(1, 'forbidden')\nos.memfd_create = fails", 0, ""),  # as in some containers
    ],
)
def test_what_the_system_refuses_is_done_without_or_told_in_one_line(broken, exit_code, words):
    code = SUPERVISED.replace("supervise()\n", f"{broken}\nsupervise()\n")
    job = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, timeout=60)
    assert job.returncode == exit_code and words in job.stderr and len(job.stderr.splitlines()) == exit_code


def test_a_debugger_or_profiler_sees_the_training_itself():
    code = "import bdb; before = os.getpid(); supervise(); assert before == os.getpid()\n"
    code = SUPERVISED.replace("supervise()\n", code)
    assert subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, timeout=60).returncode == 0


def test_looking_for_a_report_takes_no_time():
    page = ReportPage()
    page.write(run_dir="x")
    started_s = time.process_time()
    assert all(page.read() for _ in range(200))
    assert time.process_time() - started_s < 0.05  # fifty times a second, next to the training


def test_who_presses_ctrl_c_quickly_insists():
    relay = StopRelay()
    for pressed in range(3):
        for _ in range(2):  # from the terminal, and passed on
            relay._on_signal(signal.SIGINT, None)
        time.sleep(0.3)
        assert relay.insists == (pressed == 2)
