"""Policies without noise over whole episodes, on all ranks."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from agents.network.noise import action_noise
from agents.network.normalize import Normalizer
from agents.network.seeds import EVALUATION_STREAM, VALIDATION_STREAM, stream_seeds
from agents.policy import Policy, check_readable
from agents.rollout import policy_input, shift_history
from envs.task import GymTask
from envs.vector.guards import Interruption
from envs.vector.layout import TorchEnv
from rl_dist.process_group.collectives import all_gather_json, all_reduce_max
from rl_dist.process_group.world import World, stop_flag

if TYPE_CHECKING:  # other tasks are evaluated without them
    from agents.run.config import RunConfig

# (env, obs [B,F], episode_start [B]) -> actions
Controller = Callable[[Any, Tensor, Tensor], Tensor]
MAX_EPISODE_STEPS = 100_000  # an episode that no environment ends is cut here
NOISE_BLOCK = 64  # steps whose noise is drawn together


class Stopped(Interruption):
    """A signal came during evaluation; no `except Exception` of a task catches it."""


def _stop(signum: int, frame: Any) -> None:
    stop_flag.replace(signal.SIG_DFL)
    stop_flag.signum = signum  # the launcher's check: it reached this host
    raise Stopped(signum)


@contextmanager
def stoppable(world: World) -> Iterator[None]:
    """Let a stop signal raise Stopped, or end this process as one of several ranks.

    They may wait for each other where Python sees no signal; their launcher says what happened.
    """
    stop_flag.replace(_stop if world.size == 1 else signal.SIG_DFL)
    try:
        # one may have come before
        if signum := all_reduce_max(stop_flag.signum, world):
            raise Stopped(signum)
        yield
    finally:
        stop_flag.replace(signal.SIG_DFL)  # nothing is left to save


class PolicyController:
    """A trained policy's most likely actions; it keeps its state between calls.

    `zero_state` forgets everything before every step, to show what memory is worth. `noise_seed`
    samples actions instead, as in training.
    """

    def __init__(
        self,
        policy: Policy,
        normalizer: Normalizer,
        *,
        zero_state: bool = False,
        noise_seed: int | None = None,
    ) -> None:
        self.policy = policy
        self.normalizer = normalizer
        self.zero_state = zero_state
        self.noise_seed = noise_seed
        self.step = 0
        self.noise: Tensor | None = None  # [NOISE_BLOCK, B, A]
        self.state: Tensor | None = None
        self.history: Tensor | None = None

    def __call__(self, env: TorchEnv, obs: Tensor, episode_start: Tensor) -> Tensor:
        """Actions [B, A] or [B] for observations [B, F]."""
        if self.state is None or self.history is None:
            check_readable(self.policy, env.layout)
            self.state = self.policy.initial_state(len(obs))
            self.history = self.policy.empty_history(len(obs))
        start = torch.ones_like(episode_start) if self.zero_state else episode_start
        history = self.history * ~start[:, None, None]
        seen = policy_input(self.normalizer, history, obs, self.state.dtype)
        noise = None if self.noise_seed is None else self._next_noise(env, self.state)
        actions, _, _, self.state = self.policy.act(seen, self.state, start, noise)
        self.history = shift_history(history, seen)
        return actions

    def _next_noise(self, env: TorchEnv, like: Tensor) -> Tensor:
        """Return the noise of one more step, [B, A]."""
        row = self.step % NOISE_BLOCK
        if row == 0 or self.noise is None:
            share = (env.env_offset, env.num_envs)
            space = env.single_action_space
            when, color = (self.step, NOISE_BLOCK), self.policy.config.noise_color
            noise = action_noise(space, self.noise_seed or 0, *share, *when, color=color)
            self.noise = noise.to(like.device, like.dtype)
        self.step += 1
        return self.noise[row]


def shard(count: int, world: World) -> range:
    """This rank's share of `count` things: contiguous, each on exactly one rank."""
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

    Seed, number and stream say which episodes; those of validation are a stream of their own.
    One that does not end is cut after MAX_EPISODE_STEPS. One whose environment was restarted after
    a fault is run again. Returns "return", "length" and "restarts" of every episode, in order.
    """
    mine = shard(num_episodes, world)
    own: dict[str, list[float]] = {"return": [], "length": [], "restarts": []}
    if len(mine):
        env = make_env(len(mine), mine.start)
        obs, _ = env.reset(seed=stream_seeds(seed, stream, mine.start, len(mine)))
        start = torch.ones(len(mine), dtype=torch.bool, device=obs.device)  # [B]
        alive = start.clone()
        total = torch.zeros(len(mine), dtype=torch.float64, device=obs.device)
        length = total.clone()
        seen = restarts = torch.tensor(env.restarts, device=obs.device)
        for _ in range(MAX_EPISODE_STEPS):
            if not alive.any():
                break
            obs, rewards, terminated, truncated, info = env.step(controller(env, obs, start))
            world.heartbeat()
            before, seen = seen, torch.tensor(env.restarts, device=obs.device)
            again = alive & (seen > before)
            restarts = restarts + (seen - before) * alive
            total = (total + info.get("raw_rewards", rewards) * alive) * ~again
            length = (length + alive) * ~again
            start = terminated | truncated
            alive = alive & (~start | again)
        own = {"return": total.tolist(), "length": length.tolist(), "restarts": restarts.tolist()}
        env.close()
    ranks = all_gather_json(own, world)
    return {name: [value for rank in ranks for value in rank[name]] for name in own}


def episode_figures(
    task: GymTask,
    config: RunConfig,
    policy: Policy,
    normalizer: Normalizer,
    world: World,
    *,
    sampled: bool = False,
    stream: int = EVALUATION_STREAM,
) -> dict[str, float]:
    """Figures over episodes of a Gymnasium task, by which a policy is measured.

    With `sampled` the same episodes run once more, with actions sampled as in training.
    """

    def run(controller: Controller) -> dict[str, list[float]]:
        return evaluate_episodes(
            lambda count, first: task.evaluation_env(count, first, str(world.device)),
            controller,
            config.task.eval_episodes,
            config.train.seed,
            world,
            stream,
        )

    episodes = run(PolicyController(policy, normalizer))
    with_noise = {}
    if sampled:
        noise_seed = stream_seeds(config.train.seed, stream, 0, 1)[0]
        noisy = run(PolicyController(policy, normalizer, noise_seed=noise_seed))
        with_noise["return_with_noise"] = float(np.mean(noisy["return"]))
    returns, lengths = np.array(episodes["return"]), np.array(episodes["length"])
    return {
        "return": float(returns.mean()),
        "return_std": float(returns.std()),
        "return_min": float(returns.min()),
        "length": float(lengths.mean()),
        "episodes_cut": float((lengths >= MAX_EPISODE_STEPS).sum()),
        "episodes": float(len(returns)),
        "env_restarts": float(sum(episodes["restarts"])),
        **with_noise,
    }


def validation(
    task: GymTask, config: RunConfig, world: World
) -> Callable[[Policy, Normalizer], dict[str, float]]:
    """Return what training calls for `valid/` figures."""

    def validate(policy: Policy, normalizer: Normalizer) -> dict[str, float]:
        agent = policy, normalizer
        figures = episode_figures(task, config, *agent, world, stream=VALIDATION_STREAM)
        return {f"valid/{name}": value for name, value in figures.items()}

    return validate


def episode_text(figures: dict[str, float]) -> str:
    """Return one line of `episode_figures`."""
    text = (
        "{episodes:.0f} episodes without noise: mean return {return:.2f} (sd {return_std:.2f}, min "
        "{return_min:.2f}), mean length {length:.1f}"
    )
    if "return_with_noise" in figures:
        text += "; with noise, as in training: mean return {return_with_noise:.2f}"
    if figures["episodes_cut"]:
        text += f", {{episodes_cut:.0f}} cut after {MAX_EPISODE_STEPS} steps"
    if figures["env_restarts"]:
        text += ", {env_restarts:.0f} restarts of environments"
    return text.format_map(figures)
