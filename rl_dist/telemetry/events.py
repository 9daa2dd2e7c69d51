"""Run the user's command when something happens in a run, e.g. to send an email.

The process that starts the ranks calls `configure`; the main rank does so too, for events during
training. In other processes, or without a command, `notify` does nothing.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

from rl_dist.process_group.process_ends import STOP_SIGNALS

logger = logging.getLogger(__name__)

LIMIT_S = 20.0  # time limit of one command, and of waiting for all commands at the end
LONGEST_MESSAGE = 4000  # longer messages are cut to this number of characters


def configure(command: str, run_dir: str | Path) -> None:
    """Set the command that `notify` runs for the run in `run_dir`; "" means none."""
    global _messenger
    _messenger = _Messenger(command, str(run_dir)) if command else None


def notify(kind: str, message: str = "", **facts: Any) -> None:
    """Run the user's command for an event in the background; never raise an error.

    The command receives the event as a JSON object on stdin. It also receives each entry as an
    environment variable: RL_EVENT (`kind`), RL_MESSAGE, RL_RUN_DIR, RL_TIME, RL_HOST, and RL_NAME
    for a fact called "name". The command's stderr goes to the stderr of this process.

    Args:
        kind: failed, restarted, bad_steps, stopped or finished.
        message: one line for a human reader.
        facts: more entries of the event, numbers and strings by name.
    """
    if _messenger is None:
        return
    event = {"event": kind, "message": message[:LONGEST_MESSAGE], "run_dir": _messenger.run_dir}
    event |= {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "host": socket.gethostname()}
    _messenger.calls.append(_messenger.pool.submit(_messenger.call, event | facts))


def close(wait_s: float = LIMIT_S) -> None:
    """Wait up to `wait_s` seconds for running commands, then kill the rest."""
    global _messenger
    if _messenger is not None:
        _messenger.close(wait_s)
    _messenger = None


class _Messenger:
    """Runs the command in a thread, for one event after another."""

    def __init__(self, command: str, run_dir: str) -> None:
        self.command, self.run_dir = command, run_dir
        self.running: subprocess.Popen[str] | None = None
        self.calls: list[Future[None]] = []
        # the command must not inherit the launcher's blocked signals
        unblock = (signal.SIG_UNBLOCK, STOP_SIGNALS)
        self.pool = ThreadPoolExecutor(1, "on_event", signal.pthread_sigmask, unblock)

    def close(self, wait_s: float) -> None:
        with suppress(KeyboardInterrupt):  # Ctrl-C ends the wait
            wait(self.calls, wait_s)
        self.pool.shutdown(wait=False, cancel_futures=True)
        self.kill()

    def call(self, event: dict[str, Any]) -> None:
        """Run the command for one event and wait for it; log a warning if it fails."""
        variables = {
            f"RL_{name.upper()}": str(fact).replace("\0", " ") for name, fact in event.items()
        }
        try:
            process = self.running = subprocess.Popen(
                self.command,
                shell=True,  # safe: event data is only in stdin and variables, not in the command
                env=os.environ | variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                text=True,
                start_new_session=True,  # Ctrl-C must not end the command
            )
            process.communicate(json.dumps(event, default=str) + "\n", timeout=LIMIT_S)
            problem = f"ended with code {process.returncode}" if process.returncode else ""
        except subprocess.TimeoutExpired:
            problem = f"took longer than {LIMIT_S:g} s"
        except Exception as error:  # a failing command must not stop the run
            problem = f"could not be called: {error}"
        self.kill()
        if problem:
            logger.warning("on_event: the command for %s %s", event["event"], problem)

    def kill(self) -> None:
        """Kill the running command and all processes that it started."""
        running, self.running = self.running, None
        if running and running.returncode is None:
            with suppress(ProcessLookupError, PermissionError):  # the command has just ended
                os.killpg(running.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # a busy machine may take longer
                running.wait(1.0)


_messenger: _Messenger | None = None  # at most one per process
