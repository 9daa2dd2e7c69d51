"""Use trained policies without their environment: map observations to actions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium.vector.utils import batch_space, iterate

from agents.evaluate.episodes import PolicyController
from agents.network.noise import action_noise
from agents.network.seeds import PREDICTION_STREAM, stream_seeds
from agents.run.saved import LoadedAgent, Which, load_agent
from envs.vector.spaces import MASK_KEY, ActionDecoder, check_masks, flat_mask
from rl_dist.errors import UserError

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
                all actions.
            reward: [B] reward of the previous step, for a policy trained with --previous_reward.

        Raises:
            ValueError: an argument has the wrong form, or the observation contains NaN or infinity.
        """
        policy = self.agent.policy
        # encode the observation as rows
        leaf = self._encode.leaves[0]
        values = np.asarray(leaf.pick(observation))
        is_single = values.shape == leaf.space.shape
        count = 1 if is_single else len(values)
        rows = self._encode([observation] if is_single else observation, count)  # [B, F]
        masks = [action_masks] if is_single and action_masks is not None else action_masks

        # append the parts of a row that are not in the observation
        starts = np.full(count, episode_start, bool)
        state = self._checked(state, count)
        extras = {
            "previous_action": state[2] * ~starts[:, None],
            "previous_reward": (np.full(count, reward) * ~starts)[:, None],
            MASK_KEY: self._masks(masks, count),
        }
        row = np.concatenate([rows, *(extras[name] for name in self._extras)], axis=1)

        # act
        like = policy.critic_head.weight
        vectors, history = (torch.as_tensor(part).to(like) for part in state[:2])
        controller = PolicyController(policy, self.agent.normalizer, state=vectors, history=history)
        push = None
        if not deterministic:
            place = self._noise_seed, 0, count, self._num_drawn, 1
            push = policy.pushes(action_noise(self._decode.space, *place)[0].to(like))  # [B, A]
            self._num_drawn += 1
        begins = torch.from_numpy(starts).to(like.device)
        obs = torch.from_numpy(row.astype(np.float32)).to(like.device)
        chosen = controller(policy, obs, begins, push).cpu().numpy()
        inputs = self._decode.encode(chosen)[:, : state[2].shape[1]]
        actions = self._decode(chosen)
        if is_single:
            actions = next(iterate(batch_space(self.action_space, 1), actions))
        parts: Any = controller.state, controller.history
        return actions, (*(part.cpu().numpy() for part in parts), inputs)

    def _checked(self, state: State | None, count: int) -> State:
        """Check that the state fits `count` observations; return zeros for None."""
        policy = self.agent.policy
        inputs = torch.zeros(count, self._extras.get("previous_action", 0))
        parts = policy.initial_state(count), policy.empty_history(count), inputs
        zeros = tuple(part.cpu().numpy() for part in parts)
        if state is None:
            return zeros
        expected, given = ([np.shape(part) for part in parts] for parts in (zeros, state))
        if given != expected:
            raise UserError(
                f"the state of {count} observations must have the shapes {expected}, got {given}: "
                "pass what the last predict returned, or None"
            )
        return state

    def _masks(self, masks: Any, count: int) -> np.ndarray:
        """Return masks as rows [B, choices]; None allows all choices."""
        size = self._extras.get(MASK_KEY, 0)
        if masks is None:
            return np.ones((count, size))
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
