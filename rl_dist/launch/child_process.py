"""Children that are whole programs: nobody's rank, gone with their parent."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rl_dist.hardware.addresses import ADDRESS_VARIABLES
from rl_dist.process_group.process_ends import die_with_parent
from rl_dist.process_group.watchdog import JOB_DIR_VARIABLE

SCRIPT = Path(__file__).resolve().parents[2] / "train_distributed.py"
RANK_VARIABLES = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", JOB_DIR_VARIABLE}
RANK_VARIABLES |= set(ADDRESS_VARIABLES)


def start(
    arguments: Sequence[str | Path],
    *,
    path: str | Path | None = None,
    variables: dict[str, str] | None = None,
    own_session: bool = True,
    **options: Any,
) -> subprocess.Popen[Any]:
    """Start this Python in a process group of its own, without stdin.

    Args:
        arguments: of the interpreter.
        path: where it looks for modules first; None: the current directory.
        variables: of its environment, beside ours without those that make a process a rank.
        own_session: Linux shares out cores by session; without it, the child counts as one of ours.
        options: of `subprocess.Popen`.
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in RANK_VARIABLES and "TORCHELASTIC" not in name
    }
    paths = filter(None, [str(path or Path.cwd()), os.environ.get("PYTHONPATH", "")])
    group: dict[str, Any] = {"start_new_session": True} if own_session else {"process_group": 0}
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        env=environment | {"PYTHONPATH": os.pathsep.join(paths)} | (variables or {}),
        stdin=subprocess.DEVNULL,
        preexec_fn=functools.partial(die_with_parent, os.getpid()),
        **group,
        **options,
    )


def kill_group(job: subprocess.Popen[Any], patience_s: float = 5.0) -> None:
    """End a child and all its ranks by SIGKILL, and wait until they are gone."""
    deadline_s = time.monotonic() + patience_s
    with suppress(ProcessLookupError, PermissionError):  # nobody is left
        while time.monotonic() < deadline_s:
            os.killpg(job.pid, signal.SIGKILL)
            job.poll()
            time.sleep(0.01)
    job.wait()


def errors_of(lines: Sequence[str]) -> list[str]:
    """Return the messages of our commands' `error: ` lines."""
    return [line.removeprefix("error: ").strip() for line in lines if line.startswith("error: ")]
