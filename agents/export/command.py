"""Export a trained policy as an ONNX model, and check it in ONNX Runtime.

The model computes one step without noise. It takes the state as input and returns the next state.
It includes the normaliser, the reset at episode starts, and the bounds of actions.

examples:
  python -m agents.export runs/my_run
  python -m agents.export runs/my_run --which last --output my_policy
exit codes: 0 done, 1 the exported policy differs or cannot be made, 2 bad usage
"""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from agents.export.step import ExportedStep, Runner, float_copy, run_onnx, write_onnx
from agents.rollout import policy_input, shift_history
from agents.run.saved import LoadedAgent, load_agent
from envs.vector.spaces import ActionDecoder
from rl_dist.errors import CommandParser, UserError, explains_errors
from rl_dist.files import path_to_write

FOLDER, MODEL, CONTRACT = "export/onnx", "policy.onnx", "contract.json"
CONTRACT_VERSION = 4
BATCHES, NUM_STEPS = (1, 5), 64
RESET = 0.1  # probability that an episode starts at a step
TOLERANCE = 1e-5


# ---- comparison with the trained policy


def largest_difference(agent: LoadedAgent, step: ExportedStep, run: Runner) -> float:
    """Return the largest relative difference of actions over episodes with resets.

    For each number of an action, the difference is divided by the largest magnitude of this number
    over all steps, but at least by half the range of a bounded action, or by 1. Discrete choices
    are compared by the logits of the chosen options, because rounding may decide between options
    that are equally likely.
    """
    policy, decoder = float_copy(agent), step.decoder
    generator = np.random.default_rng(0)
    exported, expected = [], []  # for every step: numbers [B, n] to compare
    for batch in BATCHES:
        vectors, history = policy.initial_state(batch), policy.empty_history(batch)
        state = np.zeros((batch, step.state_size), np.float32)
        for number in range(NUM_STEPS):
            obs = sample_rows(agent, decoder, generator, batch)
            start = (generator.random(batch) < RESET) | (number == 0)
            action, state = run(obs, state, start)
            if action.shape != (batch, *step.action_shape) or state.shape[1:] != (step.state_size,):
                return float("inf")

            # Compute the same step as evaluation does.
            begins = torch.from_numpy(start)
            history = history * ~begins[:, None, None]
            seen = policy_input(
                agent.normalizer.cpu(), history, torch.from_numpy(obs), torch.float32
            )
            decided, actor, _, vectors = policy.act(seen, vectors, begins)
            history = shift_history(history, seen)
            rows = [action.reshape(batch, -1), decoder.flat(decided.numpy())]
            if policy.discrete:
                chosen = [row - decoder.start for row in rows]
                rows = [(decoder.encode(c) * actor.numpy()).sum(1, keepdims=True) for c in chosen]
            exported.append(rows[0])
            expected.append(rows[1])
    wanted = np.concatenate(expected)
    smallest = 1.0 if policy.discrete else decoder.scale
    scale = np.maximum(smallest, np.abs(wanted).max(axis=0))
    differences = np.abs(np.concatenate(exported) - wanted) / scale
    return float(np.nan_to_num(differences, nan=np.inf).max())


def sample_rows(
    agent: LoadedAgent, decoder: ActionDecoder, generator: np.random.Generator, batch: int
) -> np.ndarray:
    """Return random rows [B, F]; some values are so large that they get clipped."""
    policy, moments = agent.policy, agent.normalizer.moments
    rows = (generator.random((batch, policy.num_obs)) < 0.5).astype(np.float32)
    columns = policy.layout.columns("vector")
    mean, variance = (values[columns].cpu().numpy() for values in (moments.mean, moments.variance))
    noise = generator.standard_normal((batch, len(columns)))
    rows[:, columns] = mean + 6.0 * np.sqrt(variance) * noise
    if policy.mask_columns:
        rows[:, np.array(policy.mask_columns)[np.cumsum(decoder.sizes) - 1]] = 1.0
    return rows


# ---- contract


