"""The adapter that lets numpy environments, or a batch of them, speak torch."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from functools import cache
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import VectorEnv
from gymnasium.vector.utils import batch_space, iterate
from torch import Tensor

from envs.vector.batched import has_snapshots
from envs.vector.guards import (
    MAX_REWARD,
    EnvironmentFaultError,
    GuardedEnv,
    HangWatch,
    end_process,
)
from envs.vector.layout import Layout, Part
from envs.vector.spaces import (
    MASK_KEY,
    ActionDecoder,
    ObservationEncoder,
    RowFaultError,
    to_json,
)
from envs.vector.tensors import TensorVectorEnv, to_tensors

_LOGGER = logging.getLogger(__name__)
_STEP_KEY = "lifetime_step"
Arrays = tuple[np.ndarray, ...]  # obs, rewards, terminated, truncated and final_obs


@cache
def _warn_once(message: str) -> None:
    _LOGGER.warning("%s", message)


@dataclass
class _OneByOne:
    """Environments that step one after the other, each behind a guard."""

    guards: list[GuardedEnv]
    action_space: gymnasium.Space[Any]  # of the batch

    @property
    def can_snapshot(self) -> bool:
        return all(guard.can_snapshot for guard in self.guards)

    def reset(self, seeds: Sequence[int | None]) -> np.ndarray:
        return np.stack([g.reset(seed) for g, seed in zip(self.guards, seeds, strict=True)])

    def step(self, actions: Any) -> Arrays:
        outcomes = []
        for guard, action in zip(self.guards, iterate(self.action_space, actions), strict=True):
            final_row, reward, terminated, truncated = guard.step(action)
            row = guard.reset() if terminated or truncated else final_row
            outcomes.append((row, reward, terminated, truncated, final_row))
        return tuple(np.array(column) for column in zip(*outcomes, strict=True))

    def get_state(self) -> dict[str, Any]:
        states = [guard.get_state() for guard in self.guards]
        return {name: [state[name] for state in states] for name in states[0]}

    def set_state(self, state: Mapping[str, np.ndarray]) -> None:
        for row, guard in enumerate(self.guards):
            rows = {name: values[row] for name, values in state.items()}
            guard.set_state({n: v.item() if v.ndim == 0 else v.copy() for n, v in rows.items()})

    def close(self) -> None:
        for guard in self.guards:
            guard.watch.close_env(guard.row, guard.env)


@dataclass
class _Batch:
    """Adapter of a SAME_STEP vector environment with one seed per environment."""

    env: Any
    encoder: ObservationEncoder
    watch: HangWatch

    guards = ()  # no environment here can be rebuilt

    @property
    def can_snapshot(self) -> bool:
        return has_snapshots(self.env)

    def reset(self, seeds: Sequence[int | None]) -> np.ndarray:
        given = None if seeds[0] is None else list(seeds)
        return self.watch.call(None, lambda: self._rows(self.env.reset(seed=given)[0]))

    def _rows(self, obs: Any) -> np.ndarray:
        return self.encoder(obs, self.env.num_envs)

    def step(self, actions: Any) -> Arrays:
        return self.watch.call(None, self._step, actions)

    def _step(self, actions: Any) -> Arrays:
        raw_obs, raw_rewards, *flags, info = self.env.step(actions)
        count = self.env.num_envs
        obs = self._rows(raw_obs)
        rewards = np.array(raw_rewards, np.float64).reshape(count)
        terminated, truncated = (np.array(flag, np.bool_).reshape(count) for flag in flags)
        usable = np.abs(rewards) <= MAX_REWARD  # NaN is not
        if not usable.all():
            first = int(usable.argmin())
            raise RowFaultError(first, f"reward is {rewards[first]}")
        final_obs = obs.copy()
        for row in np.flatnonzero(terminated | truncated):
            try:
                final_obs[row] = self.encoder([info["final_obs"][row]], 1)[0]
            except RowFaultError as fault:
                raise RowFaultError(int(row), f"final {fault}") from None
        return obs, rewards, terminated, truncated, final_obs

    def get_state(self) -> dict[str, Any]:
        return self.watch.call(None, self.env.get_state)

    def set_state(self, state: Mapping[str, np.ndarray]) -> None:
        self.watch.call(None, self.env.set_state, state)

    def close(self) -> None:
        self.watch.close_env(None, self.env)


@dataclass(eq=False)
class TorchVectorEnv(TensorVectorEnv):
    """Numpy environments as rows and tensors, checked, watched and made again."""

    # the environments, or a SAME_STEP batch of them that takes one seed for each
    env: Any
    _: KW_ONLY
    env_id: str
    make: Any = None  # makes an environment again, used with `env_restarts`
    env_offset: int = 0
    device: Any = "cpu"
    kind: str = "environment"  # first word of messages about it
    end: Callable[[str], None] = end_process  # ends the process if a call cannot be interrupted
    # reports progress: at every call and, from a thread, during a call
    heartbeat: Callable[[], None] = lambda: None
    # see `envs.task.TaskConfig`
    env_timeout: float = 0.0
    env_restarts: int = 0
    info_mask: bool = False
    previous_action: bool = False
    previous_reward: bool = False

    def __post_init__(self) -> None:
        self.device = torch.device(self.device)
        self.lifetime_step = 0
        self._metrics: dict[str, tuple[float, int]] = {}
        self.watch = HangWatch(self.env_timeout, self._describe, self.end, self.heartbeat)

        # the spaces of one environment
        is_batch = isinstance(self.env, VectorEnv)
        single = self.env if is_batch else self.env[0]
        prefix = "single_" * is_batch
        observations = getattr(single, f"{prefix}observation_space")
        actions = getattr(single, f"{prefix}action_space")
        self.source_spaces = (observations, actions)
        self._decoder = ActionDecoder(actions, self.env_id)
        mask_sizes = self._decoder.sizes
        encoder = ObservationEncoder(observations, self.env_id, mask_sizes.tolist())
        self.spaces_json = to_json(observations, actions)

        # the environments
        self._envs: _OneByOne | _Batch
        if is_batch:
            self.num_envs = self.env.num_envs
            self._envs = _Batch(self.env, encoder, self.watch)
        else:
            self.num_envs = len(self.env)
            guards = [
                GuardedEnv(
                    env=env,
                    make=self.make,
                    row=row,
                    max_restarts=self.env_restarts,
                    watch=self.watch,
                    encoder=encoder,
                    mask_sizes=mask_sizes if self.info_mask else mask_sizes[:0],
                    on_metric=self._add_metric,
                )
                for row, env in enumerate(self.env)
            ]
            self._envs = _OneByOne(guards, batch_space(actions, len(guards)))
        self.can_snapshot = self._envs.can_snapshot

        # the learner's view
        parts = list(encoder.parts)
        mask_size = self._decoder.mask_size
        if self.info_mask:
            if not mask_size or any(part.kind == "mask" for part in parts):
                raise ValueError(
                    f"info_mask does nothing with environment {self.env_id}: its actions have no "
                    f"choices, or its observations hold the {MASK_KEY}; omit it"
                )
            parts.append(Part(MASK_KEY, "mask", (mask_size,)))
        self._row_size = sum(part.size for part in parts)  # without the previous action and reward
        if self.previous_action:
            size = mask_size or math.prod(self._decoder.space.shape or ())
            parts.append(Part("previous_action", "plain", (size,)))
        if self.previous_reward:
            parts.append(Part("previous_reward", "vector", (1,)))
        self.set_spaces(Layout(tuple(parts)), self._decoder.space)
        unbounded = "its actions have no bounds: it receives the policy's, about -1 to 1 at first"
        for warning in encoder.warnings + [unbounded] * (not self._decoder.is_bounded):
            if self.env_offset == 0:  # one rank is enough
                _warn_once(f"environment {self.env_id}: {warning}")

    @property
    def guards(self) -> Sequence[GuardedEnv]:
        """The environments that step one by one; none in a batch."""
        return self._envs.guards

    @property
    def restarts(self) -> list[int]:
        """Number of times that each environment was made again, [B]."""
        return [guard.restarts for guard in self.guards] or [0] * self.num_envs

    @property
    def life_seeds(self) -> list[int]:
        """The seed with which each environment's life began, [B]; 0 in a batch."""
        return [guard.life_seed for guard in self.guards] or [0] * self.num_envs

    def reset(
        self, *, seed: Any = None, options: dict[str, Any] | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        """Start all environments; with one seed for each they begin new lives at step 0."""
        if seed is not None:
            self.lifetime_step = 0
        rows = self._located(self._envs.reset, seed or [None] * self.num_envs)
        start = np.zeros((self.num_envs, self.layout.size - self._row_size), np.float32)
        return to_tensors([np.concatenate([rows, start], axis=1)], self.device)[0], {}

    def begin_again(self, rows: np.ndarray) -> None:
        """Replace the environments of a dead process; their next step is truncated.

        `rows` [B] are their rows in the shared memory, see `envs.workers.worker.row_fields`.
        """
        self.lifetime_step = int(rows["lifetime_step"][0])
        for guard, row in zip(self.guards, rows, strict=True):
            last_row = row["obs"][: self._row_size].copy()
            args = int(row["life_seeds"]), int(row["restarts"]), last_row
            self._located(guard.begin_again, *args)

    def step(
        self,
        actions: Tensor,  # [B] int64, or [B, A] float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
        """Step all environments, see `TorchEnv.step`; all tensors are fresh."""
        numpy_actions = self._decoder(actions)
        self.lifetime_step += 1
        arrays = self._located(self._envs.step, numpy_actions)
        if self.previous_action or self.previous_reward:
            obs, rewards, terminated, truncated, final_obs = arrays
            columns = [self._decoder.encode(actions)] * self.previous_action
            columns += [rewards[:, None].astype(np.float32)] * self.previous_reward
            before = np.concatenate(columns, axis=1)
            goes_on = ~(terminated | truncated)[:, None]  # [B, 1]
            obs = np.concatenate([obs, before * goes_on], axis=1)
            final_obs = np.concatenate([final_obs, before], axis=1)
            arrays = obs, rewards, terminated, truncated, final_obs
        obs, rewards, terminated, truncated, final = to_tensors(arrays, self.device)
        return obs, rewards, terminated, truncated, {"final_obs": final}

    def _add_metric(self, name: str, value: Any) -> None:
        """Add one of the numbers in info["metrics"]."""
        number = math.nan
        with suppress(TypeError, ValueError):
            number = float(np.asarray(value).item())
        if math.isfinite(number):
            total, count = self._metrics.get(name, (0.0, 0))
            self._metrics[name] = total + number, count + 1
        else:
            _warn_once(f"info['metrics'][{name!r}] is left out when it is not one finite number")

    def take_metrics(self) -> dict[str, tuple[float, int]]:
        """Return sum and count of every metric since the last call."""
        metrics = self._metrics
        self._metrics = {}
        return metrics

    def _located(self, call: Callable[..., Any], *args: Any) -> Any:
        """Run a call into the environments; EnvironmentFaultError names the one that fails."""
        try:
            return call(*args)
        except RowFaultError as fault:
            message = self._describe(fault.row, str(fault))
            raise EnvironmentFaultError(message) from fault.__cause__

    def _describe(self, row: int | None, problem: str) -> str:
        first = self.env_offset
        number = f"one of {first}..{first + self.num_envs - 1}" if row is None else str(first + row)
        step = self.lifetime_step
        return f"{self.kind} {self.env_id} number {number} at its step {step}: {problem}"

    def get_state(self) -> dict[str, Tensor]:
        """Return all the future depends on: CPU tensors [B, ...], float64 or int64."""
        if not self.can_snapshot:
            raise ValueError(
                f"environment {self.env_id} cannot be saved: it has no get_state and set_state"
            )
        tensors = {}
        for name, values in self._located(self._envs.get_state).items():
            stacked = np.stack(values)
            target = np.float64 if stacked.dtype.kind == "f" else np.int64
            tensors[name] = torch.from_numpy(stacked.astype(target, casting="safe"))
        return tensors | {_STEP_KEY: torch.full((self.num_envs,), self.lifetime_step)}

    def set_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue exactly where `get_state` was called, on this or an equal environment."""
        self.reset(seed=[0] * self.num_envs)  # environments build things at their first reset
        arrays = {name: tensor.numpy().copy() for name, tensor in state.items()}
        self.lifetime_step = int(arrays.pop(_STEP_KEY)[0])
        self._located(self._envs.set_state, arrays)

    def close_extras(self, **kwargs: Any) -> None:
        """Close the environments; nothing depends on its success."""
        self._envs.close()
        self.watch.close()
