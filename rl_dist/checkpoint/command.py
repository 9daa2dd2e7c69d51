"""The command that looks at checkpoints.

    python -m rl_dist.checkpoint verify|inspect|list PATH

A checkpoint is made and read by file.py; folder.py keeps those of a run.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from rl_dist.checkpoint.file import read_checkpoint
from rl_dist.checkpoint.folder import (
    BEST_FILE,
    CHECKPOINT_DIR,
    MEASURED,
    SUPERSEDED,
    checkpoint_files,
    iteration_in_name,
    latest_in,
)
from rl_dist.checkpoint.seal import CheckpointError
from rl_dist.errors import CommandParser, explains_errors

EPILOG = """PATH is a checkpoint file, a folder of checkpoints or a run directory.

examples:
  python -m rl_dist.checkpoint list runs/my_run              newest first, with the best marked
  python -m rl_dist.checkpoint verify runs/my_run            is every file whole?
  python -m rl_dist.checkpoint inspect runs/my_run           what the newest valid one holds
  python -m rl_dist.checkpoint inspect runs/my_run/checkpoints/best.pt --json
exit codes: 0 done, 1 a file is damaged, 2 bad usage"""
COMMANDS = {
    "verify": "check every file, one line each; exit code 1 if any is damaged",
    "inspect": "print counters, configuration and tensors of a file, "
    "or of the newest valid one of a folder or run",
    "list": "print iteration, time, size and state, newest first; marks the best",
}
COUNTERS = {"iteration": "iteration", "steps": "global_step", "episodes": "episodes"}


def verify(path: Path) -> int:
    """Print one line per file, valid or damaged; return 1 if any is damaged."""
    damaged = 0
    for file in _files(path):
        try:
            found = read_checkpoint(file)
        except CheckpointError as error:
            damaged = 1
            print(f"damaged  {error}")
            continue
        about = [
            f"{name} {found.state[key]}" for name, key in COUNTERS.items() if key in found.state
        ]
        about += [f"format {found.format_version}", f"{found.num_bytes:,} bytes"]
        print(f"valid    {file}: {', '.join(about)}")
    return damaged


def show_list(path: Path) -> int:
    """Print iteration, time, size and state of every file, newest first."""
    rows: list[tuple[int, str]] = []
    shown: set[str] = set()
    best = _digest_of_best(path)
    for file in _files(path):
        about = file.lstat()  # it may be a link to nowhere
        saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(about.st_mtime))
        row = f"{saved}  {about.st_size:>13,}  {file.name:<22} "
        try:
            found = read_checkpoint(file)
        except CheckpointError as error:
            rows.append((iteration_in_name(file), f"{row} {error}"))
            continue
        if file.name == BEST_FILE and found.sha256 in shown:
            continue  # the same as one above
        shown.add(found.sha256)
        measured = (found.state.get(MEASURED) or {}).items()
        mark = ", best" + "".join(f": {name} {value:.6g}" for name, value in measured)
        row += f" valid{mark if found.sha256 == best else ''}"
        rows.append((found.state.get("iteration", iteration_in_name(file)), row))
    print(f"{'iteration':>9}  {'saved':<19}  {'bytes':>13}  file")
    for iteration, row in sorted(rows, reverse=True):
        print(f"{iteration if iteration >= 0 else '?':>9}  {row}")
    return 0


def inspect(path: Path, as_json: bool) -> int:
    """Print facts, configuration and tensors of one checkpoint."""
    if path.is_dir():
        newest = latest_in(_folder(path))
        if newest is None:
            raise CheckpointError(f"{path} holds no valid checkpoint")
        path = newest
    found = read_checkpoint(path)
    state = found.state
    facts = {
        "path": str(path),
        "format_version": found.format_version,
        "torch_version": found.torch_version,
        "bytes": found.num_bytes,
        "sha256": found.sha256,
        **{name: state.get(key) for name, key in COUNTERS.items()},
    }
    measured = state.get(MEASURED) or {}
    config = json.loads(state.get("config") or "{}")
    tensors = [
        {"name": name, "shape": list(value.shape), "type": str(value.dtype).removeprefix("torch.")}
        for name, value in _tensors(state)
    ]
    if as_json:
        about = {**facts, "measured": measured, "config": config, "tensors": tensors}
        print(json.dumps(about, indent=2))
        return 0
    for name, value in facts.items():
        print(f"{name:<15} {value}")
    for name, value in measured.items():
        print(f"{'measured':<15} {name} {value:.6g}")
    for section, values in config.items():
        pairs = [f"{name} {value}" for name, value in values.items() if value not in ("", None)]
        line = f"{section:<15} {', '.join(pairs)}"
        print(textwrap.fill(line, 110, subsequent_indent=" " * 16))
    print(f"{len(tensors)} tensors:")
    for one in tensors:
        print(f"  {one['name']:<50} {one['shape']!s:<16} {one['type']}")
    return 0


def _tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor in nested dicts and lists, with its place."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, dict | list | tuple):
        for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _tensors(entry, f"{name}/{key}" if name else str(key))


def _folder(path: Path) -> Path:
    return path / CHECKPOINT_DIR if (path / CHECKPOINT_DIR).is_dir() else path


def _files(path: Path) -> list[Path]:
    """Return the checkpoints that PATH means, oldest first, best.pt last."""
    if not path.is_dir():
        return [path]
    folder = _folder(path)
    best = [folder / BEST_FILE] if (folder / BEST_FILE).exists() else []
    return sorted(folder.glob(SUPERSEDED)) + checkpoint_files(folder) + best


def _digest_of_best(path: Path) -> str:
    """Return the checksum of a folder's best checkpoint; "": there is none."""
    best = (_folder(path) if path.is_dir() else path.parent) / BEST_FILE
    try:
        return read_checkpoint(best).sha256 if best.exists() else ""
    except CheckpointError:
        return ""  # its own row says why


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    layout: dict[str, Any] = {
        "epilog": EPILOG,
        "formatter_class": argparse.RawDescriptionHelpFormatter,
    }
    parser = CommandParser(
        prog="python -m rl_dist.checkpoint",
        description="Look at checkpoints; nothing is changed, and nothing in them can run.",
        allow_abbrev=False,
        **layout,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="verify|inspect|list")
    for name, what in COMMANDS.items():
        command = commands.add_parser(name, help=what, description=what, **layout)
        command.add_argument("path", metavar="PATH", type=Path)
        if name == "inspect":
            command.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    if not args.path.exists() or not _files(args.path):
        what = "holds no checkpoints" if args.path.exists() else "does not exist"
        parser.error(
            f"{args.path} {what}: give a checkpoint file, a folder of them or a run directory"
        )
    return args


@explains_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    args = _parse(argv)
    try:
        if args.command == "inspect":
            return inspect(args.path, args.json)
        return verify(args.path) if args.command == "verify" else show_list(args.path)
    except CheckpointError as error:
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
        return 1
