"""Export a trained policy as an ONNX model, and check it in ONNX Runtime.

The model computes one step without action noise. It takes the state as input and returns the next
state. It also normalises observations, resets the state at episode starts, and bounds actions.

examples:
  python -m agents.export runs/my_run
  python -m agents.export runs/my_run --which last --output my_policy
exit codes: 0 done, 1 the export failed or differs from the policy, 2 bad usage
"""

import copy
import json
import os
import sys
import warnings
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from agents.learner.controller import PolicyController
from agents.learner.network.cores import NoCore
from agents.run.saved import LoadedAgent, load_agent
from rl_dist.errors import CommandParser, UserError, explains_errors
from rl_dist.files import path_to_write

FOLDER, MODEL, CONTRACT = "export/onnx", "policy.onnx", "contract.json"
CONTRACT_VERSION = 6
INPUTS, OUTPUTS = ("obs", "state", "episode_start"), ("action", "next_state")
BATCH_AXIS = {name: {0: torch.export.Dim("batch")} for name in INPUTS}
BATCHES, NUM_STEPS = (1, 5), 64
RESET = 0.1  # probability that an episode starts at a step
TOLERANCE = 1e-5
# A function that maps obs [B, F], state [B, D] and episode_start [B] to actions [B, ...] and the
# next state [B, D].
Runner = Callable[[np.ndarray, np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


# ---- one step as a module


class ExportedStep(nn.Module):
    """One step of the actor without noise, from raw observations to bounded actions.

    The state is a row of D numbers: the recurrent state of the cores, followed by the earlier
    observations of the window. The state is zero before the first step.
    """

    def __init__(self, agent: LoadedAgent) -> None:
        super().__init__()
        self.policy = policy = float_copy(agent)
        policy.critic_core = NoCore()
        # The model does not return the critic's value. Keep the critic's head, because the policy
        # reads the type of its weights, but let the head return its input.
        policy.critic_head.forward = lambda rows: rows
        recurrent_size = 0 if policy.config.stateless else policy.initial_state(1).numel()
        self.sizes = [recurrent_size, policy.empty_history(1).numel()]
        self.state_size = sum(self.sizes)
        self.encoder = agent.encoder()
        self.row_type = self.encoder.row_type(policy.layout)
        self.obs_dtype = getattr(torch, self.row_type.name)
        self.normalize = agent.normalizer.frozen(torch.promote_types(self.obs_dtype, torch.float32))

        # Convert actions to the environment's units and bounds.
        self.decoder = decoder = self.encoder.actions
        # A nested action becomes one row that contains all its parts.
        self.action_shape = decoder.target.shape or decoder.space.shape or ()
        if policy.discrete:
            self.offset = torch.as_tensor(decoder.start)  # [D] int64: smallest value per action
            return
        # Scale actions, then clip them to scaled bounds. Training first clips and then scales, with
        # the same result.
        self.stretch, self.offset, self.low, self.high = (
            torch.as_tensor(values, dtype=torch.float32)  # [A]
            for values in (
                decoder.scale,
                decoder.offset,
                *decoder.bounds,
            )
        )

    def forward(
        self,
        obs: Tensor,  # [B, F] as the environment returned them
        state: Tensor,  # [B, D]
        episode_start: Tensor,  # [B] bool; True resets the state before the step
    ) -> tuple[Tensor, Tensor]:
        """Return actions [B, ...] and the next state [B, D]."""
        batch = obs.shape[0]  # the exporter would turn len(obs) into a constant
        # Split `state` into the recurrent state and the history of observations. A policy without
        # memory or without a window has no columns for the part in `state`. Then the initial value
        # is used in every step.
        initial = self.policy.initial_state(batch), self.policy.empty_history(batch)
        recurrent, history = (
            columns.reshape(start.shape) if columns.shape[1] else start
            for columns, start in zip(state.split(self.sizes, dim=1), initial, strict=True)
        )
        controller = PolicyController(self.policy, self.normalize, state=recurrent, history=history)
        actions = controller(self.policy, obs, episode_start).reshape(batch, -1)
        if self.policy.discrete:
            actions = actions + self.offset
        else:
            actions = (actions * self.stretch + self.offset).clamp(self.low, self.high)
        after: Any = controller.state, controller.history
        columns = [part.flatten(1) for part, size in zip(after, self.sizes, strict=True) if size]
        return actions.reshape(batch, *self.action_shape), torch.cat(columns or [state], dim=1)


def float_copy(agent: LoadedAgent) -> Any:
    """Return a copy of the policy that computes in fp32."""
    policy = copy.deepcopy(agent.policy).float().requires_grad_(False)
    policy.low_precision = None
    return policy


def write_onnx(step: ExportedStep, path: Path, contract: dict) -> None:
    """Write an ONNX model for any batch size; put `contract` into its metadata."""
    num_rows = 3  # torch would turn a batch size of 0 or 1 into a constant
    inputs = (
        torch.zeros(num_rows, step.policy.num_obs, dtype=step.obs_dtype),
        torch.zeros(num_rows, step.state_size),
        torch.ones(num_rows, dtype=torch.bool),
    )
    with torch.no_grad(), warnings.catch_warnings(action="ignore"):
        program = torch.export.export(step, inputs, dynamic_shapes=BATCH_AXIS)
        model = torch.onnx.export(
            program.run_decompositions(),
            input_names=list(INPUTS),
            output_names=list(OUTPUTS),
            dynamic_shapes=BATCH_AXIS,
            opset_version=18,
            dynamo=True,
            verbose=False,
        )
    assert model is not None
    model.model.metadata_props["contract"] = json.dumps(contract)
    model.save(path, external_data=False)


def run_onnx(path: Path) -> Runner:
    """Load a model in ONNX Runtime; return a function that runs it on the CPU."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda *inputs: tuple(session.run(OUTPUTS, dict(zip(INPUTS, inputs, strict=True))))


# ---- comparison with the trained policy


def largest_difference(agent: LoadedAgent, step: ExportedStep, run: Runner) -> float:
    """Return the largest relative difference between exported and original actions.

    Both policies act on the same random observations, in episodes that start at random steps. The
    difference of each action component is divided by the larger of two numbers: the largest
    magnitude of this component over all steps, and half the component's range (1 if unbounded).
    Discrete choices are compared by the logits of the chosen options, because rounding may decide
    between options that are equally likely.
    """
    policy, decoder = float_copy(agent), step.decoder
    generator = np.random.default_rng(0)
    exported, expected = [], []  # per step: the values [B, n] to compare
    for batch in BATCHES:
        controller = PolicyController(policy, agent.normalizer)
        state = np.zeros((batch, step.state_size), np.float32)
        for number in range(NUM_STEPS):
            obs = sample_rows(agent, step, generator, batch)
            start = (generator.random(batch) < RESET) | (number == 0)
            action, state = run(obs, state, start)
            decided = controller(policy, torch.from_numpy(obs), torch.from_numpy(start))
            rows = [action.reshape(batch, -1), decoder.flat(decided.numpy())]
            if policy.discrete:
                logits = controller.actor_outputs.numpy()
                chosen = [row - decoder.start for row in rows]
                rows = [(decoder.encode(c) * logits).sum(1, keepdims=True) for c in chosen]
            exported.append(rows[0])
            expected.append(rows[1])
    expected_values = np.concatenate(expected)
    half_range = 1.0 if policy.discrete else decoder.scale
    scale = np.maximum(half_range, np.abs(expected_values).max(axis=0))
    differences = np.abs(np.concatenate(exported) - expected_values) / scale
    return float(np.nan_to_num(differences, nan=np.inf).max())


def sample_rows(
    agent: LoadedAgent, step: ExportedStep, generator: np.random.Generator, batch: int
) -> np.ndarray:
    """Return random observations [B, F], some so large that they will be clipped.

    A user's encoder may accept only real observations, such as numbers of cells: draw from these.
    """
    if agent.config.policy.encoder:
        return agent.obs.numpy()[generator.integers(len(agent.obs), size=batch)]
    moments, masks = agent.normalizer.moments, agent.policy.mask_columns
    mean, variance = moments.mean.numpy(), moments.variance.numpy()
    rows = mean + 6.0 * np.sqrt(variance) * generator.standard_normal((batch, len(mean)))
    if masks:  # mask random choices, but allow the last choice of every action
        rows[:, masks] = rows[:, masks] > 0
        rows[:, np.array(masks)[np.cumsum(step.decoder.sizes) - 1]] = 1.0
    pixels = agent.policy.layout.columns("image")
    rows[:, pixels] = generator.integers(0, 256, (batch, len(pixels)))
    return rows.astype(step.row_type)


# ---- contract


def make_contract(agent: LoadedAgent, step: ExportedStep) -> dict:
    """Describe the model's inputs and outputs, for programs that run the model.

    docs/deployment.md explains the entries.
    """
    config, decoder = agent.config, step.decoder
    if agent.policy.discrete:
        action = _tensor("action", "int64", *step.action_shape)
        action |= {"choices": decoder.sizes.tolist(), "start": decoder.start.tolist()}
    else:
        action = _tensor("action", "float32", *step.action_shape)
        action |= {"stretch": decoder.scale.tolist(), "offset": decoder.offset.tolist()}
    return {
        "contract_version": CONTRACT_VERSION,
        "env": {"id": config.task.env, "kwargs": config.task.kwargs()},
        "checkpoint": {"file": agent.path.name, "iteration": agent.iteration},
        "inputs": [
            _tensor("obs", step.row_type.name, agent.policy.num_obs) | {"parts": _parts(step)},
            _tensor("state", "float32", step.state_size),
            _tensor("episode_start", "bool"),
        ],
        "outputs": [action, _tensor("next_state", "float32", step.state_size)],
    }


def _tensor(name: str, type_name: str, *shape: int) -> dict:
    return {"name": name, "type": type_name, "shape": ["batch", *shape]}


def _parts(step: ExportedStep) -> list[dict]:
    """Describe the parts of an input row and how observations are encoded into them."""
    leaves = {leaf.part.name: leaf for leaf in step.encoder.leaves}
    parts = []
    for part, columns in step.policy.layout.slices():
        entry: dict = {
            "name": part.name,
            "kind": part.kind,
            "columns": [columns.start, columns.stop],
            "shape": list(part.shape),
        }
        leaf = leaves.get(part.name)
        if leaf and leaf.axes:
            entry["image"] = {"axes": leaf.axes, "multiplied_by": leaf.scale}
        elif leaf and len(leaf.sizes):
            entry["one_hot"] = {"first": leaf.start.tolist(), "sizes": leaf.sizes.tolist()}
        parts.append(entry)
    return parts


# ---- command


def export(agent: LoadedAgent, folder: Path) -> tuple[Path, dict]:
    """Write a policy and its contract; check the written model in ONNX Runtime.

    Returns the model's path and the contract. If the actions of the model differ from those of the
    policy, the model is deleted.

    Raises:
        UserError: a package is missing, or the model differs from the policy.
    """
    for name in ("onnx", "onnxscript", "onnxruntime"):
        if not find_spec(name):
            raise UserError(f"an export needs the package {name}: pip install 'clstm-ppo[export]'")
    step = ExportedStep(agent)
    contract = make_contract(agent, step)
    path, contract_path = (path_to_write(folder, name) for name in (MODEL, CONTRACT))
    folder.mkdir(parents=True, exist_ok=True)
    write_onnx(step, path, contract)
    difference = largest_difference(agent, step, run_onnx(path))
    if not difference <= TOLERANCE:
        path.unlink()
        raise UserError(
            f"the exported policy differs from the trained one by {difference:.2g}, more than "
            f"{TOLERANCE}: {path} is removed",
            exit_code=1,
        )
    check = {"runtime": f"onnxruntime {version('onnxruntime')}", "max_difference": difference}
    contract |= {"file": MODEL, "check": check}
    contract_path.write_text(json.dumps(contract, indent=2) + "\n", encoding="utf-8")
    return path, contract


@explains_errors
def main() -> int:
    """Run the command; return the exit code."""
    parser = CommandParser(prog="python -m agents.export", description=__doc__)
    parser.add_argument("path", metavar="RUN_DIR_OR_CHECKPOINT")
    folder = f"folder for the files (default: RUN_DIR/{FOLDER})"
    parser.add_argument("--output", type=os.path.abspath, metavar="DIR", help=folder)
    which = "checkpoint to export from a run directory (default: best.pt, if it exists)"
    parser.add_argument("--which", choices=("best", "last"), default="", help=which)
    for name in ("core", "encoder"):
        text = f"own {name} of the run; needed if another user owns its config.json"
        parser.add_argument(f"--{name}", metavar="MODULE:CLASS", help=text)
    args = parser.parse_args()
    agent = load_agent(args.path, which=args.which, core=args.core, encoder=args.encoder)
    print(f"{agent.path}, iteration {agent.iteration}")
    path, contract = export(agent, Path(args.output or path_to_write(agent.directory.path, FOLDER)))
    print(f"{path}, with {CONTRACT} in the same folder; comparison with torch: {contract['check']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
