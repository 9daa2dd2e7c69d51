"""Run policies without noise over whole episodes, on all ranks."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agents.config import RunConfig
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

# (env, obs [B,F], episode_start [B]) -> actions
Controller = Callable[[Any, Tensor, Tensor], Tensor]
MAX_EPISODE_STEPS = 100_000  # an episode that no environment ends is cut here


class Stopped(Interruption):
    """A stop signal came in an evaluation; `except Exception` does not catch it."""


def _stop(signum: int, frame: Any) -> None:
    stop_flag.replace(signal.SIG_DFL)
    stop_flag.signum = signum  # shows the launcher that the signal reached this host
    raise Stopped(signum)


def until_stopped(evaluate: Callable[[], None], world: World, run_dir: Path | None = None) -> int:
    """Evaluate until a stop signal comes; return the exit code.

    Several ranks simply die: they may wait for each other where Python sees no signal, and their
    launcher reports the end. `run_dir` names a training that this evaluation ends.
    """
    stop_flag.replace(_stop if world.size == 1 else signal.SIG_DFL)
    try:
        # a signal may have come before
        if signum := all_reduce_max(stop_flag.signum, world):
            raise Stopped(signum)
        evaluate()
    except Stopped as stopped:
        (signum,) = stopped.args
        if world.is_main_process:
            print(stopped_in_evaluation(signum, run_dir))
        return 128 + signum
    finally:
        stop_flag.replace(signal.SIG_DFL)  # nothing is left to save
    return 0


@dataclass
class PolicyController:
    """Choose a policy's most likely actions; keep its state between calls.

    `zero_state` forgets everything before every step, to show the value of memory.
    """

    policy: Policy
    normalizer: Normalizer
    zero_state: bool = False
    state: Tensor | None = None
    history: Tensor | None = None

    def __call__(self, env: TorchEnv, obs: Tensor, episode_start: Tensor) -> Tensor:
        """Return actions [B, A] or [B] for observations [B, F]."""
        if self.state is None or self.history is None:
            check_readable(self.policy, env.layout)
            self.state = self.policy.initial_state(len(obs))
            self.history = self.policy.empty_history(len(obs))
        start = torch.ones_like(episode_start) if self.zero_state else episode_start
        history = self.history * ~start[:, None, None]
        seen = policy_input(self.normalizer, history, obs, self.state.dtype)
        actions, _, _, self.state = self.policy.act(seen, self.state, start, None)
        self.history = shift_history(history, seen)
        return actions


def shard(count: int, world: World) -> range:
    """Return this rank's share of `count` things; each is on exactly one rank."""
    return range(count * world.rank // world.size, count * (world.rank + 1) // world.size)


def evaluate_episodes(
    make_env: Callable[[int, int], TorchEnv],
    controller: Controller,
    num_episodes: int,
    seed: int,
    world: World,
    stream: int = EVALUATION_STREAM,
) -> dict[str, list[float]]:
    """Run whole episodes, one environment each, over all ranks; each counts once.

    Seed, number and stream determine the episodes; validation has another stream. An episode that
    does not end is cut after MAX_EPISODE_STEPS. If its environment was restarted after a fault, an
    episode is repeated. Returns "return", "length" and "restarts" of every episode, in order.
    """
    numbers = shard(num_episodes, world)
    results: dict[str, list[float]] = {"return": [], "length": [], "restarts": []}
    if numbers:
        env = make_env(len(numbers), numbers.start)
        obs, _ = env.reset(seed=stream_seeds(seed, stream, numbers.start, len(numbers)))
        start = torch.ones(len(numbers), dtype=torch.bool, device=obs.device)  # [B]
        alive = start.clone()
        total = torch.zeros(len(numbers), dtype=torch.float64, device=obs.device)
        length = total.clone()
        all_restarts = restarts = torch.tensor(env.restarts, device=obs.device)
        for _ in range(MAX_EPISODE_STEPS):
            if not alive.any():
                break
            obs, rewards, terminated, truncated, info = env.step(controller(env, obs, start))
            world.heartbeat()
            new_restarts = torch.tensor(env.restarts, device=obs.device) - all_restarts
            all_restarts = all_restarts + new_restarts
            again = alive & (new_restarts > 0)
            restarts = restarts + new_restarts * alive
            total = (total + info.get("raw_rewards", rewards) * alive) * ~again
            length = (length + alive) * ~again
            start = terminated | truncated
            alive = alive & (~start | again)
        columns = {"return": total, "length": length, "restarts": restarts}
        results = {name: column.tolist() for name, column in columns.items()}
        env.close()
    ranks = all_gather_json(results, world)
    return {name: [value for rank in ranks for value in rank[name]] for name in results}


def episode_figures(
    task: GymTask,
    config: RunConfig,
    policy: Policy,
    normalizer: Normalizer,
    world: World,
    stream: int = EVALUATION_STREAM,
) -> dict[str, float]:
    """Return the figures of a policy over whole episodes of a Gymnasium task."""
    episodes = evaluate_episodes(
        lambda count, first: task.evaluation_env(count, first, str(world.device)),
        PolicyController(policy, normalizer),
        config.task.eval_episodes,
        config.train.seed,
        world,
        stream,
    )
    returns, lengths = np.array(episodes["return"]), np.array(episodes["length"])
    return {
        "return": float(returns.mean()),
        "return_std": float(returns.std()),
        "return_min": float(returns.min()),
        "length": float(lengths.mean()),
        "episodes_cut": float((lengths >= MAX_EPISODE_STEPS).sum()),
        "episodes": float(len(returns)),
        "env_restarts": float(sum(episodes["restarts"])),
    }


def validation(
    task: GymTask, config: RunConfig, world: World
) -> Callable[[Policy, Normalizer], dict[str, float]]:
    """Return the source of `valid/` figures in a training."""

    def validate(policy: Policy, normalizer: Normalizer) -> dict[str, float]:
        figures = episode_figures(task, config, policy, normalizer, world, VALIDATION_STREAM)
        return {f"valid/{name}": value for name, value in figures.items()}

    return validate


def episode_text(figures: dict[str, float]) -> str:
    """Return one line of `episode_figures`."""
    text = (
        "{episodes:.0f} episodes without noise: mean return {return:.2f} (sd {return_std:.2f}, min "
        "{return_min:.2f}), mean length {length:.1f}"
    )
    if figures["episodes_cut"]:
        text += f", {{episodes_cut:.0f}} cut after {MAX_EPISODE_STEPS} steps"
    if figures["env_restarts"]:
        text += ", {env_restarts:.0f} restarts of environments"
    return text.format_map(figures)
