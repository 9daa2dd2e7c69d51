"""End a rank that hangs or waits for a rank that never arrives.

The timeout of torch's process group cannot distinguish a slow rank from a dead one and does not say
which rank is missing. Therefore every rank writes its status to the store every few seconds and
reads the statuses of the others. A rank that waits in a collective call is ended in two cases:

- For `timeout_s` (during start-up: `startup_timeout_s`), another rank has neither arrived in that
  call nor made progress. If a rank is slow but makes progress, no rank is ended.
- The store has not answered during this timeout.

With `watches_work`, a rank also ends if its own work outside collective calls makes no progress
during this timeout. The time does not include pauses in which the process is suspended, for
example by Ctrl-Z.
"""

import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch.distributed as dist

from rl_dist.process_group.join import JOB_DIR_VARIABLE
from rl_dist.process_group.process_ends import flush_and_leave, report

logger = logging.getLogger(__name__)

STARTUP = "start-up"
# Value of `RankStatus.place` while a rank, which has opened the store, connects to the other ranks
CONNECTION = "connection of the ranks"
STARTUP_TIMEOUT_S = 600.0
PERIOD_S = 5.0  # longest time between two status messages of a rank
LAST_CALL_S = 20.0  # longest wait for a running store call to finish


@dataclass
class RankStatus:
    """The activity of a rank's main thread; only this thread changes the fields."""

    phase: str = STARTUP
    progress: int = 0  # a counter that increases while the rank works
    place: str = ""  # name of the collective call in which the rank is now; "": no call
    calls: int = 0  # number of collective calls so far

    @property
    def where(self) -> str:
        """The current collective call or phase, for messages."""
        if self.place:
            return f"in '{self.place}' (collective {self.calls}, {self.phase})"
        return f"in {self.phase}, outside any collective"


def end_rank(message: str, *, consequence: int = 0) -> None:
    """Report an error and end this process, from any thread.

    Args:
        consequence: see `rl_dist.launch.one_rank.RankReport`.
    """
    rank = int(os.environ.get("RANK", 0))
    summary = f"rank {rank}: {message}"
    # this logger writes to log files only
    logging.getLogger("rl_dist.launch.ranks").error("error: %s", summary)
    report(rank=rank, failed=True, consequence=consequence, summary=summary, exit_code=1)
    # If our launcher started this rank, the launcher prints the reported error.
    if JOB_DIR_VARIABLE not in os.environ:
        sys.stderr.write(f"error: {summary}\n")
    flush_and_leave(1)


