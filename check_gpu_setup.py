"""Check whether this machine can train with the given flags; estimate the time.

Run it as `python check_gpu_setup.py [flags of train_distributed.py]`.
"""

import dataclasses
import json
import shlex
import sys
from contextlib import ExitStack, redirect_stdout
from typing import Any

from agents.run.choice import ALL_SECTIONS, RUNS, choose_run
from rl_dist.errors import UserError, explains_errors, outlive_readers
from rl_dist.flags import configuration, parse_flags
from rl_dist.launch.child import SCRIPT, leave_at_signals
from rl_dist.setup_check import PROBLEM, VERDICTS, WARNING, Check, check_setup

DESCRIPTION = "Check whether this machine can train with these flags; estimate how long it takes."
EPILOG = """examples:
  python check_gpu_setup.py                                  check the default training job
  python check_gpu_setup.py --num_gpus 8 --batch_size 512    check another job
  python check_gpu_setup.py --json > setup.json              write a report for programs
exit codes: 0 can train, perhaps with warnings; 1 cannot train, or there is a warning and --strict
is given; 2 bad usage; 130 stopped by SIGINT (Ctrl-C); 143 stopped by SIGTERM"""


@configuration
class CheckFlags:
    """Flags of this command, in addition to the training flags."""

    json: bool = False
    """Print one JSON object; docs/check_gpu_setup.schema.json describes it."""
    strict: bool = False
    """Also exit with code 1 if there is a warning."""


@explains_errors
def main() -> int:
    """Run the command and return its exit code."""
    sections = {"check": CheckFlags(), **ALL_SECTIONS}
    parsed = parse_flags(sections, description=DESCRIPTION, epilog=EPILOG)
    options: CheckFlags = parsed.configs["check"]
    run_config = parsed.configs["run"]
    if run_config.resume or run_config.interactive:
        raise UserError("--resume and --interactive cannot be checked: give the flags of a new run")
    training_flags = [word for word in sys.argv[1:] if word not in ("--json", "--strict")]
    checks: list[Check] = []
    figures: dict[str, Any] = {}  # facts and measurements, for --json
    with ExitStack() as exit_stack:
        if options.json:  # print the lines below on stderr; stdout gets only the JSON object
            exit_stack.enter_context(redirect_stdout(sys.stderr))
        chosen = choose_run(parsed, exit_stack)
        budget = chosen.config.train.budget
        run_dir = chosen.directory.path if chosen.directory else RUNS
        for check in check_setup(chosen.config.launch, training_flags, run_dir, budget, figures):
            checks.append(check)
            print(f"{check.verdict:<8} {check.name:<12} {check.measured}", flush=True)
            if check.fix:
                print(f"{'':<21} -> {check.fix}")
    command = shlex.join(["python", str(SCRIPT), *training_flags])
    verdict = max((check.verdict for check in checks), key=VERDICTS.index)
    code = int(verdict == PROBLEM or (verdict == WARNING and options.strict))
    if options.json:
        report = {"version": 9, "verdict": verdict, "exit_code": code, "command": command}
        report["checks"] = [dataclasses.asdict(check) for check in checks]
        print(json.dumps(report | figures, indent=2))
    else:
        can_train = "cannot train with these flags" if verdict == PROBLEM else "can train"
        print(f"\n{can_train} ({verdict}). The command:\n{command}")
    return code


if __name__ == "__main__":
    outlive_readers()
    leave_at_signals()
    sys.exit(main())
