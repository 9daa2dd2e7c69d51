"""Evaluate policies on complete episodes without action noise, on all ranks."""

import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agents.learner.controller import PolicyController
from agents.learner.network.seeds import EVALUATION_STREAM, VALIDATION_STREAM, stream_seeds
from agents.learner.trainer import Training
from envs.task import GymTask
from envs.vector.guards import EnvironmentFaultError, Interruption
from rl_dist.errors import UserError
from rl_dist.process_group.collectives import all_gather_json, all_reduce_max
from rl_dist.process_group.process_ends import stopped_in_evaluation
from rl_dist.process_group.world import World, stop_flag

# A function that maps (env, obs [B, F], episode_start [B]) to actions.
Controller = Callable[[Any, Tensor, Tensor], Tensor]
BUDGET = 10  # by default, validation takes at most one in this many environment steps of training
FEWEST_EPISODES = 5  # by default, the smallest number of episodes in a validation
# A longer episode is cut off. In tasks whose episodes are short or never end, so is an episode that
# is much longer than those in training: see `episode_limit`.
MAX_EPISODE_STEPS = 100_000
RESAMPLES = 2000  # number of bootstrap samples
ENDS = (0.025, 0.975)  # quantiles at the ends of a 95 % interval
Interval = dict[str, float]  # mean, and ends of its 95 % interval: low and high


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


def shard(count: int, world: World) -> range:
    """Return this rank's share of the indices 0 .. count - 1."""
    return range(count * world.rank // world.size, count * (world.rank + 1) // world.size)


def evaluate_episodes(
    task: GymTask,
    controller: Controller,
    seed: int,
    world: World,
    stream: int = EVALUATION_STREAM,
    max_steps: int = MAX_EPISODE_STEPS,
) -> np.ndarray:
    """Run the task's N evaluation episodes, divided among the ranks.

    Each episode has its own environment and depends only on `seed`, `stream` and its number.
    Validation and evaluation use different streams. If an environment is restarted after a fault,
    its episode is repeated. Episodes that still run after `max_steps` steps are cut off.

    Returns:
        An array [4, N], the same on every rank. Its rows are the return, the length, the number of
        repetitions of each episode, and 1 if it was cut off, else 0.
    """
    numbers = shard(task.config.eval_episodes, world)
    columns: list[list[float]] = [[], [], [], []]
    if numbers:
        env = task.evaluation_env(len(numbers), numbers.start, str(world.device))
        obs, _ = env.reset(seed=stream_seeds(seed, stream, numbers.start, len(numbers)))
        shape = 3, len(numbers)
        total, length, repeats = torch.zeros(shape, dtype=torch.float64, device=obs.device)
        alive = start = length == 0  # [B], all True
        restarts = repeats  # restarts of each environment
        for _ in range(max_steps):
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
        columns = torch.stack([total, length, repeats, alive]).tolist()
        env.close()
    return np.concatenate(all_gather_json(columns, world), axis=1)


def episode_figures(episodes: np.ndarray) -> dict[str, float]:
    """Compute statistics from the array that `evaluate_episodes` returns."""
    returns, lengths, repeats, cut = episodes
    figures = {
        "return": returns.mean(),
        "return_std": returns.std(),
        "return_min": returns.min(),
        "length": lengths.mean(),
        "episodes_cut": cut.sum(),
        "episodes": len(returns),
        "env_restarts": repeats.sum(),
    }
    return {name: float(value) for name, value in figures.items()}


def episode_limit(global_step: int, episodes: int) -> int:
    """Return the number of steps after which an evaluation cuts off an episode.

    This is 10 times the mean length of training episodes, but at least 1,000. The arguments are the
    counters of the training. Without this limit, an evaluation might take much longer than the
    training if a policy has learned to keep an episode going, or if episodes never end.
    """
    longest = 10 * global_step // episodes if episodes else 0
    return min(max(longest, 1000), MAX_EPISODE_STEPS)


@dataclass(frozen=True)
class Validation:
    """Validates the policy of a training; a call returns metrics named valid/...

    With `within_budget`, all validations of a run together take at most a tenth as many environment
    steps as its training, so they have fewer episodes, or none if the budget is used up. The number
    of episodes follows from counters that checkpoints save and that are the same on all ranks.
    """

    task: GymTask
    seed: int
    world: World
    within_budget: bool

    def __call__(self, training: Training) -> dict[str, float]:
        """Run validation episodes on all ranks; return {} if the budget allows too few."""
        num_episodes = self.task.config.eval_episodes
        max_steps = episode_limit(training.global_step, training.episodes)
        used = training.validated
        if self.within_budget:
            budget = training.global_step // BUDGET - used["steps"]
            affordable = budget // self._expected_length(training)
            if affordable < min(FEWEST_EPISODES, num_episodes):
                return {}
            num_episodes = min(affordable, num_episodes)
            max_steps = min(budget // num_episodes, max_steps)
        config = replace(self.task.config, eval_episodes=num_episodes)
        episodes = evaluate_episodes(
            replace(self.task, config=config),
            PolicyController(training.policy, training.normalizers.obs),
            self.seed,
            self.world,
            VALIDATION_STREAM,
            max_steps,
        )
        # All environments are stepped until the longest episode has ended; the length of a repeated
        # episode does not include the steps before its repetition.
        length = max_steps if episodes[2].any() else int(episodes[1].max())
        used["steps"] += num_episodes * length
        used["longest"] = max(length, used["longest"])
        figures = episode_figures(episodes) | {"total_steps": used["steps"]}
        return {f"valid/{name}": value for name, value in figures.items()}

    def _expected_length(self, training: Training) -> int:
        """Return a length that the next validation episodes will hardly exceed."""
        mean = training.global_step // training.episodes if training.episodes else 100
        longest = training.validated["longest"]
        length = 2 * max(longest, mean) if longest else 10 * mean
        limit = self.task.max_episode_steps
        return min(limit, max(length, 1000)) if limit else length


def try_evaluation_env(task: GymTask, world: World) -> None:
    """Make one evaluation environment beside the training's, to fail before any work.

    Raises:
        UserError: the environment cannot be made.
    """
    try:
        task.evaluation_env(1, world.rank, str(world.device)).close()
    except (ValueError, EnvironmentFaultError) as error:
        raise UserError(
            f"beside the training environments, none can be made for evaluation: {error}; "
            "--validate_every 0 --eval_episodes 1 leaves out validation and tests in one "
            "environment after the training, --eval_episodes 0 leaves out all evaluation"
        ) from error


def compare_on_episodes(
    task: GymTask, seed: int, agents: dict[str, PolicyController], world: World, max_steps: int
) -> tuple[dict[str, dict[str, float]], str]:
    """Evaluate agents on the same episodes; return the statistics, also as text."""
    figures = {
        name: episode_figures(evaluate_episodes(task, agent, seed, world, max_steps=max_steps))
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
    return interval(np.mean(samples), draws.mean(axis=1))


def interval(mean: Any, draws: np.ndarray) -> Interval:
    """Return a mean with the 95 % interval of its bootstrap draws."""
    low, high = np.quantile(draws, ENDS).tolist()
    return {"mean": float(mean), "low": low, "high": high}
