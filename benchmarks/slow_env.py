"""Two slow environments, and what workers and groups gain on them.

SlowSteps-v0 computes for about a millisecond a step, more or less; Waiting-v0 waits for two. From
the checkout: `--env benchmarks.slow_env:SlowSteps-v0`; `python -m benchmarks.slow_env` measures.
"""

from __future__ import annotations

import time
from typing import Any

import gymnasium
import numpy as np

ROUNDS = 14_000  # of plain Python, about a millisecond
WAIT_S = 2e-3


class SlowSteps(gymnasium.Env):
    """Rewards an action near the last observation; every step computes for 0.5 to 1.5 ms."""

    def __init__(self) -> None:
        self.observation_space = gymnasium.spaces.Box(-1.0, 1.0, (4,), np.float32)
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)
        self._seen = np.zeros(4, np.float32)
        self._steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict | None = None
    ) -> tuple[np.ndarray, dict]:
        """A fresh episode of 50 steps."""
        super().reset(seed=seed)
        self._steps = 0
        self._seen = self.np_random.uniform(-1, 1, 4).astype(np.float32)
        return self._seen, {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Compute, then go on."""
        total = 0
        for number in range(int(ROUNDS * self.np_random.uniform(0.5, 1.5))):
            total += number * number
        reward = -abs(float(action[0]) - float(self._seen[0]))
        self._seen = self.np_random.uniform(-1, 1, 4).astype(np.float32)
        self._steps += 1
        return self._seen, reward, False, self._steps >= 50, {"total": total}


class Waiting(SlowSteps):
    """The same, but every step waits for 2 ms, as for a simulator behind a socket."""

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Wait, then go on."""
        time.sleep(WAIT_S)
        reward = -abs(float(action[0]) - float(self._seen[0]))
        self._seen = self.np_random.uniform(-1, 1, 4).astype(np.float32)
        self._steps += 1
        return self._seen, reward, False, self._steps >= 50, {}


WAYS = ((0, 1), (1, 1), (1, 2), (2, 1), (2, 2), (8, 1), (8, 2))  # workers and groups


def measure(env_id: str, num_envs: int, num_steps: int, rounds: int) -> None:
    """Print steps/s of rollouts in all ways: medians of rounds in which they take turns."""
    import torch

    from agents.network.inputs import Normalizer
    from agents.policy import Policy, PolicyConfig
    from agents.rollout import collect, fresh_carry
    from envs import make_vector_env
    from envs.workers.env import WorkerEnv

    torch.set_num_threads(1)
    ways: dict[tuple[int, int], list[float]] = {way: [] for way in WAYS}
    envs: dict[tuple[int, int], Any] = {}
    for workers, groups in WAYS:
        made: Any = make_vector_env(env_id, num_envs) if not workers else None
        envs[workers, groups] = made or WorkerEnv(env_id, num_envs, workers, groups)
    space, num_obs = envs[0, 1].single_action_space, envs[0, 1].single_observation_space.shape[0]
    policy, normalizer = Policy(PolicyConfig(), num_obs, space), Normalizer(num_obs)
    noise = torch.randn(num_steps, num_envs, *space.shape)
    carries = {way: fresh_carry(policy, env.reset()[0]) for way, env in envs.items()}
    for _ in range(rounds):
        for way, env in envs.items():
            started_s = time.perf_counter()
            collect(policy, normalizer, env, carries[way], noise, num_steps, gamma=0.99)
            ways[way].append(num_envs * num_steps / (time.perf_counter() - started_s))
    plain = np.median(ways[0, 1])
    print(f"{env_id}, {num_envs} environments, {num_steps} steps, medians of {rounds} rounds")
    for (workers, groups), rates in ways.items():
        low, middle, high = np.quantile(rates, (0.0, 0.5, 1.0))
        spread = f"{middle:8,.0f} steps/s ({low:,.0f}-{high:,.0f})"
        print(f"{workers} workers, {groups} groups {spread}  {middle / plain:5.2f}x", flush=True)
    for env in envs.values():
        env.close()


gymnasium.register("SlowSteps-v0", f"{__name__}:SlowSteps")
gymnasium.register("Waiting-v0", f"{__name__}:Waiting")

if __name__ == "__main__":
    for name in ("Waiting-v0", "SlowSteps-v0"):
        measure(f"benchmarks.slow_env:{name}", num_envs=64, num_steps=16, rounds=5)
