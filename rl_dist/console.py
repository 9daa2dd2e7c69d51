"""Output that outlives its reader, and errors that several ranks see."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from typing import Any

FIRST_RANK_S = 10.0  # for the first rank of a machine to say what the others see as well


class _Outliving:
    """A stream whose reader may go away before the program: from then on, what is written is lost.

    Ctrl-C in a shell also ends the `tee` that reads our lines; a checkpoint must still be saved.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def outlive_readers() -> None:
    """Let stdout and stderr of this process go nowhere once nobody reads them."""
    for name in ("stdout", "stderr"):
        if not isinstance(getattr(sys, name), _Outliving):
            setattr(sys, name, _Outliving(getattr(sys, name)))


def tell_once(line: str) -> None:
    """Print bad usage on stderr, under torchrun once on a machine.

    All ranks there see the same flags, files and devices, and torchrun ends the others when the first has left. They
    wait for that before they speak: what only one of them sees is told, a little later.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("LOCAL_RANK", "0") != "0" and _is_ended():
        return
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def _is_ended() -> bool:
    """Wait for torchrun to end this process, which then leaves by itself; False: it does not."""
    if not hasattr(signal, "sigtimedwait"):  # macOS
        return False
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        return signal.sigtimedwait([signal.SIGTERM], FIRST_RANK_S) is not None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
