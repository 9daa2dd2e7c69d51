"""Checkpoints, whole or absent, and the command that looks at them.

    python -m rl_dist.checkpoint verify|inspect|list PATH

The file is made and read by checkpoint_file.py, a run's folder of them is kept by checkpoint_folder.py.
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

from rl_dist.checkpoint.file import CheckpointFile, load_checkpoint, read_checkpoint
from rl_dist.checkpoint.folder import (
    BEST_FILE,
    CHECKPOINT_DIR,
    MEASURED,
    SUPERSEDED,
    Best,
    Found,
    checkpoint_files,
    find_latest_run,
    iteration_in_name,
    latest_checkpoint,
    latest_in,
    load_latest,
    save_checkpoint,
)
from rl_dist.checkpoint.seal import CheckpointError
from rl_dist.errors import CommandParser, explains_errors

__all__ = [
    "BEST_FILE",
    "CHECKPOINT_DIR",
    "MEASURED",
    "Best",
    "CheckpointError",
    "Found",
    "find_latest_run",
    "latest_checkpoint",
    "load_checkpoint",
    "load_latest",
    "save_checkpoint",
]

EPILOG = """PATH is a checkpoint file, a folder of checkpoints or a run directory.

examples:
  python -m rl_dist.checkpoint list runs/my_run              newest first, with the best marked
  python -m rl_dist.checkpoint verify runs/my_run            is every file whole?
  python -m rl_dist.checkpoint inspect runs/my_run           what the newest valid one holds
  python -m rl_dist.checkpoint inspect runs/my_run/checkpoints/best.pt --json
exit codes: 0 done, 1 a file is damaged, 2 bad usage"""


def verify(path: Path) -> int:
    """One line per file, valid or why not; 1 if any is damaged."""
    damaged = 0
    for file in _files(path):
        try:
            found = read_checkpoint(file)
            about = f"{_counters(found.state)}, format {found.format_version}, {found.num_bytes:,} bytes"
            print(f"valid    {file}: {about}")
        except CheckpointError as error:
            damaged += 1
            print(f"damaged  {error}")
    return min(damaged, 1)


def show_list(path: Path) -> int:
    """Newest first: iteration, time, size, valid or why not, and which is the best."""
    rows: list[tuple[int, str]] = []
    digests: dict[str, Path] = {}
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
        if file.name == BEST_FILE and found.sha256 in digests:
            continue  # the same as one above
        digests[found.sha256] = file
        values = "".join(f": {name} {value:.6g}" for name, value in (found.state.get(MEASURED) or {}).items())
        mark = f", best{values}" if found.sha256 == best else ""
        rows.append((found.state.get("iteration", iteration_in_name(file)), f"{row} valid{mark}"))
    print(f"{'iteration':>9}  {'saved':<19}  {'bytes':>13}  file")
    for iteration, row in sorted(rows, reverse=True):
        print(f"{iteration if iteration >= 0 else '?':>9}  {row}")
    return 0


def inspect(path: Path, as_json: bool) -> int:
    """What one checkpoint holds."""
    if path.is_dir():
        newest = latest_in(_folder(path))
        if newest is None:
            raise CheckpointError(f"{path} holds no valid checkpoint")
        path = newest
    about = description(read_checkpoint(path))
    print(json.dumps(about, indent=2) if as_json else _as_text(about))
    return 0


def description(found: CheckpointFile) -> dict[str, Any]:
    """Plain facts about a checkpoint: counters, configuration and tensors, too."""
    state = found.state
    try:
        config = json.loads(state.get("config") or "{}")
    except (TypeError, ValueError):
        config = {}
    return {
        "path": str(found.path),
        "format_version": found.format_version,
        "torch_version": found.torch_version,
        "bytes": found.num_bytes,
        "sha256": found.sha256,
        "iteration": state.get("iteration"),
        "steps": state.get("global_step"),
        "episodes": state.get("episodes"),
        "measured": state.get(MEASURED) or {},
        "config": config,
        "tensors": [
            {"name": name, "shape": list(tensor.shape), "type": str(tensor.dtype).removeprefix("torch.")}
            for name, tensor in _tensors(state)
        ],
    }


def _as_text(about: dict[str, Any]) -> str:
    lines = [f"{name:<15} {value}" for name, value in about.items() if name not in ("config", "tensors", "measured")]
    lines += [f"{'measured':<15} {name} {value:.6g}" for name, value in about["measured"].items()]
    for section, values in about["config"].items():
        pairs = ", ".join(f"{name} {value}" for name, value in values.items() if value not in ("", None))
        lines += textwrap.wrap(f"{section:<15} {pairs}", 110, subsequent_indent=" " * 16)
    lines.append(f"{len(about['tensors'])} tensors:")
    lines += [f"  {one['name']:<50} {one['shape']!s:<16} {one['type']}" for one in about["tensors"]]
    return "\n".join(lines)


def _tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor in nested dicts and lists, with its place."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, dict | list | tuple):
        for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _tensors(entry, f"{name}/{key}" if name else str(key))


def _counters(state: dict[str, Any]) -> str:
    names = {"iteration": "iteration", "global_step": "steps", "episodes": "episodes"}
    return ", ".join(f"{word} {state[name]}" for name, word in names.items() if name in state) or "no counters"


def _folder(path: Path) -> Path:
    return path / CHECKPOINT_DIR if (path / CHECKPOINT_DIR).is_dir() else path


def _files(path: Path) -> list[Path]:
    """The checkpoints that PATH means, oldest first, best.pt last."""
    if not path.is_dir():
        return [path]
    folder = _folder(path)
    best = [folder / BEST_FILE] if (folder / BEST_FILE).exists() else []
    return sorted(folder.glob(SUPERSEDED)) + checkpoint_files(folder) + best


def _digest_of_best(path: Path) -> str:
    """The checksum of a folder's best checkpoint, "" where there is none."""
    best = (_folder(path) if path.is_dir() else path.parent) / BEST_FILE
    try:
        return read_checkpoint(best).sha256 if best.exists() else ""
    except CheckpointError:
        return ""  # its own row says why


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = CommandParser(
        prog="python -m rl_dist.checkpoint",
        description="Look at checkpoints; nothing is changed, and nothing in them can run.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="verify|inspect|list")
    for name, what in (
        ("verify", "check every file, one line each; exit code 1 if any is damaged"),
        ("inspect", "what a file (of a folder or run: the newest valid one) holds: counters, configuration, tensors"),
        ("list", "newest first: iteration, time, size, valid or why not; marks the best"),
    ):
        command = commands.add_parser(
            name, help=what, description=what, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        command.add_argument("path", metavar="PATH", type=Path)
    commands.choices["inspect"].add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    if not args.path.exists():
        parser.error(f"{args.path} does not exist: give a checkpoint file, a folder of them or a run directory")
    if not _files(args.path):
        parser.error(f"{args.path} holds no checkpoints: give a checkpoint file, a folder of them or a run directory")
    return args


@explains_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Entry of the command; returns the exit code."""
    args = _parse(argv)
    try:
        if args.command == "inspect":
            return inspect(args.path, args.json)
        return verify(args.path) if args.command == "verify" else show_list(args.path)
    except CheckpointError as error:
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
        return 1
