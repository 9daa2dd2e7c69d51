"""Output that outlives its reader."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any


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
