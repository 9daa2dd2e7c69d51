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
from envs.vector.layout import Layout
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
        self._own_mask = Layout(self._encode.parts).columns("mask")
        self._noise_seed = stream_seeds(seed, PREDICTION_STREAM, 0, 1)[0]
        self._num_drawn = 0
        self._warned_of_masks = False

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
            state: what the call before returned; None: at the start.
            episode_start: [B] bool, whose state is forgotten first; None: nobody's.
            deterministic: the most likely action; else drawn anew at every call, from numbers that
                no training draws. That is white noise, whatever --noise_color the policy had.
            action_masks: for a policy trained with --info_mask, as its environment's info has it
                (an array, or a tuple of arrays), or one for each observation of a batch; None: all
                count as allowed, with a warning at the first call.
            reward: [B] of the step before, for a policy trained with --previous_reward.

        Raises:
            UserError: an argument that does not fit, or holds NaN or infinity.
        """
        rows, single = self._encoded(observation)  # [B, F]
        count = len(rows)
        begins = False if episode_start is None else episode_start
        start = _for_each(count, "episode_start", begins).astype(bool)
        rewards = _for_each(count, "reward", reward) * ~start
        has_memory = not self.agent.policy.config.stateless
        if state is None and episode_start is not None and has_memory and not start.all():
            text = "predict got no state in the middle of an episode: the policy acts without its "
            warnings.warn(text + "memory; pass what the call before returned", stacklevel=2)
        state = self._checked_state(state, count)
        before = state[2] * ~start[:, None]
        if action_masks is not None:
            action_masks = self._given_masks([action_masks] if single else action_masks, count)
        extras = self._extra_columns(count, action_masks, before, rewards)
        row = np.concatenate([rows, *extras], axis=1)
        actions, after_step = self._act(
            torch.from_numpy(row), state, torch.from_numpy(start), deterministic
        )
        own = self._decode(actions)
        after = self._decode.encode(actions)[:, : before.shape[1]]
        return (_first(own) if single else own), (*after_step, after)

    def _encoded(self, observation: Any) -> tuple[np.ndarray, bool]:
        """Return an observation as rows [B, F], and whether it was a single one."""
        try:
            self._check_shape(observation)
            single = self._is_single(observation)
            batch = [observation] if single else observation
            batch = np.asarray(batch) if single and not _is_nested(observation) else batch
            rows = self._encode(batch, 1 if single else _batch_size(observation))
        except (LookupError, TypeError, ValueError) as error:
            why = (
                f"it has no {error}"
                if isinstance(error, KeyError)
                else one_line(error, named=False)
            )
            if isinstance(observation, tuple) and isinstance(self.observation_space, spaces.Box):
                why = "it is a tuple: of what reset and step return, take the first"
            space = " ".join(str(self.observation_space).split())[:300]
            raise UserError(f"observation does not fit {space}: {why}") from None
        return _finite("observation", rows), single

    def _check_shape(self, observation: Any) -> None:
        """Refuse what is neither one observation nor a batch; parts are checked later."""
        wanted = self.observation_space.shape
        if wanted is None or _is_nested(observation):
            return
        shape = np.shape(observation)
        if shape != wanted and not (shape[:1] > (0,) and shape[1:] == wanted):
            batch = str((0, *wanted)).replace("0", "N", 1)
            raise ValueError(f"its shape is {shape}; one has {wanted}, a batch of N {batch}")

    def _checked_state(self, state: State | None, count: int) -> State:
        """Return the state of so many environments: zeros for None."""
        policy = self.agent.policy
        parts = policy.initial_state(count), policy.empty_history(count)
        inputs = np.zeros((count, self._extras.get("previous_action", 0)), np.float32)
        zeros = (*(part.cpu().numpy() for part in parts), inputs)
        if state is None:
            return zeros
        wanted = [part.shape for part in zeros]
        found = [np.shape(part) for part in state] if isinstance(state, tuple | list) else []
        if found == wanted:
            return tuple(_finite("state", part) for part in state)
        raise UserError(
            f"state does not fit {count} observation(s) of this policy: expected shapes {wanted}, "
            f"got {found}; pass what the last predict returned, or None where a batch begins"
        )

    def _given_masks(self, masks: Any, count: int) -> np.ndarray:
        """Return one mask for each observation as [B, choices], in any form of training's."""
        size = self._extras.get(MASK_KEY)
        if not size:
            raise UserError("action_masks: this policy was trained without --info_mask")
        try:
            given = np.array([flat_mask(mask) for mask in masks], np.float32)
            if len(given) != count > 1:
                raise ValueError(f"there are {len(given)} masks")
            given = given.reshape(count, size)
            check_masks(given, self._decode.sizes)
        except (TypeError, ValueError) as error:
            wanted = f"{count} mask(s) of {size} numbers, one per option of each choice"
            why = one_line(error, named=False)
            raise UserError(f"action_masks must be {wanted}: {why}") from None
        return given

    def _extra_columns(
        self, count: int, masks: np.ndarray | None, action: np.ndarray, reward: np.ndarray
    ) -> list[np.ndarray]:
        """Return what a row has beyond the observation, each [B, n] float32."""
        columns = {"previous_action": action}
        if size := self._extras.get(MASK_KEY):
            if masks is None and not self._warned_of_masks:
                self._warned_of_masks = True
                text = "predict got no action_masks: all actions count as allowed, though this "
                text += "policy was trained with --info_mask; pass action_masks=info['action_mask']"
                warnings.warn(text, stacklevel=3)
            columns[MASK_KEY] = np.ones((count, size)) if masks is None else masks
        columns["previous_reward"] = reward[:, None]
        return [columns[name].astype(np.float32) for name in self._extras]

    def _act(
        self, obs: Tensor, state: State, start: Tensor, deterministic: bool
    ) -> tuple[Tensor, State]:
        policy, normalizer = self.agent.policy, self.agent.normalizer
        device, dtype = policy.critic_head.weight.device, policy.critic_head.weight.dtype
        lstm_state, history = (torch.as_tensor(part).to(device, dtype) for part in state[:2])
        obs, start = obs.to(device), start.to(device)
        history = history * ~start[:, None, None]
        seen = policy_input(normalizer, history, obs, lstm_state.dtype)
        noise = None
        if not deterministic:
            place = (self._noise_seed, 0, len(obs), self._num_drawn, 1)
            drawn = action_noise(self._decode.space, *place)
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
