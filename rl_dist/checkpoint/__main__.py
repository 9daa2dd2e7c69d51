"""Show checkpoints: `python -m rl_dist.checkpoint list|verify|inspect PATH`."""

import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from rl_dist.checkpoint.content import MEASURED, CheckpointError, tensors_in
from rl_dist.checkpoint.store import checkpoint_files, latest_checkpoint, load_checkpoint
from rl_dist.errors import CommandParser, UserError, explains_errors, printable, table

EPILOG = """commands:
  list      print the iteration, validity and metric of every file
  verify    print the same, but exit with code 1 if any file is damaged
  inspect   print the numbers, configuration and tensors of one file (default: newest valid file)
PATH is a checkpoint file, a folder of checkpoints or a run directory.

examples:
  python -m rl_dist.checkpoint list runs/my_run              newest first, best.pt last
  python -m rl_dist.checkpoint verify runs/my_run            check that every file is undamaged
  python -m rl_dist.checkpoint inspect runs/my_run           show the newest valid file
  python -m rl_dist.checkpoint inspect runs/my_run/checkpoints/best.pt --json
exit codes: 0 success, 1 a file is damaged, 2 bad usage"""


def show_list(files: Sequence[Path]) -> bool:
    """Print one line per file, newest first; return True if no file is damaged."""
    all_valid = True
    rows = []
    for file in reversed(files):
        iteration = "?"
        verdict = "valid"
        try:
            state = load_checkpoint(file)
            iteration = state.get("iteration", "?")
            for name, value in state.get(MEASURED, {}).items():
                verdict += f", {name} {value:.6g}"
        except CheckpointError as error:
            verdict = f"damaged: {error}"
            all_valid = False
        rows.append([*map(printable, (iteration, file.name, verdict))])
    print(table(("iteration", "file", "state"), rows))
    return all_valid


def inspect(file: Path, as_json: bool) -> None:
    """Print the numbers, the configuration and the tensors in one checkpoint."""
    state = load_checkpoint(file)
    report = {"path": str(file), MEASURED: state.get(MEASURED, {})}
    report |= {name: value for name, value in state.items() if isinstance(value, int | float)}
    config = json.loads(state.get("config", "{}"))
    tensors = {
        name: f"{list(value.shape)} {value.dtype}" for name, value in tensors_in(state).items()
    }
    if as_json:
        print(json.dumps(report | {"config": config, "tensors": tensors}, indent=2))
        return
    for name, value in (report | config | tensors).items():
        print(printable(f"{name:<15} {value}"))


@explains_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = CommandParser(
        prog="python -m rl_dist.checkpoint",
        description="Show checkpoints, without changing them or running code from them.",
        epilog=EPILOG,
    )
    parser.add_argument("command", choices=("list", "verify", "inspect"))
    parser.add_argument("path", metavar="PATH", type=Path)
    parser.add_argument("--json", action="store_true", help="print one JSON object (inspect only)")
    args = parser.parse_args(argv)
    files = checkpoint_files(args.path) if args.path.is_dir() else [args.path]
    if not args.path.exists() or not files:
        fix = "give a checkpoint file, a folder of checkpoints or a run directory"
        parser.error(f"{args.path} holds no checkpoints: {fix}")
    if args.command != "inspect":
        return 0 if show_list(files) or args.command == "list" else 1
    file = latest_checkpoint(args.path) if args.path.is_dir() else args.path
    try:
        if file is None:
            raise CheckpointError(f"{args.path} holds no valid checkpoint")
        inspect(file, args.json)
    except CheckpointError as error:
        raise UserError(str(error), exit_code=1) from None
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # exit silently after `| head`
    sys.exit(main())
