"""Call the user's command for events of a run, for example to send a mail.

The process that starts the ranks calls `configure`, and so does the main rank for events of the
training itself. In other processes, and without a command, `notify` does nothing.
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

LIMIT_S = 20.0  # limit of one call, and of all calls at the end
LONGEST_MESSAGE = 4000  # characters


def configure(command: str, run_dir: str | Path) -> None:
    """Call `command` for events of the run in `run_dir`; "" calls nothing."""
    global _messenger
    _messenger = _Messenger(command, str(run_dir)) if command else None


def notify(kind: str, message: str = "", **facts: Any) -> None:
    """Call the user's command for an event; never blocks, never raises.

    The command gets one JSON object on stdin and each of its entries as RL_NAME: RL_EVENT (`kind`),
    RL_MESSAGE, RL_RUN_DIR, RL_TIME, RL_HOST and one per fact. Its stderr is that of the run.

    Args:
        kind: failed, restarted, bad_steps, stopped or finished.
        message: one line for a person.
        facts: numbers and strings, by name.
    """
    if _messenger is None:
        return
    event = {"event": kind, "message": message[:LONGEST_MESSAGE], "run_dir": _messenger.run_dir}
    event |= {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "host": socket.gethostname()}
    _messenger.calls.append(_messenger.pool.submit(_messenger.call, event | facts))


def close(wait_s: float = LIMIT_S) -> None:
    """Wait for commands that still run, then end them."""
    global _messenger
    if _messenger is not None:
        _messenger.close(wait_s)
    _messenger = None


class _Messenger:
    """Calls the command for one event after the other, in a thread."""

    def __init__(self, command: str, run_dir: str) -> None:
        self.command, self.run_dir = command, run_dir
        self.running: subprocess.Popen[str] | None = None
        self.calls: list[Future[None]] = []
        # the command must not inherit the launcher's blocked signals
        unblock = (signal.SIG_UNBLOCK, STOP_SIGNALS)
        self.pool = ThreadPoolExecutor(1, "on_event", signal.pthread_sigmask, unblock)

    def close(self, wait_s: float) -> None:
        with suppress(KeyboardInterrupt):  # Ctrl-C: do not wait
            wait(self.calls, wait_s)
        self.pool.shutdown(wait=False, cancel_futures=True)
        self.kill()

    def call(self, event: dict[str, Any]) -> None:
        """Run the command to its end; log the problem, if any."""
        variables = {
            f"RL_{name.upper()}": str(fact).replace("\0", " ") for name, fact in event.items()
        }
        try:
            process = self.running = subprocess.Popen(
                self.command,
                shell=True,  # the user's command; events are in stdin and variables only
                env=os.environ | variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                text=True,
                start_new_session=True,  # Ctrl-C must not end it
            )
            process.communicate(json.dumps(event, default=str) + "\n", timeout=LIMIT_S)
            problem = f"ended with code {process.returncode}" if process.returncode else ""
        except subprocess.TimeoutExpired:
            problem = f"took longer than {LIMIT_S:g} s"
        except Exception as error:  # no error of the command ends the run
            problem = f"could not be called: {error}"
        self.kill()
        if problem:
            logger.warning("on_event: the command for %s %s", event["event"], problem)

    def kill(self) -> None:
        """End the running command, with all processes that it started."""
        running, self.running = self.running, None
        if running and running.returncode is None:
            with suppress(ProcessLookupError, PermissionError):  # it has just ended
                os.killpg(running.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # it may take longer on a busy machine
                running.wait(1.0)


_messenger: _Messenger | None = None  # one per process
