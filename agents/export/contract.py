"""The contract of an exported policy: what it takes and returns."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from agents.config import RunConfig
from agents.export.step import ExportedStep
from agents.run.saved import LoadedAgent
from envs.vector.spaces import categories_of, image_axes, image_scale, leaves, named

CONTRACT_VERSION = 3
MEANINGS = {
    "action_mask": "1 where an action is allowed, from info['action_mask']",
    "previous_action": "the action before, one-hot or scaled to [-1, 1]; zeros at an episode start",
    "previous_reward": "the reward before; 0 at an episode start",
}


def make_contract(agent: LoadedAgent, step: ExportedStep) -> dict[str, Any]:
    """Return all that a program needs to feed the exported step; plain data."""
    policy = agent.policy
    discrete = policy.discrete

    def entry(name: str, description: str, type_name: str, *shape: int) -> dict[str, Any]:
        return {
            "name": name,
            "description": description,
            "type": type_name,
            "shape": ["batch", *shape],
        }

    before = "zeros before the first step, then next_state of the step before"
    forgets = "true forgets the state first: obs is the first of its episode"
    row = "row of the observation's parts, not normalised"
    obs = entry("obs", row, "float32", policy.num_obs)
    likely = "most likely action, in the environment's units and within its bounds"
    action = entry("action", likely, "int64" if discrete else "float32", *step.action_shape)
    action |= {
        "parts": _action_parts(agent),
        "choices": step.decoder.sizes.tolist(),
        "start": step.start.tolist() if discrete else [],
        "stretch": [] if discrete else step.stretch.tolist(),
        "offset": [] if discrete else step.offset.tolist(),
    }
    saved_spaces = json.loads(agent.spaces_json) if agent.spaces_json else [None, None]
    return {
        "contract_version": CONTRACT_VERSION,
        "env": {"id": agent.config.task.env, "kwargs": _env_kwargs(agent.config)},
        "spaces": dict(zip(("observation", "action"), _strict(saved_spaces), strict=True)),
        "inputs": [
            obs | {"parts": _parts(agent)},
            entry("state", before, "float32", step.state_size),
            entry("episode_start", forgets, "bool"),
        ],
        "outputs": [
            action,
            entry("next_state", "state for the next step", "float32", step.state_size),
        ],
        "checkpoint": {
            "file": agent.path.name,
            "sha256": file_hash(agent.path),
            "iteration": agent.iteration,
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


def _env_kwargs(config: RunConfig) -> dict[str, Any]:
    """Return the arguments that make the environment; of trading what is not at its default."""
    if not config.task.is_trading:
        return config.task.kwargs()
    sections = (config.data, config.market, config.trading)
    pairs = [item for section in sections for item in vars(section).items()]
    defaults = {
        name: value for section in sections for name, value in vars(type(section)()).items()
    }
    return {name: value for name, value in pairs if value != defaults[name]}
