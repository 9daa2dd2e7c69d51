"""Adapt a numpy vector environment to the learner's TorchEnv interface."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from envs.vector.batched import has_snapshots
from envs.vector.guards import MAX_REWARD, HangWatch, end_process
from envs.vector.layout import Layout, Part, StepResult
from envs.vector.spaces import (
    MASK_KEY,
    ActionDecoder,
    ObservationEncoder,
    RowFaultError,
    Space,
    to_json,
)
from envs.vector.tensors import TensorVectorEnv, step_result, to_tensors

_LOGGER = logging.getLogger(__name__)
_STEP_KEY = "lifetime_step"
# Per environment: the number of restarts, and the seed of the last seeded reset.
LIFE = [("restarts", "i8"), ("life_seed", "i8")]
Arrays = tuple[np.ndarray, ...]  # obs, rewards, terminated, truncated, final_obs


@cache
def warn_once(message: str) -> None:
    """Log a warning, but log the same text only once."""
    _LOGGER.warning("%s", message)


@dataclass(eq=False)
class TorchVectorEnv(TensorVectorEnv):
    """Adapts a numpy vector environment to the TorchEnv interface.

    The adapter checks everything that the environments return and watches how long each call
    takes. The vector environment must use autoreset SAME_STEP and accept one seed per environment.
    """

    env: Any  # the vector environment, or the list of environments of `OneByOne`
    _: KW_ONLY
    env_id: str
    make: Any = None  # makes the replacement of a failed environment
    env_offset: int = 0
    device: Any = "cpu"
    kind: str = "environment"  # first word of every message about an environment
    end: Callable[[str], None] = end_process  # ends the process if a call cannot be interrupted
    # Reports progress. It runs before every call and, in a watcher thread, during long calls.
    heartbeat: Callable[[], None] = lambda: None
    # The flags below are those of `envs.task.TaskConfig`.
    env_timeout: float = 0.0
    env_restarts: int = 0
    info_mask: bool = False
    previous_action: bool = False
    previous_reward: bool = False

    def __post_init__(self) -> None:
        env = self.env
        self._set_up(env.num_envs, env.single_observation_space, env.single_action_space)
        self.can_snapshot = has_snapshots(env)

    def _set_up(self, num_envs: int, observations: Space, actions: Space) -> None:
        self.num_envs = num_envs
        self.device = torch.device(self.device)
        self.lives = np.zeros(num_envs, LIFE)
        self.lifetime_step = 0
        self.watch = HangWatch(self.env_timeout, self._describe, self.end, self.heartbeat)
        self.decoder = ActionDecoder(actions, self.env_id)
        self.encoder = ObservationEncoder(observations, self.env_id, self.decoder.sizes)
        self.spaces_json = to_json(observations, actions)

        # layout of the row that the learner sees
        parts = list(self.encoder.parts)
        mask_size = self.decoder.mask_size
        if self.info_mask:
            if not mask_size or any(part.kind == "mask" for part in parts):
                raise ValueError(
                    f"info_mask does nothing with environment {self.env_id}: its actions have no "
                    f"choices, or its observations hold the {MASK_KEY}; omit it"
                )
            parts.append(Part(MASK_KEY, "mask", (mask_size,)))
        self.row_size = sum(part.size for part in parts)  # without the previous action and reward
        if self.previous_action:
            size = mask_size or math.prod(self.decoder.space.shape or ())
            parts.append(Part("previous_action", "plain", (size,)))
        if self.previous_reward:
            parts.append(Part("previous_reward", "vector", (1,)))
        self.set_spaces(Layout(tuple(parts)), self.decoder.space)
        for leaf in self.encoder.leaves:
            if leaf.part.kind == "vector" and len(leaf.space.shape) > 2 and self.env_offset == 0:
                warn_once(
                    f"environment {self.env_id}: {leaf.part.name} {list(leaf.space.shape)} of "
                    f"{leaf.space.dtype} is read as numbers without a CNN, which reads uint8 images"
                )

    @property
    def restarts(self) -> list[int]:
        """Number of restarts of each environment, [B]."""
        return self.lives["restarts"].tolist()

    def reset(
        self, *, seed: Any = None, options: dict[str, Any] | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        """Start all environments; new seeds also set their lifetime step to 0."""
        if seed is not None:
            self.lives["life_seed"] = seed
            self.lifetime_step = 0
        obs = np.zeros((self.num_envs, self.layout.size), np.float32)
        obs[:, : self.row_size] = self._call_reset(seed)
        return to_tensors([obs], self.device)[0], {}

    def step(
        self,
        actions: Tensor,  # [B] int64, or [B, A] float
    ) -> StepResult:
        """Step all environments (see `TorchEnv.step`) and return newly allocated tensors."""
        numpy_actions = self.decoder(actions)
        self.lifetime_step += 1
        obs, rewards, terminated, truncated, final_obs = self._call_step(numpy_actions)
        if self.previous_action or self.previous_reward:
            columns = [self.decoder.encode(actions)] * self.previous_action
            columns += [rewards[:, None].astype(np.float32)] * self.previous_reward
            previous = np.concatenate(columns, axis=1)
            continues = ~(terminated | truncated)[:, None]  # [B, 1]; new episodes start with 0
            obs = np.concatenate([obs, previous * continues], axis=1)
            final_obs = np.concatenate([final_obs, previous], axis=1)
        return step_result([rewards, obs, final_obs, terminated, truncated], self.device)

    def _describe(self, row: int | None, problem: str) -> str:
        first = self.env_offset
        number = f"one of {first}..{first + self.num_envs - 1}" if row is None else str(first + row)
        step = self.lifetime_step
        return f"{self.kind} {self.env_id} number {number} at its step {step}: {problem}"

    def get_state(self) -> dict[str, Tensor]:
        """Return a complete snapshot of the environments, see `TorchEnv.get_state`."""
        tensors = {_STEP_KEY: torch.full((self.num_envs,), self.lifetime_step)}
        for name, values in self.watch.call(None, self._call_get_state).items():
            stacked = np.stack(values)
            target = np.float64 if stacked.dtype.kind == "f" else np.int64
            tensors[name] = torch.from_numpy(stacked.astype(target, casting="safe"))
        return tensors

    def set_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore a snapshot from this environment or from one with the same settings."""
        # some environments create their state at the first reset
        self.reset(seed=[0] * self.num_envs)
        arrays = {name: tensor.numpy().copy() for name, tensor in state.items()}
        self.lifetime_step = int(arrays.pop(_STEP_KEY)[0])
        self.watch.call(None, self._call_set_state, arrays)

    def close_extras(self, **kwargs: Any) -> None:
        """Close the environments; log a failure instead of raising it."""
        self.watch.close_env(None, self.env)
        self.watch.close()

    # ---- calls into the vector environment

    def _call_reset(self, seeds: Any) -> np.ndarray:
        return self.watch.call(None, self._reset_batch, seeds)

    def _reset_batch(self, seeds: Any) -> np.ndarray:
        obs, _ = self.env.reset(seed=seeds)
        return self.encoder(obs, self.num_envs)

    def _call_step(self, actions: Any) -> Arrays:
        return self.watch.call(None, self._step_batch, actions)

    def _step_batch(self, actions: Any) -> Arrays:
        raw_obs, raw_rewards, *flags, info = self.env.step(actions)
        obs = self.encoder(raw_obs, self.num_envs)
        rewards = np.array(raw_rewards, np.float64).reshape(self.num_envs)
        terminated, truncated = (np.array(flag, bool).reshape(self.num_envs) for flag in flags)
        usable = np.abs(rewards) <= MAX_REWARD  # NaN also gives False
        if not usable.all():
            first = int(usable.argmin())
            raise RowFaultError(first, f"reward is {rewards[first]}")
        final_obs = obs.copy()
        ended = np.flatnonzero(terminated | truncated)
        if len(ended):
            try:
                finals = [info["final_obs"][row] for row in ended]
                final_obs[ended] = self.encoder(finals, len(ended))
            except RowFaultError as fault:
                raise RowFaultError(int(ended[fault.row or 0]), f"final {fault}") from None
        return obs, rewards, terminated, truncated, final_obs

    def _call_get_state(self) -> dict[str, Any]:
        return self.env.get_state()

    def _call_set_state(self, state: dict[str, np.ndarray]) -> None:
        self.env.set_state(state)
