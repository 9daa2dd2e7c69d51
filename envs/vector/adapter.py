"""The adapter that lets numpy environments, or a batch of them, speak torch."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode, VectorEnv
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
from envs.vector.layout import Layout, Part, TorchEnv
from envs.vector.spaces import (
    MASK_KEY,
    ActionDecoder,
    ObservationEncoder,
    RowFaultError,
    to_json,
)

_LOGGER = logging.getLogger(__name__)
_STEP_KEY = "lifetime_step"
Arrays = tuple[np.ndarray, ...]  # obs, rewards, terminated, truncated and final_obs


def to_tensors(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Return arrays on a device; a GPU gets them by one copy that nobody waits for."""
    if device.type != "cuda":
        return [torch.from_numpy(array) for array in arrays]
    order = sorted(range(len(arrays)), key=lambda i: -arrays[i].itemsize)  # so each is aligned
    raw = [np.ascontiguousarray(arrays[i]).reshape(-1).view(np.uint8) for i in order]
    packed = torch.from_numpy(np.concatenate(raw)).pin_memory().to(device, non_blocking=True)
    parts = dict(zip(order, packed.split([len(each) for each in raw]), strict=True))
    kinds = [torch.from_numpy(array[:0]).dtype for array in arrays]
    return [parts[i].view(kinds[i]).view(array.shape) for i, array in enumerate(arrays)]


@cache
def _warn_once(message: str) -> None:
    _LOGGER.warning("%s", message)


class _OneByOne:
    """Environments that step one after the other, each behind a guard."""

    def __init__(self, guards: list[GuardedEnv], action_space: gymnasium.Space[Any]) -> None:
        self.guards = guards
        self._action_space = action_space  # of the batch

    def reset(self, seeds: Sequence[int | None]) -> np.ndarray:
        return np.stack([g.reset(seed) for g, seed in zip(self.guards, seeds, strict=True)])

    def step(self, actions: Any) -> Arrays:
        pairs = zip(self.guards, iterate(self._action_space, actions), strict=True)
        outcomes = []
        for guard, action in pairs:
            final_row, reward, terminated, truncated = guard.step(action)
            row = guard.reset() if terminated or truncated else final_row
            outcomes.append((row, reward, terminated, truncated, final_row))
        rows, rewards, terminated, truncated, final_rows = zip(*outcomes, strict=True)
        flags = np.array(terminated), np.array(truncated)
        return np.stack(rows), np.array(rewards), *flags, np.stack(final_rows)

    def get_state(self) -> dict[str, Any]:
        states = [guard.get_state() for guard in self.guards]
        return {name: [state[name] for state in states] for name in states[0]}

    def set_state(self, state: Mapping[str, np.ndarray]) -> None:
        for row, guard in enumerate(self.guards):
            rows = {name: values[row] for name, values in state.items()}
            guard.set_state({n: v.item() if v.ndim == 0 else v.copy() for n, v in rows.items()})

    def close(self) -> None:
        for guard in self.guards:
            guard.close()


class _Batch:
    """A vector environment of SAME_STEP that takes one seed per environment."""

    def __init__(
        self, env: VectorEnv[Any, Any, Any], encoder: ObservationEncoder, watch: HangWatch
    ) -> None:
        self.guards: list[GuardedEnv] = []
        self.env = env
        self._encoder = encoder
        self._watch = watch

    def reset(self, seeds: Sequence[int | None]) -> np.ndarray:
        given = None if seeds[0] is None else list(seeds)
        return self._watch.call(None, self._reset, given)

    def _reset(self, seeds: Any) -> np.ndarray:
        return self._encoder(self.env.reset(seed=seeds)[0], self.env.num_envs)

    def step(self, actions: Any) -> Arrays:
        return self._watch.call(None, self._step, actions)

    def _step(self, actions: Any) -> Arrays:
        raw, raw_rewards, raw_terminated, raw_truncated, info = self.env.step(actions)
        count = self.env.num_envs
        obs = self._encoder(raw, count)
        rewards = np.array(raw_rewards, np.float64).reshape(count)
        terminated = np.array(raw_terminated, np.bool_).reshape(count)
        truncated = np.array(raw_truncated, np.bool_).reshape(count)
        usable = np.abs(rewards) <= MAX_REWARD  # NaN is not
        if not usable.all():
            first = int(usable.argmin())
            raise RowFaultError(first, f"reward is {rewards[first]}")
        final_obs = obs.copy()
        for row in np.flatnonzero(terminated | truncated):
            try:
                final_obs[row] = self._encoder([info["final_obs"][row]], 1)[0]
            except RowFaultError as fault:
                raise RowFaultError(int(row), f"final {fault}") from None
        return obs, rewards, terminated, truncated, final_obs

    def get_state(self) -> dict[str, Any]:
        return self._watch.call(None, self.env.get_state)  # type: ignore[attr-defined]

    def set_state(self, state: Mapping[str, np.ndarray]) -> None:
        self._watch.call(None, self.env.set_state, state)  # type: ignore[attr-defined]

    def close(self) -> None:
        self._watch.call(None, self.env.close)


