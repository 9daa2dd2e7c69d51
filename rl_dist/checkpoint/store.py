"""Write and read checkpoints: files with a checksum and without code.

A run keeps its last few checkpoints and the best one. A checkpoint is the zip archive that
torch.save writes, and `torch.load` can read it. The file ends with a zip comment such as this:

    rl_dist checkpoint, format 5, torch 2.13.0, sha256:<64 hexadecimal digits>

The digits are the SHA-256 of all bytes before the word sha256. `load_checkpoint` checks this
hash before torch reads the file, so torch never reads a damaged file.
"""

import hashlib
import io
import math
import re
import struct
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rl_dist.checkpoint.content import (
    FORMS,
    MEASURED,
    CheckpointError,
    Schema,
    State,
    check_plain,
    check_state,
    forms_of,
)
from rl_dist.errors import UserError, one_line
from rl_dist.files import Record, log_once, plain_file, read_plain, remove, replace_file
from rl_dist.process_group.collectives import all_gather_json
from rl_dist.process_group.world import World
from rl_dist.run_dir import BEST_FILE, CHECKPOINT_DIR

FORMAT_VERSION = 5  # increased if new code cannot read older checkpoints
LAST_READER = "0.5.0"  # the last program version that reads formats before FORMAT_VERSION
_DIGEST_BYTES = len("sha256:") + 64
_COMMENT = re.compile(
    rb"rl_dist checkpoint, format (\d{1,9}), torch [^,]{1,100}, sha256:([0-9a-f]{64})\Z"
)
_NAME = re.compile(r"iteration_(\d+)\.pt")


class OtherFormatError(CheckpointError):
    """An undamaged checkpoint that another version of this program wrote."""


class LoadedCheckpoint(NamedTuple):
    """The path and the state of a valid checkpoint."""

    path: Path
    state: State


# ---- one file


def load_checkpoint(path: str | Path, schema: type[Schema] = Schema) -> State:
    """Load a state of tensors and plain values to the CPU; never run code from the file.

    Args:
        schema: schema of the program that should have written the checkpoint; see `check_state`.
    """
    try:
        with open(path, "rb", opener=plain_file) as file:
            is_archive = file.read(4) == b"PK\x03\x04"  # else, do not read it: it may be huge
        data = read_plain(path, None) if is_archive else b""
    except OSError as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: {error.strerror}") from None
    comment = _COMMENT.search(data[-300:])
    if comment is None:
        raise CheckpointError(f"checkpoint {path} is empty, truncated or not a checkpoint")
    if hashlib.sha256(memoryview(data)[:-_DIGEST_BYTES]).hexdigest().encode() != comment[2]:
        problem = "is damaged: its bytes do not match its SHA-256 checksum"
        raise CheckpointError(f"checkpoint {path} {problem}")
    if (version := int(comment[1])) != FORMAT_VERSION:
        reader = f"version {LAST_READER}" if version < FORMAT_VERSION else "a newer version"
        raise OtherFormatError(
            f"checkpoint {path} has format version {version}, but this program reads "
            f"{FORMAT_VERSION}: use {reader} of the program"
        )
    try:
        with warnings.catch_warnings(action="ignore"):  # the checks below raise errors instead
            state = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
        check_plain(state)
        check_state(state, schema)
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint {path} is refused: {error}") from None
    except Exception as error:  # zip, pickle and torch raise many types of errors
        cause = one_line(error, 80)
        raise CheckpointError(
            f"checkpoint {path} is not plain data: do not trust it; no code in it was run ({cause})"
        ) from None
    return state


def pack(state: State) -> bytes:
    """Convert a state of plain values to the bytes of a checkpoint file."""
    check_plain(state)
    buffer = io.BytesIO()
    # Save to a buffer: if torch wrote to a file on a full disk, it would raise a zip error.
    torch.save(state, buffer)
    return seal(buffer.getvalue())


def seal(archive: bytes) -> bytes:
    """Add the comment with the format version and the checksum to a zip archive.

    A zip file ends with the length of its comment, then the comment (PKWARE APPNOTE 4.3.16).
    """
    assert archive[-22:-18] == b"PK\x05\x06" and archive[-2:] == b"\0\0", "unexpected zip ending"
    about = f"rl_dist checkpoint, format {FORMAT_VERSION}, torch {torch.__version__}, ".encode()
    data = archive[:-2] + struct.pack("<H", len(about) + _DIGEST_BYTES) + about
    return data + b"sha256:" + hashlib.sha256(data).hexdigest().encode()


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file completely or not at all; create its folder if needed.

    Raises:
        CheckpointError: the file cannot be written; the message gives its path and the reason.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, data, sync=True, part="unfinished.part")
    except OSError as error:
        raise CheckpointError(
            f"cannot write checkpoint {path}: {error.strerror or error}"
        ) from None


# ---- the checkpoints of a run


