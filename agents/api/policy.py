"""Use trained policies without their environment: map observations to actions."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agents.network.noise import action_noise
from agents.network.seeds import PREDICTION_STREAM, stream_seeds
from agents.rollout import policy_input, shift_history
from agents.run.saved import LoadedAgent, Which, load_agent
from envs.vector.spaces import MASK_KEY, ActionDecoder, check_masks, flat_mask
from rl_dist.errors import UserError, one_line

# The state of a policy: recurrent state [B, S, H]; earlier observations of the window [B, n-1, F];
# previous action, encoded as an input [B, D], where D is 0 without --previous_action.
State = tuple[np.ndarray, ...]


class LoadedPolicy:
    """A trained policy that keeps no state: `predict` takes it and returns the next.

    Observations and actions have the form of the environment in which the policy was trained:
    see `observation_space` and `action_space`.
    """

    def __init__(self, agent: LoadedAgent, seed: int = 0) -> None:
        self.agent = agent
        self.observation_space, self.action_space = agent.spaces
        self._decode = ActionDecoder(self.action_space, "of this policy")
        self._encode = agent.encoder()
        # Parts of a row that are not in the observation, such as the previous action. Observations
        # of the trading environment are complete rows.
        parts = agent.policy.layout.parts
        num_observed = len(self._encode.parts) if agent.spaces_json else len(parts)
        self._extras = {part.name: part.size for part in parts[num_observed:]}
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
        """Return the action for an observation or a batch, and the next state.

        The signature follows sb3-contrib, so that sb3's `evaluate_policy` accepts this object.

        Args:
            observation: one element of `observation_space`, or a batch of them.
            state: the state that the previous call returned; None at the start.
            episode_start: [B] bool, True where an episode begins; there the state is reset.
            deterministic: True takes the most likely action, False samples one. Samples use white
                noise, whatever --noise_color was, and never repeat the noise of training.
            action_masks: for a policy trained with --info_mask: the mask from the environment's
                info (an array, or a tuple of arrays), or a list of masks for a batch. None allows
                all actions and gives a warning.
            reward: [B] reward of the previous step, for a policy trained with --previous_reward.

        Raises:
            ValueError: an argument has the wrong form, or contains NaN or infinity.
        """
        rows, is_single = self._encoded(observation)  # [B, F]
        count = len(rows)
        forgets = False if episode_start is None else episode_start
        start = np.broadcast_to(np.ravel(forgets).astype(bool), count).copy()
        rewards = np.broadcast_to(np.ravel(reward), count) * ~start
        state = self._fitting(state, count)
        if action_masks is None and MASK_KEY in self._extras:
            text = "predict got no action_masks: all actions count as allowed, though this policy "
            text += "was trained with --info_mask; pass action_masks=info['action_mask']"
            warnings.warn(text, stacklevel=2)
        masks = [action_masks] if is_single and action_masks is not None else action_masks
        extras = {
            "previous_action": state[2] * ~start[:, None],
            "previous_reward": rewards[:, None],
            MASK_KEY: self._masks(masks, count),
        }
        columns = [rows, *(extras[name].astype(np.float32) for name in self._extras)]
        row = np.concatenate(columns, axis=1)
        if not all(np.isfinite(part).all() for part in (row, *state)):
            raise UserError("observation, reward or state holds NaN or infinity")
        actions, state = self._act(torch.from_numpy(row), state, start, deterministic)
        return (_first(actions) if is_single else actions), state

    def _act(
        self, obs: Tensor, state: State, start: np.ndarray, deterministic: bool
    ) -> tuple[Any, State]:
        """Return actions in the environment's units, and the next state."""
        policy = self.agent.policy
        like = policy.critic_head.weight
        lstm_state, history = (torch.as_tensor(part).to(like) for part in state[:2])
        obs = obs.to(like.device)
        begins = torch.from_numpy(start).to(like.device)
        history = history * ~begins[:, None, None]
        seen = policy_input(self.agent.normalizer, history, obs, like.dtype)
        push = None
        if not deterministic:
            place = (self._noise_seed, 0, len(obs), self._num_drawn, 1)
            noise = action_noise(self._decode.space, *place)[0].to(like)  # [B, A]
            push = policy.pushes(noise)
            self._num_drawn += 1
        actions, _, _, lstm_state = policy.act(seen, lstm_state, begins, push)
        inputs = self._decode.encode(actions)[:, : state[2].shape[1]]
        after = lstm_state.cpu().numpy(), shift_history(history, seen).cpu().numpy(), inputs
        return self._decode(actions), after

    def _encoded(self, observation: Any) -> tuple[np.ndarray, bool]:
        """Encode an observation or a batch as rows [B, F].

        The second value is True for a single observation.
        """
        first = self._encode.leaves[0]
        space = first.space
        try:
            shape = np.shape(first.pick(observation))
            is_single = shape == space.shape
            if not is_single and (shape[1:] != space.shape or not shape[0]):
                raise ValueError(f"its shape is {shape}; a single one has {space.shape}")
            batch = [observation] if is_single else observation
            return self._encode(batch, 1 if is_single else shape[0]), is_single
        except (LookupError, TypeError, ValueError) as error:
            text = " ".join(str(self.observation_space).split())[:300]
            why = one_line(error, named=isinstance(error, KeyError))
            raise UserError(f"observation does not fit {text}: {why}") from None

    def _fitting(self, state: State | None, count: int) -> State:
        """Check that the state fits `count` observations; return zeros for None."""
        policy = self.agent.policy
        parts = policy.initial_state(count), policy.empty_history(count)
        inputs = np.zeros((count, self._extras.get("previous_action", 0)), np.float32)
        zeros = (*(part.cpu().numpy() for part in parts), inputs)
        if state is None:
            return zeros
        expected, given = ([np.shape(part) for part in parts] for parts in (zeros, state))
        if given != expected:
            raise UserError(
                f"state does not fit {count} observation(s) of this policy: expected shapes "
                f"{expected}, got {given}; pass what the last predict returned, or None at a start"
            )
        return state

    def _masks(self, masks: Any, count: int) -> np.ndarray:
        """Return masks as rows [B, choices]; None allows all choices."""
        size = self._extras.get(MASK_KEY, 0)
        if masks is None:
            return np.ones((count, size))
        if not size:
            raise UserError("action_masks: this policy was trained without --info_mask")
        rows = np.array([flat_mask(mask) for mask in masks], np.float32).reshape(count, size)
        check_masks(rows, self._decode.sizes)
        return rows


def load_policy(
    path: str | Path,
    which: Which = "",
    device: str | torch.device = "cpu",
    seed: int = 0,
    core: str | None = None,
) -> LoadedPolicy:
    """Load the policy of a run directory or checkpoint file.

    Args:
        which: checkpoint of a run directory, best or last; "": see `load_agent`.
        device: device that computes the actions.
        seed: seed of the noise that `predict` uses with deterministic=False.
        core: module:Class, as given to --core in training. You need it if the run directory is not
            yours, or if the checkpoint was copied without its run directory.

    Raises:
        UserError: the checkpoint is missing or damaged, or `core` is needed.
    """
    return LoadedPolicy(load_agent(path, device, which, core), seed)


def _first(actions: Any) -> Any:
    """Return the action in a batch of one."""
    if isinstance(actions, dict):
        return {name: _first(part) for name, part in actions.items()}
    return tuple(map(_first, actions)) if isinstance(actions, tuple) else actions[0]
