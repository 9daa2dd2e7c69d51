"""The end of a checkpoint file: format version and checksum.

The comment of its zip archive is the end of the file:

    rl_dist checkpoint, format 3, torch 2.13.0, sha256:<64 hexadecimal digits>

The digits are the SHA-256 of every byte before the word sha256, the format version included. So any
changed byte is refused before torch sees the file, and a file of a newer format is known by its
version, not by a strange error. Format 1 is the same without the words before sha256.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
from pathlib import Path

import torch

from rl_dist.hardware.plain_files import plain_file, read_open

FORMAT_VERSION = 3  # raised when an older program could not go on from what a newer one writes
_MARK = b"sha256:"
_SEAL_BYTES = len(_MARK) + 64
_ABOUT = re.compile(rb"rl_dist checkpoint, format (\d{1,9}), torch ([!-+\--~]{1,100}), \Z")
_ABOUT_BYTES = 200  # at most


class CheckpointError(ValueError):
    """A checkpoint cannot be written or trusted; names the path and the cause."""


class NewerFormatError(CheckpointError):
    """A whole checkpoint, written by a newer version of this program."""


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
    """Read a file, if its bytes are those that were written.

    Raises:
        CheckpointError: missing, no plain file, empty, truncated, changed, too large for the
            memory, or no checkpoint at all.
    """
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


def about(data: bytes) -> tuple[int, str]:
    """Return format version and torch version of a file whose checksum is right."""
    found = _ABOUT.search(data[-_SEAL_BYTES - _ABOUT_BYTES : -_SEAL_BYTES])
    return (int(found[1]), found[2].decode()) if found else (1, "unknown")
