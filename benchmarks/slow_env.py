"""Define two slow environments; measure how much workers and groups speed them up.

A step of SlowSteps-v0 computes for about 1 ms; a step of Waiting-v0 waits for 2 ms. To train on
SlowSteps-v0, run train_distributed.py with `--env benchmarks.slow_env:SlowSteps-v0`. To measure the
speed of both, run `python -m benchmarks.slow_env`.
"""

from __future__ import annotations

import time
from typing import Any

import gymnasium
import numpy as np

ROUNDS = 14_000  # number of passes of a Python loop; together they take about 1 ms
WAIT_S = 2e-3
WAYS = ((0, 1), (1, 1), (1, 2), (2, 1), (2, 2), (8, 1), (8, 2))  # pairs (workers, groups)


class SlowSteps(gymnasium.Env):
    """An environment that computes for 0.5 to 1.5 ms in each step.

    The reward is minus the distance between the action and the first number of the observation.
    """

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict | None = None
    ) -> tuple[np.ndarray, dict]:
        """Begin an episode of 50 steps."""
        super().reset(seed=seed)
        self._steps = 0
        self._seen = self.np_random.uniform(-1, 1, 4).astype(np.float32)
        return self._seen, {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Compute or wait, then return a random observation."""
        self.work()
        reward = -abs(float(action[0]) - float(self._seen[0]))
        self._seen = self.np_random.uniform(-1, 1, 4).astype(np.float32)
        self._steps += 1
        return self._seen, reward, False, self._steps >= 50, {}

    def work(self) -> None:
        """Compute for 0.5 to 1.5 ms."""
        total = 0
        for number in range(int(ROUNDS * self.np_random.uniform(0.5, 1.5))):
            total += number * number


class Waiting(SlowSteps):
    """SlowSteps whose steps wait for 2 ms instead, like a simulator behind a socket."""

    def work(self) -> None:
        """Wait for 2 ms."""
        time.sleep(WAIT_S)


def measure(env_id: str, num_envs: int, num_steps: int, rounds: int) -> None:
    """Print the median steps/s of rollouts for each pair of numbers of workers and groups."""
    import torch

    from agents.learner.network.inputs import Normalizer
    from agents.learner.policy import Policy
    from agents.learner.rollout import collect, fresh_carry
    from agents.learner.settings import PolicyConfig
    from envs import make_vector_env
    from envs.workers.env import WorkerEnv

    torch.set_num_threads(1)
    noise = torch.randn(num_steps, num_envs, 1)
    envs: dict[tuple[int, int], Any] = {(0, 1): make_vector_env(env_id, num_envs)}
    policy = Policy(PolicyConfig(), envs[0, 1].layout, SlowSteps.action_space)
    for workers, groups in WAYS[1:]:
        envs[workers, groups] = WorkerEnv(num_envs, workers, groups, env_id=env_id)
    seeds = list(range(num_envs))
    carries = {way: fresh_carry(policy, env.reset(seed=seeds)[0]) for way, env in envs.items()}
    rates: dict[tuple[int, int], list[float]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way, env in envs.items():
            started_s = time.perf_counter()
            _, carries[way] = collect(
                policy, Normalizer(4), env, carries[way], noise, num_steps, gamma=0.99
            )
            rates[way].append(num_envs * num_steps / (time.perf_counter() - started_s))
    print(f"{env_id}, {num_envs} environments, {num_steps} steps, medians of {rounds} rollouts")
    for (workers, groups), way_rates in rates.items():
        low, middle, high = np.quantile(way_rates, (0.0, 0.5, 1.0))
        gain = middle / np.median(rates[0, 1])
        spread = f"{middle:8,.0f} steps/s ({low:,.0f}-{high:,.0f})"
        print(f"{workers} workers, {groups} groups {spread}  {gain:5.2f}x", flush=True)
    for env in envs.values():
        env.close()


gymnasium.register("SlowSteps-v0", f"{__name__}:SlowSteps")
gymnasium.register("Waiting-v0", f"{__name__}:Waiting")

if __name__ == "__main__":
    for name in ("Waiting-v0", "SlowSteps-v0"):
        measure(f"benchmarks.slow_env:{name}", num_envs=64, num_steps=16, rounds=5)
