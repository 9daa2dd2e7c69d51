"""One-line errors, output streams that survive a closed pipe, and text tables."""

import argparse
import difflib
import errno
import functools
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any, NoReturn

# Environment variable with the path of the file to which a child process writes its result.
RESULT_FILE = "RL_DIST_RESULT_FILE"
QUIET = "RL_DIST_QUIET"  # environment variable: if it is set, the ranks print nothing
# Error numbers that mean "no space left": the user can free some space and resume the run.
FULL_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# Error numbers that mean "writing is not allowed"
CLOSED_DISK = {errno.EACCES, errno.EPERM, errno.EROFS}
# Exceptions that the user's code may raise. SystemExit is included, because user code could
# otherwise end a failed job with exit code 0.
FOREIGN_ERRORS = (Exception, SystemExit)


# ---- streams


class _OutlivingStream:
    """An output stream that discards text after its reader has exited.

    Ctrl-C in a shell also ends the `tee` that reads this output. Training must then still be
    able to save a checkpoint.
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
        """Do nothing, so that an environment cannot close the stream."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class SilentStream(_OutlivingStream):
    """A stream that discards all text; `silenced` is the stream that it replaces."""

    silenced = property(lambda self: self._stream)

    def write(self, text: str) -> int:
        """Discard text."""
        return len(text)


@contextmanager
def streams(replacement: Callable[[Any], Any]) -> Iterator[None]:
    """Replace stdout and stderr by `replacement(stream)` inside the `with` block."""
    with redirect_stdout(replacement(sys.stdout)), redirect_stderr(replacement(sys.stderr)):
        yield


def outlive_readers() -> None:
    """Make stdout and stderr discard text instead of failing when the reader exits."""
    kind = SilentStream if QUIET in os.environ else _OutlivingStream
    for name in ("stdout", "stderr"):
        # Python sets the stream to None if its descriptor was closed at start-up.
        stream = getattr(sys, name) or Path(os.devnull).open("w")  # noqa: SIM115
        if not isinstance(stream, _OutlivingStream):
            setattr(sys, name, kind(stream))
    escape_what_the_locale_lacks()


def use_utf8() -> None:
    """Restart this program in UTF-8 mode if the locale cannot represent all file names."""
    if sys.getfilesystemencoding() != "utf-8" and not sys.flags.ignore_environment:
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, sys.orig_argv)


def escape_what_the_locale_lacks() -> None:
    """Make stdout and stderr print escapes such as \\xe8 for characters they cannot encode."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # None, closed or not a file
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


# ---- text for users


def printable(text: Any) -> str:
    """Return text with line ends and control characters escaped.

    A run directory may come from someone else. Its text must not send commands to the terminal.
    """
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in str(text))


def text_of(error: BaseException) -> str:
    """Return str(error), or "" if a user's exception has a `__str__` that raises an error."""
    with suppress(*FOREIGN_ERRORS):
        return str(error)
    return ""


def one_line(error: BaseException, limit: int = 300, *, named: bool = True) -> str:
    """Return an error's message on one line, shortened to about `limit` characters.

    The line begins with the type of the error, unless `named` is False.
    """
    message = printable(" ".join(text_of(error).split()))
    shown = message if len(message) <= limit else message[:limit] + "..."
    if named and shown:
        return f"{type(error).__name__}: {shown}"
    return shown or type(error).__name__


def message_and_code(error: ValueError | OSError) -> tuple[str, int]:
    """Return an error's message on one line, and the exit code for this error."""
    message = str(error)
    exit_code = getattr(error, "exit_code", 2)
    if isinstance(error, UnicodeEncodeError):
        message = f"{error.object!r:.200} is not UTF-8 text: use another name"
    if isinstance(error, OSError):
        exit_code = 1
        if error.filename and error.errno not in FULL_DISK:  # the user may choose another path
            message = f"{error.filename}: {error.strerror}; check the path, or use another one"
            exit_code = 2
    return printable(" ".join(message.split())), exit_code


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a question that suggests similar names, or "" if there are none."""
    similar = difflib.get_close_matches(name, list(known), n=3, cutoff=0.75)
    return f"did you mean {' or '.join(similar)}?" if similar else ""


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format rows of text as a Markdown table."""
    all_rows = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*all_rows, strict=True)]
    all_rows.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(map(str.ljust, row, widths))} |" for row in all_rows)


