"""Gather the metrics of each iteration from all ranks in one collective call."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from agents.learner.rollout import Rollout
from envs.vector.layout import TorchEnv
from rl_dist.process_group.clock import StepClock, Stragglers
from rl_dist.process_group.collectives import all_gather_json
from rl_dist.process_group.world import World
from rl_dist.telemetry.monitor import Monitor

logger = logging.getLogger(__name__)


class Recorder:
    """Measures the parts of each iteration, and gathers the records of all ranks."""

    def __init__(self, world: World, clock: StepClock) -> None:
        self.world = world
        self.clock = clock  # measures the phases of gradient steps
        self.stragglers = Stragglers()
        self.restarts_seen = 0  # number of environment restarts in earlier records
        self.started = 0.0
        self.seconds: dict[str, float] = {}  # seconds per part of the iteration

    def begin(self) -> None:
        """Start timing an iteration."""
        self.world.forget_waits()
        self.started = time.perf_counter()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time the part of the iteration that runs in this context."""
        begun = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - begun

    def gather(self, rollout: Rollout, env: TorchEnv, monitor: Monitor, signum: int) -> dict:
        """Combine episodes, times and machine load of all ranks into one record.

        Every rank must call this. Counts are sums over ranks; times are maxima over ranks, except
        time/reduction_s, which is the minimum. "signum" is the highest number of a stop signal that
        a rank has received, or 0 if no rank has received one.
        """
        restarts = sum(env.restarts)
        # number, total return and total length of the episodes that ended
        ended, returns, lengths = rollout.episodes.sum(1).tolist()
        collect = self.seconds["collect"]
        update = self.seconds["update"]
        # All waiting is part of the update: during the rollout, ranks do not wait for each other.
        waited = self.world.sync_seconds + self.world.gradient_seconds
        times = {
            "time/collect_s": collect,
            "time/update_s": update,
            "time/update_own_s": update - waited,
            **self.clock.read(),
            "time/idle_share": waited / (collect + update),
        }
        # sum and count of the values of each metric
        sums = {f"env/{name}": pair for name, pair in env.take_metrics().items()}
        sums |= {"episode/return": (returns, ended), "episode/length": (lengths, ended)}
        local = {
            "entry": {  # this rank's entry in "ranks" of the record
                "rank": self.world.rank,
                "episode/count": int(ended),
                "episode/return": returns / ended if ended else None,
                **times,
                **monitor.take(),
            },
            "sums": sums,
            "restarts": restarts - self.restarts_seen,
            "signum": signum,
        }
        self.restarts_seen = restarts

        # combine the values of all ranks
        gathered = all_gather_json(local, self.world)
        entries = [values["entry"] for values in gathered]
        for line in self.stragglers.observe(entries):
            logger.warning(line)
        num_steps = self.world.size * rollout.rewards.numel()
        return {
            **means([values["sums"] for values in gathered]),
            "episode/count": sum(entry["episode/count"] for entry in entries),
            "env/restarts": sum(values["restarts"] for values in gathered),
            "signum": max(values["signum"] for values in gathered),
            **{name: max(entry[name] for entry in entries) for name in times},
            # The last rank to reach a reduction waits for no other rank, so the minimum over ranks
            # is the time of the reduction alone.
            "time/reduction_s": min(entry["time/reduction_s"] for entry in entries),
            "time/sync_s": self.world.sync_seconds,
            "time/sps": num_steps / (time.perf_counter() - self.started),
            "ranks": entries,
        }


def means(ranks: list[dict[str, tuple[float, float]]]) -> dict[str, float | None]:
    """Return the mean of each metric, given the (sum, count) pairs of each rank by name."""
    sums: dict = {}
    for pairs in ranks:
        for name, pair in pairs.items():
            sums[name] = sums.get(name, 0.0) + np.array(pair)
    return {name: float(total / count) if count else None for name, (total, count) in sums.items()}
