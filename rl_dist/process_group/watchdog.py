"""Ends a rank whose peer never arrives or whose own work hangs; names the place.

The process group's own timeout cannot tell a slow rank from a dead one, nor say who did not come.
So every rank publishes its status every few seconds, through the store where the ranks met, from a
thread of its own. A rank that waits reads the others'. It ends when

- all ranks wait, but not all in the same collective: none of these calls will ever come back;
- all ranks have come, but for `CONNECT_TIMEOUT_S` some of them do not reach the others;
- a rank has left for good and never made the call in which this one waits; or
- a rank has neither come nor made progress for `timeout_s` (in start-up: `startup_timeout_s`). A
  slow rank that goes on is waited for.

With `watches_work` a rank also ends when its own work, outside collectives, makes no progress for
so long. Time in which the whole process was halted, as by Ctrl-Z, does not count there.

Where the store is lost, training goes on as long as no collective takes longer than `timeout_s`.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch.distributed as dist

from rl_dist.process_group.process_ends import leave, report

logger = logging.getLogger(__name__)

# private directory of a job of our launcher; its ranks meet there
JOB_DIR_VARIABLE = "RL_DIST_JOB_DIR"
STARTUP = "start-up"
LEFT = "left"  # the phase of a rank that makes no more calls
STARTUP_TIMEOUT_S = 600.0
CONNECTION = "connection of the ranks"  # a place, after they have met in the store
CONNECT_TIMEOUT_S = 120.0  # from when the last rank has come there
PERIOD_S = 5.0  # between two messages of a rank
LAST_WORD_S = 20.0  # for a call of the store that had begun; one that has vanished takes 5 s
# messages of a rank that still waits in the same place, before it is believed to be stuck
STEADY_MESSAGES = 2


@dataclass
class RankStatus:
    """What a rank's main thread is doing; on its own rank, it alone writes here."""

    phase: str = STARTUP
    progress: int = 0  # grows while work goes on
    place: str = ""  # the collective it waits in
    calls: int = 0  # collectives entered so far

    @property
    def where(self) -> str:
        """Describe the place in words."""
        if self.phase == LEFT:
            return f"which has left after collective {self.calls}"
        if self.place:
            return f"in '{self.place}' (collective {self.calls}, {self.phase})"
        return f"in {self.phase}, outside any collective"


@dataclass
class _Seen:
    """A rank as another one sees it."""

    status: RankStatus
    number: int  # of the message; grows while the rank's thread is alive
    since_s: float  # when it was first seen like this
    news: int = 0  # messages since then


def end_rank(message: str, exit_code: int = 1, *, consequence: int = 0) -> None:
    """Report an error and end this process at once, from any thread.

    `consequence`: as in `rl_dist.launch.ranks.RankReport`.
    """
    rank = int(os.environ.get("RANK", 0))
    summary = f"rank {rank}: {message}"
    # for the log file only
    logging.getLogger("rl_dist.launch.ranks").error("error: %s", summary)
    report(rank=rank, failed=True, consequence=consequence, summary=summary, exit_code=exit_code)
    if JOB_DIR_VARIABLE not in os.environ:  # else the launcher prints it, once
        sys.stderr.write(f"error: {summary}\n")
    sys.stdout.flush()
    sys.stderr.flush()
    logging.shutdown()
    leave(exit_code)


class StatusFiles:
    """The latest status of every rank, each in a file of its own.

    Torch's FileStore keeps all: 2 MB a day and rank.
    """

    def __init__(self, stem: str, size: int) -> None:
        self._paths = [Path(f"{stem}.{rank}") for rank in range(size)]

    def set(self, rank: int, text: str) -> None:
        """Put a rank's status, whole."""
        part = Path(f"{self._paths[rank]}.part")
        part.write_text(text)
        part.replace(self._paths[rank])

    def read_all(self) -> list[bytes]:
        """Return the latest statuses of all ranks, empty where there is none."""
        return [path.read_bytes() if path.exists() else b"" for path in self._paths]


class StatusKeys:
    """The latest status of every rank in a store; two requests read them all."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        # a connection of its own: one is blocked while the main thread waits in it
        self._store = dist.PrefixStore("doing", store.clone())  # type: ignore[attr-defined]
        self._keys = [str(each) for each in range(size)]
        for key in self._keys if rank == 0 else ():
            self._store.compare_set(key, "", "")  # for requests wait for keys that are not there

    def set(self, rank: int, text: str) -> None:
        """Put a rank's status."""
        self._store.set(self._keys[rank], text)

    def read_all(self) -> list[bytes]:
        """Return the latest statuses of all ranks, empty where there is none."""
        if not self._store.check(self._keys):  # rank 0 has not come
            return [b""] * len(self._keys)
        return self._store.multi_get(self._keys)


