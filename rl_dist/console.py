"""Output that outlives its reader, and errors that several ranks see."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

FIRST_RANK_S = 10.0  # for the first rank of a machine to say what the others see as well


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
            setattr(sys, name, _Outliving(getattr(sys, name)))


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
