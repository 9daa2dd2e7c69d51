"""The command that looks at checkpoints.

python -m rl_dist.checkpoint verify|inspect|list PATH
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from rl_dist.checkpoint.spec import CheckpointError
from rl_dist.checkpoint.store import MEASURED, checkpoint_files, latest_checkpoint, read_checkpoint
from rl_dist.errors import CommandParser, UserError, explains_errors, printable

EPILOG = """PATH is a checkpoint file, a folder of checkpoints or a run directory.

examples:
  python -m rl_dist.checkpoint list runs/my_run              newest first, best.pt last
  python -m rl_dist.checkpoint verify runs/my_run            is every file whole?
  python -m rl_dist.checkpoint inspect runs/my_run           what the newest valid one holds
  python -m rl_dist.checkpoint inspect runs/my_run/checkpoints/best.pt --json
exit codes: 0 done, 1 a file is damaged, 2 bad usage"""
COMMANDS = {
    "list": "print iteration, time, size, metric of the best and state of every file",
    "verify": "the same; exit code 1 if any file is damaged",
    "inspect": "print counters, configuration and tensors of a file, "
    "or of the newest valid one of a folder or run",
}
COUNTERS = {"iteration": "iteration", "steps": "global_step", "episodes": "episodes"}


def show_list(files: Sequence[Path]) -> bool:
    """Print a line per file, newest first; return True if all are whole."""
    all_whole = True
    print(f"{'iteration':>9}  {'saved':<19}  {'bytes':>13}  file")
    for file in reversed(files):
        about = file.stat()
        saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(about.st_mtime))
        iteration, verdict = "?", "valid"
        try:
            state, _ = read_checkpoint(file)
            iteration = state.get("iteration", "?")
            for name, value in (state.get(MEASURED) or {}).items():
                verdict += f", {name} {value:.6g}"
        except CheckpointError as error:
            verdict, all_whole = f"damaged: {error}", False
        line = f"{iteration:>9}  {saved}  {about.st_size:>13,}  {file.name:<22}  {verdict}"
        print(printable(line))
    return all_whole


def inspect(file: Path, as_json: bool) -> None:
    """Print facts, configuration and tensors of one checkpoint."""
    state, facts = read_checkpoint(file)
    counters = {name: state.get(key) for name, key in COUNTERS.items()}
    facts = {"path": str(file), **facts, **counters}
    measured = state.get(MEASURED) or {}
    config = json.loads(state.get("config") or "{}")
    tensors = [
        {"name": name, "shape": list(value.shape), "type": str(value.dtype).removeprefix("torch.")}
        for name, value in _tensors(state)
    ]
    if as_json:
        about = {**facts, "measured": measured, "config": config, "tensors": tensors}
        print(json.dumps(about, indent=2))
        return
    for name, value in (facts | measured | config).items():
        print(printable(f"{name:<15} {value}"))
    print(f"{len(tensors)} tensors:")
    for tensor in tensors:
        print(printable(f"  {tensor['name']:<50} {tensor['shape']!s:<16} {tensor['type']}"))


def _tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor in nested dicts and lists, with its place."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, dict | list | tuple):
        for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _tensors(entry, f"{name}/{key}" if name else str(key))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = CommandParser(
        prog="python -m rl_dist.checkpoint",
        description="Look at checkpoints; nothing is changed, and nothing in them can run.",
        epilog=EPILOG,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="verify|inspect|list")
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("path", metavar="PATH", type=Path)
        if name == "inspect":
            command.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    args.files = checkpoint_files(args.path) if args.path.is_dir() else [args.path]
    if not args.path.exists() or not args.files:
        problem = "holds no checkpoints" if args.path.exists() else "does not exist"
        fix = "give a checkpoint file, a folder of them or a run directory"
        parser.error(f"{args.path} {problem}: {fix}")
    return args


@explains_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    args = _parse(argv)
    if args.command != "inspect":
        whole = show_list(args.files)
        return 0 if whole or args.command == "list" else 1
    file = latest_checkpoint(args.path) if args.path.is_dir() else args.path
    try:
        if file is None:
            raise CheckpointError(f"{args.path} holds no valid checkpoint")
        inspect(file, args.json)
    except CheckpointError as error:
        raise UserError(str(error), exit_code=1) from None
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` is no error
    sys.exit(main())
