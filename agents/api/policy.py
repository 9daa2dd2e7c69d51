"""Trained policies in use: observations in, actions out, without the environment."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from agents.network.noise import action_noise
from agents.network.seeds import PREDICTION_STREAM, stream_seeds
from agents.rollout import policy_input, shift_history
from agents.run.saved import LoadedAgent, Which, load_agent
from envs.vector.spaces import MASK_KEY, ActionDecoder, check_masks, flat_mask
from rl_dist.errors import UserError, one_line

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
        self._encode = agent.encoder()
        # without spaces of their own rows come whole
        parts = agent.policy.layout.parts
        own = len(self._encode.parts) if agent.spaces_json else len(parts)
        self._extras = {part.name: part.size for part in parts[own:]}
        self._noise_seed = stream_seeds(seed, PREDICTION_STREAM, 0, 1)[0]
        self._num_drawn = 0

    def predict(
        self,
        observation: Any,
        state: State | None = None,
        episode_start: np.ndarray | None = None,
        deterministic: bool = True,
        action_masks: Any = None,
        reward: np.ndarray | float = 0.0,
    ) -> tuple[Any, State]:
        """Return the action for an observation, or for a batch, and the state after.

        The convention is that of sb3-contrib, so that sb3's `evaluate_policy` takes a policy.

        Args:
            observation: one of `observation_space`, or a batch of them.
            state: the state that the previous call returned; None: at the start.
            episode_start: [B] bool, where to forget the state first; None: nowhere.
            deterministic: the most likely action; else drawn at every call, from numbers that no
                training draws. That is white noise, whatever --noise_color the policy had.
            action_masks: for a policy trained with --info_mask, as its environment's info has it
                (an array, or a tuple of arrays), or one for each observation of a batch; None: all
                count as allowed, with a warning.
            reward: [B] of the previous step, for a policy trained with --previous_reward.

        Raises:
            UserError: an argument that does not fit, or holds NaN or infinity.
        """
        is_single = self._is_single(observation)
        rows = self._encoded(observation, is_single)  # [B, F]
        count = len(rows)
        starts = False if episode_start is None else episode_start
        start = _for_each(count, "episode_start", starts).astype(bool)
        rewards = _for_each(count, "reward", reward) * ~start
        has_memory = not self.agent.policy.config.stateless
        if state is None and episode_start is not None and has_memory and not start.all():
            text = "predict got no state in the middle of an episode: the policy acts without its "
            warnings.warn(text + "memory; pass what the call before returned", stacklevel=2)
        state = self._checked_state(state, count)
        columns = {"previous_action": state[2] * ~start[:, None]}
        columns["previous_reward"] = rewards[:, None]
        if size := self._extras.get(MASK_KEY):
            if action_masks is None:
                text = "predict got no action_masks: all actions count as allowed, though this "
                text += "policy was trained with --info_mask; pass action_masks=info['action_mask']"
                warnings.warn(text, stacklevel=2)
            columns[MASK_KEY] = np.ones((count, size))
        if action_masks is not None:
            columns[MASK_KEY] = self._masks([action_masks] if is_single else action_masks, count)
        extras = [columns[name].astype(np.float32) for name in self._extras]
        row = torch.from_numpy(np.concatenate([rows, *extras], axis=1))
        actions, after_step = self._act(row, state, torch.from_numpy(start), deterministic)
        decoded = self._decode(actions)
        inputs = self._decode.encode(actions)[:, : state[2].shape[1]]
        return (_first(decoded) if is_single else decoded), (*after_step, inputs)

    def _is_single(self, observation: Any) -> bool:
        """Return whether this is one observation and not a batch of them."""
        space: Any = self.observation_space
        try:
            while isinstance(space, spaces.Dict | spaces.Tuple):
                key: Any = next(iter(space.spaces)) if isinstance(space, spaces.Dict) else 0
                space, observation = space[key], observation[key]
            return np.shape(observation) == (space.shape or ())
        except (LookupError, TypeError, ValueError):
            return True  # it fits in no way, as encoding shows

    def _encoded(self, observation: Any, is_single: bool) -> np.ndarray:
        """Return an observation, or a batch, as rows [B, F]."""
        shape = self.observation_space.shape
        try:
            count = 1 if is_single else _batch_size(observation)
            batch = [observation] if is_single else observation
            if count < 1 or shape not in (None, np.shape(batch)[1:]):
                raise ValueError(f"its shape is {np.shape(observation)}; one has {shape}")
            rows = self._encode(batch, count)
        except (LookupError, TypeError, ValueError) as error:
            space = " ".join(str(self.observation_space).split())[:300]
            why = one_line(error, named=isinstance(error, KeyError))
            raise UserError(f"observation does not fit {space}: {why}") from None
        return _finite("observation", rows)

    def _checked_state(self, state: State | None, count: int) -> State:
        """Return the state for `count` environments: zeros for None."""
        policy = self.agent.policy
        parts = policy.initial_state(count), policy.empty_history(count)
        inputs = np.zeros((count, self._extras.get("previous_action", 0)), np.float32)
        zeros = (*(part.cpu().numpy() for part in parts), inputs)
        if state is None:
            return zeros
        expected = [part.shape for part in zeros]
        given = [np.shape(part) for part in state] if isinstance(state, tuple | list) else []
        if given != expected:
            raise UserError(
                f"state does not fit {count} observation(s) of this policy: expected shapes "
                f"{expected}, got {given}; pass what the last predict returned, or None at a start"
            )
        return tuple(_finite("state", part) for part in state)

    def _masks(self, masks: Any, count: int) -> np.ndarray:
        """Return one mask for each observation as [B, choices], from any form of training's."""
        size = self._extras.get(MASK_KEY)
        if not size:
            raise UserError("action_masks: this policy was trained without --info_mask")
        try:
            rows = np.array([flat_mask(mask) for mask in masks], np.float32)
            if len(rows) != count > 1:
                raise ValueError(f"there are {len(rows)} masks")
            rows = rows.reshape(count, size)
            check_masks(rows, self._decode.sizes)
        except (TypeError, ValueError) as error:
            problem = f"action_masks must be {count} mask(s) of {size} numbers"
            raise UserError(f"{problem}: {one_line(error, named=False)}") from None
        return rows

    def _act(
        self, obs: Tensor, state: State, start: Tensor, deterministic: bool
    ) -> tuple[Tensor, State]:
        policy, normalizer = self.agent.policy, self.agent.normalizer
        like = policy.critic_head.weight
        lstm_state, history = (torch.as_tensor(part).to(like) for part in state[:2])
        obs, start = obs.to(like.device), start.to(like.device)
        history = history * ~start[:, None, None]
        seen = policy_input(normalizer, history, obs, like.dtype)
        push = None
        if not deterministic:
            place = (self._noise_seed, 0, len(obs), self._num_drawn, 1)
            noise = action_noise(self._decode.space, *place)[0].to(like)  # [B, A]
            push = policy.pushes(noise)
            self._num_drawn += 1
        actions, _, _, after = policy.act(seen, lstm_state, start, push)
        return actions, (after.cpu().numpy(), shift_history(history, seen).cpu().numpy())