# ---- errors


class UserError(ValueError):
    """An error that the user can fix; it is printed on one line, with no traceback."""

    def __init__(self, message: str, *, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def unwritable(what: str, error: OSError) -> UserError:
    """Return a UserError which says that `what` cannot be written, and why."""
    message = f"{what} cannot be written: {error.strerror or error}"
    if error.errno not in FULL_DISK:
        return UserError(message)
    return UserError(f"{message}; free some space, then continue with --resume", exit_code=1)


def explains_errors(main: Callable[..., int]) -> Callable[..., int]:
    """Make `main` print a ValueError or OSError on one line and return an exit code."""

    @functools.wraps(main)
    def command(*args: Any, **options: Any) -> int:
        if vars(sys.modules["__main__"]).get("main") is command:
            use_utf8()  # a restart is possible, because this process runs only this command
        escape_what_the_locale_lacks()
        try:
            return main(*args, **options)
        except (ValueError, OSError) as error:
            message, code = message_and_code(error)
            print_error_once(f"error: {message}")
            return code

    return command


def report_to_caller(**facts: str) -> None:
    """Write facts, such as `run_dir` or `error`, to the file that RESULT_FILE names.

    A parent process sets this environment variable and reads the file. If it is not set, do
    nothing.
    """
    if path := os.environ.get(RESULT_FILE):
        with suppress(OSError, ValueError):
            earlier_facts = json.loads(Path(path).read_text())
            Path(path).write_text(json.dumps(earlier_facts | facts))


def print_error_once(line: str) -> None:
    """Print an error on stderr; under torchrun, print it only once per machine.

    The ranks of a machine usually fail with the same error. The first rank that fails creates a
    marker file and prints the error. The other ranks find the file and print nothing.
    """
    try:
        if marker := _mark(f"printed_{hashlib.sha256(line.encode()).hexdigest()}"):
            marker.touch(exist_ok=False)
    except FileExistsError:
        return
    except OSError:  # the disk is full, for example; every rank then prints the error
        pass
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
    report_to_caller(error=line.removeprefix("error: "))


def refuse_restarts() -> None:
    """Make restarted ranks exit immediately, because a restart would only repeat the error.

    torchrun restarts failed ranks, regardless of their exit code. This function creates a marker
    file. Restarted ranks find this file and exit.
    """
    if marker := _mark("refused", every_start=True):
        with suppress(OSError):
            marker.touch()


def restarts_refused() -> bool:
    """Return True if a rank on this machine has already called `refuse_restarts`."""
    marker = _mark("refused", every_start=True)
    return marker is not None and marker.exists()


def _mark(name: str, *, every_start: bool = False) -> Path | None:
    """Return the path of a marker file that torchrun's ranks on this machine share.

    Without torchrun, return None. By default, restarted ranks use a new marker file; with
    `every_start`, they use the same file as before.
    """
    attempt_dir = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "")).parent.parent
    if not attempt_dir.name.startswith("attempt_"):
        return None
    return (attempt_dir.parent if every_start else attempt_dir) / name


class CommandParser(argparse.ArgumentParser):
    """An argument parser that prints errors on one line and exits with code 2."""

    # Help texts mention commands. Every match of the first pattern is replaced by the second text,
    # which is the command as the user has typed it. By default, nothing matches.
    renamed: tuple[str, str] = "$^", ""

    def __init__(self, **options: Any) -> None:
        as_written = argparse.RawDescriptionHelpFormatter
        super().__init__(allow_abbrev=False, formatter_class=as_written, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the command line; refuse arguments that are not valid UTF-8."""
        for word in sys.argv if args is None else args:
            word.encode()  # raises UnicodeEncodeError if the argument is not UTF-8
        return super().parse_known_args(args, namespace)

    def format_help(self) -> str:
        """Return the help text, in which commands look as the user has typed them."""
        return re.sub(*self.renamed, super().format_help())

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with code 2; ranks that torchrun restarts exit, too."""
        print_error_once("error: " + " ".join(message.split()))
        refuse_restarts()
        raise SystemExit(2) from UserError(message)
