"""Things that may lie where a file of a run is expected; none may hang or kill who reads it."""

import os
import socket
from pathlib import Path

SPARSE_BYTES = 40 * 2**30


def sparse(path):
    path.touch()
    os.truncate(path, SPARSE_BYTES)


def bound_socket(path):
    here = Path.cwd()
    os.chdir(path.parent)  # a socket's path has at most 107 bytes
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(here)


def folder_with_content(path):
    path.mkdir()
    (path / "of a user").write_text("x")


ODD_FILES = {
    "pipe": os.mkfifo,
    "directory": folder_with_content,
    "socket": bound_socket,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "sparse giant": sparse,
    "link to nowhere": lambda path: path.symlink_to("nowhere"),
    "link to itself": lambda path: path.symlink_to(path.name),
}
