"""One checkpoint file: written whole or not at all, read without running code.

A checkpoint is torch.save's zip archive, which plain `torch.load` reads, too. The comment of the
archive is the end of the file:

    rl_dist checkpoint, format 4, torch 2.13.0, sha256:<64 hexadecimal digits>

The digits are the SHA-256 of every byte before the word sha256, the format version included. So any
changed byte is refused before torch sees the file, and a file of another format is known by its
version, not by a strange error.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import re
import shutil
import struct
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_dist.checkpoint.schema import StateError, check_state
from rl_dist.errors import printable
from rl_dist.files import plain_file, read_open, remove

FORMAT_VERSION = 4  # raised when this program could not go on from what another one writes
LAST_READER = "0.5.0"  # version of this program that reads older formats
_MARK = b"sha256:"
_SEAL_BYTES = len(_MARK) + 64
_ABOUT = re.compile(rb"rl_dist checkpoint, format (\d{1,9}), torch ([!-+\--~]{1,100}), \Z")
_ABOUT_BYTES = 200  # at most
# file systems that cannot sync a folder: names there are as safe as they get
_NO_SYNC = {errno.EINVAL, errno.ENOTSUP}
_PLAIN_TYPES = (str, int, float, bool, type(None))


class CheckpointError(ValueError):
    """A checkpoint cannot be written or trusted; names the path and the cause."""


class OtherFormatError(CheckpointError):
    """A whole checkpoint, written by another version of this program."""


@dataclass(frozen=True)
class CheckpointFile:
    """A whole checkpoint: its state, and facts about the file."""

    path: Path
    state: dict[str, Any]
    format_version: int
    torch_version: str  # that wrote it
    num_bytes: int
    sha256: str  # of all but the digits themselves and the mark before them


def load_checkpoint(path: str | Path) -> dict[str, Any]:
    """Read a checkpoint to the CPU; tensors and plain values, never pickled code.

    Raises:
        CheckpointError: missing, empty, truncated, changed, of another format, or no checkpoint.
    """
    return read_checkpoint(path).state


def read_checkpoint(path: str | Path) -> CheckpointFile:
    """Read a checkpoint and facts about its file; raises like `load_checkpoint`."""
    path = Path(path)
    data = read_sealed(path)
    found = _ABOUT.search(data[-_SEAL_BYTES - _ABOUT_BYTES : -_SEAL_BYTES])
    if found is None:
        raise CheckpointError(f"checkpoint {path} is not ours: it names no format")
    version, torch_version = int(found[1]), found[2].decode()
    if version != FORMAT_VERSION:
        reader = f"version {LAST_READER}" if version < FORMAT_VERSION else "a newer version"
        raise OtherFormatError(
            f"checkpoint {path} has format version {version}, and this program reads "
            f"{FORMAT_VERSION}: use {reader} of the program"
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


def write_atomically(path: Path, data: bytes) -> None:
    """Make `path` hold `data` whole, or leave it as it was; make its folder.

    Raises:
        CheckpointError: names path, bytes needed and cause. No half-written file stays.
    """
    # a leftover of another process cannot have this name
    part = path.with_name(f"{os.getpid()}.pt.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for leftover in path.parent.glob("*.pt.part"):
            remove(leftover)
        with part.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        _sync_names(path.parent)
    except OSError as error:
        with suppress(OSError):  # a folder that cannot be written holds nothing of ours
            part.unlink(missing_ok=True)
        cause = str(error.strerror or error)
        with suppress(OSError):
            cause += f" ({shutil.disk_usage(path.parent).free:,} bytes are free there)"
        raise CheckpointError(
            f"cannot write checkpoint {path} ({len(data):,} bytes): {cause}"
        ) from None


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


def seal(archive: bytes, format_version: int = FORMAT_VERSION) -> bytes:
    """Return a zip archive with the comment.

    Source: a zip file ends with the two-byte length of its comment and the comment, PKWARE APPNOTE
    4.3.16.
    """
    assert archive[-22:-18] == b"PK\x05\x06" and archive[-2:] == b"\0\0", "not the zip end we know"
    words = f"rl_dist checkpoint, format {format_version}, torch {torch.__version__}, ".encode()
    data = archive[:-2] + struct.pack("<H", len(words) + _SEAL_BYTES) + words
    return data + _MARK + hashlib.sha256(data).hexdigest().encode()


def read_sealed(path: Path) -> bytes:
    """Read a file, if its bytes are those that were written."""
    try:
        with open(path, "rb", opener=plain_file) as file:
            # the ends first: a giant that is none is not read
            start = file.read(4)
            file.seek(max(0, os.fstat(file.fileno()).st_size - _SEAL_BYTES))
            wrong = ""
            if not start:
                wrong = "is empty"
            elif start != b"PK\x03\x04":
                wrong = "is damaged or no checkpoint: it does not start like one"
            elif file.read(len(_MARK)) != _MARK:
                wrong = "is truncated or not ours: its checksum is missing"
            else:
                file.seek(0)
                data = read_open(file, None)
                digest = hashlib.sha256(memoryview(data)[:-_SEAL_BYTES]).hexdigest()
                if data[-64:] != digest.encode():
                    wrong = "is damaged: its bytes do not match its SHA-256 checksum"
    except OSError as error:
        wrong = f"cannot be read: {error.strerror or error}"
    if wrong:
        raise CheckpointError(f"checkpoint {path} {wrong}")
    return data


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
    message = printable(" ".join(message.split()))
    if code := re.search(r"GLOBAL (\S+)", message):
        wants = f"it wants to run {code[1][:80]}, and a checkpoint holds data only"
        return f"{wants}; nothing was run: do not trust it"
    if "TorchScript" in message:
        return "it is a TorchScript archive, which holds code; nothing was run: do not trust it"
    cause = message.rpartition("WeightsUnpickler error:")[2].partition("Check the documentation")[0]
    cause = re.sub("Weights only load failed.|In PyTorch 2.6.*trusted source.", "", cause)
    cause = cause.strip()[:160] or "it gives no reason"
    return f"torch {torch.__version__} cannot read it: {cause}"
