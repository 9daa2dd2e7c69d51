"""Gather the metrics of an iteration from all ranks in one collective call."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from agents.rollout import Rollout
from envs.vector.layout import TorchEnv
from rl_dist.files import log_once
from rl_dist.process_group.clock import StepClock, Stragglers
from rl_dist.process_group.collectives import all_gather_json
from rl_dist.process_group.world import World
from rl_dist.telemetry.monitor import Monitor

logger = logging.getLogger(__name__)


class Recorder:
    """Times the parts of each iteration and gathers the records of all ranks."""

    def __init__(self, world: World, clock: StepClock) -> None:
        self.world = world
        self.clock = clock  # times the phases of gradient steps
        self.stragglers = Stragglers()
        self.names_seen: set[str] = set()  # names of metrics in earlier records
        self.restarts_seen = 0  # restarts of local environments that are already recorded
        self.started = 0.0
        self.seconds: dict[str, float] = {}  # seconds per part of the iteration

    def begin(self) -> None:
        """Start timing an iteration."""
        self.world.forget_waits()
        self.started = time.perf_counter()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time a part of the iteration."""
        begun = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - begun

    def gather(
        self, rollout: Rollout, env: TorchEnv, monitor: Monitor, signum: int
    ) -> dict[str, Any]:
        """Combine episodes, times and machine load of all ranks into one record.

        Every rank must call this. Counts are sums over ranks; times are maxima over ranks. "signum"
        is the highest number of a stop signal that any rank has received, or 0.
        """
        restarts = sum(env.restarts)
        ended, returns, lengths = rollout.episodes.sum(1).tolist()
        times = self._times()
        local = {
            "entry": {
                "rank": self.world.rank,
                "episode/count": int(ended),
                "episode/return": returns / ended if ended else None,
                **times,
                **monitor.take(),
            },
            "sums": [returns, lengths, restarts - self.restarts_seen],
            "env": env.take_metrics(),
            "signum": signum,
        }
        self.restarts_seen = restarts

        # combine the values of all ranks
        ranks = all_gather_json(local, self.world)
        entries = [rank["entry"] for rank in ranks]
        for line in self.stragglers.observe(entries):
            logger.warning(line)
        columns = zip(*(rank["sums"] for rank in ranks), strict=True)
        returns, lengths, restarts = (sum(column) for column in columns)
        count = sum(entry["episode/count"] for entry in entries)
        num_steps = self.world.size * rollout.rewards.numel()
        return {
            "episode/return": returns / count if count else None,
            "episode/length": lengths / count if count else None,
            "episode/count": count,
            **means_of_envs([rank["env"] for rank in ranks]),
            "env/restarts": restarts,
            "signum": max(rank["signum"] for rank in ranks),
            **{name: max(entry[name] for entry in entries) for name in times},
            "time/sync_s": self.world.sync_seconds,
            "time/sps": num_steps / (time.perf_counter() - self.started),
            "ranks": entries,
        }

    def _times(self) -> dict[str, float]:
        """Return this rank's times; it waits for other ranks only during the update."""
        waited = self.world.sync_seconds + self.world.gradient_seconds
        collect, update = self.seconds["collect"], self.seconds["update"]
        return {
            "time/collect_s": collect,
            "time/update_s": update,
            "time/update_own_s": update - waited,
            **self.clock.read(),
            "time/idle_share": waited / (collect + update),
        }

    def warn_of_absent(self, names: Mapping[str, str], metrics: Mapping[str, Any]) -> None:
        """Warn once about each flag whose env/ metric no environment has reported."""
        self.names_seen |= metrics.keys()
        for flag, name in names.items():
            if name.startswith("env/") and name not in self.names_seen:
                log_once(f"{flag} {name}: no environment has reported it so far, check its name")


def means_of_envs(ranks: list[dict[str, tuple[float, int]]]) -> dict[str, float]:
    """Return the mean of each metric from the (sum, count) pairs of all ranks."""
    totals: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    for rank in ranks:
        for name, (total, count) in rank.items():
            totals[name] += total
            counts[name] += count
    return {f"env/{name}": totals[name] / count for name, count in counts.items() if count}
