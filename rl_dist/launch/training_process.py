"""The training command as a function: start it, wait, return its result."""

from __future__ import annotations

import json
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_dist.launch.child_process import SCRIPT, Child
from rl_dist.launch.short_run import ended_lines


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """The result of a training."""

    success: bool
    exit_code: int  # of the script; negative: ended by that signal
    iterations: int  # of the whole run, those before a resume included
    final_losses: dict[str, float] = field(default_factory=dict)  # of the last iteration
    seconds: float
    run_dir: Path | None  # absolute; None: it never came to have one
    error: str  # one line; "" where there is none


def launch_distributed_training(
    flags: Sequence[str] = (), *, echo: bool = True, script: Path = SCRIPT, **named: Any
) -> TrainingResult:
    """Run train_distributed.py to its end, in processes of its own.

        >>> from rl_dist import launch_distributed_training
        >>> result = launch_distributed_training(num_gpus=2, device="cpu", quick=True)
        >>> if result.success:
        ...     print(result.run_dir, result.iterations, result.final_losses["loss/policy"])
        ... else:
        ...     print(result.exit_code, result.error)

    Ctrl-C lets the training save and stop, and is then raised here; a second one ends it at once.

    Args:
        flags: of the script, as on its command line.
        echo: let the script print to stdout and stderr of this process.
        script: the training script.
        named: flags by name: True is --name, False --no-name, None no flag, a dict becomes JSON.
    """
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rl_dist_result_") as folder:
        words = [script, *flags, *as_flags(named)]
        child = Child(words, Path(folder), variables={"PYTHONUNBUFFERED": "1"}, echo=echo)
        try:
            child.job.wait()
        except KeyboardInterrupt:
            # it is in a session of its own: Ctrl-C has not reached it
            child.job.send_signal(signal.SIGINT)
            child.job.wait()
            raise
        finally:
            child.kill()
        facts = child.facts()
    code = child.job.returncode
    run_dir = Path(facts["run_dir"]).absolute() if "run_dir" in facts else None
    if run_dir and not run_dir.is_dir():  # a failed start leaves none
        run_dir = None
    lines = ended_lines(run_dir) if run_dir else []
    last = json.loads(lines[-1]) if lines else {}
    return TrainingResult(
        success=code == 0,
        exit_code=code,
        iterations=last.get("iteration", 0),
        final_losses={name: value for name, value in last.items() if name.startswith("loss/")},
        seconds=time.monotonic() - started_s,
        run_dir=run_dir,
        error=_error(code, facts),
    )


def as_flags(named: Mapping[str, Any]) -> list[str]:
    """Turn keyword arguments into words of a command line."""
    words = []
    for name, value in named.items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        elif value is not None:
            words.append(f"--{name}={json.dumps(value) if isinstance(value, Mapping) else value}")
    return words


def _error(code: int, facts: Mapping[str, str]) -> str:
    if code == 0:
        return ""
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    return facts.get("error") or f"ended with code {code} without a report"