def load_policy(
    path: str | Path,
    which: Which = "",
    device: str | torch.device = "cpu",
    seed: int = 0,
    core: str | None = None,
) -> LoadedPolicy:
    """Load the policy of a run directory or checkpoint file.

    Args:
        which: checkpoint of a run directory, best or last; "": the best if there is one.
        device: where it computes.
        seed: of the noise of `predict` with deterministic=False.
        core: the module:Class of a policy of --core, repeated where its run directory is not your
            own or the checkpoint was copied without it.

    Raises:
        UserError: there is no such checkpoint, it is damaged, or its core has to be named.
    """
    return LoadedPolicy(load_agent(path, device, which, core), seed)


def _for_each(count: int, name: str, given: Any) -> np.ndarray:
    """Return [count] numbers, one for all or one for each."""
    numbers = np.asarray(given)
    if numbers.dtype.kind not in "biuf" or numbers.size not in (1, count):
        raise UserError(f"{name} must be {count} number(s), one per observation, got {given!r:.80}")
    return np.broadcast_to(_finite(name, numbers).ravel(), count)


def _finite(name: str, numbers: Any) -> np.ndarray:
    """Return numbers as an array; refuse NaN and infinity."""
    if not np.isfinite(numbers).all():
        raise UserError(f"{name} holds NaN or infinity")
    return np.asarray(numbers)


def _batch_size(observation: Any) -> int:
    while isinstance(observation, dict | tuple):
        first = next(iter(observation)) if isinstance(observation, dict) else 0
        observation = observation[first]
    return len(observation)


def _first(actions: Any) -> Any:
    """Return the only action of a batch."""
    if isinstance(actions, dict):
        return {name: _first(part) for name, part in actions.items()}
    return tuple(map(_first, actions)) if isinstance(actions, tuple) else actions[0]
