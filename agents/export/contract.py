"""What an exported policy takes and returns: a contract and a card."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch

from agents.export.step import INPUTS, OUTPUTS, ExportedStep
from agents.run.config import SUMMARY
from agents.run.saved import LoadedAgent
from envs.task import TaskConfig
from envs.vector.spaces import categories_of, image_axes, image_scale, leaves, named
from rl_dist.hardware.plain_files import read_plain

CONTRACT_VERSION = 1
MEANINGS = {
    "action_mask": "1 where an action is allowed, from info['action_mask']",
    "previous_action": "the action before, one-hot or scaled to [-1, 1]; zeros at an episode start",
    "previous_reward": "the reward before; 0 at an episode start",
}


def make_contract(agent: LoadedAgent, step: ExportedStep) -> dict[str, Any]:
    """Return all that a program needs to feed the exported step; plain data."""
    policy = agent.policy
    batch = ["batch"]
    state = {"shape": [*batch, step.state_size], "type": "float32"}
    action_type = "int64" if policy.discrete else "float32"
    descriptions = {
        "obs": "row of the observation's parts, not normalised",
        "state": "zeros before the first step, then next_state of the step before",
        "episode_start": "true forgets the state first: obs is the first of its episode",
        "action": "most likely action, in the environment's units and within its bounds",
        "next_state": "state for the next step",
    }
    shapes: dict[str, dict[str, Any]] = {
        "obs": {"shape": [*batch, policy.num_obs], "type": "float32", "parts": _parts(agent)},
        "state": state,
        "episode_start": {"shape": batch, "type": "bool"},
        "action": {"shape": [*batch, *step.action_shape], "type": action_type}
        | {"parts": _action_parts(agent)}
        | {
            "choices": step.decoder.sizes.tolist(),
            "start": step.start.tolist() if policy.discrete else [],
        },
        "next_state": state,
    }
    entries = {
        name: {"name": name, "description": text} | shapes[name]
        for name, text in descriptions.items()
    }
    spaces_json = json.loads(agent.spaces_json) if agent.spaces_json else [None, None]
    return {
        "contract_version": CONTRACT_VERSION,
        "env": {"id": agent.config.task.env, "kwargs": agent.config.task.env_kwargs},
        "spaces": dict(zip(("observation", "action"), _strict(spaces_json), strict=True)),
        "inputs": [entries[name] for name in INPUTS],
        "outputs": [entries[name] for name in OUTPUTS],
        "normalizer": _normalizer(agent, step),
        "checkpoint": {
            "file": agent.path.name,
            "sha256": file_hash(agent.path),
            "iteration": agent.iteration,
        },
        "versions": {
            "torch": torch.__version__,
            "numpy": np.__version__,
            "gymnasium": gymnasium.__version__,
        },
    }


def _strict(value: Any) -> Any:
    """Return JSON that every parser takes: infinite bounds are text."""
    if isinstance(value, dict):
        return {name: _strict(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_strict(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _parts(agent: LoadedAgent) -> list[dict[str, Any]]:
    """Return the parts of a row: columns, kind, and how the environment's values become numbers."""
    observation = agent.spaces[0]
    own = {named(path) or "observation": space for path, space in leaves(observation)}
    known = len(agent.encoder().parts) if agent.spaces_json else 0
    found = []
    for number, (part, place) in enumerate(agent.policy.layout.slices()):
        entry: dict[str, Any] = {
            "name": part.name,
            "kind": part.kind,
            "columns": [place.start, place.stop],
            "shape": list(part.shape),
        }
        if number >= known:
            entry |= {"meaning": MEANINGS[part.name]} if part.name in MEANINGS else {}
        elif (categories := categories_of(own[part.name])) is not None:
            first, sizes = (values.tolist() for values in categories)
            entry["one_hot"] = {"first": first, "sizes": sizes}
        elif part.kind == "image":
            space = own[part.name]
            axes, scale = image_axes(space), image_scale(space)
            entry["image"] = {"axes": list(axes or ()), "divided_by": scale}
        found.append(entry)
    return found


def _action_parts(agent: LoadedAgent) -> list[dict[str, Any]]:
    """Return the parts of an action, whose numbers come one after the other."""
    found, first = [], 0
    for path, space in leaves(agent.spaces[1]):
        size = int(np.prod(space.shape or ()))
        columns = [first, first + size]
        found.append({"name": named(path) or "action", "columns": columns})
        found[-1]["shape"] = list(space.shape or ())
        first += size
    return found


