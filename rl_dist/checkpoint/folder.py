"""The checkpoints of one run: the last few, the best, and the one to go on from."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rl_dist.checkpoint.file import (
    CheckpointError,
    OtherFormatError,
    load_checkpoint,
    pack,
    write_atomically,
)
from rl_dist.errors import UserError
from rl_dist.files import log_once, remove
from rl_dist.process_group.collectives import all_gather_json
from rl_dist.process_group.world import World

CHECKPOINT_DIR = "checkpoints"
BEST_FILE = "best.pt"
MEASURED = "measured"  # in a state: {metric: value} of the metric by which the best is chosen
_NAME = re.compile(r"iteration_(\d+)\.pt")


def save_checkpoint(
    directory: str | Path, state: dict[str, Any], *, iteration: int, keep: int, best: bool = False
) -> Path:
    """Write `iteration_00000120.pt` whole or not at all, and drop old ones.

    Args:
        state: tensors, numbers, strings, None, in dicts, lists and tuples.
        iteration: part of the name. Later iterations already there are removed: they are from a
            past that a resumed run does not share.
        keep: how many of the newest checkpoints stay, at least 1.
        best: it becomes best.pt as well, which stays however many follow.

    Raises:
        CheckpointError: a value that could not be loaded again, or a disk that cannot be written.
    """
    assert keep >= 1
    path = Path(directory, f"iteration_{iteration:08d}.pt")
    data = pack(state)
    # best.pt first: a run killed between the two repeats this iteration, and finds its best there.
    best_path = path.with_name(BEST_FILE)
    if best and not best_path.is_dir():
        write_atomically(best_path, data)
    write_atomically(path, data)
    known = checkpoint_files(path.parent)
    at = known.index(path)
    # a pipe or directory is none of those to keep
    oldest = [file for file in known[: at + 1] if file.is_file()][-keep:][0]
    for file in [*known[: known.index(oldest)], *known[at + 1 :]]:
        remove(file)
    return path


class Found(NamedTuple):
    """A valid checkpoint and its state."""

    path: Path
    state: dict[str, Any]


def load_latest(run_dir: str | Path) -> Found | None:
    """Load the newest valid checkpoint of a run or folder; logs which it skipped.

    best.pt is the last resort: it may be all that a cleaner has left.

    Raises:
        OtherFormatError: the newest one is whole, but of another format: falling back would lose
            the training in it.
    """
    for path in reversed(_best_and_files(checkpoint_folder(run_dir))):
        try:
            return Found(path, load_checkpoint(path))
        except OtherFormatError:
            raise
        except CheckpointError as error:
            log_once(f"skipped: {error}")
    return None


def latest_checkpoint(run_dir: str | Path) -> Path | None:
    """Return the path of the checkpoint that `load_latest` finds."""
    found = load_latest(run_dir)
    return found.path if found else None


def find_latest_run(runs_dir: str | Path) -> Path | None:
    """Return the run directory below `runs_dir` whose valid checkpoint is the newest."""
    newest: list[tuple[float, Path]] = []
    for directory in Path(runs_dir).glob(f"*/{CHECKPOINT_DIR}"):
        files = [path for path in _best_and_files(directory) if path.is_file()]
        if files:
            newest.append((max(path.stat().st_mtime for path in files), directory.parent))
    ordered = (run_dir for _, run_dir in sorted(newest, reverse=True))
    return next((run_dir for run_dir in ordered if latest_checkpoint(run_dir)), None)


def _best_and_files(folder: Path) -> list[Path]:
    best = folder / BEST_FILE
    return [*([best] if best.exists() else []), *checkpoint_files(folder)]


def checkpoint_folder(path: str | Path) -> Path:
    """Return the folder of checkpoints in a run directory, else the path itself."""
    folder = Path(path, CHECKPOINT_DIR)
    return folder if folder.is_dir() else Path(path)


def checkpoint_files(directory: Path) -> list[Path]:
    """List checkpoint files by iteration, oldest first, without best.pt."""
    found = [path for path in directory.glob("iteration_*.pt") if _NAME.fullmatch(path.name)]
    return sorted(found, key=iteration_in_name)


def iteration_in_name(path: Path) -> int:
    """Return the iteration in a file's name; -1: there is none."""
    match = _NAME.match(path.name)
    return int(match[1]) if match else -1


class Best:
    """The best value so far of the metric that chooses best.pt; equal on all ranks.

    The value reached before stands in best.pt itself, so that no resumed run replaces it by a worse
    one. Higher is better.

    Args:
        names: the metric is the first of these that the run reports; none: no best.pt.
    """

    def __init__(self, names: Sequence[str], directory: Path, world: World) -> None:
        self.names = names
        self.world = world
        self.measured: dict[str, float] = {}  # at this iteration
        self.improved = False
        found = None
        if names and world.is_main_process:
            found = _value_of_best(names, directory / BEST_FILE)
        self.value = all_gather_json(found, world)[0]

    def update(self, metrics: Mapping[str, Any]) -> bool:
        """Take in these metrics; True if they beat all before. All ranks must call."""
        self.measured = {}
        name = next((name for name in self.names if name in metrics), None)
        value = None if name is None else all_gather_json(metrics[name], self.world)[0]
        if not isinstance(value, int | float | None):
            raise UserError(f"keep_best {name} is no number: name a metric that is one")
        # None: no episode has ended, for example
        if name is not None and value is not None and math.isfinite(value):
            self.measured = {name: float(value)}
        self.improved = bool(self.measured) and (self.value is None or value > self.value)
        return self.improved

    def saved(self) -> None:
        """Record that this iteration is saved, in best.pt too if it is the best."""
        if self.improved:
            (self.value,) = self.measured.values()


def save_agreed(
    run_dir: Path,
    state: dict[str, Any] | None,  # of the main process only
    iteration: int,
    keep: int,
    best: Best,
    world: World,
) -> tuple[Path, str]:
    """Let the main process save a run; all ranks must call.

    Returns:
        The checkpoint's path, and why it could not be written: "" where it was.
    """
    path, problem = run_dir, ""
    if state is not None:
        state[MEASURED] = best.measured
        folder = run_dir / CHECKPOINT_DIR
        try:
            path = save_checkpoint(
                folder, state, iteration=iteration, keep=keep, best=best.improved
            )
        except CheckpointError as error:
            kept = latest_checkpoint(run_dir)
            way_on = f"{kept.name} stays valid, --resume {run_dir} goes on from it" if kept else ""
            problem = f"{error}; {way_on or 'there is no earlier one'}"
    # of the main process; all ranks act on it together
    problem, name = all_gather_json([problem, str(path)], world)[0]
    if not problem:
        best.saved()
    return Path(name), problem


def last_checkpoint(run_dir: Path) -> str:
    """Return a clause that names the checkpoint to go on from."""
    newest = latest_checkpoint(run_dir)
    return f"the last good checkpoint is {newest}" if newest else "there is no checkpoint yet"


def _value_of_best(names: Sequence[str], path: Path) -> float | None:
    """Return the value in best.pt; None: the next one shall replace it."""
    if not path.exists():
        return None
    try:
        measured = load_checkpoint(path).get(MEASURED) or {}
        for name in names:
            if name in measured:
                return measured[name]
        problem = f"{path} was chosen by {', '.join(measured) or 'no metric'}"
    except CheckpointError as error:
        problem = str(error)
    log_once(f"{problem}; the next checkpoint with {' or '.join(names)} takes its place")
    return None