def save_checkpoint(
    directory: str | Path, state: State, *, iteration: int, keep: int, best: bool = False
) -> Path:
    """Write a file such as iteration_00000120.pt, and remove old checkpoints.

    Args:
        iteration: number in the file's name. Checkpoints with higher numbers are removed, because
            they are from before the run was resumed at an earlier iteration.
        keep: number of newest checkpoints to keep, at least 1.
        best: also write best.pt, in addition to the `keep` newest checkpoints.

    Raises:
        CheckpointError: `load_checkpoint` would refuse a value, or a file cannot be written.
    """
    path = Path(directory, f"iteration_{iteration:08d}.pt")
    data = pack(state)
    # Write best.pt first. If the run is killed between the two writes, a resumed run repeats this
    # iteration; best.pt then already contains its result.
    if best:
        write_atomically(path.with_name(BEST_FILE), data)
    write_atomically(path, data)
    # keep the newest `keep` files, but none with a higher number than this checkpoint
    numbered = [file for file in checkpoint_files(path.parent) if file.name != BEST_FILE]
    kept = numbered[: numbered.index(path) + 1][-keep:]
    for file in numbered:
        if file not in kept:
            remove(file)
    return path


def save_agreed(
    run_dir: Path,
    state: State | None,
    world: World,
    *,
    iteration: int,
    keep: int,
    measured: Mapping[str, float],
    best: bool,
) -> Path:
    """Save a checkpoint on the main process; return its path on every rank.

    Every rank must call this.

    Args:
        state: state to save; None on ranks other than the main process.
        measured: the metric that selects the best checkpoint, as {name: value}; {} if unknown.
        best: True if this is the best checkpoint so far.

    Raises:
        UserError: the checkpoint cannot be written. All ranks raise this error.
    """
    path = ""
    problem = ""
    if state is not None:
        content = state | {MEASURED: dict(measured), FORMS: forms_of(state)}
        folder = run_dir / CHECKPOINT_DIR
        try:
            path = str(save_checkpoint(folder, content, iteration=iteration, keep=keep, best=best))
        except CheckpointError as error:
            problem = str(error)
    path, problem = all_gather_json([path, problem], world)[0]
    if problem:
        raise UserError(problem, exit_code=1)
    return Path(path)


def load_latest(run_dir: str | Path, schema: type[Schema] = Schema) -> LoadedCheckpoint | None:
    """Load the newest valid checkpoint of a run or folder; log each skipped file.

    best.pt is tried last. It may be the only file if the user has deleted the others.

    Raises:
        OtherFormatError: the newest undamaged file has another format version. Loading an older
            file instead would lose training progress.
    """
    for path in reversed(checkpoint_files(run_dir)):
        try:
            return LoadedCheckpoint(path, load_checkpoint(path, schema))
        except OtherFormatError:
            raise
        except CheckpointError as error:
            log_once(f"skipped: {error}")
    return None


def latest_checkpoint(run_dir: str | Path, schema: type[Schema] = Schema) -> Path | None:
    """Return the path of the newest valid checkpoint, or None; see `load_latest`."""
    newest = load_latest(run_dir, schema)
    return newest.path if newest else None


def find_latest_run(runs_dir: str | Path) -> Path | None:
    """Return the run in `runs_dir` with the most recent checkpoint, or None."""
    files = Path(runs_dir).glob(f"*/{CHECKPOINT_DIR}/*.pt")
    newest = max(files, key=lambda file: file.lstat().st_mtime, default=None)
    return newest and newest.parents[1]


def checkpoint_folder(path: str | Path) -> Path:
    """Return a run directory's checkpoints folder; return any other path unchanged."""
    folder = Path(path, CHECKPOINT_DIR)
    return folder if folder.is_dir() else Path(path)


def checkpoint_files(path: str | Path) -> list[Path]:
    """List the checkpoints of a run or folder: first best.pt, then the others by iteration.

    Subfolders are skipped, even if they have the name of a checkpoint.
    """
    files = [file for file in checkpoint_folder(path).glob("*.pt") if file.is_file()]
    named = [file for file in files if file.name == BEST_FILE or iteration_in_name(file) >= 0]
    return sorted(named, key=iteration_in_name)


def iteration_in_name(path: Path) -> int:
    """Return the iteration in a checkpoint's file name, or -1 if the name has no iteration."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


class Best:
    """Remembers the best value of the metric that selects best.pt, equally on all ranks.

    Higher values are better. best.pt also contains the value, so that a resumed run does not
    replace the file with a worse checkpoint. If best.pt is damaged or was selected by another
    metric, the next checkpoint replaces it.

    Args:
        names: names of metrics. The first one that the run reports is used. If there are no names,
            no best.pt is written.
    """

    def __init__(self, names: Sequence[str], directory: Path, world: World) -> None:
        self.names = names
        self.world = world
        values = [-math.inf]
        if names and world.is_main_process:
            with suppress(CheckpointError):
                saved = load_checkpoint(directory / BEST_FILE).get(MEASURED, {})
                values = [saved[name] for name in names if name in saved] + values
        self.value: float = all_gather_json(values[0], world)[0]

    def update(self, metrics: Record) -> bool:
        """Return True if the metric is the best so far; every rank must call this."""
        name = next((name for name in self.names if name in metrics), "")
        value: Any = all_gather_json(metrics[name], self.world)[0] if name else None
        # the metric is None if, for example, no episode has ended
        is_known = value is not None and math.isfinite(value)
        # the value in this iteration
        self.measured = {name: float(value)} if is_known else {}
        # If two validations are equal, prefer the later one: it follows a longer training.
        is_tie = value == self.value and name.startswith("valid/")
        self.improved = is_known and (value > self.value or is_tie)
        return self.improved

    def saved(self) -> None:
        """Store an improved value as the best one; call this after saving a checkpoint."""
        if self.improved:
            (self.value,) = self.measured.values()
