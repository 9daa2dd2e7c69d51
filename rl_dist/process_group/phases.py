"""Named sections of the work, timed or traced while somebody listens.

    with section("environment"):
        env.step(actions)

    @section("update")
    def update(...): ...

Without a listener a section costs under a microsecond or two, and none of the numbers computed inside ever changes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

Listener = Callable[[str], AbstractContextManager[object]]
_listener: Listener | None = None


def listen(listener: Listener | None) -> None:
    """Let `listener` surround every section from now on; None: nobody."""
    global _listener
    _listener = listener


@contextmanager
def section(name: str) -> Iterator[None]:
    """Give what is done inside a name; also a decorator."""
    if _listener is None:
        yield
        return
    with _listener(name):
        yield


class SectionTimes:
    """A listener that adds up seconds by path, such as "collect/environment".

    It waits for the GPU at both ends of a section, so that the section that asked for work pays for it.
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = {}  # in the order in which sections were first left
        self._device, self._path = device, ""

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        outer, self._path = self._path, f"{self._path}/{name}".lstrip("/")
        started = self.now()
        try:
            yield
        finally:
            self.seconds[self._path] = self.seconds.get(self._path, 0.0) + self.now() - started
            self._path = outer

    def now(self) -> float:
        """Seconds of the clock, once the GPU has done what it was asked to."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
