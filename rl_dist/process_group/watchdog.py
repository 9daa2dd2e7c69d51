"""Ends a rank that waits in vain for others, and says which and where.

The process group's own timeout cannot tell a slow rank from a dead one, nor say who did not come. So every rank
tells the others what it is doing, every few seconds, through the store where the ranks met, from a thread of its
own. A rank that waits reads what the others do. It ends when

- all ranks wait, but not all in the same collective: they made different calls, and none will ever come back;
- a rank has left for good and never made the call in which it waits; or
- a rank has neither come nor made progress for `timeout_s`. A slow rank that goes on is waited for.

Where the store is lost, training goes on as long as no collective takes longer than `timeout_s`.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from rl_dist.process_group.process_ends import leave, report

logger = logging.getLogger(__name__)

JOB_DIR_VARIABLE = "RL_DIST_JOB_DIR"  # private directory of a job of our launcher; its ranks meet there
STARTUP = "start-up"
LEFT = "left"  # the phase of a rank that makes no more calls
STARTUP_TIMEOUT_S = 600.0
PERIOD_S = 5.0  # between two beats
LAST_WORD_S = 20.0  # for a call of the store that had begun; one that has vanished takes 5 s
STEADY_BEATS = 2  # news of a rank that still waits in the same place, before it is believed to be stuck


@dataclass
class Doing:
    """What this rank's main thread is doing; it alone writes here."""

    phase: str = STARTUP
    progress: int = 0  # grows while work goes on
    place: str = ""  # the collective it waits in
    calls: int = 0  # collectives entered so far


@dataclass(frozen=True)
class Beat:
    """What a rank told the others."""

    phase: str
    progress: int
    place: str
    calls: int

    @property
    def where(self) -> str:
        """The place in words."""
        if self.phase == LEFT:
            return f"which has left after collective {self.calls}"
        if self.place:
            return f"in '{self.place}' (collective {self.calls}, {self.phase})"
        return f"in {self.phase}, outside any collective"


@dataclass
class _Seen:
    """A rank as another one sees it."""

    beat: Beat
    number: int  # of the beat; grows while the rank's thread is alive
    since_s: float  # when it was first seen like this
    news: int = 0  # beats since then


def end_rank(message: str, exit_code: int = 1, *, consequence: bool = False) -> None:
    """Report an error and end this process at once, from any thread.

    Args:
        consequence: another rank is to blame.
    """
    rank = int(os.environ.get("RANK", 0))
    text = f"error: rank {rank}: {message}"
    logging.getLogger("rl_dist.launch.rank").error(text)  # for the log file: the launcher tells the console
    if JOB_DIR_VARIABLE in os.environ:  # the launcher tells the user, once
        facts = {"message": text, "rank": rank, "at_ns": time.monotonic_ns(), "consequence": consequence}
        report(**facts, summary=text.removeprefix("error: "), exit_code=exit_code)
    else:
        sys.stderr.write(text + "\n")
    sys.stdout.flush()
    sys.stderr.flush()
    logging.shutdown()
    leave(exit_code)


class BeatFiles:
    """The latest value of every key, each in a file of its own.

    Torch's FileStore keeps all: 2 MB a day and rank.
    """

    def __init__(self, stem: str) -> None:
        self._stem = stem

    def set(self, key: str, value: str) -> None:
        """Put a value, whole."""
        part = Path(f"{self._stem}.{key}.part")
        part.write_text(value)
        part.replace(f"{self._stem}.{key}")

    def check(self, keys: list[str]) -> bool:
        """Whether all of them have a value."""
        return all(os.path.exists(f"{self._stem}.{key}") for key in keys)

    def get(self, key: str) -> bytes:
        """The latest value."""
        return Path(f"{self._stem}.{key}").read_bytes()


