"""Checkpoints: one file, written atomically, checked byte by byte when read.

The file is torch.save's zip archive. Its SHA-256 stands in the archive's comment field, so the file
stays one that plain `torch.load` reads, needs no companion, and any changed byte is refused.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import re
import struct
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

CHECKPOINT_DIR = "checkpoints"
_NAME = re.compile(r"iteration_(\d+)\.pt")
_MARK = b"sha256:"
_COMMENT_BYTES = len(_MARK) + 64
_PLAIN_TYPES = (str, int, float, bool, type(None))


class CheckpointError(ValueError):
    """A checkpoint cannot be written or trusted; names the path and the cause."""


def save_checkpoint(directory: str | Path, state: dict[str, Any], *, iteration: int, keep: int) -> Path:
    """Write `iteration_00000120.pt` whole or not at all, and drop old ones.

    Args:
        directory: made if missing.
        state: tensors, numbers, strings, None, in dicts, lists and tuples.
        iteration: part of the name. Later iterations already there are from a past that a resumed
            run does not share; they are renamed to *.pt.superseded.
        keep: how many of the newest checkpoints stay, at least 1.

    Raises:
        CheckpointError: a value that could not be loaded again, or a disk that cannot be written.
    """
    if keep < 1:
        raise CheckpointError(f"keep_checkpoints must be at least 1, got {keep}")
    _check_plain(state, "state")
    path = Path(directory, f"iteration_{iteration:08d}.pt")
    data = _serialise(state)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for leftover in path.parent.glob("*.pt.part"):
            leftover.unlink()
        _write_atomically(path, data)
        _retain(path, keep)
    except OSError as error:
        size = f"{len(data) / 2**20:.1f} MiB"
        raise CheckpointError(f"cannot write {path} ({size}): {error.strerror or error}") from None
    return path


def load_checkpoint(path: str | Path) -> dict[str, Any]:
    """Read a checkpoint to the CPU; tensors and plain values, never pickled code.

    Raises:
        CheckpointError: missing, empty, truncated, changed, or no checkpoint at all.
    """
    data = _read_checked(Path(path))
    try:
        return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except Exception as error:  # zip, pickle and torch errors of many kinds; the bytes are as saved
        cause = " ".join(str(error).split())[:200]
        raise CheckpointError(f"checkpoint {path}: torch {torch.__version__} refuses it: {cause}") from None


def latest_checkpoint(run_dir: str | Path) -> Path | None:
    """The newest intact checkpoint of a run; damaged ones are skipped and logged."""
    for path in reversed(_checkpoints(Path(run_dir, CHECKPOINT_DIR))):
        try:
            _read_checked(path)
            return path
        except CheckpointError as error:
            logger.warning("skipped: %s", error)
    return None


def find_latest_run(runs_dir: str | Path) -> Path | None:
    """The run directory below `runs_dir` whose intact checkpoint is the newest."""
    newest: list[tuple[float, Path]] = []
    for directory in Path(runs_dir).glob(f"*/{CHECKPOINT_DIR}"):
        times = [path.stat().st_mtime for path in _checkpoints(directory)]
        if times:
            newest.append((max(times), directory.parent))
    ordered = (run_dir for _, run_dir in sorted(newest, reverse=True))
    return next((run_dir for run_dir in ordered if latest_checkpoint(run_dir)), None)


def _checkpoints(directory: Path) -> list[Path]:
    """Checkpoint files by iteration, oldest first."""
    found = [path for path in directory.glob("iteration_*.pt") if _NAME.fullmatch(path.name)]
    return sorted(found, key=_iteration)


def _iteration(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match, path
    return int(match[1])


def _serialise(state: dict[str, Any]) -> bytes:
    """The archive's bytes with their SHA-256 as its comment.

    A zip file ends with the two-byte length of its comment and the comment. Source: PKWARE
    APPNOTE 4.3.16.
    """
    buffer = io.BytesIO()
    torch.save(state, buffer)  # to memory first: a full disk would surface as a zip error
    data = buffer.getvalue()
    assert data[-22:-18] == b"PK\x05\x06" and data[-2:] == b"\0\0", "not the zip end we know"
    data = data[:-2] + struct.pack("<H", _COMMENT_BYTES)
    return data + _MARK + hashlib.sha256(data).hexdigest().encode()


def _read_checked(path: Path) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: {error.strerror or error}") from None
    if not data:
        raise CheckpointError(f"checkpoint {path} is empty")
    body, comment = data[:-_COMMENT_BYTES], data[-_COMMENT_BYTES:]
    if not data.startswith(b"PK"):
        raise CheckpointError(f"checkpoint {path} is damaged or no checkpoint: it does not start like one")
    if not comment.startswith(_MARK):
        raise CheckpointError(f"checkpoint {path} is truncated or not ours: its checksum is missing")
    if comment[len(_MARK) :] != hashlib.sha256(body).hexdigest().encode():
        raise CheckpointError(f"checkpoint {path} is damaged: its bytes do not match its SHA-256 checksum")
    return data


def _write_atomically(path: Path, data: bytes) -> None:
    part = path.with_suffix(".pt.part")
    try:
        with open(part, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY)  # the new name must survive a power cut, too
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _retain(path: Path, keep: int) -> None:
    known = _checkpoints(path.parent)
    for later in known[known.index(path) + 1 :]:
        logger.warning("%s is from before this resume; renamed to .superseded", later)
        later.replace(later.with_suffix(".pt.superseded"))
    for old in known[: max(0, known.index(path) + 1 - keep)]:
        old.unlink()


def _check_plain(value: Any, where: str) -> None:
    """Refuse what `torch.load(weights_only=True)` would refuse, while it can still be mended."""
    if isinstance(value, Tensor) or type(value) in _PLAIN_TYPES:
        return
    if isinstance(value, dict):
        for key, entry in value.items():
            _check_plain(key, f"{where} key {key!r}")
            _check_plain(entry, f"{where}[{key!r}]")
    elif type(value) in (list, tuple):
        for index, entry in enumerate(value):
            _check_plain(entry, f"{where}[{index}]")
    else:
        raise CheckpointError(f"{where} is a {type(value).__name__}; make it a tensor or a plain value")