def _normalizer(agent: LoadedAgent, step: ExportedStep) -> dict[str, Any]:
    """Return what the step does to a row first; for information, it is inside."""
    columns = agent.policy.layout.columns("vector")
    found = {"enabled": step.normalize, "inside": True, "clip": step.clip, "columns": columns}
    if step.normalize:
        found |= {
            "shift": step.shift[columns].tolist(),
            "scale": step.scale[columns].tolist(),
        }
    return found


def make_card(agent: LoadedAgent, contract: dict[str, Any], how_to_run: str) -> str:
    """Return the policy card: task, training, scores, how to run it, configuration."""
    config, check = agent.config, contract["check"]
    task = config.task.env + (f" {config.task.env_kwargs}" if config.task.env_kwargs else "")
    steps = f"{agent.global_step:,} environment steps"
    trained = f"{agent.iteration} iterations of recurrent PPO, {steps}"
    sections = {name: config.to_dict()[name] for name in ("task", "policy", "train", "ppo")}
    obs, state = (contract["inputs"][index]["shape"][-1] for index in (0, 1))
    return f"""# Policy for {config.task.env}

| | |
|---|---|
| Task | `{task}` |
| Policy | {config.policy.policy}, hidden size {config.policy.hidden_size}, without noise |
| Trained | {trained}, seed {config.train.seed} |
| Checkpoint | `{contract["checkpoint"]["file"]}`, SHA-256 `{contract["checkpoint"]["sha256"]}` |
| File | `{contract["file"]}`, SHA-256 `{contract["sha256"]}` |
| Checked | {check["runtime"]} differs from torch by at most {check["max_difference"]:.1e} |

## Scores
{_scores(agent)}

## Use
`obs` [batch, {obs}], `state` [batch, {state}] and `episode_start` [batch] go in, `action` and
`next_state` come out. `contract.json` says what the columns are. Normaliser, reset and the bounds
of actions are inside. This plays 1,000 steps where an observation is one Box of numbers;
`examples/deployment.py` of the trainer makes rows and actions of any spaces.

```python
{how_to_run}

{_make_env_lines(config.task)}
obs, info = env.reset()
state, begins = np.zeros((1, {state}), np.float32), True
for _ in range(1000):
    row = np.asarray(obs, np.float32).reshape(1, -1)
    action, state = policy(row, state, np.array([begins]))
    obs, reward, terminated, truncated, info = env.step(action[0])
    begins = terminated or truncated
    if begins:
        obs, info = env.reset()
```

## Configuration
```json
{json.dumps(sections, indent=2)}
```
"""


def _make_env_lines(task: TaskConfig) -> str:
    """Return the Python lines that make the environment."""
    spec = gymnasium.registry.get(task.env)
    ours = spec and str(spec.entry_point).startswith("envs.")
    kwargs = f", **{task.kwargs()}" if task.kwargs() else ""
    known = "import envs  # of the trainer: registers it\n" if ours else ""
    return f"{known}env = gymnasium.make({task.env!r}{kwargs})"


def _scores(agent: LoadedAgent) -> str:
    """Return the scores of these weights, and of the newest where they are others."""
    found: list[str] = []
    if agent.measured:
        why = "by which the best checkpoint is chosen, which flatters it"
        found = [f"Of these weights, in training, {why}:\n", *_score_lines(agent.measured), ""]
    path = agent.run_dir / SUMMARY
    if not path.is_file():
        no_end = "the run has no summary.json, as its training has not come to an end."
        return "\n".join([*found, f"None yet of the evaluation at the end: {no_end}"])
    summary = json.loads(read_plain(path))
    newest = summary["iteration"]
    whose = "these weights"
    if newest != agent.iteration:
        whose = (
            f"the newest weights, of iteration {newest}, NOT of these, of iteration "
            f"{agent.iteration}, which python -m agents.evaluate measures"
        )
    lines = _score_lines(summary["test"])
    return "\n".join([*found, f"At the end of the training, of {whose}:\n", *lines])


def _score_lines(tested: Any, name: str = "") -> list[str]:
    """Return one line per number of a nested summary."""
    if isinstance(tested, dict):
        inner = (_score_lines(value, f"{name} {key}".strip()) for key, value in tested.items())
        return [line for lines in inner for line in lines]
    return [f"- {name}: {tested:.6g}"] if isinstance(tested, int | float) else []
