"""Errors of one line, streams that survive their readers, and tables of text."""

from __future__ import annotations

import argparse
import difflib
import errno
import functools
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

# Environment variable: the file in which a child process leaves its result.
RESULT_FILE = "RL_DIST_RESULT_FILE"
# The same result, for a caller in this process.
reported: dict[str, str] = {}

FULL_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}  # the user can make room, then resume
CLOSED_DISK = {errno.EACCES, errno.EPERM, errno.EROFS}
# Everything that a user's own code may raise. Its SystemExit must not end a job as a success.
FOREIGN_ERRORS = (Exception, SystemExit)

FIRST_RANK_S = 10.0  # longest wait for the first rank of a machine to print the same error
# Errors of the system that another path avoids; their exit code is 2.
_WRONG_PLACE = {
    *(errno.ENOENT, errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.EISDIR),
    *(errno.ENOTDIR, errno.EEXIST, errno.EINVAL, errno.ELOOP),
}


# ---- streams


class _OutlivingStream:
    """A stream that drops text once its reader has gone.

    Ctrl-C in a shell also ends the `tee` that reads our lines; a checkpoint must still be saved.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):  # ValueError: the stream is closed
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()

    def close(self) -> None:
        """Stay open, even if an environment closes it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def outlive_readers() -> None:
    """Make stdout and stderr drop their text once nobody reads them."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or Path(os.devnull).open("w")  # noqa: SIM115  # None: closed
        if not isinstance(stream, _OutlivingStream):
            setattr(sys, name, _OutlivingStream(stream))


# ---- text for people


def printable(text: Any) -> str:
    """Return text with line ends and control characters escaped.

    A run directory may be foreign, and its text must not control the terminal.
    """
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in str(text))


def one_line(error: BaseException, limit: int = 300, *, named: bool = True) -> str:
    """Return an error on one line of about `limit` characters, with its type."""
    message = printable(" ".join(str(error).split()))
    shown = message if len(message) <= limit else message[:limit] + "..."
    if named and shown:
        return f"{type(error).__name__}: {shown}"
    return shown or type(error).__name__


def explained(error: ValueError | OSError) -> tuple[str, int]:
    """Return an error's message in one line, and the exit code that it means."""
    message = str(error)
    exit_code = getattr(error, "exit_code", 2)
    if isinstance(error, OSError):
        place = f"{error.filename}: " if error.filename else ""
        message = f"{place}{error.strerror or error}"
        exit_code = 1
        if error.errno in _WRONG_PLACE:
            message += "; check the path, or name another one"
            exit_code = 2
    return printable(" ".join(message.split())), exit_code


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a question that suggests similar names, or "" if there are none."""
    near = difflib.get_close_matches(name, list(known), n=3)
    return f"did you mean {' or '.join(near)}?" if near else ""


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return rows of text as a table in Markdown."""
    cells = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(map(str.ljust, row, widths))} |" for row in cells)


def no_module(module: str, error: BaseException) -> str:
    """Return why a module was not found, or "" if the error has another cause."""
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if not missing or not f"{module}.".startswith(f"{missing}."):
        return ""
    return f"there is no module {missing} in {Path.cwd()} or elsewhere on the Python path"


# ---- errors


class UserError(ValueError):
    """A mistake that the user can fix: printed as one line, without a traceback."""

    def __init__(self, message: str, *, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def unwritable(what: str, error: OSError) -> UserError:
    """Return an error that says what cannot be written, and why."""
    message = f"{what} cannot be written: {error.strerror or error}"
    if error.errno not in FULL_DISK:
        return UserError(message)
    return UserError(f"{message}; make room, then continue with --resume", exit_code=1)


def explains_errors(main: Callable[..., int]) -> Callable[..., int]:
    """Make a command print wrong flags and files as one line, with an exit code."""

    @functools.wraps(main)
    def command(*args: Any, **options: Any) -> int:
        try:
            return main(*args, **options)
        except (ValueError, OSError) as error:
            message, code = explained(error)
            print_error_once(f"error: {message}")
            return code

    return command


def report_to_caller(**facts: str) -> None:
    """Report run_dir or error to the program that started or called this one."""
    reported.update(facts)
    if path := os.environ.get(RESULT_FILE):
        with suppress(OSError, ValueError):
            known = json.loads(Path(path).read_text())
            Path(path).write_text(json.dumps(known | facts))


def print_error_once(line: str) -> None:
    """Print an error on stderr; under torchrun, print it once on each machine.

    The ranks of a machine mostly see the same error. The first rank prints it and leaves a mark.
    The others wait for this mark, and print an error that the first rank did not see.
    """
    mark = _mark(f"printed_{hashlib.sha256(line.encode()).hexdigest()}")
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    deadline_s = time.monotonic() + FIRST_RANK_S
    while mark and not is_first and time.monotonic() < deadline_s:
        if mark.exists():
            return
        time.sleep(0.05)
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
    report_to_caller(error=line.removeprefix("error: "))
    if is_first:
        _leave(mark)


def refuse_restarts() -> None:
    """Mark an error that a restart would only repeat.

    torchrun restarts ranks after any exit code. The new ranks find the mark and leave.
    """
    _leave(_mark("refused", every_start=True))


def restarts_refused() -> bool:
    """Return True in a rank after `refuse_restarts` at an earlier start."""
    mark = _mark("refused", every_start=True)
    return mark is not None and mark.exists()


def _mark(name: str, *, every_start: bool = False) -> Path | None:
    """Return a file that torchrun's ranks on this machine share; None without torchrun.

    It belongs to this start of the ranks, or to every start of them.
    """
    start = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "")).parent.parent
    if not start.name.startswith("attempt_"):
        return None
    return (start.parent if every_start else start) / name


def _leave(mark: Path | None) -> None:
    with suppress(OSError):
        if mark:
            mark.touch()


class CommandParser(argparse.ArgumentParser):
    """A parser with errors of one line on stderr and exit code 2."""

    def __init__(self, **options: Any) -> None:
        as_written = argparse.RawDescriptionHelpFormatter
        super().__init__(allow_abbrev=False, formatter_class=as_written, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the command line; refuse words that are not UTF-8."""
        words = sys.argv[1:] if args is None else list(args)
        for word in words:
            if word != word.encode(errors="replace").decode():
                self.error(f"{word!r} is not UTF-8 text: use another name")
        return super().parse_known_args(words, namespace)

    def error(self, message: str) -> NoReturn:
        """Print the message and exit."""
        print_error_once("error: " + " ".join(message.split()))
        refuse_restarts()
        raise SystemExit(2) from UserError(message)
