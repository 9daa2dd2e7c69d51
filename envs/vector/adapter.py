"""The adapter that lets a numpy vector environment speak torch, and guards it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space
from torch import Tensor

from envs.vector.faults import (
    MAX_OBSERVATION,
    MAX_REWARD,
    EnvironmentFaultError,
    RowFaultError,
    are_flags,
)
from envs.vector.guards import GuardedEnv, say_dropped
from envs.vector.hangs import HangWatch, end_process
from envs.vector.layout import Layout, Part, TorchEnv
from envs.vector.snapshots import get_states, has_protocol, set_states
from envs.vector.spaces import MASK_KEY, ActionDecoder, ObservationEncoder, to_json
from rl_dist.errors import one_line

_LOGGER = logging.getLogger(__name__)
_STEP_KEY = "lifetime_step"


def to_tensors(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Arrays on a device; a GPU gets them by one copy, without the host waiting."""
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


class TorchVectorEnv(VectorEnv[Tensor, Tensor, Tensor], TorchEnv):
    """A vector environment of torch tensors around a numpy one."""

    def __init__(
        self,
        env: VectorEnv[Any, Any, Any],
        *,
        env_id: str,
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
        """Wrap a SAME_STEP vector environment that takes one seed for each environment.

        Options that are not of this class are fields of `envs.task.TaskConfig`.

        Args:
            end: ends the process if a call that hangs cannot be interrupted.
            heartbeat: reports that work goes on: at every call and, from a thread, during one.
            kind: what messages call it.
        """
        self.env = env
        self.env_id = env_id
        self.kind = kind
        self.env_offset = env_offset
        self.device = torch.device(device)
        self.num_envs = env.num_envs
        self._started = False
        self._lifetime_step = 0
        self._metrics: dict[str, tuple[float, int]] = {}
        self._decoder = ActionDecoder(env.single_action_space, env_id)
        sizes = self._decoder.sizes.tolist()
        self._encoder = ObservationEncoder(env.single_observation_space, env_id, sizes)
        self._warn_of_spaces()
        self._own_mask = Layout(self._encoder.parts).columns("mask")
        self._info_mask, self._inputs = info_mask, (previous_action, previous_reward)
        self.layout = Layout((*self._encoder.parts, *self._extra_parts()))
        self.single_observation_space = self._row_space()
        self.single_action_space = self._decoder.space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.spaces_json = to_json(env.single_observation_space, env.single_action_space)
        self.metadata = {**env.metadata, "autoreset_mode": AutoresetMode.SAME_STEP}
        self._guards: list[GuardedEnv] = []  # a native batch has none
        self._watch = HangWatch(
            env_timeout, lambda row, problem: str(self._fault(row, problem)), end, heartbeat
        )
        if isinstance(env, SyncVectorEnv):
            self._guards = [
                GuardedEnv(
                    one,
                    make,
                    row,
                    env_restarts,
                    self._watch,
                    self._encoder.spaces,
                    sizes if info_mask else (),
                )
                for row, (one, make) in enumerate(zip(env.envs, env.env_fns, strict=True))
            ]
            env.envs = list(self._guards)
        snapshots = [guard.can_snapshot for guard in self._guards] or [has_protocol(env)]
        self.can_snapshot = all(snapshots)

    def _warn_of_spaces(self) -> None:
        """Say once for all ranks what is passed on otherwise than many expect."""
        warnings = [f": {words}" for words in self._encoder.warnings]
        if not self._decoder.is_bounded:
            warnings.append(
                " has actions without bounds: it receives the policy's as they are, about -1 to 1 "
                "at first; gymnasium.wrappers.RescaleAction gives them bounds"
            )
        for words in warnings if self.env_offset == 0 else ():
            _warn_once(f"environment {self.env_id}{words}")

    def _extra_parts(self) -> list[Part]:
        """Return the parts of a row that do not come from the observation."""
        parts = []
        if self._info_mask:
            if not self._decoder.mask_size or any(p.kind == "mask" for p in self._encoder.parts):
                raise ValueError(
                    f"info_mask does nothing with environment {self.env_id}: its actions have no "
                    f"choices, or its observations hold the {MASK_KEY}; leave it out"
                )
            parts.append(Part(MASK_KEY, "mask", (self._decoder.mask_size,)))
        previous_action, previous_reward = self._inputs
        if previous_action:
            size = self._decoder.mask_size or self._decoder.space.shape[0]  # type: ignore[index]
            parts.append(Part("previous_action", "plain", (size,)))
        if previous_reward:
            parts.append(Part("previous_reward", "vector", (1,)))
        return parts

    def _row_space(self) -> Box:
        """Return the space of rows: the observation's, and what is added to it."""
        own = self._encoder.space
        low, high = (np.full(self.layout.size, bound, np.float32) for bound in (-np.inf, np.inf))
        low[: len(own.low)], high[: len(own.high)] = own.low, own.high
        return Box(low, high)

    @property
    def restarts(self) -> list[int]:
        """How often each environment was made again, [B]."""
        return [guard.restarts for guard in self._guards] or [0] * self.num_envs

    @property
    def life_seeds(self) -> list[int]:
        """The seed with which each environment's life began, [B]; 0 in a native batch."""
        return [guard.life_seed for guard in self._guards] or [0] * self.num_envs

    @property
    def row_under_way(self) -> int | None:
        """The row that is being called, or was last; None: all of them."""
        return self._watch.row

    def reset(
        self,
        *,
        seed: int | Sequence[int] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Start all environments; one seed for each begins new lives at step 0."""
        if seed is not None:
            if isinstance(seed, int) or len(seed) != self.num_envs:
                raise ValueError(
                    f"seed must be a list of {self.num_envs} integers, one per environment, "
                    f"got {seed}: see agents/network/seeds.py"
                )
            seed = list(seed)
            self._lifetime_step = 0
        obs = self._guarded(self._reset, seed=seed, options=options)
        self._started = True
        return to_tensors([obs], self.device)[0], {}

    def begin_again(
        self, life_seeds: Sequence[int], restarts: Sequence[int], lifetime_step: int
    ) -> tuple[Tensor, dict[str, Any]]:
        """Start in the place of environments whose process has ended."""
        self._lifetime_step = lifetime_step
        for guard, life_seed, count in zip(self._guards, life_seeds, restarts, strict=True):
            guard.begin_again(life_seed, count)
        return self.reset()

    def _reset(self, **kwargs: Any) -> np.ndarray:
        raw, info = self.env.reset(**kwargs)
        obs = self._encode(raw, "observation")
        previous = np.zeros((self.num_envs, self._previous_size), np.float32)
        return self._with_extras(obs, self._masks(info), previous)

    def step(
        self,
        actions: Tensor,  # [B] int64, or [B, A] float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
        """Step all environments; those that end start again within the same step.

        Returns obs [B, F] float32, rewards [B] float64, terminated [B] and truncated [B] bool, and
        info with `final_obs` [B, F]: of episodes that ended the last observation, elsewhere obs.
        All are fresh.
        """
        numpy_actions = self._decoder(actions, self.num_envs)
        self._lifetime_step += 1
        stepped = self._guarded(self._step, numpy_actions, self._previous_action(actions))
        obs, rewards, terminated, truncated, final_obs = to_tensors(stepped, self.device)
        return obs, rewards, terminated, truncated, {"final_obs": final_obs}

    def _step(self, actions: Any, previous_action: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return obs, rewards, terminated, truncated and final_obs, checked and fresh."""
        raw, raw_rewards, raw_terminated, raw_truncated, info = self.env.step(actions)
        self._add_metrics(info)
        obs = self._encode(raw, "observation")
        rewards = self._column(raw_rewards, np.float64, "reward")
        self._check_range(rewards[:, None], "reward", MAX_REWARD)
        terminated = self._column(raw_terminated, np.bool_, "terminated flag")
        truncated = self._column(raw_truncated, np.bool_, "truncated flag")
        final_obs = obs.copy()
        rows = np.flatnonzero(terminated | truncated)
        if len(rows):
            given = info.get("final_obs", [None] * self.num_envs)
            for row in rows:
                if given[row] is None:
                    raise RowFaultError(
                        int(row), "ended an episode without the final_obs of SAME_STEP"
                    )
            final = [given[row] for row in rows]
            final_obs[rows] = self._encode(final, "final observation", rows)

        # what a row says besides the observation; no action follows a final one
        if len(self.layout.parts) > len(self._encoder.parts):
            ended = (terminated | truncated)[:, None]  # [B, 1]
            mask = self._masks(info)
            previous = [previous_action] + [rewards[:, None].astype(np.float32)] * self._inputs[1]
            before = np.concatenate(previous, axis=1)
            obs = self._with_extras(obs, mask, before * ~ended)
            final_obs = self._with_extras(final_obs, np.where(ended, 1.0, mask), before)
        return obs, rewards, terminated, truncated, final_obs

    @property
    def _previous_size(self) -> int:
        parts = self.layout.parts[len(self._encoder.parts) :]
        return sum(part.size for part in parts if part.kind != "mask")

    def _previous_action(self, actions: Tensor) -> np.ndarray:
        """Return actions as inputs of the next step, [B, 0] where they are none."""
        if self._inputs[0]:
            return self._decoder.encode(actions)
        return np.zeros((self.num_envs, 0), np.float32)

    def _with_extras(self, obs: np.ndarray, mask: np.ndarray, previous: np.ndarray) -> np.ndarray:
        """Return rows [B, F] of observations, masks and what came before."""
        if mask.shape[1] + previous.shape[1] == 0:
            return obs
        return np.concatenate([obs, mask, previous], axis=1, dtype=np.float32)

    def _masks(self, info: Mapping[str, Any]) -> np.ndarray:
        """Return the masks that infos hold, [B, n], [B, 0] where they are not asked for."""
        if not self._info_mask:
            return np.zeros((self.num_envs, 0), np.float32)
        if MASK_KEY not in info:
            raise RowFaultError(None, f"info has no {MASK_KEY}, which --info_mask asks for")
        masks = np.array(info[MASK_KEY], np.float32)
        wanted = (self.num_envs, self._decoder.mask_size)
        if masks.shape != wanted:
            raise RowFaultError(None, f"{MASK_KEY} has shape {masks.shape}, not {wanted}")
        self._decoder.check_masks(masks)
        return masks

    def _add_metrics(self, info: Mapping[str, Any]) -> None:
        """Add the numbers in info["metrics"], of episodes that end too."""
        for source in (info, info.get("final_info", {})):
            metrics = source.get("metrics") if isinstance(source, Mapping) else None
            if not isinstance(metrics, Mapping):
                continue
            for name, values in metrics.items():
                if name.startswith("_"):  # Gymnasium's mask: who gave the metric
                    continue
                given = np.broadcast_to(metrics.get(f"_{name}", True), np.shape(values))
                numbers = np.asarray(values)[given]
                if numbers.dtype.kind not in "biuf":
                    say_dropped(name, f"of type {numbers.dtype}")
                    continue
                if not np.isfinite(numbers).all():
                    say_dropped(name, str(numbers[~np.isfinite(numbers)][0]))
                    numbers = numbers[np.isfinite(numbers)]
                if numbers.size:
                    total, count = self._metrics.get(name, (0.0, 0))
                    self._metrics[name] = (total + float(numbers.sum()), count + numbers.size)

    def take_metrics(self) -> dict[str, tuple[float, int]]:
        """Return sum and count of every metric since the last call."""
        taken, self._metrics = self._metrics, {}
        return taken

    def _encode(self, raw: Any, what: str, rows: np.ndarray | None = None) -> np.ndarray:
        """Return observations of these rows (None: all), checked, as a fresh array [rows, F]."""
        try:
            encoded = self._encoder(raw, self.num_envs if rows is None else len(rows))
        except (TypeError, ValueError, KeyError, IndexError) as error:
            row = getattr(error, "row", None)
            if row is not None and rows is not None:
                row = int(rows[row])
            why = one_line(error, named=row is None)
            raise RowFaultError(row, f"{what} is unusable: {why}") from error
        self._check_range(encoded, what, MAX_OBSERVATION, rows)
        if rows is None and self._own_mask:
            self._decoder.check_masks(encoded[:, self._own_mask])
        return encoded

    def _column(self, raw: Any, dtype: Any, what: str) -> np.ndarray:
        column = np.array(raw, dtype=dtype)
        if column.shape != (self.num_envs,):
            raise RowFaultError(None, f"{what}s have shape {column.shape}, not ({self.num_envs},)")
        if dtype is np.bool_ and not are_flags(raw):
            raise RowFaultError(None, f"a {what} is neither true nor false")
        return column

    def _check_range(
        self, values: np.ndarray, what: str, limit: float, rows: np.ndarray | None = None
    ) -> None:
        """Refuse values [rows, F] of these rows (None: all) beyond the limit, or NaN."""
        usable = np.abs(values) <= limit  # NaN is not
        if usable.all():
            return
        first, position = np.argwhere(~usable)[0]
        where = f" at position {position}" if what != "reward" else ""
        num_more = int((~usable.all(axis=1)).sum()) - 1
        others = f" ({num_more} more environments too)" if num_more else ""
        row = int(first if rows is None else rows[first])
        raise RowFaultError(row, f"{what} is {values[first, position]}{where}{others}")

    def _guarded(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a call into the environments, naming the one that fails."""
        try:
            return self._watch.call(None, call, *args, **kwargs)
        except RowFaultError as fault:
            raise self._fault(fault.row, str(fault)) from fault.__cause__

    def _fault(self, row: int | None, problem: str) -> EnvironmentFaultError:
        first = self.env_offset
        number = f"one of {first}..{first + self.num_envs - 1}" if row is None else str(first + row)
        return EnvironmentFaultError(self.env_id, number, self._lifetime_step, problem, self.kind)

    def get_state(self) -> dict[str, Tensor]:
        """Return all the future depends on: CPU tensors [B, ...], float64 or int64."""
        if not self.can_snapshot:
            raise ValueError(
                f"environment {self.env_id} cannot be saved: it has no get_state and set_state"
            )
        steps = torch.full((self.num_envs,), self._lifetime_step, dtype=torch.int64)
        return self._guarded(get_states, self.env) | {_STEP_KEY: steps}

    def set_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue exactly where `get_state` was called, on this or an equal environment."""
        if not self._started:
            # makes what environments build on their first reset
            self.reset(seed=[0] * self.num_envs)
        own = {name: tensor for name, tensor in state.items() if name != _STEP_KEY}
        self._guarded(set_states, self.env, own)
        self._lifetime_step = int(state[_STEP_KEY][0])

    def close_extras(self, **kwargs: Any) -> None:
        """Close the wrapped environment; nothing depends on its success."""
        try:
            self._guarded(self.env.close, **kwargs)
        except EnvironmentFaultError as fault:
            _LOGGER.warning("%s, when it was closed", fault)
        finally:
            self._watch.close()
