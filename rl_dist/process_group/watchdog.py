"""End a rank whose peer never arrives or whose own work hangs; name the place.

The process group's own timeout cannot distinguish a slow rank from a dead one, nor say who is
missing. So every rank publishes its status every few seconds, through the store where the ranks
met, and reads the others'. A rank that waits in a collective ends when

- another rank has left and will never make that call;
- all ranks wait, but not all in the same collective: none of these calls will ever return;
- all ranks have come, but for `CONNECT_TIMEOUT_S` some of them do not reach the others;
- a rank has neither come nor made progress for `timeout_s` (in start-up: `startup_timeout_s`). A
  slow rank that makes progress is waited for; or
- the store has not answered for as long.

With `watches_work` a rank also ends when its own work, outside collectives, makes no progress for
that time. Time in which the whole process was halted, as by Ctrl-Z, does not count there.
"""

from __future__ import annotations

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

from rl_dist.process_group.process_ends import flush_and_leave, report

logger = logging.getLogger(__name__)

JOB_DIR_VARIABLE = "RL_DIST_JOB_DIR"  # private directory of a job of our launcher
STARTUP = "start-up"
LEFT = "left"  # the phase of a rank that makes no more calls
CONNECTION = "connection of the ranks"  # a place, after they have met in the store
STARTUP_TIMEOUT_S = 600.0
CONNECT_TIMEOUT_S = 120.0  # from when the last rank has come to the connection
PERIOD_S = 5.0  # between two messages of a rank
LAST_WORD_S = 20.0  # for a call of the store that has begun
STEADY_MESSAGES = 2  # further messages from the same place, before a rank is believed to wait there


@dataclass
class RankStatus:
    """The state of a rank's main thread; on its rank, only that thread writes here."""

    phase: str = STARTUP
    progress: int = 0  # grows while work continues
    place: str = ""  # the collective it waits in
    calls: int = 0  # collectives entered so far

    @property
    def where(self) -> str:
        """Describe the place for a message."""
        if self.phase == LEFT:
            return f"which has left after collective {self.calls}"
        if self.place:
            return f"in '{self.place}' (collective {self.calls}, {self.phase})"
        return f"in {self.phase}, outside any collective"


def end_rank(message: str, exit_code: int = 1, *, consequence: int = 0) -> None:
    """Report an error and end this process, from any thread.

    Args:
        consequence: see `rl_dist.launch.ranks.RankReport`.
    """
    rank = int(os.environ.get("RANK", 0))
    summary = f"rank {rank}: {message}"
    # for the log file only
    logging.getLogger("rl_dist.launch.ranks").error("error: %s", summary)
    report(rank=rank, failed=True, consequence=consequence, summary=summary, exit_code=exit_code)
    if JOB_DIR_VARIABLE not in os.environ:  # else the launcher prints it, once
        sys.stderr.write(f"error: {summary}\n")
    flush_and_leave(exit_code)


@dataclass
class Peer:
    """Another rank, seen from here since this rank's status changed last."""

    status: RankStatus
    since_s: float  # when this status was first seen
    first: int  # number of its first message with this status
    last: int = 0

    @property
    def steady(self) -> bool:
        """True if it waits in a collective and has repeated that."""
        return bool(self.status.place) and self.last - self.first >= STEADY_MESSAGES


