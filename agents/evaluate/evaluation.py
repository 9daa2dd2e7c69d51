"""Running policies without noise over markets or whole episodes, on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from torch import Tensor

from agents.evaluate.statistics import Record
from agents.normalize import Normalizer
from agents.policy import Policy
from agents.rollout import policy_input, shift_history
from rl_dist.process_group.collectives import gather_json
from rl_dist.process_group.world import World
from rl_dist.seeding import EVALUATION_STREAM, stream_seeds

Controller = Callable[[VectorEnv, Tensor, Tensor], Tensor]  # (env, obs [B,F], episode_start [B]) -> actions
MAX_EPISODE_STEPS = 100_000  # an episode that no environment ends is cut here
ACCOUNTS = ("traded_usd", "fees_usd", "num_trades", "exposure")


class PolicyController:
    """A trained policy's most likely actions; it keeps its state between calls.

    `zero_state` forgets everything before every step: the ablation that shows what memory is worth.
    """

    def __init__(self, policy: Policy, normalizer: Normalizer, *, zero_state: bool = False) -> None:
        self.policy, self.normalizer, self.zero_state = policy, normalizer, zero_state
        self.state: Tensor | None = None
        self.history: Tensor | None = None

    def __call__(self, env: VectorEnv, obs: Tensor, episode_start: Tensor) -> Tensor:
        """Actions [B, A] or [B] for observations [B, F]."""
        if self.state is None or self.history is None:
            window = max(self.policy.config.feature_window - 1, 0)
            self.state = self.policy.initial_state(len(obs))
            self.history = self.state.new_zeros(len(obs), window, self.policy.num_obs)
        start = torch.ones_like(episode_start) if self.zero_state else episode_start
        history = self.history * ~start[:, None, None]
        seen = policy_input(self.normalizer, history, obs, self.state.dtype)
        actions, _, _, self.state = self.policy.act(seen, self.state, start)
        self.history = shift_history(history, seen)
        return actions


def run_markets(env: Any, controller: Controller, on_step: Callable[[], None] = lambda: None) -> Record:
    """One pass of an evaluation-mode trading environment over all its markets.

    A market on which the policy is ruined stays at the value it had then.
    """
    obs, _ = env.reset(seed=[0] * env.num_envs)
    start = torch.ones(env.num_envs, dtype=torch.bool, device=env.device)
    alive = start.clone()
    values, accounts = [env.portfolio_value], []
    for _ in range(env.num_days - 1):
        obs, _, terminated, truncated, info = env.step(controller(env, obs, start))
        on_step()
        values.append(torch.where(alive, info["portfolio_value"], values[-1]))
        accounts.append(torch.stack([info[name] * alive for name in ACCOUNTS]))
        start = terminated | truncated
        alive = alive & ~start
    columns = torch.stack(accounts, dim=2).cpu().numpy()  # [4, M, D]
    named = dict(zip(ACCOUNTS, columns, strict=True))
    return Record(values=torch.stack(values, dim=1).cpu().numpy(), **named)


def shard(count: int, world: World) -> range:
    """This rank's share of `count` things: contiguous, each on exactly one rank."""
    return range(count * world.rank // world.size, count * (world.rank + 1) // world.size)


def judge_markets(
    markets: Sequence[Any],
    make_env: Callable[[Sequence[Any]], Any],
    controllers: dict[str, Callable[[], Controller]],
    world: World,
) -> dict[str, Record]:
    """Run every controller over all markets, the markets spread over the ranks.

    Returns:
        Each controller's record of all M markets, in order, the same on every rank.
    """
    mine = [markets[index] for index in shard(len(markets), world)]
    env = make_env(mine) if mine else None  # once: its tables cost more than a pass
    own: dict[str, dict[str, list]] = {}
    for name, make_controller in controllers.items():
        record = run_markets(env, make_controller(), on_step=world.beat) if mine else None
        own[name] = {key: value.tolist() for key, value in vars(record).items()} if record else {}
    ranks = [rank for rank in gather_json(own, world) if any(rank.values())]
    fields = ("values", *ACCOUNTS)
    return {
        name: Record(**{field: np.concatenate([rank[name][field] for rank in ranks]) for field in fields})
        for name in controllers
    }


def restarts_of(env: Any) -> Tensor:
    """How often each environment was made anew so far, [B]; 0 where none can be."""
    return torch.tensor(getattr(env, "restarts", [0] * env.num_envs))


def judge_episodes(
    make_env: Callable[[int, int], Any],
    controller: Controller,
    num_episodes: int,
    seed: int,
    world: World,
) -> dict[str, list[float]]:
    """Whole episodes, one environment each, over all ranks; each counted once.

    Each environment runs its first episode from its own evaluation seed, so long episodes weigh as
    much as short ones. One that does not end is cut after MAX_EPISODE_STEPS. One whose environment was
    made anew after a fault is not judged by its beginning: it is run anew.

    Returns:
        "return", "length" and "restarts" of every episode, in order of their number, the same on every rank.
    """
    mine = shard(num_episodes, world)
    own: dict[str, list[float]] = {"return": [], "length": [], "restarts": []}
    if len(mine):
        env = make_env(len(mine), mine.start)
        obs, _ = env.reset(seed=stream_seeds(seed, EVALUATION_STREAM, mine.start, len(mine)))
        start = torch.ones(len(mine), dtype=torch.bool, device=obs.device)
        alive = start.clone()
        total = torch.zeros(len(mine), dtype=torch.float64, device=obs.device)
        length = total.clone()
        seen = restarts = restarts_of(env).to(obs.device)
        for _ in range(MAX_EPISODE_STEPS):
            if not alive.any():
                break
            obs, rewards, terminated, truncated, info = env.step(controller(env, obs, start))
            world.beat()
            before, seen = seen, restarts_of(env).to(obs.device)
            anew = alive & (seen > before)
            restarts = restarts + (seen - before) * alive
            total = (total + info.get("raw_rewards", rewards) * alive) * ~anew
            length = (length + alive) * ~anew
            start = terminated | truncated
            alive = alive & (~start | anew)
        own = {"return": total.tolist(), "length": length.tolist(), "restarts": restarts.tolist()}
        env.close()
    ranks = gather_json(own, world)
    return {name: [value for rank in ranks for value in rank[name]] for name in own}