class TorchVectorEnv(VectorEnv[Tensor, Tensor, Tensor], TorchEnv):
    """Numpy environments as rows and tensors, checked, watched and made again."""

    metadata = {"render_modes": [], "autoreset_mode": AutoresetMode.SAME_STEP}

    def __init__(
        self,
        envs: VectorEnv[Any, Any, Any] | Sequence[gymnasium.Env[Any, Any]],
        *,
        env_id: str,
        make: Any = None,
        env_offset: int = 0,
        device: str | torch.device = "cpu",
        env_timeout: float = 0.0,
        env_restarts: int = 0,
        end: Callable[[str], None] = end_process,
        heartbeat: Callable[[], None] = lambda: None,
        kind: str = "environment",
        info_mask: bool = False,
        previous_action: bool = False,
        previous_reward: bool = False,
    ) -> None:
        """Wrap environments, or a SAME_STEP batch of them that takes one seed for each.

        Options that are not below are fields of `envs.task.TaskConfig`.

        Args:
            make: function that makes an environment again, used with `env_restarts`.
            end: ends the process if a call that hangs cannot be interrupted.
            heartbeat: reports that work goes on: at every call and, from a thread, during one.
            kind: first word of messages about it.
        """
        self.env = envs
        self.env_id = env_id
        self.kind = kind
        self.env_offset = env_offset
        self.device = torch.device(device)
        self._is_started = False
        self._lifetime_step = 0
        self._metrics: dict[str, tuple[float, int]] = {}
        self._previous_action = previous_action
        self._previous_reward = previous_reward
        self.watch = HangWatch(env_timeout, self._describe, end, heartbeat)

        # what the environments take and give
        first: Any = envs if isinstance(envs, VectorEnv) else envs[0]
        single = "single_" * isinstance(envs, VectorEnv)
        self.source_spaces = tuple(
            getattr(first, f"{single}{name}_space") for name in ("observation", "action")
        )
        self._decoder = ActionDecoder(self.source_spaces[1], env_id)
        sizes = self._decoder.sizes.tolist()
        encoder = ObservationEncoder(self.source_spaces[0], env_id, sizes)
        self.spaces_json = to_json(*self.source_spaces)
        self._warn_of_spaces(encoder)

        # the environments
        self._envs: _OneByOne | _Batch
        if isinstance(envs, VectorEnv):
            self.num_envs = envs.num_envs
            self._envs = _Batch(envs, encoder, self.watch)
            self.can_snapshot = has_snapshots(envs)
        else:
            self.num_envs = len(envs)
            sizes_in_info, add = sizes if info_mask else (), self._add_metric
            guards = [
                GuardedEnv(env, make, row, env_restarts, self.watch, encoder, sizes_in_info, add)
                for row, env in enumerate(envs)
            ]
            self._envs = _OneByOne(guards, batch_space(self.source_spaces[1], self.num_envs))
            self.can_snapshot = all(guard.can_snapshot for guard in guards)

        # what the learner sees
        self._row_size = sum(part.size for part in encoder.parts) + info_mask * sum(sizes)
        self.layout = Layout((*encoder.parts, *self._extra_parts(encoder, info_mask)))
        self.single_observation_space = Box(-np.inf, np.inf, (self.layout.size,))
        self.single_action_space = self._decoder.space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)

    def _warn_of_spaces(self, encoder: ObservationEncoder) -> None:
        """Warn, once for all ranks, of spaces that are read in an unexpected way."""
        warnings = [f": {warning}" for warning in encoder.warnings]
        if not self._decoder.is_bounded:
            warnings.append(
                " has actions without bounds: it receives the policy's as they are, about -1 to 1 "
                "at first; gymnasium.wrappers.RescaleAction gives them bounds"
            )
        for warning in warnings if self.env_offset == 0 else ():
            _warn_once(f"environment {self.env_id}{warning}")

    def _extra_parts(self, encoder: ObservationEncoder, info_mask: bool) -> list[Part]:
        """Return the parts of a row that do not come from the observation."""
        parts = []
        mask_size = self._decoder.mask_size
        if info_mask:
            if not mask_size or any(part.kind == "mask" for part in encoder.parts):
                raise ValueError(
                    f"info_mask does nothing with environment {self.env_id}: its actions have no "
                    f"choices, or its observations hold the {MASK_KEY}; leave it out"
                )
            parts.append(Part(MASK_KEY, "mask", (mask_size,)))
        if self._previous_action:
            size = mask_size or math.prod(self._decoder.space.shape or ())
            parts.append(Part("previous_action", "plain", (size,)))
        if self._previous_reward:
            parts.append(Part("previous_reward", "vector", (1,)))
        return parts

    @property
    def guards(self) -> list[GuardedEnv]:
        """The environments that step one by one; none in a batch of their own."""
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
            self._lifetime_step = 0
        rows = self._located(self._envs.reset, seed or [None] * self.num_envs)
        self._is_started = True
        start = np.zeros((self.num_envs, self.layout.size - rows.shape[1]), np.float32)
        return to_tensors([np.concatenate([rows, start], axis=1)], self.device)[0], {}

    def begin_again(
        self, lifetime_step: int, life_seeds: Any, restarts: Any, last_obs: np.ndarray
    ) -> None:
        """Stand in for environments whose process has ended; the next step is truncated."""
        self._lifetime_step = lifetime_step
        for guard, life_seed, count, row in zip(
            self.guards, life_seeds, restarts, last_obs, strict=True
        ):
            self._located(guard.begin_again, int(life_seed), int(count), row[: self._row_size])

    def step(
        self,
        actions: Tensor,  # [B] int64, or [B, A] float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
        """Step all environments, see `TorchEnv.step`; all tensors are fresh."""
        numpy_actions = self._decoder(actions)
        self._lifetime_step += 1
        arrays = self._located(self._envs.step, numpy_actions)
        if self._previous_action or self._previous_reward:
            obs, rewards, terminated, truncated, final_obs = arrays
            columns = [self._decoder.encode(actions)] * self._previous_action
            columns += [rewards[:, None].astype(np.float32)] * self._previous_reward
            before = np.concatenate(columns, axis=1)
            goes_on = ~(terminated | truncated)[:, None]  # [B, 1]
            obs = np.concatenate([obs, before * goes_on], axis=1)
            final_obs = np.concatenate([final_obs, before], axis=1)
            arrays = obs, rewards, terminated, truncated, final_obs
        obs, rewards, terminated, truncated, final = to_tensors(arrays, self.device)
        return obs, rewards, terminated, truncated, {"final_obs": final}

    def _add_metric(self, name: str, value: Any) -> None:
        """Add one of the numbers in info["metrics"]."""
        try:
            number = float(np.asarray(value).item())
        except (TypeError, ValueError):
            number = math.nan
        if math.isfinite(number):
            total, count = self._metrics.get(name, (0.0, 0))
            self._metrics[name] = total + number, count + 1
        else:
            _warn_once(f"info['metrics'][{name!r}] is not always one finite number: left out then")

    def take_metrics(self) -> dict[str, tuple[float, int]]:
        """Return sum and count of every metric since the last call."""
        metrics, self._metrics = self._metrics, {}
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
        step = self._lifetime_step
        return f"{self.kind} {self.env_id} number {number} at its step {step}: {problem}"

    def get_state(self) -> dict[str, Tensor]:
        """Return all the future depends on: CPU tensors [B, ...], float64 or int64."""
        if not self.can_snapshot:
            raise ValueError(
                f"environment {self.env_id} cannot be saved: it has no get_state and set_state"
            )
        steps = torch.full((self.num_envs,), self._lifetime_step)
        return self._located(self._state) | {_STEP_KEY: steps}

    def _state(self) -> dict[str, Tensor]:
        tensors = {}
        for name, values in self._envs.get_state().items():
            stacked = np.stack(values)
            target = np.float64 if stacked.dtype.kind == "f" else np.int64
            tensors[name] = torch.from_numpy(stacked.astype(target, casting="safe"))
        return tensors

    def set_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue exactly where `get_state` was called, on this or an equal environment."""
        if not self._is_started:  # environments build things at their first reset
            self.reset(seed=[0] * self.num_envs)
        arrays = {name: tensor.numpy().copy() for name, tensor in state.items()}
        self._lifetime_step = int(arrays.pop(_STEP_KEY)[0])
        self._located(self._envs.set_state, arrays)

    def close_extras(self, **kwargs: Any) -> None:
        """Close the environments; nothing depends on its success."""
        try:
            self._located(self._envs.close)
        except EnvironmentFaultError as fault:
            _LOGGER.warning("%s, when it was closed", fault)
        finally:
            self.watch.close()
