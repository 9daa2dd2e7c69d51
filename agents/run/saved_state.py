"""Whether a checkpoint's tensors are those that its configuration describes."""

from __future__ import annotations

from typing import Any

import torch
from gymnasium import spaces

from agents.policy import Policy, PolicyConfig, check_weights
from agents.rollout import fresh_carry
from rl_dist.errors import UserError


def check_shapes(state: dict[str, Any], config: PolicyConfig, dtype: torch.dtype) -> None:
    """Compare a checkpoint's tensors with its configuration; takes no memory.

    Raises:
        UserError: names the first that differs.
    """
    with torch.device("meta"):
        policy = Policy(config, state["num_obs"], action_space(state)).to(dtype)
    check_weights(policy, state["policy"])
    carry = state["carry"]
    for name, like in fresh_carry(policy, carry["obs"].to("meta")).tensors().items():
        if name not in carry or (carry[name].shape, carry[name].dtype) != (like.shape, like.dtype):
            raise UserError(f"the checkpoint is damaged: carry {name!r} is not {list(like.shape)} of {like.dtype}")


def action_space(state: dict[str, Any]) -> spaces.Space:
    """As large as that of the environment that a checkpoint is of."""
    number = state["num_actions"]
    return spaces.Discrete(number) if state["discrete"] else spaces.Box(-1.0, 1.0, (number,))