@dataclass
class Verdicts:
    """Decides from statuses why a rank must end; knows no clock, thread or store."""

    rank: int
    size: int
    timeout_s: float
    startup_timeout_s: float = STARTUP_TIMEOUT_S
    watches_work: bool = False
    _own: RankStatus = field(default_factory=RankStatus)
    _since_s: float = 0.0  # when this rank's status changed last
    _heard_s: float = 0.0  # when the store answered last
    _looks: int = 0  # with the same status; a halted process does not look
    _peers: dict[int, Peer] = field(default_factory=dict)

    @property
    def period_s(self) -> float:
        """Seconds between two looks."""
        return min(PERIOD_S, self.timeout_s / 10, self.startup_timeout_s / 10)

    def look(self, own: RankStatus, messages: Mapping[int, bytes] | None, now_s: float) -> str:
        """Return why this rank must end, or "".

        Args:
            own: the status of this rank.
            messages: of all ranks, number and status as JSON; None: the store did not answer.
            now_s: the time of this look; looks are `period_s` apart.
        """
        if own != self._own or not self._looks:
            self._own, self._since_s, self._looks = own, now_s, 0
            self._peers.clear()
        self._looks += 1
        if messages is not None:
            self._heard_s = now_s
        for rank, message in (messages or {}).items():
            if rank == self.rank:
                continue
            number, fields = json.loads(message)
            status = RankStatus(**fields)
            peer = self._peers.get(rank)
            if peer is None or peer.status != status:
                peer = self._peers[rank] = Peer(status, now_s, number)
            peer.last = number
        return self._waits_for_nothing(now_s) if own.place else self._hangs()

    def _limit(self) -> tuple[float, str]:
        if self._own.phase == STARTUP:
            return self.startup_timeout_s, f"(--startup_timeout {self.startup_timeout_s:g})"
        return self.timeout_s, f"(--collective_timeout {self.timeout_s:g})"

    def _hangs(self) -> str:
        limit_s, limit = self._limit()
        worked_s = (self._looks - 1) * self.period_s
        if not self.watches_work or worked_s < limit_s:
            return ""
        return f"made no progress for {worked_s:.0f} s {self._own.where} {limit}"

    def _waits_for_nothing(self, now_s: float) -> str:
        own, (limit_s, limit) = self._own, self._limit()
        waited_s = now_s - self._since_s
        waited = f"waited {waited_s:.0f} s {own.where}"
        if now_s - max(self._since_s, self._heard_s) >= limit_s:
            return f"{waited}, and the store that knows for whom does not answer: it may be lost"
        peers = dict(sorted(self._peers.items()))
        left = [
            f"rank {rank}, {peer.status.where}"
            for rank, peer in peers.items()
            if peer.status.phase == LEFT and peer.status.calls < own.calls
        ]
        if left:
            return f"waits {own.where} for {' and '.join(left)}"
        elsewhere = {
            rank: peer
            for rank, peer in peers.items()
            if (peer.status.place, peer.status.calls) != (own.place, own.calls)
        }
        statuses = {rank: peer.status for rank, peer in peers.items()} | {self.rank: own}
        if len(statuses) == self.size:
            stuck = sorted(rank for rank in statuses if statuses[rank].place == CONNECTION)
            stuck_s = now_s - max(self._since_s, *(peer.since_s for peer in peers.values()))
            if stuck and stuck_s >= min(CONNECT_TIMEOUT_S, self.startup_timeout_s):
                return (
                    f"all ranks have come, but ranks {stuck[:8]} did not reach the others for "
                    f"{stuck_s:.0f} s: check firewalls, and GLOO_SOCKET_IFNAME or "
                    "NCCL_SOCKET_IFNAME on their machines"
                )
            if elsewhere and not stuck and all(peer.steady for peer in peers.values()):
                listed = "; ".join(f"rank {r} waits {statuses[r].where}" for r in sorted(statuses))
                return f"the ranks made different collective calls and wait forever: {listed}"
        if waited_s < limit_s:
            return ""
        if any(now_s - peer.since_s < limit_s - 2 * self.period_s for peer in elsewhere.values()):
            return ""  # a slow rank that makes progress
        missing = [
            f"rank {rank}, which made no progress {peer.status.where}"
            for rank, peer in elsewhere.items()
        ]
        absent = sorted({*range(self.size)} - statuses.keys())
        missing += [f"rank {rank}, which never came" for rank in absent]
        if not missing:
            return f"{waited}, as all other ranks do: their connection is broken"
        return f"{waited} for {' and '.join(missing)} {limit}"


class Watchdog:
    """Two threads of one rank: one exchanges statuses, the other ends the rank.

    The first may hang in the store when the store's machine vanishes, whatever its timeouts.
    """

    def __init__(self, doing: RankStatus, store: dist.Store, verdicts: Verdicts) -> None:
        self.doing = doing
        self._verdicts = verdicts
        # A second connection: the first is blocked while the main thread waits in it.
        self._store = dist.PrefixStore("doing", store.clone())  # type: ignore[attr-defined]
        self._keys = [str(number) for number in range(verdicts.size)]
        for key in self._keys:  # reading waits for missing keys
            self._store.compare_set(key, "", "")
        self._messages: dict[int, bytes] | None = None  # read since the last look
        self._number = 0  # of this rank's messages
        self._closed = threading.Event()
        self._main = threading.current_thread()
        self._exchange = threading.Thread(target=self._exchange_statuses, daemon=True)
        self._exchange.start()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def close(self) -> None:
        """Stop; safe to call twice."""
        self._closed.set()
        self._exchange.join(LAST_WORD_S)  # in the store at exit, it would abort the process

    def _exchange_statuses(self) -> None:
        answers = True
        while not self._closed.wait(self._verdicts.period_s):
            try:
                self._publish()
                texts = enumerate(self._store.multi_get(self._keys))
                self._messages = {rank: text for rank, text in texts if text}
                answers = True
            # its file was cleared away, or its machine is out of reach
            except (RuntimeError, OSError) as error:
                if answers:
                    reason = str(error).splitlines()[0]
                    logger.warning("the ranks' statuses are lost, training continues: %s", reason)
                answers = False
        with suppress(RuntimeError, OSError):  # a store that others have closed
            self.doing.phase, self.doing.place = LEFT, ""
            self._publish()

    def _publish(self) -> None:
        self._number += 1
        message = json.dumps([self._number, asdict(self.doing)])
        self._store.set(self._keys[self._verdicts.rank], message)

    def _watch(self) -> None:
        while not self._closed.wait(self._verdicts.period_s):
            own, messages, self._messages = replace(self.doing), self._messages, None
            problem = self._verdicts.look(own, messages, time.monotonic())
            if not problem or self._closed.is_set():
                continue
            if frame := sys._current_frames().get(self._main.ident or 0):
                stack = "".join(traceback.format_stack(frame))
                logger.info("the main thread is at\n%s", stack)
                if not own.place:
                    problem += f", at {Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            end_rank(problem, consequence=int(bool(own.place)))
