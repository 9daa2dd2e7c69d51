"""Evaluate policies on complete episodes without action noise, on all ranks."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agents.network.inputs import Normalizer
from agents.network.seeds import EVALUATION_STREAM, VALIDATION_STREAM, stream_seeds
from agents.policy import Policy
from agents.rollout import policy_input, shift_history
from agents.run.saved import check_readable
from envs.task import GymTask
from envs.vector.guards import Interruption
from envs.vector.layout import TorchEnv
from rl_dist.process_group.collectives import all_gather_json, all_reduce_max
from rl_dist.process_group.process_ends import stopped_in_evaluation
from rl_dist.process_group.world import World, stop_flag

# A function that maps (env, obs [B, F], episode_start [B]) to actions.
Controller = Callable[[Any, Tensor, Tensor], Tensor]
MAX_EPISODE_STEPS = 100_000  # longer episodes are cut off
RESAMPLES = 2000  # number of bootstrap samples
ENDS = (0.025, 0.975)  # quantiles at the ends of a 95 % interval
Interval = list[float]  # value, and lower and upper bound of its 95 % interval


class Stopped(Interruption):
    """Raised by a stop signal during an evaluation."""


def _stop(signum: int, frame: Any) -> None:
    stop_flag.replace(signal.SIG_DFL)
    stop_flag.signum = signum  # shows the launcher that the signal reached this host
    raise Stopped(signum)


def until_stopped(evaluate: Callable[[], None], world: World, run_dir: Path | None = None) -> int:
    """Call `evaluate`, and end it if a stop signal arrives; return the exit code.

    With several ranks, a signal ends each process immediately, because a rank may be waiting for
    others in code that Python signal handlers cannot interrupt. In this case, the launcher reports
    the stop.

    Args:
        run_dir: run directory, for the evaluation at the end of training; otherwise None.
    """
    stop_flag.replace(_stop if world.size == 1 else signal.SIG_DFL)
    try:
        # A signal may have arrived before the handler was replaced above.
        if signum := all_reduce_max(stop_flag.signum, world):
            raise Stopped(signum)
        evaluate()
    except Stopped as stopped:
        (signum,) = stopped.args
        if world.is_main_process:
            print(stopped_in_evaluation(signum, run_dir))
        return 128 + signum
    finally:
        stop_flag.replace(signal.SIG_DFL)  # no state to save, so signals may end the process
    return 0


@dataclass
class PolicyController:
    """Chooses a policy's most likely actions; keeps its state between calls.

    With `zero_state`, the state is reset before every step, to measure how much the memory helps.
    """

    policy: Policy
    normalizer: Callable[[Tensor], Tensor]
    zero_state: bool = False
    state: Tensor | None = None  # recurrent state [B, S, H]
    history: Tensor | None = None  # earlier observations of the window [B, n-1, F]

    def __call__(
        self,
        env: TorchEnv | Policy,  # only its observation layout is read
        obs: Tensor,
        episode_start: Tensor,
        push: Tensor | None = None,
    ) -> Tensor:
        """Return actions [B, A] or [B] for observations [B, F] and noise `push` [B, A]."""
        if self.state is None or self.history is None:
            check_readable(self.policy, env.layout)
            self.state = self.policy.initial_state(len(obs))
            self.history = self.policy.empty_history(len(obs))
        start = torch.ones_like(episode_start) if self.zero_state else episode_start
        history = self.history * ~start[:, None, None]
        seen = policy_input(self.normalizer, history, obs)
        actions, self.outputs, _, self.state = self.policy.act(seen, self.state, start, push)
        self.history = shift_history(history, seen)
        return actions


def shard(count: int, world: World) -> range:
    """Return this rank's share of the indices 0 .. count - 1."""
    return range(count * world.rank // world.size, count * (world.rank + 1) // world.size)


def evaluate_episodes(
    task: GymTask,
    controller: Controller,
    seed: int,
    world: World,
    stream: int = EVALUATION_STREAM,
) -> np.ndarray:
    """Run the task's N evaluation episodes, divided among the ranks.

    Each episode has its own environment and depends only on `seed`, `stream` and its number.
    Validation and evaluation use different streams. If an environment is restarted after a fault,
    its episode is repeated.

    Returns:
        An array [3, N], the same on every rank. Its rows are the return, the length and the number
        of repetitions of each episode.
    """
    numbers = shard(task.config.eval_episodes, world)
    columns: list[list[float]] = [[], [], []]
    if numbers:
        env = task.evaluation_env(len(numbers), numbers.start, str(world.device))
        obs, _ = env.reset(seed=stream_seeds(seed, stream, numbers.start, len(numbers)))
        shape = 3, len(numbers)
        total, length, repeats = torch.zeros(shape, dtype=torch.float64, device=obs.device)
        alive = start = length == 0  # [B], all True
        restarts = repeats  # restarts of each environment
        for _ in range(MAX_EPISODE_STEPS):
            if not alive.any():
                break
            obs, rewards, terminated, truncated, info = env.step(controller(env, obs, start))
            world.heartbeat()
            before, restarts = restarts, torch.tensor(env.restarts, device=obs.device)
            repeated = alive & (restarts > before)
            repeats = repeats + repeated
            total = (total + info.get("raw_rewards", rewards) * alive) * ~repeated
            length = (length + alive) * ~repeated
            start = terminated | truncated
            alive = alive & (~start | repeated)
        columns = torch.stack([total, length, repeats]).tolist()
        env.close()
    return np.concatenate(all_gather_json(columns, world), axis=1)


def episode_figures(episodes: np.ndarray) -> dict[str, float]:
    """Compute statistics from the array that `evaluate_episodes` returns."""
    returns, lengths, repeats = episodes
    figures = {
        "return": returns.mean(),
        "return_std": returns.std(),
        "return_min": returns.min(),
        "length": lengths.mean(),
        "episodes_cut": (lengths >= MAX_EPISODE_STEPS).sum(),
        "episodes": len(returns),
        "env_restarts": repeats.sum(),
    }
    return {name: float(value) for name, value in figures.items()}


def validate(
    task: GymTask, seed: int, world: World, policy: Policy, normalizer: Normalizer
) -> dict[str, float]:
    """Validate a policy during training; return metrics named valid/..."""
    controller = PolicyController(policy, normalizer)
    episodes = evaluate_episodes(task, controller, seed, world, VALIDATION_STREAM)
    return {f"valid/{name}": value for name, value in episode_figures(episodes).items()}


def compare_on_episodes(
    task: GymTask, seed: int, agents: dict[str, PolicyController], world: World
) -> tuple[dict[str, dict[str, float]], str]:
    """Evaluate agents on the same episodes; return the statistics, also as text."""
    figures = {
        name: episode_figures(evaluate_episodes(task, agent, seed, world))
        for name, agent in agents.items()
    }
    line = (
        "{}: {episodes:.0f} episodes without noise: mean return {return:.2f} (sd {return_std:.2f}, "
        "min {return_min:.2f}), mean length {length:.1f}, {episodes_cut:.0f} cut, "
        "{env_restarts:.0f} environment restarts"
    )
    return figures, "\n".join(line.format(name, **values) for name, values in figures.items())


def mean_interval(samples: np.ndarray | list[float]) -> Interval:
    """Return the mean of R independent samples and its bootstrap interval.

    Source: Agarwal et al., "Deep reinforcement learning at the edge of the statistical precipice",
    NeurIPS 2021, https://arxiv.org/abs/2108.13264.
    """
    draws = np.random.default_rng(0).choice(samples, (RESAMPLES, len(samples)))
    return [float(np.mean(samples)), *np.quantile(draws.mean(axis=1), ENDS).tolist()]
