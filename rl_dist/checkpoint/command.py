"""The command that looks at checkpoints.

    python -m rl_dist.checkpoint verify|inspect|list PATH

A checkpoint is made and read by file.py; folder.py keeps those of a run.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from rl_dist.checkpoint.file import CheckpointError, read_checkpoint
from rl_dist.checkpoint.folder import (
    BEST_FILE,
    MEASURED,
    checkpoint_files,
    checkpoint_folder,
    latest_checkpoint,
)
from rl_dist.errors import CommandParser, explained, explains_errors, printable

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


def show_list(path: Path) -> bool:
    """Print a line per file, newest first; return True if all are whole."""
    all_whole = True
    print(f"{'iteration':>9}  {'saved':<19}  {'bytes':>13}  file")
    for file in reversed(_files(path)):
        about = file.lstat()  # it may be a link to nowhere
        saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(about.st_mtime))
        try:
            state = read_checkpoint(file).state
            iteration, verdict = state.get("iteration", "?"), "valid"
            for name, value in (state.get(MEASURED) or {}).items():
                verdict += f", {name} {value:.6g}"
        except CheckpointError as error:
            iteration, verdict, all_whole = "?", f"damaged: {error}", False
        line = f"{iteration:>9}  {saved}  {about.st_size:>13,}  {file.name:<22}  {verdict}"
        print(printable(line))
    return all_whole


def inspect(path: Path, as_json: bool) -> None:
    """Print facts, configuration and tensors of one checkpoint."""
    newest = latest_checkpoint(path) if path.is_dir() else path
    if newest is None:
        raise CheckpointError(f"{path} holds no valid checkpoint")
    found = read_checkpoint(newest)
    facts = {
        "path": str(newest),
        "format_version": found.format_version,
        "torch_version": found.torch_version,
        "bytes": found.num_bytes,
        "sha256": found.sha256,
        **{name: found.state.get(key) for name, key in COUNTERS.items()},
    }
    measured = found.state.get(MEASURED) or {}
    config = json.loads(found.state.get("config") or "{}")
    tensors = [
        {"name": name, "shape": list(value.shape), "type": str(value.dtype).removeprefix("torch.")}
        for name, value in _tensors(found.state)
    ]
    if as_json:
        about = {**facts, "measured": measured, "config": config, "tensors": tensors}
        print(json.dumps(about, indent=2))
        return
    for name, value in (facts | measured).items():
        print(printable(f"{name:<15} {value}"))
    for section, values in config.items():
        shown = ", ".join(f"{name} {value}" for name, value in values.items())
        print(printable(f"{section:<15} {shown}"))
    print(f"{len(tensors)} tensors:")
    for one in tensors:
        print(printable(f"  {one['name']:<50} {one['shape']!s:<16} {one['type']}"))


def _tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor in nested dicts and lists, with its place."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, dict | list | tuple):
        for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _tensors(entry, f"{name}/{key}" if name else str(key))


def _files(path: Path) -> list[Path]:
    """Return the checkpoints that PATH means: best.pt, then the oldest ones first."""
    if not path.is_dir():
        return [path]
    folder = checkpoint_folder(path)
    best = [folder / BEST_FILE] if (folder / BEST_FILE).exists() else []
    return best + checkpoint_files(folder)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = CommandParser(
        prog="python -m rl_dist.checkpoint",
        description="Look at checkpoints; nothing is changed, and nothing in them can run.",
        epilog=EPILOG,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="verify|inspect|list")
    for name, what in COMMANDS.items():
        command = commands.add_parser(name, help=what, description=what)
        command.add_argument("path", metavar="PATH", type=Path)
        if name == "inspect":
            command.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    if not args.path.exists() or not _files(args.path):
        what = "holds no checkpoints" if args.path.exists() else "does not exist"
        fix = "give a checkpoint file, a folder of them or a run directory"
        parser.error(f"{args.path} {what}: {fix}")
    return args


@explains_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    args = _parse(argv)
    try:
        if args.command == "inspect":
            inspect(args.path, args.json)
            return 0
        whole = show_list(args.path)
        return 0 if whole or args.command == "list" else 1
    except CheckpointError as error:
        print(f"error: {explained(error)[0]}", file=sys.stderr)
        return 1