def make_contract(agent: LoadedAgent, step: ExportedStep) -> dict[str, Any]:
    """Describe inputs and outputs for programs that run the model.

    docs/deployment.md explains the entries.
    """
    config, decoder, is_discrete = agent.config, step.decoder, agent.policy.discrete
    checkpoint = {"file": agent.path.name, "iteration": agent.iteration}
    return {
        "contract_version": CONTRACT_VERSION,
        "env": {"id": config.task.env, "kwargs": config.task.kwargs()},
        "checkpoint": checkpoint | {"sha256": file_hash(agent.path)},
        "inputs": [
            _tensor("obs", "float32", agent.policy.num_obs) | {"parts": _parts(agent)},
            _tensor("state", "float32", step.state_size),
            _tensor("episode_start", "bool"),
        ],
        "outputs": [
            _tensor("action", "int64" if is_discrete else "float32", *step.action_shape)
            | {
                "choices": decoder.sizes.tolist(),
                "start": decoder.start.tolist() if is_discrete else [],
                "stretch": [] if is_discrete else decoder.scale.tolist(),
                "offset": [] if is_discrete else decoder.offset.tolist(),
            },
            _tensor("next_state", "float32", step.state_size),
        ],
    }


def _tensor(name: str, type_name: str, *shape: int) -> dict[str, Any]:
    return {"name": name, "type": type_name, "shape": ["batch", *shape]}


def file_hash(path: Path) -> str:
    """Return the SHA-256 digest of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _parts(agent: LoadedAgent) -> list[dict[str, Any]]:
    """Describe the parts of a row, and how an observation is encoded into each part."""
    leaves = {leaf.part.name: leaf for leaf in agent.encoder().leaves}
    parts = []
    for part, columns in agent.policy.layout.slices():
        entry: dict[str, Any] = {
            "name": part.name,
            "kind": part.kind,
            "columns": [columns.start, columns.stop],
            "shape": list(part.shape),
        }
        leaf = leaves.get(part.name)
        if leaf and leaf.axes:
            entry["image"] = {"axes": leaf.axes, "divided_by": leaf.scale}
        elif leaf and len(leaf.sizes):
            entry["one_hot"] = {"first": leaf.start.tolist(), "sizes": leaf.sizes.tolist()}
        parts.append(entry)
    return parts


# ---- command


def export(agent: LoadedAgent, folder: Path) -> tuple[Path, dict[str, Any]]:
    """Write a policy and its contract; check the written model in ONNX Runtime.

    Return the model's path and the contract. If the model's actions differ from the policy's, the
    model is removed and a UserError is raised.
    """
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
    contract |= {"file": MODEL, "sha256": file_hash(path), "check": check}
    contract_path.write_text(json.dumps(contract, indent=2) + "\n", encoding="utf-8")
    return path, contract


@explains_errors
def main() -> int:
    """Run the command; return the exit code."""
    parser = CommandParser(prog="python -m agents.export", description=__doc__)
    parser.add_argument("path", metavar="RUN_DIR_OR_CHECKPOINT")
    folder = f"folder for the files (default: RUN_DIR/{FOLDER})"
    parser.add_argument("--output", metavar="DIR", help=folder)
    which = "checkpoint of a run directory (default: the best one where there is one)"
    parser.add_argument("--which", choices=("best", "last"), default="", help=which)
    core = "the core of --policy own; needed to import it if another user owns config.json"
    parser.add_argument("--core", metavar="MODULE:CLASS", help=core)
    args = parser.parse_args()
    agent = load_agent(args.path, which=args.which, core=args.core)
    print(f"{agent.path}, iteration {agent.iteration}")
    path, contract = export(agent, Path(args.output or path_to_write(agent.run_dir, FOLDER)))
    check = contract["check"]
    print(
        f"{path}: {path.stat().st_size / 2**20:.2f} MiB, with {CONTRACT} beside it; "
        f"{check['runtime']} differs from torch by at most {check['max_difference']:.1e}"
    )
    return 0
