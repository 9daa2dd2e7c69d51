"""Define the entries of a training run's checkpoints, with their types and ranges."""

from typing import Annotated, Literal

from pydantic import Field, Json
from torch import Tensor

from rl_dist.checkpoint.content import Count, OptimizerState, Schema, State, Tensors


class RunSchema(Schema):
    """State of a run of the training script."""

    program = "train_distributed.py"
    marks = ("carry", "global_step")  # entries that no other program's checkpoints have
    may_be_infinite = ("environments/",)  # an environment may use NaN and inf in its state

    iteration: Count
    global_step: Count
    episodes: Count
    validated: dict[Literal["steps", "longest"], Count] = {}
    bad_in_a_row: Count
    peak_learning_rate: Annotated[float, Field(ge=0, le=10**6)] = 0.0
    policy: Tensors
    optimizer: OptimizerState
    strategy: dict[str, State]
    normalizers: Tensors
    carry: Tensors
    environments: dict[str, Tensor] | None
    num_obs: Count
    num_actions: Count
    action_sizes: list[Count]
    discrete: bool
    layout: Json[list]
    config: Json[dict[str, dict]]
    spaces: Literal[""] | Json[list]
