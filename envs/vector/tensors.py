"""Vector environments of tensors: their spaces, and numpy arrays on a device."""

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


class TensorVectorEnv(VectorEnv[Tensor, Tensor, Tensor], TorchEnv):  # type: ignore[misc]
    """A TorchEnv as Gymnasium sees it."""

    metadata: dict[str, Any] = {"autoreset_mode": AutoresetMode.SAME_STEP, "render_modes": []}

    def set_spaces(self, layout: Layout, action_space: gymnasium.Space[Any]) -> None:
        """Set the layout of rows and the actions of each environment."""
        self.layout = layout
        self.single_observation_space = Box(-np.inf, np.inf, (layout.size,), np.float32)
        self.single_action_space = action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(action_space, self.num_envs)


def to_tensors(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Return arrays on a device; a GPU gets them by one copy that nobody waits for."""
    if device.type != "cuda":
        return [torch.from_numpy(array) for array in arrays]
    order = sorted(range(len(arrays)), key=lambda i: -arrays[i].itemsize)  # so each is aligned
    raw = [np.ascontiguousarray(arrays[i]).reshape(-1).view(np.uint8) for i in order]
    packed = torch.from_numpy(np.concatenate(raw)).pin_memory().to(device, non_blocking=True)
    parts = dict(zip(order, packed.split([len(array) for array in raw]), strict=True))
    kinds = [torch.from_numpy(array[:0]).dtype for array in arrays]
    return [parts[i].view(kinds[i]).view(array.shape) for i, array in enumerate(arrays)]


def step_result(arrays: Sequence[np.ndarray], device: torch.device) -> StepResult:
    """Return what `TorchEnv.step` returns, made of arrays; the last one is final_obs."""
    obs, rewards, terminated, truncated, final_obs = to_tensors(arrays, device)
    return obs, rewards, terminated, truncated, {"final_obs": final_obs}