class Watchdog:
    """The thread of one rank that tells the others what it does and looks after them."""

    def __init__(self, doing: Doing, store: dist.Store, rank: int, size: int, timeout_s: float) -> None:
        self.doing, self.rank, self.size, self.timeout_s = doing, rank, size, timeout_s
        self.period_s = min(PERIOD_S, timeout_s / 10)
        self._store: dist.Store | BeatFiles
        if isinstance(store, dist.FileStore):
            self._store = BeatFiles(store.path)  # type: ignore[attr-defined]  # it has
        else:
            self._store = dist.PrefixStore("doing", store)
        self._number = 0
        self._own = Beat("", 0, "", 0)
        self._own_since_s = time.monotonic()
        self._told_stack = False
        self._seen: dict[int, _Seen] = {}
        self._closed = threading.Event()
        self._main = threading.current_thread()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop; safe to call twice."""
        self._closed.set()
        if self._thread is not threading.current_thread():
            self._thread.join(LAST_WORD_S)  # in the store at exit, it would abort the process

    def _run(self) -> None:
        answers = True
        while not self._closed.wait(self.period_s):
            try:
                self._beat()
                verdict = self._look() if self._own.place else ""
                answers = True
            except (RuntimeError, OSError) as error:  # files were cleared away, or another machine is out of reach
                if answers:
                    cause = str(error).splitlines()[0]
                    logger.warning("the store where the ranks met does not answer, training goes on: %s", cause)
                answers, verdict = False, self._alone()
            if verdict and not self._closed.is_set():
                self._tell_stack()
                end_rank(verdict, consequence=True)
        with suppress(RuntimeError, OSError):  # a store that others have taken along
            self.doing.phase, self.doing.place = LEFT, ""
            self._beat()

    def _alone(self) -> str:
        """Like `_look`, when nothing can be read of the others: they may be slow or gone."""
        waited_s = time.monotonic() - self._own_since_s
        if not self._own.place or waited_s < self._limit_s():
            return ""
        return f"waited {waited_s:.0f} s {self._own.where}, and the store that would say for whom is lost"

    def _limit_s(self) -> float:
        return max(self.timeout_s, STARTUP_TIMEOUT_S) if self._own.phase == STARTUP else self.timeout_s

    def _beat(self) -> None:
        """Tell what this rank does; begin to look at the others anew when it did something else before."""
        own, now_s = Beat(**vars(self.doing)), time.monotonic()
        if own != self._own:
            self._own, self._own_since_s, self._told_stack = own, now_s, False
            self._seen.clear()
        elif not own.place and not self._told_stack and now_s - self._own_since_s > self._limit_s() / 2:
            logger.warning("no progress for %.0f s %s", now_s - self._own_since_s, own.where)
            self._tell_stack()
        self._number += 1
        self._store.set(str(self.rank), json.dumps([self._number, vars(own)]))

    def _look(self) -> str:
        """Read what the others do, while this rank waits; returns why it waits in vain, or nothing."""
        now_s = time.monotonic()
        for rank in range(self.size):
            if rank == self.rank or not self._store.check([str(rank)]):
                continue
            number, told = json.loads(self._store.get(str(rank)))
            beat, seen = Beat(**told), self._seen.get(rank)
            if seen is None or seen.beat != beat:
                self._seen[rank] = _Seen(beat, number, now_s)
            elif seen.number != number:
                seen.number, seen.news = number, seen.news + 1
        return self._departed() or self._different_calls() or self._absent(now_s)

    def _departed(self) -> str:
        """Who has left without making the call in which this rank waits."""
        left = {
            rank: seen.beat
            for rank, seen in self._seen.items()
            if seen.beat.phase == LEFT and seen.beat.calls < self._own.calls
        }
        told = " and ".join(f"rank {rank}, {beat.where}" for rank, beat in sorted(left.items()))
        return f"waits {self._own.where} for {told}" if left else ""

    def _different_calls(self) -> str:
        others = list(self._seen.values())
        if len(others) < self.size - 1 or any(not o.beat.place or o.news < STEADY_BEATS for o in others):
            return ""
        if all((o.beat.place, o.beat.calls) == (self._own.place, self._own.calls) for o in others):
            return ""  # all wait for the same: the network is slow
        places = {self.rank: self._own} | {rank: seen.beat for rank, seen in self._seen.items()}
        told = "; ".join(f"rank {rank} waits {beat.where}" for rank, beat in sorted(places.items()))
        return f"the ranks made different collective calls and wait for each other: {told}"

    def _absent(self, now_s: float) -> str:
        """Who has kept this rank waiting without any progress for too long."""
        if now_s - self._own_since_s < self._limit_s():
            return ""
        waited = f"waited {now_s - self._own_since_s:.0f} s {self._own.where}"
        missing = []
        for rank in (rank for rank in range(self.size) if rank != self.rank):
            seen = self._seen.get(rank)
            if seen is None:
                missing.append(f"rank {rank}, which never came")
            elif (seen.beat.place, seen.beat.calls) != (self._own.place, self._own.calls):
                if now_s - seen.since_s < self._limit_s() - 2 * self.period_s:
                    return ""  # it goes on
                missing.append(f"rank {rank}, which made no progress {seen.beat.where}")
        if not missing:
            return f"{waited}, as all other ranks do: their connection is broken"
        return f"{waited} for {' and '.join(missing)} (--collective_timeout {self.timeout_s:g})"

    def _tell_stack(self) -> None:
        """Log where the main thread is."""
        self._told_stack = True
        frame = sys._current_frames().get(self._main.ident or 0)
        logger.info("the main thread is at\n%s", "".join(traceback.format_stack(frame)) if frame else "?")
