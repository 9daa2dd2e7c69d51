"""Programs of ours in processes of their own, gone with their parent."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from rl_dist.errors import RESULT_FILE, UnknownFlagError, UserError
from rl_dist.hardware.addresses import ADDRESS_VARIABLES, COPIES
from rl_dist.process_group.process_ends import die_with_parent
from rl_dist.process_group.watchdog import JOB_DIR_VARIABLE

SCRIPT = Path(__file__).resolve().parents[2] / "train_distributed.py"
RANK_VARIABLES = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", JOB_DIR_VARIABLE}
RANK_VARIABLES |= {*ADDRESS_VARIABLES, *COPIES}


def leave_at_signals() -> None:
    """Let SIGINT and SIGTERM leave through all `finally`, which end children."""

    def leave(signum: int, frame: object) -> NoReturn:
        raise SystemExit(128 + signum)

    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, leave)


class Child:
    """A program of ours under way."""

    def __init__(
        self,
        arguments: Sequence[object],
        folder: Path,
        name: str = "child",
        *,
        variables: dict[str, str] | None = None,
        own_session: bool = True,
        echo: bool = False,
    ) -> None:
        """Start this Python in a process group of its own, without stdin.

        Args:
            arguments: of the interpreter.
            folder: of the files in which the child leaves its stderr and its report.
            variables: of its environment, beside ours without those that make a process a rank.
            own_session: Linux shares out cores by session; without it, the child counts as ours.
            echo: it prints where this process prints.
        """
        self._stderr = folder / f"{name}.err"
        self._report = folder / f"{name}.json"
        self._report.write_text("{}")
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in RANK_VARIABLES and "TORCHELASTIC" not in name
        }
        paths = [str(Path.cwd()), str(SCRIPT.parent), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        environment[RESULT_FILE] = str(self._report)
        with self._stderr.open("wb") as stderr:
            self.job = subprocess.Popen(
                [sys.executable, *map(str, arguments)],
                env=environment | (variables or {}),
                stdin=subprocess.DEVNULL,
                stdout=None if echo else subprocess.DEVNULL,
                stderr=None if echo else stderr,
                start_new_session=own_session,
                process_group=None if own_session else 0,
                preexec_fn=functools.partial(die_with_parent, os.getpid()),
            )

    def kill(self, patience_s: float = 5.0) -> None:
        """End it and all its ranks by SIGKILL, and wait until they are gone."""
        deadline_s = time.monotonic() + patience_s
        with suppress(ProcessLookupError, PermissionError):  # nobody is left
            while time.monotonic() < deadline_s:
                os.killpg(self.job.pid, signal.SIGKILL)
                self.job.poll()
                time.sleep(0.01)
        self.job.wait()

    def facts(self) -> dict[str, str]:
        """Return what it reported; see `rl_dist.errors.report_to_caller`."""
        return json.loads(self._report.read_text())

    def error(self) -> str:
        """Return why it failed: its own error, or the last of what it printed.

        Raises:
            UserError: it refused what it was given; in its own words.
        """
        facts = self.facts()
        error = facts.get("error", "")
        if "unknown_flag" in facts:
            raise UnknownFlagError(error, facts["unknown_flag"])
        if self.job.returncode == 2 and error:
            raise UserError(error)
        last_lines = self._stderr.read_text(errors="replace").splitlines()[-3:]
        return error or "; ".join(last_lines) or "it printed nothing"
