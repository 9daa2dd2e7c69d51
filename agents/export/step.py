"""Export one step of a policy as an ONNX model."""

from __future__ import annotations

import copy
import json
import logging
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from agents.network.cores import PassThrough
from agents.rollout import policy_input, shift_history
from agents.run.saved import LoadedAgent
from envs.vector.spaces import ActionDecoder
from rl_dist.errors import UserError, one_line

INPUTS, OUTPUTS = ("obs", "state", "episode_start"), ("action", "next_state")
OPSET = 18
BATCH_AXIS = {name: {0: torch.export.Dim("batch")} for name in INPUTS}
# A function that maps obs [B, F], state [B, D] and episode_start [B] to actions [B, ...] and the
# next state [B, D].
Runner = Callable[[np.ndarray, np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


class ExportedStep(nn.Module):
    """One policy step without noise and critic, with normaliser, reset and bounds.

    The state is one row of D numbers, which are zero at the start: the recurrent state of the
    cores, then the earlier observations of the window.
    """

    def __init__(self, agent: LoadedAgent) -> None:
        super().__init__()
        self.policy = policy = float_copy(agent)
        policy.critic_core, weight = PassThrough(), policy.critic_head.weight
        policy.critic_head = nn.Identity()  # type: ignore[assignment]
        policy.critic_head.register_buffer("weight", weight)  # the policy reads its dtype
        vectors_size = 0 if policy.config.stateless else policy.initial_state(1).numel()
        self.sizes = [vectors_size, policy.empty_history(1).numel()]
        self.state_size = sum(self.sizes)
        self.normalize = agent.normalizer.frozen(torch.float32)

        # Convert actions to the environment's units and bounds.
        self.decoder = decoder = ActionDecoder(agent.spaces[1], "of this policy")
        # The parts of a nested action are joined into one row.
        self.action_shape = tuple(decoder.target.shape or decoder.space.shape or ())
        if decoder.mask_size:
            self.start = torch.as_tensor(decoder.start)  # [D] int64: first value of each choice
            return
        # In training, actions are clipped before they are stretched. The result is the same.
        self.stretch = torch.as_tensor(decoder.scale, dtype=torch.float32)  # [A]
        self.offset = torch.as_tensor(decoder.offset, dtype=torch.float32)  # [A]
        self.low, self.high = (
            _inside(getattr(decoder, name) * decoder.scale + decoder.offset, sign)
            for name, sign in (("low", 1.0), ("high", -1.0))
        )

    def forward(
        self,
        obs: Tensor,  # [B, F] as the environment returned them
        state: Tensor,  # [B, D]
        episode_start: Tensor,  # [B] bool; where True, the state is reset first
    ) -> tuple[Tensor, Tensor]:
        """Return actions [B, ...] and the next state [B, D]."""
        state = torch.where(episode_start[:, None], 0.0, state)
        batch = obs.shape[0]  # the exporter would turn len(obs) into a constant
        parts = self.policy.initial_state(batch), self.policy.empty_history(batch)
        vectors, history = (
            row.reshape(part.shape) if row.shape[1] else part
            for row, part in zip(state.split(self.sizes, dim=1), parts, strict=True)
        )
        seen = policy_input(self.normalize, history, obs, torch.float32)
        actions, _, _, vectors = self.policy.act(seen, vectors, episode_start)
        after = [vectors, shift_history(history, seen)]
        rows = [part.flatten(1) for part, size in zip(after, self.sizes, strict=True) if size]
        return self._in_units(actions), torch.cat(rows or [state], dim=1)

    def _in_units(self, actions: Tensor) -> Tensor:
        """Convert actions to the environment's units, and clip them to its bounds."""
        shape = (actions.shape[0], *self.action_shape)
        if self.policy.discrete:
            return (actions.reshape(actions.shape[0], len(self.start)) + self.start).reshape(shape)
        stretched = actions * self.stretch + self.offset
        return torch.minimum(torch.maximum(stretched, self.low), self.high).reshape(shape)


def _inside(bound: np.ndarray, sign: float) -> Tensor:
    """Round bounds to float32, towards the inside of the range.

    Lower bounds (sign 1) are rounded up, upper bounds (sign -1) down.
    """
    rounded = bound.astype(np.float32)
    inwards = np.nextafter(rounded, np.float32(sign * np.inf))
    return torch.from_numpy(np.where(sign * rounded < sign * bound, inwards, rounded))


def float_copy(agent: LoadedAgent) -> Any:
    """Return a copy of the policy that computes in fp32."""
    policy = copy.deepcopy(agent.policy).float().eval().requires_grad_(False)
    policy.low_precision = None
    return policy


def write_onnx(step: ExportedStep, path: Path, contract: dict[str, Any]) -> None:
    """Write an ONNX model for any batch size, with the contract in its metadata."""
    for name in ("onnx", "onnxscript", "onnxruntime"):
        try:
            import_module(name)
        except ImportError:
            raise UserError(
                f"an export needs the package {name}: pip install 'clstm-ppo[export]'"
            ) from None
    num_rows = 3  # torch would turn a batch size of 0 or 1 into a constant
    inputs = (
        torch.zeros(num_rows, step.policy.num_obs),
        torch.zeros(num_rows, step.state_size),
        torch.ones(num_rows, dtype=torch.bool),
    )
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)  # hides the progress messages of the exporter
    try:
        with torch.no_grad(), warnings.catch_warnings(action="ignore"):
            program = torch.export.export(step, inputs, dynamic_shapes=BATCH_AXIS)
            model = torch.onnx.export(
                program.run_decompositions(),
                input_names=list(INPUTS),
                output_names=list(OUTPUTS),
                dynamic_shapes=BATCH_AXIS,
                opset_version=OPSET,
                dynamo=True,
                verbose=False,
            )
    except Exception as error:  # tracing and users' cores may raise any error
        raise UserError(f"the policy cannot be traced: {one_line(error)}", exit_code=1) from error
    finally:
        logging.disable(disabled)
    assert model is not None
    model.model.metadata_props["contract"] = json.dumps(contract)
    model.save(path, external_data=False)


def run_onnx(path: Path) -> Runner:
    """Load a model in ONNX Runtime; return a function that runs it on the CPU."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda *inputs: tuple(session.run(OUTPUTS, dict(zip(INPUTS, inputs, strict=True))))
