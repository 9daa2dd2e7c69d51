"""Adapt a batch of environments that takes and returns tensors, such as a simulator on a GPU."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor
from torch.utils._pytree import tree_leaves

from envs.vector.adapter import MAX_REWARD, guarded
from envs.vector.batched import has_snapshots
from envs.vector.guards import HangWatch, end_process
from envs.vector.layout import Layout, Metrics, StepResult
from envs.vector.same_step import SameStep
from envs.vector.space_json import to_json
from envs.vector.spaces import ActionDecoder, Leaf, ObservationEncoder
from envs.vector.tensors import LIFE, MISSING_RESETS, RESETS, ArrayEnv, random_int63, seed_keys

LAST_ROWS = "batch/last_rows"  # entry of a snapshot


@dataclass(eq=False, kw_only=True)
class TensorBatch(ArrayEnv):
    """Adapts a batch of tensors to the TorchEnv interface.

    A step reads nothing from the device. Therefore, NaN and other unusable values are only noted;
    `check`, which the trainer calls once per rollout, raises an error.
    """

    env: SameStep
    end: Callable[[str], None] = end_process
    spreads: bool = True  # start the first episodes at random ages, if the batch can

    def __post_init__(self) -> None:
        env = self.env
        env.mark = self.mark
        self.num_envs = env.num_envs
        self.device = torch.device(self.device)
        self.lives = np.zeros(self.num_envs, LIFE)
        self.watch = HangWatch(self.env_timeout, self.describe, self.end, self.heartbeat)
        self.watch.is_limited = False  # until the second step: the first may compile kernels
        target = env.single_action_space
        if isinstance(target, spaces.Dict | spaces.Tuple):
            raise ValueError(f"environment {self.env_id}: a batch of tensors needs plain actions")
        self.decoder = ActionDecoder(target, self.env_id)
        self.encoder = ObservationEncoder(env.single_observation_space, self.env_id, self.decoder)
        self.layout = Layout(self.encoder.parts)
        self.single_action_space = self.decoder.space
        self.spaces_json = to_json(env.single_observation_space, target)
        self.can_snapshot = has_snapshots(env)
        self.dtype = getattr(torch, self.encoder.row_type(self.layout).name)
        # numbers that decode actions, on the device
        decoder = self.decoder
        if decoder.mask_size:
            numbers: tuple[np.ndarray, ...] = (decoder.start,)
        else:
            numbers = (decoder.scale, decoder.offset, *decoder.bounds)
        dtype = torch.int64 if decoder.mask_size else torch.float32
        self.numbers = [torch.as_tensor(v, dtype=dtype, device=self.device) for v in numbers]

    @guarded
    @torch.no_grad()  # a simulator may be differentiable
    def reset(self, *, seed: Sequence[int]) -> tuple[Tensor, dict]:
        """Start all environments with new seeds; return observations [B, F] and {}."""
        self.lives["lifetime_step"] = 0
        obs, _ = self.env.reset(seed=seed)
        ages = getattr(self.env, "episode_length_buf", None)
        if self.spreads and isinstance(ages, Tensor):
            # Otherwise, all episodes would end in the same step: rsl_rl/runners/on_policy_runner.py
            limit = int(torch.as_tensor(self.env.max_episode_length).max())
            spread = random_int63(seed_keys(seed), torch.zeros(self.num_envs).long()) % limit
            ages.copy_(spread)
        self.env_device = tree_leaves(obs)[0].device
        self.rows = self._rows(obs)
        return self.rows, {}

    @guarded
    @torch.no_grad()
    def step(self, actions: Tensor) -> StepResult:
        """Step all environments; return newly allocated tensors, see `TorchEnv.step`."""
        self.lives["lifetime_step"] += 1
        # not at the end of the first step, where the watch would still see its start
        self.watch.is_limited |= self.lives["lifetime_step"][0] > 1
        obs, raw_rewards, terminated, truncated, info = self.env.step(self._decoded(actions))
        rows = self._rows(obs)
        terminated = terminated.to(self.device)
        truncated = truncated.to(self.device)
        ended = terminated | truncated
        rewards = raw_rewards.to(self.device, torch.float64, copy=True)
        self.mark(f"reward is NaN, infinite or above {MAX_REWARD}", ~(rewards.abs() <= MAX_REWARD))
        last_rows = self.rows  # the observation before the step, as in rsl_rl/algorithms/ppo.py
        if "final_obs" in info:
            last_rows = self._rows(info["final_obs"], ended)
            self.mark(MISSING_RESETS, ended)
            self.mark(RESETS, (rows != last_rows).any(dim=1) & ended)
        final_obs = torch.where(ended[:, None], last_rows, rows)
        self.rows = rows
        return rows, rewards, terminated, truncated, {"final_obs": final_obs}

    def take_metrics(self) -> Metrics:
        """Return sum and count of the values that the batch has logged."""
        return self.env.take_metrics()

    @guarded
    def get_state(self) -> dict[str, Tensor]:
        """Return a complete snapshot, see `TorchEnv.get_state`."""
        state = self.env.get_state() | {LAST_ROWS: self.rows}
        state = {name: torch.as_tensor(values) for name, values in state.items()}
        wide = {True: torch.float64, False: torch.int64}
        return {
            name: v.detach().to("cpu", wide[v.is_floating_point()]) for name, v in state.items()
        }

    def set_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore a snapshot; the batch gets float64 and int64 tensors on the CPU."""
        self.rows = state[LAST_ROWS].to(self.device, self.dtype)
        self.env.set_state({name: value for name, value in state.items() if name != LAST_ROWS})

    def close(self) -> None:
        """Close the batch; log a failure instead of raising it."""
        self.watch.close_env(None, self.env)
        self.watch.close()

    # ---- numbers

    def _rows(self, obs: Any, ended: Tensor | None = None) -> Tensor:
        """Return nested observations as new rows [B, F]; see `ObservationEncoder`.

        Last observations have a meaning only in the rows of `ended` [B], and need no masks.
        """
        columns = []
        for leaf in self.encoder.leaves:
            if leaf.masked and ended is not None:  # no action follows
                ones = torch.ones(self.num_envs, leaf.part.size, device=self.device)
                columns.append(ones.to(self.dtype))
                continue
            name = leaf.part.name if ended is None else f"final {leaf.part.name}"
            values = torch.as_tensor(leaf.pick(obs), device=self.device)
            shape = [self.num_envs, *leaf.space.shape]
            if [*values.shape] != shape:
                raise ValueError(f"{name} has shape {[*values.shape]}, not {shape}")
            part, usable = self._columns(leaf, values)
            columns.append(part)
            problem = "is NaN, infinite or outside its space"
            if leaf.masked:
                problem = "forbids every action, or holds other numbers than 0 and 1"
            self.mark(f"{name} {problem}", ~usable if ended is None else ~usable & ended)
        return torch.cat(columns, dim=1)  # a copy, because a batch may use its tensors again

    def _columns(self, leaf: Leaf, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the columns [B, n] of one part of the observations, and which rows fit it [B]."""
        if leaf.axes:
            values = values.permute(0, *(axis + 1 for axis in leaf.axes))
        flat = values.flatten(1) if values.ndim > 1 else values[:, None]
        if leaf.axes and (leaf.scale > 1 or values.dtype != torch.uint8):
            if values.is_floating_point():  # probably in [0, 1], not in [0, 255]
                raise ValueError(
                    f"{leaf.part.name} has type {values.dtype}, not {leaf.space.dtype}"
                )
            usable = ((flat >= 0) & (flat <= leaf.space.high.max().item())).all(dim=1)
        elif leaf.masked:
            choices = flat.split(leaf.masked.sizes.tolist(), dim=1)
            usable = torch.stack([choice.any(dim=1) for choice in choices]).all(dim=0)
            usable &= ((flat == 0) | (flat == 1)).all(dim=1)
        elif len(leaf.sizes):
            start = torch.as_tensor(leaf.start, device=self.device)
            digits = (flat - start).unsqueeze(2)  # [B, D, 1]
            options = [
                digits[:, i] == torch.arange(size, device=self.device)
                for i, size in enumerate(leaf.sizes)
            ]
            usable = torch.stack([chosen.any(dim=1) for chosen in options]).all(dim=0)
            flat = torch.cat(options, dim=1)
        else:
            usable = flat.to(self.dtype).isfinite().all(dim=1)
        return (flat * leaf.scale if leaf.scale > 1 else flat).to(self.dtype), usable

    def _decoded(self, actions: Tensor) -> Tensor:
        """Return actions in the units and the shape of the batch."""
        target = self.decoder.target
        if self.decoder.mask_size:
            (start,) = self.numbers
            decoded = actions.reshape(self.num_envs, -1) + start
        else:
            scale, offset, low, high = self.numbers
            dtype = getattr(torch, target.dtype.name)
            decoded = (actions * scale + offset).clamp(low, high).to(dtype)
        return decoded.reshape(self.num_envs, *target.shape).to(self.env_device)
