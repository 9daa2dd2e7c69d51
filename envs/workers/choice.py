"""How many workers: measured, where the user leaves it open."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from envs import make_vector_env
from envs.vector.layout import random_actions

COSTS_S = 4e-3  # what workers must save in a step of all environments; they cost 0.4 to 2 ms
MOSTLY = 0.5  # of a step: one that computes more keeps a core busy
MOST_PER_CORE = 8  # workers, where steps mostly wait
SAMPLE_ENVS, SAMPLE_STEPS, SAMPLE_S = 4, 64, 1.0


def choose_workers(
    env_id: str, num_envs: int, *, env_kwargs: dict[str, Any], **options: Any
) -> tuple[int, str]:
    """Return the number of workers for a rank, and why, in a line."""
    step_s, busy_share = _measure(env_id, json.dumps(env_kwargs), *options.items())
    cores = max(1, _num_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    for_one_core = 1.0 if busy_share > MOSTLY else min(1 / max(busy_share, 0.01), MOST_PER_CORE)
    workers = min(num_envs, round(cores * for_one_core))
    all_s = num_envs * step_s
    saved_s = all_s * (1 - 1 / workers)
    found = f"{num_envs} environments of {env_id} take {1e3 * all_s:.2g} ms a step"
    found += f", {busy_share:.0%} of it computing"
    if saved_s < COSTS_S:
        why = f"workers on {cores} core(s) would save {1e3 * saved_s:.2g} ms"
        return 0, f"{found}: they step in place, as {why}, which pays from {1e3 * COSTS_S:g} on"
    return workers, f"{found}: {workers} workers on each rank, for {cores} core(s)"


@cache
def _measure(env_id: str, kwargs: str, *options: tuple[str, Any]) -> tuple[float, float]:
    """Return the seconds of one environment's step, and the share in which it computes."""
    env = make_vector_env(env_id, SAMPLE_ENVS, env_kwargs=json.loads(kwargs), **dict(options))
    env.action_space.seed(0)
    obs = env.reset(seed=list(range(SAMPLE_ENVS)))[0]
    spent_s: list[tuple[float, float]] = []  # by step: on the clock, and with or wanting a core
    until_s = time.perf_counter() + SAMPLE_S
    while len(spent_s) < SAMPLE_STEPS and time.perf_counter() < until_s:
        actions = torch.as_tensor(random_actions(env, obs))
        began_s = time.perf_counter(), _wanted_core_s()
        obs = env.step(actions)[0]
        spent_s.append((time.perf_counter() - began_s[0], _wanted_core_s() - began_s[1]))
    env.close()
    # quiet steps: others on this machine slow down some of them, and make some queue
    took_s = sorted(took_s for took_s, _ in spent_s)[len(spent_s) // 4]
    busy_share = sorted(busy_s / took_s for took_s, busy_s in spent_s)[len(spent_s) // 10]
    return took_s / SAMPLE_ENVS, min(1.0, busy_share)


def _wanted_core_s() -> float:
    """Return for how long this process has computed, or queued for a core that others held."""
    queued_ns = 0
    with suppress(OSError, IndexError):  # another system, or a kernel without this figure
        queued_ns = int(Path("/proc/self/schedstat").read_text().split()[1])
    return time.process_time() + 1e-9 * queued_ns


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
