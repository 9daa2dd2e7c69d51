"""Trained policies in use: observations in, actions out, without the environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from agents.noise import action_noise
from agents.rollout import policy_input, shift_history
from agents.run.config import Which
from agents.run.saved import LoadedAgent, load_agent
from envs.vector.spaces import MASK_KEY, ActionDecoder, ObservationEncoder
from rl_dist.errors import UserError

# recurrent state [B, S, H], window before [B, n-1, F], action before as an input [B, n or 0]
State = tuple[np.ndarray, ...]


class LoadedPolicy:
    """A trained policy; it keeps no state, which goes in and comes out of `predict`.

    Observations and actions are those of the environment it was trained in, whose spaces it brings.
    """

    def __init__(self, agent: LoadedAgent, seed: int = 0) -> None:
        self.agent = agent
        self.observation_space, self.action_space = agent.spaces
        self._decode = ActionDecoder(self.action_space, "of this policy")
        mask_size = self._decode.mask_size
        self._encode = ObservationEncoder(self.observation_space, "of this policy", mask_size)
        # without spaces of their own rows come whole
        parts = agent.policy.layout.parts
        own = len(self._encode.parts) if agent.spaces_json else len(parts)
        self._extras = {part.name: part.size for part in parts[own:]}
        self._seed, self._num_drawn = seed, 0

    def predict(
        self,
        observation: Any,
        state: State | None = None,
        episode_start: np.ndarray | None = None,
        deterministic: bool = True,
        action_masks: np.ndarray | None = None,
        reward: np.ndarray | float = 0.0,
    ) -> tuple[Any, State]:
        """Return the action for an observation, or for a batch, and the state after.

        The convention is that of sb3-contrib, so that sb3's `evaluate_policy` takes a policy.

        Args:
            observation: one of `observation_space`, or a batch of them.
            state: what the call before returned; None: at the start.
            episode_start: [B] bool, whose state is forgotten first; None: nobody's.
            deterministic: the most likely action; else sampled as in training.
            action_masks: [B, choices], for a policy trained with --info_mask; None: all allowed.
            reward: [B] of the step before, for a policy trained with --previous_reward.

        Raises:
            UserError: a state of another batch, or masks that do not fit.
        """
        single = self._is_single(observation)
        batch = [observation] if single else observation
        batch = np.asarray(batch) if single and not _is_nested(observation) else batch
        count = 1 if single else _batch_size(observation)
        start = np.zeros(count, bool) if episode_start is None else np.asarray(episode_start, bool)
        start = start.reshape(count)
        before = np.zeros((count, self._extras.get("previous_action", 0)), np.float32)
        if state is not None and len(state[2]) == count:
            before = state[2] * ~start[:, None]
        extras = self._extra_columns(count, action_masks, before, np.asarray(reward) * ~start)
        row = np.concatenate([self._encode(batch, count), *extras], axis=1)  # [B, F]
        tensors = torch.from_numpy(row), torch.from_numpy(start)
        actions, state = self._act(tensors[0], state, tensors[1], deterministic)
        own = self._decode(actions, count)
        after = self._decode.encode(actions)[:, : before.shape[1]]
        return (_first(own) if single else own), (*state, after)

    def _extra_columns(
        self, count: int, masks: np.ndarray | None, action: np.ndarray, reward: np.ndarray
    ) -> list[np.ndarray]:
        """Return what a row has beyond the observation, each [B, n] float32."""
        columns = {"previous_action": action}
        if size := self._extras.get(MASK_KEY):
            given = np.ones((count, size)) if masks is None else np.asarray(masks)
            if given.size != count * size:
                raise UserError(f"action_masks has {given.size} numbers, not {count} x {size}")
            columns[MASK_KEY] = given.reshape(count, size)
            ends = np.cumsum(self._decode.sizes)[:-1]
            if not all(part.any(1).all() for part in np.split(columns[MASK_KEY], ends, axis=1)):
                raise UserError("action_masks allows no action: each choice needs a 1")
        elif masks is not None:
            raise UserError("action_masks: this policy was trained without --info_mask")
        columns["previous_reward"] = np.broadcast_to(reward, count)[:, None]
        return [columns[name].astype(np.float32) for name in self._extras]

    def _act(
        self, obs: Tensor, state: State | None, start: Tensor, deterministic: bool
    ) -> tuple[Tensor, State]:
        policy, normalizer = self.agent.policy, self.agent.normalizer
        device = policy.critic_head.weight.device
        before = policy.initial_state(len(obs)), policy.empty_history(len(obs))
        if state is not None:
            lstm_state, history = (torch.as_tensor(part, device=device) for part in state[:2])
        else:
            lstm_state, history = before
        if lstm_state.shape != before[0].shape:
            raise UserError(
                f"state is of {len(lstm_state)} environments and observation of {len(obs)}: pass "
                "None where a batch begins"
            )
        obs, start = obs.to(device), start.to(device)
        history = history * ~start[:, None, None]
        seen = policy_input(normalizer, history, obs, lstm_state.dtype)
        noise = None
        if not deterministic:
            drawn = action_noise(self._decode.space, self._seed, 0, len(obs), self._num_drawn, 1)
            noise = drawn[0].to(device, lstm_state.dtype)  # [B, A]
            self._num_drawn += 1
        actions, _, _, after = policy.act(seen, lstm_state, start, noise)
        return actions, (after.cpu().numpy(), shift_history(history, seen).cpu().numpy())

    def _is_single(self, observation: Any) -> bool:
        """Return whether this is one observation and not a batch of them."""
        space: Any = self.observation_space
        while isinstance(space, spaces.Dict | spaces.Tuple):
            key: Any = next(iter(space.spaces)) if isinstance(space, spaces.Dict) else 0
            space, observation = space[key], observation[key]
        return np.shape(observation) == (space.shape or ())


def load_policy(
    path: str | Path, which: Which = "", device: str | torch.device = "cpu", seed: int = 0
) -> LoadedPolicy:
    """Load the policy of a run directory or checkpoint file.

    Args:
        which: checkpoint of a run directory, best or last; "": the best if there is one.
        device: where it computes.
        seed: of the noise of `predict` with deterministic=False.

    Raises:
        UserError: there is no such checkpoint, or it is damaged.
    """
    return LoadedPolicy(load_agent(path, device, which), seed)


def _is_nested(observation: Any) -> bool:
    return isinstance(observation, dict | tuple)


def _batch_size(observation: Any) -> int:
    while _is_nested(observation):
        first = next(iter(observation)) if isinstance(observation, dict) else 0
        observation = observation[first]
    return len(observation)


def _first(actions: Any) -> Any:
    """Return the only action of a batch."""
    if isinstance(actions, dict):
        return {name: _first(part) for name, part in actions.items()}
    return tuple(map(_first, actions)) if isinstance(actions, tuple) else actions[0]
