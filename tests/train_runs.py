"""Start small training and evaluation runs, here or in new processes."""

import json
import os
import shlex
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import pandas as pd
import psutil
import pytest
import torch

import train_distributed
from agents.evaluate import command as evaluate
from rl_dist.telemetry.metrics import close_logging

REPO = Path(__file__).parents[1]
MAIN = REPO / "clstm_ppo.py"
PATIENCE_S = 120.0  # how long a usually quick event may take on a busy machine
RECALL = shlex.split(
    "--env Recall-v0 --num_envs 4 --num_steps 16 --bptt_steps 8 --batch_size 4 --hidden_size 8 "
    "--device cpu"
)
BRIEF = shlex.split("--total_steps 64 --eval_episodes 2 --validate_every 0")
SIZES = shlex.split(
    "--num_episodes 8 --num_envs 4 --batch_size 8 --num_steps 32 --bptt_steps 8 --hidden_size 8"
)
SPANS = shlex.split(
    "--train_end 2015-12-31 --valid_start 2016-01-04 --valid_end 2016-02-26 "
    "--test_start 2019-06-03 --test_end 2019-08-30"
)
WORLDS = ["--num_worlds", "2", "--episode_days", "60"]
SMALL = [*SIZES, *SPANS, *WORLDS]  # flags of a small run on the simulated market


def run_here(main, *argv):
    """Run a command in this process; return its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setattr(sys, "argv", ["command", *map(str, argv)])
        try:
            return main()
        except SystemExit as leaving:
            return leaving.code
        finally:
            close_logging()
            torch.set_num_threads(1)


def train_here(*argv):
    return run_here(train_distributed.main, *argv)


def evaluate_here(*argv):
    return run_here(evaluate.main, *argv)


@contextmanager
def output_in(folder):
    """Redirect stdout and stderr of this process and its children to two files."""
    with ExitStack() as held:
        streams = (1, "out", redirect_stdout), (2, "err", redirect_stderr)
        for descriptor, name, redirect in streams:
            file = held.enter_context(Path(folder, name).open("w", buffering=1))
            before = os.dup(descriptor)
            held.callback(os.close, before)
            held.callback(os.dup2, before, descriptor)
            os.dup2(file.fileno(), descriptor)
            held.enter_context(redirect(file))
        yield


def python_path(*folders):
    """Return a PYTHONPATH of these folders, followed by the PYTHONPATH of this process."""
    inherited = filter(None, [os.environ.get("PYTHONPATH")])
    return os.pathsep.join([*map(str, folders), *inherited])


def start(*argv, **options):
    """Start `python` with these arguments in a new session; `env` holds additional variables."""
    variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": python_path(REPO, REPO / "tests")}
    options["env"] = os.environ | variables | options.get("env", {})
    options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, *map(str, argv)]
    return subprocess.Popen(command, start_new_session=True, **options)


def run_in(folder, *argv, code=0, **variables):
    """Run `python` in a folder; return what it prints to stdout and stderr."""
    job = start(*argv, cwd=folder, env=variables)
    printed = job.communicate(timeout=300)
    assert job.returncode == code, printed
    return printed


def run_benchmark(name, *flags):
    """Run a benchmark; return the lines of its output, JSON lines as objects."""
    job = start(REPO / "benchmarks" / name, *flags)
    printed, errors = job.communicate(timeout=900)
    assert job.returncode == 0, errors
    return [json.loads(line) if line[:1] == "{" else line for line in printed.splitlines()]


def start_training(*argv):
    return start(REPO / "train_distributed.py", *argv)


def only_error(stderr):
    """Check that stderr is a single error line, and return it."""
    lines = stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), stderr
    return lines[0]


def printed_error(capsys):
    """Check that only one error line was printed to stderr, and return it."""
    return only_error(capsys.readouterr().err)


def records(run_dir):
    return [json.loads(line) for line in Path(run_dir, "metrics.jsonl").read_text().splitlines()]


def iterations(run_dir):
    """Return the numbers of the iterations that have a record."""
    return [line["iteration"] for line in records(run_dir)]


def daily_bars(num_stocks=5, num_days=400, start="2018-01-01"):
    """Return daily bars, one row per date and stock; `adj_close` is 90 % of `close`."""
    rng = np.random.default_rng(0)
    dates = np.busday_offset(start, np.arange(num_days), roll="forward")
    close = 50 * np.exp(np.cumsum(rng.normal(0, 0.01, (num_days, num_stocks)), axis=0))
    open_ = close * np.exp(rng.normal(0, 0.003, close.shape))
    return pd.DataFrame(
        {
            "date": np.repeat(dates.astype(str), num_stocks),
            "tic": np.tile([f"T{i}" for i in range(num_stocks)], num_days),
            "open": open_.ravel(),
            "high": (np.maximum(open_, close) * 1.004).ravel(),
            "low": (np.minimum(open_, close) / 1.004).ravel(),
            "close": close.ravel(),
            "adj_close": 0.9 * close.ravel(),
            "volume": np.rint(rng.lognormal(12, 0.5, close.size)),
        }
    )


def lives(pid):
    """Return whether a process still runs; a zombie does not count."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def session(leader):
    """Return the running processes in the session that `start` created for `leader`."""

    def inside(process):
        try:
            return os.getsid(process.pid) == leader and lives(process.pid)
        except ProcessLookupError:
            return False

    return [process for process in psutil.process_iter() if inside(process)]


def assert_nobody_left(leader):
    wait_until(lambda: not session(leader))


def end_of(job, code=0):
    """Wait until a job ends with `code` and leaves no process; return its stderr."""
    out, err = job.communicate(timeout=300)
    assert job.returncode == code, out + err
    assert_nobody_left(job.pid)
    return err


def wait_until(true, job=None, within_s=PATIENCE_S):
    """Wait until the function returns a true value, and return that value.

    If the process `job` ends before that, fail.
    """
    deadline_s = time.monotonic() + within_s
    while not (found := true()):
        assert job is None or job.poll() is None, job.communicate()
        assert time.monotonic() < deadline_s, "the expected event did not happen in time"
        time.sleep(0.05)
    return found
