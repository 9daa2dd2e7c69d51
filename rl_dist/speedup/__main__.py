"""Predict the speedup of training on more GPUs.

RUN_DIR is a run whose flags are used. All flags of train_distributed.py are accepted.

examples:
  python -m rl_dist.speedup                             the main job, on this machine
  python -m rl_dist.speedup --gpus 1 2 4 8 --json       more ranks, as JSON
  python -m rl_dist.speedup RUN_DIR                     the job of an earlier run
  python -m rl_dist.speedup --gpus 8 --gpu "H100 SXM"   speedup on a card that is not here
  python -m rl_dist.speedup --gpus 8 --gpu "H100 SXM" --sps 90000    ... and time and cost
predicted: environment steps/s relative to one rank. The 95 % interval follows from how much the
iteration times vary; modelled figures have a standard error of at least 10 %. Time and cost need
steps/s, either measured here or given by --sps. Each figure takes about 15 s. docs/planning.md
explains the model.
exit codes: 0 done, 1 a short run failed or its rate kept changing, 2 wrong usage
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from inspect import getdoc, signature
from typing import Any

from rl_dist.errors import CommandParser, UserError, explains_errors
from rl_dist.launch.child import ChildError, leave_at_signals
from rl_dist.speedup.estimate import as_text, estimate_training_speedup
from rl_dist.speedup.model import CARDS

SPECIAL: dict[str, dict[str, Any]] = {
    "gpus": {"type": int, "nargs": "+", "metavar": "N"},
    "gpu": {"metavar": "NAME"},
    "scaling": {"choices": ("strong", "weak", "both")},
    "device": {"choices": ("auto", "cpu", "cuda")},
}


def _parse(argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return `estimate_training_speedup` arguments by name, and the training flags."""
    parser = CommandParser(
        prog="python -m rl_dist.speedup",
        usage="%(prog)s [RUN_DIR] [--gpus N [N ...]] [training flags]",
        description=__doc__,
        epilog=f"names for --gpu: {', '.join(CARDS)}",
    )
    texts = dict(re.findall(r"^ +(\w+): (.+)\.$", getdoc(estimate_training_speedup) or "", re.M))
    _, _, *parameters = signature(estimate_training_speedup).parameters.values()
    for parameter in parameters:
        name, default = parameter.name, parameter.default
        options = SPECIAL.get(name) or {"type": type(default), "metavar": "X"}
        parser.add_argument(f"--{name}", default=default, help=texts[name], **options)
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    args, flags = parser.parse_known_args(argv)
    args.run_dir = flags.pop(0) if argv and not argv[0].startswith("-") else ""
    if flags and not flags[0].startswith("-"):
        fix = "RUN_DIR comes first, other values follow a flag"
        raise UserError(f"unexpected argument {flags[0]!r}: {fix}")
    return vars(args), flags


@explains_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    options, flags = _parse(sys.argv[1:] if argv is None else argv)
    as_json = options.pop("json")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        report = estimate_training_speedup(flags, **options)
    except ChildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(asdict(report), indent=2) if as_json else as_text(report))
    return 0


if __name__ == "__main__":
    leave_at_signals()
    sys.exit(main())
