"""The agents in saved runs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from agents.normalize import Normalizer, observation_normalizer
from agents.policy import Policy, PolicyConfig, check_weights, spaces_of
from agents.rollout import fresh_carry
from agents.run.config import RunConfig, load_saved
from rl_dist.checkpoint.folder import CHECKPOINT_DIR
from rl_dist.errors import UserError
from rl_dist.parallel.config import autocast_dtype


@dataclass(frozen=True)
class LoadedAgent:
    """A trained policy with its normaliser, ready to act."""

    policy: Policy
    normalizer: Normalizer
    config: RunConfig
    iteration: int
    path: Path

    @property
    def run_dir(self) -> Path:
        """Return the directory of its run, or where the checkpoint was copied to."""
        folder = self.path.absolute().parent
        return folder.parent if folder.name == CHECKPOINT_DIR else folder


def load_agent(path: str | Path, device: str | torch.device = "cpu") -> LoadedAgent:
    """Load a policy from a checkpoint or run directory, wherever it was trained."""
    file, state = load_saved(path)
    config = RunConfig.from_dict(json.loads(state["config"]))
    check_shapes(state, config.policy, config.launch.dtype)
    layout, action_space = spaces_of(state)
    policy = Policy(config.policy, layout, action_space).to(config.launch.dtype)
    policy.low_precision = autocast_dtype(config.launch.precision)
    policy.load_state_dict(state["policy"])
    normalizer = observation_normalizer(layout, config.train.normalize_obs)
    normalizer.load_state_dict(state["obs_normalizer"])
    return LoadedAgent(policy.to(device), normalizer.to(device), config, state["iteration"], file)


def check_shapes(state: dict[str, Any], config: PolicyConfig, dtype: torch.dtype) -> None:
    """Compare a checkpoint's tensors with its configuration; takes no memory.

    Raises:
        UserError: names the first that differs.
    """
    with torch.device("meta"):
        policy = Policy(config, *spaces_of(state)).to(dtype)
    check_weights(policy, state["policy"])
    carry = state["carry"]
    for name, like in fresh_carry(policy, carry["obs"].to("meta")).tensors().items():
        if name not in carry or (carry[name].shape, carry[name].dtype) != (like.shape, like.dtype):
            raise UserError(
                f"the checkpoint is damaged: carry {name!r} is not {list(like.shape)} of "
                f"{like.dtype}"
            )
