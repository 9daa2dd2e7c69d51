"""Two slow environments, and the gain from workers and groups on them.

SlowSteps-v0 computes for about a millisecond a step; Waiting-v0 waits for two. From the checkout:
`--env benchmarks.slow_env:SlowSteps-v0`; `python -m benchmarks.slow_env` measures both.
"""

from __future__ import annotations

import time
from typing import Any

import gymnasium
import numpy as np

ROUNDS = 14_000  # of plain Python, about a millisecond
WAIT_S = 2e-3
EPISODE_STEPS = 50
NUM_ENVS, NUM_STEPS, TURNS = 64, 16, 5
WAYS = ((0, 1), (1, 1), (1, 2), (2, 1), (2, 2), (8, 1), (8, 2))  # workers and groups


class SlowSteps(gymnasium.Env):
    """Rewards an action near the last observation; every step computes for 0.5 to 1.5 ms."""

    def __init__(self) -> None:
        self.observation_space = gymnasium.spaces.Box(-1.0, 1.0, (4,), np.float32)
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict | None = None
    ) -> tuple[np.ndarray, dict]:
        """Start an episode."""
        super().reset(seed=seed)
        self.age = 0
        return self._observe(), {}

    def _observe(self) -> np.ndarray:
        self.obs = self.np_random.uniform(-1, 1, 4).astype(np.float32)
        return self.obs

    def _work(self) -> None:
        for number in range(int(ROUNDS * self.np_random.uniform(0.5, 1.5))):
            number * number

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Work, then return the next observation."""
        self._work()
        reward = -abs(float(action[0]) - float(self.obs[0]))
        self.age += 1
        return self._observe(), reward, False, self.age >= EPISODE_STEPS, {}


class Waiting(SlowSteps):
    """The same, but every step waits for 2 ms, like a simulator behind a socket."""

    def _work(self) -> None:
        time.sleep(WAIT_S)


def measure(env_id: str) -> None:
    """Print steps/s of rollouts for each way: medians of turns."""
    # start-up: environment workers import this file, and need no torch (2 s)
    import torch

    from agents.network.inputs import Normalizer
    from agents.policy import Policy, PolicyConfig
    from agents.rollout import collect, fresh_carry
    from envs import make_vector_env
    from envs.workers.env import WorkerEnv

    torch.set_num_threads(1)
    envs: dict[tuple[int, int], Any] = {
        (workers, groups): WorkerEnv(env_id, NUM_ENVS, workers, groups)
        if workers
        else make_vector_env(env_id, NUM_ENVS)
        for workers, groups in WAYS
    }
    space, num_obs = envs[0, 1].single_action_space, envs[0, 1].single_observation_space.shape[0]
    policy, normalizer = Policy(PolicyConfig(), num_obs, space), Normalizer(num_obs)
    noise = torch.randn(NUM_STEPS, NUM_ENVS, *space.shape)
    carries = {way: fresh_carry(policy, env.reset()[0]) for way, env in envs.items()}
    rates: dict[tuple[int, int], list[float]] = {way: [] for way in WAYS}
    for _ in range(TURNS):
        for way, env in envs.items():
            started_s = time.perf_counter()
            collect(policy, normalizer, env, carries[way], noise, NUM_STEPS, gamma=0.99)
            rates[way].append(NUM_ENVS * NUM_STEPS / (time.perf_counter() - started_s))
    print(f"{env_id}, {NUM_ENVS} environments, {NUM_STEPS} steps, medians of {TURNS} turns")
    for (workers, groups), env in envs.items():
        env.close()
        low, middle, high = np.quantile(rates[workers, groups], (0.0, 0.5, 1.0))
        gain = middle / np.median(rates[0, 1])
        figures = f"{middle:8,.0f} steps/s ({low:,.0f}-{high:,.0f})  {gain:5.2f}x"
        print(f"{workers} workers, {groups} groups {figures}", flush=True)


gymnasium.register("SlowSteps-v0", f"{__name__}:SlowSteps")
gymnasium.register("Waiting-v0", f"{__name__}:Waiting")

if __name__ == "__main__":
    for name in ("Waiting-v0", "SlowSteps-v0"):
        measure(f"benchmarks.slow_env:{name}")