class Watchdog:
    """The thread of one rank that publishes its status and looks after the others."""

    def __init__(
        self,
        doing: RankStatus,
        store: dist.Store,
        rank: int,
        size: int,
        timeout_s: float,
        startup_timeout_s: float = STARTUP_TIMEOUT_S,
        *,
        watches_work: bool = False,
    ) -> None:
        self.doing = doing
        self.rank = rank
        self.size = size
        self.timeout_s = timeout_s
        self.startup_timeout_s = startup_timeout_s
        self.watches_work = watches_work
        self.period_s = min(PERIOD_S, timeout_s / 10, startup_timeout_s / 10)
        self._statuses: StatusFiles | StatusKeys
        if isinstance(store, dist.FileStore):
            self._statuses = StatusFiles(store.path, size)  # type: ignore[attr-defined]  # it has
        else:
            self._statuses = StatusKeys(store, rank, size)
        self._number = 0
        self._own = RankStatus("")
        self._own_since_s = time.monotonic()
        self._own_number = 1  # of the first message with this status
        self._logged_stack = False
        self._seen: dict[int, _Seen] = {}
        self._closed = threading.Event()
        self._main = threading.current_thread()
        self._asked_s = math.inf  # when a call of the store began that has not come back
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()
        threading.Thread(target=self._watch_store, name="watchdog's store", daemon=True).start()

    def close(self) -> None:
        """Stop; safe to call twice."""
        self._closed.set()
        if self._thread is not threading.current_thread():
            self._thread.join(LAST_WORD_S)  # in the store at exit, it would abort the process

    def _run(self) -> None:
        answers = True
        while not self._closed.wait(self.period_s):
            try:
                self._asked_s = time.monotonic()
                self._publish()
                problem = self._look() if self._own.place else ""
                answers = True
            # files were cleared away, or another machine is out of reach
            except (RuntimeError, OSError) as error:
                if answers:
                    logger.warning(
                        "the store where the ranks met does not answer, training goes on: %s",
                        str(error).splitlines()[0],
                    )
                answers = False
                problem = self._alone()
            self._asked_s = math.inf
            waits_for_others = bool(self._own.place)
            problem = problem if waits_for_others else self._hanging_work()
            if problem and not self._closed.is_set():
                self._log_stack()
                end_rank(problem, consequence=int(waits_for_others))
        with suppress(RuntimeError, OSError):  # a store that others have taken along
            self.doing.phase = LEFT
            self.doing.place = ""
            self._publish()

    def _watch_store(self) -> None:
        """End this rank if it waits and the store hangs, as that of a vanished machine does."""
        before, since_s = RankStatus(""), 0.0
        while not self._closed.wait(self.period_s):
            now_s, own = time.monotonic(), replace(self.doing)
            if own != before:
                before, since_s = own, now_s
            waits_s = now_s - max(since_s, self._asked_s)  # for both
            if own.place and waits_s > self._limit_s() and not self._closed.is_set():
                self._log_stack()
                words = f"waited {waits_s:.0f} s {own.where}, and the store that would say for whom"
                end_rank(f"{words} does not answer: its machine may be lost", consequence=1)

    def _limit_s(self) -> float:
        return self.startup_timeout_s if self._own.phase == STARTUP else self.timeout_s

    def _waited_s(self) -> float:
        return time.monotonic() - self._own_since_s

    def _worked_s(self) -> float:
        """Return how long this thread has seen the same status; a halted process sees nothing."""
        return (self._number - self._own_number) * self.period_s

    def _limit_text(self) -> str:
        flag = "--startup_timeout" if self._own.phase == STARTUP else "--collective_timeout"
        return f"({flag} {self._limit_s():g})"

    def _hanging_work(self) -> str:
        """Say where this rank's own work hangs, outside collectives; "": it does not."""
        if not self.watches_work or self._worked_s() < self._limit_s():
            return ""
        made = f"made no progress for {self._worked_s():.0f} s {self._own.where}"
        if frame := sys._current_frames().get(self._main.ident or 0):
            made += f", at {Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        return f"{made} {self._limit_text()}"

    def _publish(self) -> None:
        """Publish this rank's status; forget the others' if it has changed."""
        own = replace(self.doing)
        if own != self._own:
            self._own = own
            self._own_since_s = time.monotonic()
            self._own_number = self._number + 1
            self._logged_stack = False
            self._seen.clear()
        if not own.place and not self._logged_stack and self._worked_s() > self._limit_s() / 2:
            logger.warning("no progress for %.0f s %s", self._worked_s(), own.where)
            self._log_stack()
        self._number += 1
        self._statuses.set(self.rank, json.dumps([self._number, asdict(own)]))

    def _alone(self) -> str:
        """Decide like `_look`, when nothing can be read of the others."""
        if not self._own.place or self._waited_s() < self._limit_s():
            return ""
        waited = f"waited {self._waited_s():.0f} s {self._own.where}"
        return f"{waited}, and the store that would say for whom is lost"

    def _look(self) -> str:
        """Read the others' status while this rank waits; return why it waits in vain, or ""."""
        now_s = time.monotonic()
        for rank, text in enumerate(self._statuses.read_all()):
            if rank == self.rank or not text:
                continue
            number, fields = json.loads(text)
            status = RankStatus(**fields)
            seen = self._seen.get(rank)
            if seen is None or seen.status != status:
                self._seen[rank] = _Seen(status, number, now_s)
            elif seen.number != number:
                seen.number = number
                seen.news += 1
        return self._departed() or self._different_calls() or self._absent(now_s)

    def _statuses_by_rank(self) -> dict[int, RankStatus]:
        seen = {rank: seen.status for rank, seen in self._seen.items()}
        return dict(sorted(({self.rank: self._own} | seen).items()))

    def _unconnected(self, now_s: float) -> str:
        """Name ranks that came long ago, as all did, and still do not reach the others."""
        statuses = self._statuses_by_rank()
        stuck = [rank for rank, status in statuses.items() if status.place == CONNECTION]
        if not stuck or len(statuses) < self.size:
            return ""
        since_s = max(self._own_since_s, *(seen.since_s for seen in self._seen.values()))
        if now_s - since_s < min(CONNECT_TIMEOUT_S, self.startup_timeout_s):
            return ""
        names = ", ".join(map(str, stuck[:8])) + ", ..." * (len(stuck) > 8)
        return (
            f"all ranks have come, but {names} did not reach the others for {now_s - since_s:.0f} "
            "s: check firewalls, and GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME on their machines"
        )

    def _departed(self) -> str:
        """Name ranks that left without making the call in which this rank waits."""
        left = [
            f"rank {rank}, {seen.status.where}"
            for rank, seen in sorted(self._seen.items())
            if seen.status.phase == LEFT and seen.status.calls < self._own.calls
        ]
        return f"waits {self._own.where} for {' and '.join(left)}" if left else ""

    def _waits_with_us(self, status: RankStatus) -> bool:
        return (status.place, status.calls) == (self._own.place, self._own.calls)

    def _different_calls(self) -> str:
        others = self._seen.values()
        steady = [seen for seen in others if seen.status.place and seen.news >= STEADY_MESSAGES]
        if len(steady) < self.size - 1:
            return ""
        if all(self._waits_with_us(seen.status) for seen in others):
            return ""  # the network is slow
        places = self._statuses_by_rank()
        if any(status.place == CONNECTION for status in places.values()):
            return ""  # and not with all of them alike
        listed = "; ".join(f"rank {rank} waits {one.where}" for rank, one in places.items())
        return f"the ranks made different collective calls and wait for each other: {listed}"

    def _absent(self, now_s: float) -> str:
        """Name ranks that have kept this one waiting without any progress for too long."""
        if unconnected := self._unconnected(now_s):
            return unconnected
        if self._waited_s() < self._limit_s():
            return ""
        missing = []
        for rank in (rank for rank in range(self.size) if rank != self.rank):
            seen = self._seen.get(rank)
            if seen is None:
                missing.append(f"rank {rank}, which never came")
            elif not self._waits_with_us(seen.status):
                if now_s - seen.since_s < self._limit_s() - 2 * self.period_s:
                    return ""  # it goes on
                missing.append(f"rank {rank}, which made no progress {seen.status.where}")
        waited = f"waited {self._waited_s():.0f} s {self._own.where}"
        if not missing:
            return f"{waited}, as all other ranks do: their connection is broken"
        return f"{waited} for {' and '.join(missing)} {self._limit_text()}"

    def _log_stack(self) -> None:
        """Log where the main thread is."""
        self._logged_stack = True
        frame = sys._current_frames().get(self._main.ident or 0)
        stack = "".join(traceback.format_stack(frame)) if frame else "?"
        logger.info("the main thread is at\n%s", stack)
