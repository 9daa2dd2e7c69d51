"""Report whether this machine can train with given flags: will it fit, how long.

Run it as `python check_gpu_setup.py [flags of train_distributed.py]`.
"""

# ruff: noqa: E402  (signals count before the slow imports)
from __future__ import annotations

import os
import signal
import sys
from typing import Any, NoReturn


def _leave(signum: int, frame: Any) -> NoReturn:
    """Leave through all `finally`: what was started is ended, files are removed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.write(2, f"stopped by {signal.Signals(signum).name}\n".encode())
    raise SystemExit(128 + signum)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, _leave)
    signal.signal(signal.SIGTERM, _leave)

import argparse
import dataclasses
import json
import shlex
from contextlib import ExitStack, nullcontext, redirect_stdout
from pathlib import Path

from agents.config import SECTIONS
from agents.run.choice import RUNS, add_run_flags, choose_run
from rl_dist.errors import UserError, explains_errors, outlive_readers
from rl_dist.flags import parse_flags
from rl_dist.launch.child import SCRIPT
from rl_dist.launch.short_run import without
from rl_dist.setup_check import PROBLEM, WARNING, Check, check_setup, slowing_variables, worst

DESCRIPTION = (
    "Check that this machine can train with these flags, if it fits, and how long it takes."
)
EPILOG = """examples:
  python check_gpu_setup.py                                  the main job on this machine
  python check_gpu_setup.py --num_gpus 8 --batch_size 512    another one
  python check_gpu_setup.py --json > setup.json              docs/check_gpu_setup.schema.json
exit codes: 0 it can train (warnings included), 1 it cannot, or --strict and a warning, 2 bad usage,
130 and 143 stopped by INT and TERM"""
OWN_FLAGS = {
    "json": "print one JSON object, see docs/check_gpu_setup.schema.json",
    "strict": "exit with 1 on a warning, too",
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command, and those of training outside its sections."""
    group = parser.add_argument_group("check")
    for name, meaning in OWN_FLAGS.items():
        group.add_argument(f"--{name}", action="store_true", help=meaning)
    add_run_flags(parser)


@explains_errors
def main() -> int:
    """Run the command; returns the exit code."""
    parsed = parse_flags(SECTIONS, description=DESCRIPTION, epilog=EPILOG, extra=add_flags)
    if "RANK" in os.environ:
        raise UserError("RANK is set: ranks are started here, start this without torchrun")
    if parsed.extra.resume:
        raise UserError("--resume: give the flags that the run was started with instead")
    if parsed.extra.interactive:
        raise UserError("--interactive asks nothing here: give the flags to be checked")
    in_json, flags = parsed.extra.json, without(sys.argv[1:], tuple(OWN_FLAGS))
    checks: list[Check] = []
    figures: dict[str, Any] = {}
    with redirect_stdout(sys.stderr) if in_json else nullcontext(), ExitStack() as held:
        config, run_dir, _, _ = choose_run(parsed, held)
        budget = (config.train.num_episodes, "episodes")
        if config.train.total_steps:
            budget = (config.train.total_steps, "steps")
        for check in check_setup(config.launch, flags, run_dir or RUNS, budget, figures):
            checks.append(check)
            if not in_json:
                check.print()
    # the command to copy
    unset = [word for name in slowing_variables(os.environ) for word in ("-u", name)]
    script = SCRIPT.name if SCRIPT.parent == Path.cwd() else str(SCRIPT)
    command = shlex.join([*(["env", *unset] if unset else []), "python", script, *flags])
    verdicts = [check.verdict for check in checks]
    verdict = worst(verdicts)
    code = int(verdict == PROBLEM or (verdict == WARNING and parsed.extra.strict))
    if in_json:
        found = {"version": 5, "verdict": verdict, "exit_code": code, "command": command}
        lines = [dataclasses.asdict(check) for check in checks]
        print(json.dumps(found | {"checks": lines} | figures, indent=2))
        return code
    counts = f"{verdicts.count(PROBLEM)} problem(s), {verdicts.count(WARNING)} warning(s)"
    summary = "cannot train like this" if verdict == PROBLEM else "can train"
    print(f"\n{summary}: {counts}. The command:\n{command}")
    return code


if __name__ == "__main__":
    outlive_readers()
    sys.exit(main())