@dataclass
class Verdicts:
    """Decides whether this rank must end, given all ranks' statuses and the time."""

    rank: int
    size: int
    timeout_s: float
    startup_timeout_s: float = STARTUP_TIMEOUT_S
    watches_work: bool = False
    _local: RankStatus | None = None  # the status of this rank at the last call of `look`
    _since_s: float = 0.0  # time when this rank's status last changed
    _heard_s: float = 0.0  # time when the store last answered
    # Number of calls of `look` since this rank's status last changed. Calls are counted, because
    # time passes even while the process is suspended.
    _looks: int = 0
    # (rank, its status) -> time when `look` first read this status; cleared when this process
    # changes its own status
    _seen: dict[tuple[int, bytes], float] = field(default_factory=dict)

    @property
    def period_s(self) -> float:
        """Seconds between two calls of `look`."""
        return min(PERIOD_S, self.timeout_s / 10, self.startup_timeout_s / 10)

    def look(self, local: RankStatus, messages: Mapping[int, bytes] | None, now_s: float) -> str:
        """Return the reason why this rank must end, or "".

        Args:
            local: the status of this rank.
            messages: statuses of all ranks as JSON; None: the store did not answer.
            now_s: the current time. The caller must call this method every `period_s` seconds.
        """
        if local != self._local:
            self._local = local
            self._since_s = self._heard_s = now_s
            self._looks = 0
            self._seen.clear()
        self._looks += 1
        if messages is not None:
            self._heard_s = now_s
            self._seen = {item: self._seen.get(item, now_s) for item in messages.items()}
        limit_s = self.timeout_s
        flag = f"(--collective_timeout {limit_s:g})"
        if local.phase == STARTUP:
            limit_s = self.startup_timeout_s
            flag = f"(--startup_timeout {limit_s:g})"
        if local.place:
            return self._waits_for_nothing(local, now_s, limit_s, flag)
        worked_s = (self._looks - 1) * self.period_s
        if self.watches_work and worked_s >= limit_s:
            return f"made no progress for {worked_s:.0f} s {local.where} {flag}"
        return ""

    def _waits_for_nothing(self, local: RankStatus, now_s: float, limit_s: float, flag: str) -> str:
        """Return the reason why this rank, which is in a collective call, must end, or ""."""
        waited_s = now_s - self._since_s
        waited = f"waited {waited_s:.0f} s {local.where}"
        if now_s - self._heard_s >= limit_s:
            return f"{waited}, and the store does not answer: the machine that hosts it may be lost"
        missing = {rank: "never came" for rank in range(self.size) if rank != self.rank}
        # A rank whose status has changed after this time is slow, but makes progress.
        progress_s = now_s - limit_s + 2 * self.period_s
        is_slow = waited_s < limit_s
        for (rank, message), since_s in self._seen.items():
            status = RankStatus(**json.loads(message))
            if (status.place, status.calls) == (local.place, local.calls):
                missing.pop(rank, None)
            elif rank != self.rank:
                missing[rank] = f"made no progress {status.where}"
                is_slow |= since_s > progress_s
        if is_slow:
            return ""
        if missing:
            listed = [f"rank {rank}, which {reason}" for rank, reason in missing.items()]
            return f"{waited} for {' and '.join(listed)} {flag}"
        return (
            f"{waited}, as all other ranks do: they cannot reach each other; check firewalls and "
            "GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME on their machines"
        )


class Watchdog:
    """Runs two threads in a rank: one exchanges statuses, the other may end the rank.

    The threads are separate because the first one can hang in a store call, despite all timeouts,
    if the machine that hosts the store is lost.
    """

    def __init__(self, doing: RankStatus, store: dist.Store, verdicts: Verdicts) -> None:
        self.doing = doing
        self._verdicts = verdicts
        # Open a second connection to the store, because the main thread can block the first one.
        self._store = dist.PrefixStore("doing", store.clone())  # type: ignore[attr-defined]
        self._keys = [str(number) for number in range(verdicts.size)]
        # Create all keys, because reading a missing key would wait until it exists.
        for key in self._keys:
            self._store.compare_set(key, "", "")
        # statuses read since the last `look`; None: the store did not answer
        self._messages: dict[int, bytes] | None = None
        self._closed = threading.Event()
        self._main_thread = threading.get_ident()
        self._exchange = threading.Thread(target=self._exchange_statuses, daemon=True)
        self._exchange.start()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def close(self) -> None:
        """Stop both threads; a second call does nothing."""
        self._closed.set()
        # Wait for the thread: if it were in a store call at exit, it would abort the process.
        self._exchange.join(LAST_CALL_S)

    def _exchange_statuses(self) -> None:
        key = self._keys[self._verdicts.rank]
        while not self._closed.wait(self._verdicts.period_s):
            # If the store is lost, `Verdicts` notices that answers are missing.
            with suppress(RuntimeError, OSError):
                self._store.set(key, json.dumps(asdict(self.doing)))
                texts = enumerate(self._store.multi_get(self._keys))
                self._messages = {rank: text for rank, text in texts if text}

    def _watch(self) -> None:
        while not self._closed.wait(self._verdicts.period_s):
            local = replace(self.doing)
            messages, self._messages = self._messages, None
            problem = self._verdicts.look(local, messages, time.monotonic())
            if not problem or self._closed.is_set():
                continue
            frame = sys._current_frames()[self._main_thread]
            logger.info("the main thread is at\n%s", "".join(traceback.format_stack(frame)))
            if not local.place:
                problem += f", at {Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            end_rank(problem, consequence=1 if local.place else 0)
