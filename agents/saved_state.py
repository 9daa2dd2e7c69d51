"""Whether a checkpoint's tensors are those that its configuration describes."""

from __future__ import annotations

from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor

from agents.clstm import Policy, PolicyConfig
from agents.rollout import fresh_carry
from rl_dist.world import UserError


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


def check_weights(policy: Policy, weights: dict[str, Tensor]) -> None:
    """Compare a policy's shape with that of weights to be loaded.

    Raises:
        UserError: they have another shape than the policy; one line naming the first that differs.
    """
    own = policy.state_dict()
    for name in sorted(set(own) | set(weights)):
        here = tuple(own[name].shape) if name in own else "absent"
        there = tuple(weights[name].shape) if name in weights else "absent"
        if here != there:
            raise UserError(
                f"the checkpoint is of another shape: {name} is {there} there and {here} here; "
                "use the environment, --observation, --policy and --hidden_size it was trained with"
            )
