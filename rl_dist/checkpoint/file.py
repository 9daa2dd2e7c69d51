"""One checkpoint file: written whole or not at all, read without running code.

A checkpoint is torch.save's zip archive, which plain `torch.load` reads, too; seal.py describes its
end.
"""

from __future__ import annotations

import errno
import io
import os
import re
import shutil
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_dist.checkpoint.schema import StateError, check_state
from rl_dist.checkpoint.seal import (
    FORMAT_VERSION,
    CheckpointError,
    NewerFormatError,
    about,
    read_sealed,
    seal,
)
from rl_dist.hardware.plain_files import log_once, remove

# file systems that cannot sync a folder: names there are as safe as they get
_NO_SYNC = {errno.EINVAL, errno.ENOTSUP}
_PLAIN_TYPES = (str, int, float, bool, type(None))


@dataclass(frozen=True)
class CheckpointFile:
    """A whole checkpoint: its state, and facts about the file."""

    path: Path
    state: dict[str, Any]
    format_version: int
    torch_version: str  # that wrote it; "unknown" in format 1
    num_bytes: int
    sha256: str  # of all but the digits themselves and the mark before them


def load_checkpoint(path: str | Path) -> dict[str, Any]:
    """Read a checkpoint to the CPU; tensors and plain values, never pickled code.

    Raises:
        CheckpointError: missing, empty, truncated, changed, of a newer format, or no checkpoint.
    """
    return read_checkpoint(path).state


def read_checkpoint(path: str | Path) -> CheckpointFile:
    """Read a checkpoint and facts about its file; raises like `load_checkpoint`."""
    path = Path(path)
    data = read_sealed(path)
    version, torch_version = about(data)
    if version > FORMAT_VERSION:
        raise NewerFormatError(
            f"checkpoint {path} has format version {version}, and this program reads up to "
            f"{FORMAT_VERSION}: use the version of the program that wrote it, or a newer one"
        )
    digest = data[-64:].decode()
    return CheckpointFile(path, _unpack(path, data), version, torch_version, len(data), digest)


def pack(state: dict[str, Any]) -> bytes:
    """Return the bytes of a checkpoint file.

    Raises:
        CheckpointError: a value that could not be loaded again.
    """
    check_plain(state, "state")
    buffer = io.BytesIO()
    torch.save(state, buffer)  # to memory first: a full disk would surface as a zip error
    return seal(buffer.getvalue())


def check_plain(value: Any, where: str) -> None:
    """Refuse a value that `torch.load(weights_only=True)` would refuse later."""
    if isinstance(value, dict):
        for key, entry in value.items():
            check_plain(key, f"{where} key {key!r}")
            check_plain(entry, f"{where}[{key!r}]")
    elif type(value) in (list, tuple):
        for index, entry in enumerate(value):
            check_plain(entry, f"{where}[{index}]")
    elif not isinstance(value, Tensor) and type(value) not in _PLAIN_TYPES:
        kind = type(value).__name__
        raise CheckpointError(f"{where} is a {kind}; make it a tensor or a plain value")


def write_atomically(path: Path, data: bytes, *, second_name: Path | None = None) -> None:
    """Make `path` hold `data` whole, or leave it as it was.

    Args:
        path: the file; its folder is made if missing.
        second_name: gets the same content, just before `path` does: a hard link where the file
            system knows them. A directory in its place stays, and is named once.

    Raises:
        CheckpointError: names path, bytes needed and cause. No half-written file stays.
    """
    # a leftover of another process cannot have this name
    part, second = (path.with_name(f"{os.getpid()}.{number}.pt.part") for number in (1, 2))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for leftover in path.parent.glob("*.pt.part"):
            remove(leftover)
        _write(part, data)
        if second_name:
            try:
                os.link(part, second)
            except OSError:  # no hard links here, or too many: a copy
                _write(second, data)
            try:
                second.replace(second_name)
            except IsADirectoryError:
                log_once(f"{second_name} cannot be written, for it is a directory: move it away")
                second.unlink()
        part.replace(path)
        _sync_names(path.parent)
    except OSError as error:
        for leftover in (part, second):
            with suppress(OSError):  # a folder that cannot be written holds nothing of ours
                leftover.unlink(missing_ok=True)
        cause = str(error.strerror or error)
        with suppress(OSError):
            cause += f" ({shutil.disk_usage(path.parent).free:,} bytes are free there)"
        raise CheckpointError(
            f"cannot write checkpoint {path} ({len(data):,} bytes): {cause}"
        ) from None


def _write(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_names(directory: Path) -> None:
    """Let new names survive a power cut, too."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
    finally:
        os.close(descriptor)


def _unpack(path: Path, data: bytes) -> dict[str, Any]:
    """Load the state of a file whose checksum is right, which still may not be ours."""
    try:
        with warnings.catch_warnings(action="ignore"):  # the line below says it all
            state = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
        if not isinstance(state, dict):
            raise CheckpointError(f"it holds a {type(state).__name__}, not a state")
        check_plain(state, "state")
        check_state(state)
        return state
    except (CheckpointError, StateError) as error:
        cause = str(error)
    except Exception as error:  # zip, pickle and torch errors of many kinds
        cause = _reason(str(error))
    raise CheckpointError(f"checkpoint {path} is refused: {cause}")


def _reason(message: str) -> str:
    """Shorten torch's objection to a file, without its advice to trust it."""
    message = "".join(c if c.isprintable() else " " for c in message)
    if code := re.search(r"GLOBAL (\S+)", message):
        wants = f"it wants to run {code[1][:80]}, and a checkpoint holds data only"
        return f"{wants}; nothing was run: do not trust it"
    if "TorchScript" in message:
        return "it is a TorchScript archive, which holds code; nothing was run: do not trust it"
    cause = message.rpartition("WeightsUnpickler error:")[2].partition("Check the documentation")[0]
    cause = re.sub("Weights only load failed.|In PyTorch 2.6.*trusted source.", "", cause)
    cause = " ".join(cause.split())[:160] or "it gives no reason"
    return f"torch {torch.__version__} cannot read it: {cause}"
