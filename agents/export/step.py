"""The exported step, from row and state to action and state, as an ONNX model."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import logging
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from agents.network.cores import State
from agents.network.heads import forbid
from agents.run.saved import LoadedAgent
from envs.vector.spaces import ActionDecoder
from rl_dist.errors import UserError, one_line

INPUTS, OUTPUTS = ("obs", "state", "episode_start"), ("action", "next_state")
OPSET = 18
BATCH_AXIS = {name: {0: torch.export.Dim("batch")} for name in INPUTS}


class ExportedStep(nn.Module):
    """One step without noise, with normaliser, reset and bounds inside.

    There is no time axis, and no LSTM or GRU node: recurrent layers are matrix products and gates.
    The critic is left out. All that is remembered is one row of D numbers, zeros at first: the
    actor core's vectors, the feature core's, and the observations of a window before this one.
    """

    shift: Tensor  # [F]
    scale: Tensor  # [F]
    start: Tensor  # [D] int64, first value of each choice
    stretch: Tensor  # [A]
    offset: Tensor  # [A]
    low: Tensor  # [A]
    high: Tensor  # [A]

    def __init__(self, agent: LoadedAgent) -> None:
        super().__init__()
        self.policy = policy = (
            copy.deepcopy(agent.policy).float().cpu().eval().requires_grad_(False)
        )
        policy.low_precision = None
        self.window = policy.config.feature_window
        self.vectors = 0  # [H] in the state
        if not policy.config.stateless:
            of_features = 0 if self.window else policy.feature_core.num_states
            self.vectors = policy.actor_core.num_states + of_features
        self.memory_size = self.vectors * policy.config.hidden_size
        self.state_size = self.memory_size + max(self.window - 1, 0) * policy.num_obs

        # frozen statistics
        self.normalize = agent.normalizer.enabled
        self.clip = agent.normalizer.clip
        shift, scale = agent.normalizer.constants(torch.float32)
        self.register_buffer("shift", torch.as_tensor(shift).expand(policy.num_obs).cpu().clone())
        self.register_buffer("scale", scale.cpu())
        self._set_actions(ActionDecoder(agent.spaces[1], "of this policy"))

    def _set_actions(self, decoder: ActionDecoder) -> None:
        """Keep what makes an environment's action: first values, or bounds and units."""
        self.decoder = decoder
        self.nested = isinstance(decoder.target, spaces.Dict | spaces.Tuple)
        self.action_shape = () if self.nested else tuple(decoder.target.shape or ())
        if self.nested:
            self.action_shape = tuple(decoder.space.shape or ())
        if decoder.mask_size:
            self.register_buffer("start", torch.as_tensor(decoder.start))  # [D] int64
            return
        # stretched and then clipped: the same as the other way round
        self.register_buffer("stretch", torch.as_tensor(decoder.scale, dtype=torch.float32))
        self.register_buffer("offset", torch.as_tensor(decoder.offset, dtype=torch.float32))
        for name, sign in (("low", 1), ("high", -1)):
            bound = getattr(decoder, name) * decoder.scale + decoder.offset
            rounded = bound.astype(np.float32)
            outside = sign * rounded < sign * bound  # of a float64 space
            inside = np.nextafter(rounded, np.float32(sign * np.inf))
            self.register_buffer(name, torch.from_numpy(np.where(outside, inside, rounded)))

    def forward(
        self,
        obs: Tensor,  # [B, F] as the environment gave it
        state: Tensor,  # [B, D]
        episode_start: Tensor,  # [B] bool; forgets the state first
    ) -> tuple[Tensor, Tensor]:
        """Return actions [B, ...] and the state [B, D] after them."""
        state = torch.where(episode_start[:, None], 0.0, state)
        seen = obs
        if self.normalize:
            seen = ((obs - self.shift) * self.scale).clamp(-self.clip, self.clip)
        actor, after = self._network(seen, state)
        if self.policy.mask_columns:
            actor = forbid(actor, seen[:, self.policy.mask_columns])
        return self._actions(actor), after

    def _network(self, seen: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the actor's outputs [B, A] and the state after them."""
        policy = self.policy
        size, split = policy.config.hidden_size, policy.actor_core.num_states
        history = state[:, self.memory_size :]  # [B, (n-1) * F]
        vectors = state[:, : self.memory_size].reshape(seen.shape[0], self.vectors, size)
        before = vectors.transpose(0, 1)  # [S, B, H]
        if policy.config.stateless:
            num_states = split + policy.feature_core.num_states
            before = seen.new_zeros(num_states, seen.shape[0], size)
        feature_state: State
        if self.window:
            rows = torch.cat([history, seen], dim=1)  # [B, n * F]
            features, feature_state = self._windowed_features(rows), before[split:]
            history = rows[:, policy.num_obs :]
        else:
            features, feature_state = policy.features(seen[None], before[split:])
        outputs, actor_state = policy.actor_core(features, before[:split])
        after = history
        if self.memory_size:
            vectors = torch.stack([*actor_state, *feature_state], dim=1)
            after = torch.cat([vectors.reshape(seen.shape[0], self.memory_size), history], dim=1)
        return policy.actor_head(outputs[0]), after

    def _windowed_features(self, rows: Tensor) -> Tensor:
        """Features [1, B, H] of the last n observations, read step by step from zeros."""
        policy = self.policy
        core = policy.feature_core
        state = rows.new_zeros(core.num_states, rows.shape[0], policy.config.hidden_size)
        encoded = policy.feature_encoder(rows.reshape(rows.shape[0], self.window, policy.num_obs))
        for step in range(self.window):
            outputs, state = core(encoded[None, :, step], state)
        return policy.feature_mlp(outputs)

    def _actions(self, actor: Tensor) -> Tensor:
        """Return the most likely actions in the environment's units, within its bounds."""
        policy = self.policy
        if policy.discrete:
            chosen = (policy.choices(actor) if policy.action_sizes else actor).argmax(-1)
            shaped = chosen.reshape(actor.shape[0], len(self.start)) + self.start
            return shaped.reshape(actor.shape[0], *self.action_shape)
        means = actor.tanh() if policy.config.squash_actions else actor
        stretched = means * self.stretch + self.offset
        bounded = torch.minimum(torch.maximum(stretched, self.low), self.high)
        return bounded.reshape(actor.shape[0], *self.action_shape)


def write_onnx(step: ExportedStep, path: Path, contract: dict[str, Any]) -> None:
    """Write an ONNX model whose metadata holds the contract."""
    for name in ("onnx", "onnxscript", "onnxruntime"):
        try:
            import_module(name)
        except ImportError:
            raise UserError(
                f"an export needs the package {name}: pip install 'clstm-ppo[export]'"
            ) from None
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)  # of the exporter's own progress
    try:
        with warnings.catch_warnings(action="ignore"), contextlib.redirect_stdout(io.StringIO()):
            model = torch.onnx.export(
                _traced(step),
                input_names=list(INPUTS),
                output_names=list(OUTPUTS),
                dynamic_shapes=BATCH_AXIS,  # for its name
                opset_version=OPSET,
                dynamo=True,
                verbose=False,
            )
    finally:
        logging.disable(disabled)
    assert model is not None
    model.model.metadata_props["contract"] = json.dumps(contract)
    model.save(path, external_data=False)


def run_onnx(path: Path) -> Callable[..., tuple[np.ndarray, np.ndarray]]:
    """Load a model in ONNX Runtime, on one thread of the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda *inputs: tuple(session.run(OUTPUTS, dict(zip(INPUTS, inputs, strict=True))))


def _traced(step: ExportedStep) -> torch.export.ExportedProgram:
    """Trace the step for any number of environments; refuse one that cannot be."""
    rows = 3  # neither 0 nor 1, which torch takes for constants
    inputs = (
        torch.zeros(rows, step.policy.num_obs),
        torch.zeros(rows, step.state_size),
        torch.ones(rows, dtype=torch.bool),
    )
    try:
        with torch.no_grad():
            return torch.export.export(step, inputs, dynamic_shapes=BATCH_AXIS).run_decompositions()
    except Exception as error:  # of a tracer, or of foreign code: anything
        raise UserError(f"the policy cannot be traced: {one_line(error)}", exit_code=1) from error
