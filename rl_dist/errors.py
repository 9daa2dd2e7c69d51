"""Errors for users, printed once, on streams that outlive their readers."""

from __future__ import annotations

import argparse
import errno
import functools
import hashlib
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

_SURROGATE = re.compile(r"[\ud800-\udfff]")

FULL_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}  # no bad usage: it may be mended while a run waits
CLOSED_DISK = {errno.EACCES, errno.EPERM, errno.EROFS}  # to this user

FIRST_RANK_S = 10.0  # for the first rank of a machine to say what the others see as well
_WRONG_KIND = "move away what lies there, or name another place"
_CURES = {
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EMFILE: "allow more open files, such as by ulimit -n 1024",
    errno.ENFILE: "this machine has too many open files: close some",
    errno.ENOSPC: "make room",
    errno.EACCES: "choose a place that you may use",
    errno.EPERM: "choose a place that you may use",
    **dict.fromkeys((errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.EINVAL, errno.ELOOP), _WRONG_KIND),
}
_MISTAKES = {errno.ENOENT, *_CURES} - {errno.EMFILE, errno.ENFILE, errno.ENOSPC}  # of the user, not of the machine


class _Outliving:
    """A stream whose reader may go away before the program: from then on, what is written is lost.

    Ctrl-C in a shell also ends the `tee` that reads our lines; a checkpoint must still be saved.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):  # ValueError: closed
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()

    def close(self) -> None:
        """Stay open: what an environment closes is ours, too."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def outlive_readers() -> None:
    """Let stdout and stderr of this process go nowhere once nobody reads them."""
    for name in ("stdout", "stderr"):
        if not isinstance(getattr(sys, name), _Outliving):
            setattr(sys, name, _Outliving(getattr(sys, name) or open(os.devnull, "w")))  # noqa: SIM115  # None: closed


def explained(error: ValueError | OSError) -> tuple[str, int]:
    """What the user or the system did wrong, in one line, and the exit code."""
    if isinstance(error, ValueError):
        return " ".join(str(error).split()), getattr(error, "exit_code", 2)
    what = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else ""
    cure = f"; {_CURES[error.errno]}" if error.errno in _CURES else ""
    told = f"{what}: {error.strerror or error}{cure}".removeprefix(": ")
    return " ".join(told.split()), 2 if error.errno in _MISTAKES else 1


def explains_errors(main: Callable[..., int]) -> Callable[..., int]:
    """Let a command end with one line where it cannot work with what it was given."""

    @functools.wraps(main)
    def command(*args: Any, **options: Any) -> int:
        try:
            return main(*args, **options)
        except (ValueError, OSError) as error:
            message, code = explained(error)
            tell_once(f"error: {message}")
            return code

    return command


def tell_once(line: str) -> None:
    """Print an error on stderr, under torchrun once on a machine.

    Ranks mostly see the same flags, files and numbers. The first one tells, and marks what it told; the others wait
    for that mark. What only one of them sees is told a little later, and never lost: torchrun may end a rank because
    the first one broke off for want of it.
    """
    mark, first = _mark_of(line), os.environ.get("LOCAL_RANK", "0") == "0"
    if mark and not first and _is_told(mark):
        return
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
    if mark and first:
        with suppress(OSError):
            mark.touch()


def _mark_of(line: str) -> Path | None:
    """A file, among those that torchrun makes for this start of the machine's ranks; None: it makes none."""
    own = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    return Path(own).parent.parent / f"told_{hashlib.sha256(line.encode()).hexdigest()}" if own else None


def _is_told(mark: Path) -> bool:
    """Wait for the mark, or until torchrun ends this process, which then leaves by itself."""
    ended: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda signum, frame: ended.append(signum))
    try:
        deadline_s = time.monotonic() + FIRST_RANK_S
        while not mark.exists() and not ended and time.monotonic() < deadline_s:
            time.sleep(0.05)
        return mark.exists()
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


class UserError(ValueError):
    """A mistake that the user can mend: printed as one line, without a traceback."""

    def __init__(self, message: str, *, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def unwritable(what: str, error: OSError) -> UserError:
    """What to tell the user of a file or folder that cannot be written."""
    told = f"{what} cannot be written: {error.strerror or error}"
    if error.errno not in FULL_DISK:
        return UserError(told)
    return UserError(f"{told}; make room, then go on with --resume", exit_code=1)


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors are one line on stderr, whatever their kind; exit code 2."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse words that are text."""
        words = sys.argv[1:] if args is None else list(args)
        for word in words:
            if _SURROGATE.search(word):
                self.error(f"{word!r} is no text in UTF-8: use other names")
        return super().parse_known_args(words, namespace)

    def error(self, message: str) -> NoReturn:
        """Print and exit."""
        tell_once("error: " + " ".join(message.split()))
        sys.exit(2)
