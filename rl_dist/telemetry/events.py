"""Run the user's command at events of a run, for example to send an email.

The process that starts the ranks calls `configure`. The main rank also calls `configure`, because
events can happen during training. In other processes, or without a command, `notify` does nothing.
"""

import functools
import json
import logging
import os
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from rl_dist.process_group.process_ends import STOP_SIGNALS

logger = logging.getLogger(__name__)

LIMIT_S = 20.0  # longest wait for running commands at the end of a run
LONGEST_MESSAGE = 4000  # in characters; the rest of a longer message is cut off

_command = ""
_run_dir = ""
# event and process of each command that was started and may still run
_running: list[tuple[str, subprocess.Popen[str]]] = []


def configure(command: str, run_dir: str | Path) -> None:
    """Set the command that `notify` starts, and the run directory that it reports."""
    global _command, _run_dir
    _command = command
    _run_dir = str(run_dir)


def notify(kind: str, message: str = "", **facts: object) -> None:
    """Start the user's command for an event in the background; never raise an error.

    The command receives the event as a JSON object on stdin. It also receives each entry of this
    object as an environment variable: RL_EVENT (`kind`), RL_MESSAGE, RL_RUN_DIR, RL_TIME, RL_HOST,
    and RL_X for a fact called "x". The command shares the stderr of this process.

    Args:
        kind: failed, restarted, bad_steps, stopped or finished.
        message: one line for a human reader.
        facts: additional entries of the event (numbers or strings), by name.
    """
    if not _command:
        return
    event: dict[str, object] = {
        "event": kind,
        "message": message[:LONGEST_MESSAGE],
        "run_dir": _run_dir,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": socket.gethostname(),
        **facts,
    }
    variables = {f"RL_{name.upper()}": str(fact).replace("\0", " ") for name, fact in event.items()}
    try:
        process = subprocess.Popen(
            _command,
            shell=True,  # safe: the command contains no data of the event
            env=os.environ | variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # Ctrl-C must not reach the command
            # the command must not inherit the launcher's blocked signals
            preexec_fn=functools.partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, STOP_SIGNALS),
        )
        _running.append((kind, process))
        stdin: Any = process.stdin
        with suppress(BrokenPipeError), stdin:  # the command may end without reading stdin
            stdin.write(json.dumps(event, default=str) + "\n")
    except Exception as error:  # a failing command must not stop the run
        logger.warning("on_event: the command for event %s could not be started: %s", kind, error)


def close(wait_s: float = LIMIT_S) -> None:
    """Wait up to `wait_s` seconds for commands, then kill those that are still running.

    All processes that a killed command has started are killed, too. For each command that fails,
    one warning is logged.
    """
    configure("", "")
    deadline_s = time.monotonic() + wait_s
    while _running:
        kind, process = _running.pop(0)
        try:
            code = process.wait(max(0.0, deadline_s - time.monotonic()))
            problem = f"ended with code {code}" if code else ""
        except (subprocess.TimeoutExpired, KeyboardInterrupt):  # Ctrl-C ends the wait
            problem = "took too long and was killed"
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if problem:
            logger.warning("on_event: the command for event %s %s", kind, problem)
