"""Base class and helpers for vector environments that take and return tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from torch import Tensor

from envs.vector.layout import Layout, StepResult, TorchEnv

STEP_FIELDS = ("rewards", "obs", "final_obs", "terminated", "truncated")


class TensorVectorEnv(VectorEnv[Tensor, Tensor, Tensor], TorchEnv):  # type: ignore[misc]
    """A TorchEnv that is also a Gymnasium vector environment."""

    metadata: dict[str, Any] = {"autoreset_mode": AutoresetMode.SAME_STEP, "render_modes": []}

    def set_spaces(self, layout: Layout, action_space: gymnasium.Space[Any]) -> None:
        """Set the observation spaces from a layout, and the action spaces from a space."""
        self.layout = layout
        self.single_observation_space = Box(-np.inf, np.inf, (layout.size,), np.float32)
        self.single_action_space = action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(action_space, self.num_envs)


def to_tensors(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Convert arrays to tensors on a device.

    For a GPU, all arrays are packed into one asynchronous copy. Every array must be aligned inside
    this copy, so pass arrays with larger item sizes first.
    """
    if device.type != "cuda":
        return [torch.from_numpy(array) for array in arrays]
    raw = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays]
    packed = torch.from_numpy(np.concatenate(raw)).pin_memory().to(device, non_blocking=True)
    parts = packed.split([len(array) for array in raw])
    kinds = [torch.from_numpy(array[:0]).dtype for array in arrays]
    return [part.view(kinds[i]).view(arrays[i].shape) for i, part in enumerate(parts)]


def step_result(arrays: Sequence[np.ndarray], device: torch.device) -> StepResult:
    """Convert arrays in the order of STEP_FIELDS to the result of `TorchEnv.step`."""
    rewards, obs, final_obs, terminated, truncated = to_tensors(arrays, device)
    return obs, rewards, terminated, truncated, {"final_obs": final_obs}
