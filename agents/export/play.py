"""Play episodes with an exported policy in ONNX Runtime: python play.py [FOLDER].

This file lies beside every exported policy and needs gymnasium, numpy and onnxruntime alone.
`DeployedPolicy` is there to be copied: it makes rows of what the environment shows, as
contract.json says, and actions in the environment's structure.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import onnxruntime

EPISODES = 3


def load(folder: Path) -> tuple[dict[str, Any], Callable[..., Any]]:
    """Return the contract and the step, which takes and returns rows."""
    contract = json.loads((folder / "contract.json").read_text())
    path = folder / contract["file"]
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [each["name"] for each in contract["inputs"]]
    return contract, lambda *inputs: session.run(None, dict(zip(names, inputs, strict=True)))


def make_env(contract: dict[str, Any]) -> gymnasium.Env:
    """Make the environment that the policy was trained in."""
    sys.path.insert(0, "")  # its module may lie in the current directory
    with suppress(ImportError):
        import_module("envs")  # registers the environments of the trainer
    return gymnasium.make(contract["env"]["id"], **contract["env"]["kwargs"])


class DeployedPolicy:
    """Acts in one environment, and remembers what it has to between the steps."""

    def __init__(self, contract: dict[str, Any], step: Callable[..., Any]) -> None:
        self.contract, self.step = contract, step
        self.parts = contract["inputs"][0]["parts"]
        self.spaces = contract["spaces"]
        self.state = np.zeros((1, contract["inputs"][1]["shape"][1]), np.float32)
        self.begin()

    def begin(self) -> None:
        """Let the next observation be the first of an episode."""
        self.begins, self.before = True, np.zeros(0)  # the action before, as an input

    def act(self, obs: Any, info: Mapping[str, Any] | None = None, reward: float = 0.0) -> Any:
        """Return the action for an observation and the info and reward beside it."""
        values = list(leaves(self.spaces["observation"], obs))
        row = [encode(part, value) for part, value in zip(self.parts, values, strict=False)]
        row += [self._extra(part, info or {}, reward) for part in self.parts[len(values) :]]
        rows = np.concatenate(row)[None]  # [1, F]
        action, self.state = self.step(rows, self.state, np.array([self.begins]))
        self.begins, self.before = False, self._as_input(np.ravel(action[0]))
        parts = iter(self.contract["outputs"][0]["parts"])
        return rebuilt(self.spaces["action"], np.ravel(action[0]), parts)

    def _extra(self, part: dict[str, Any], info: Mapping[str, Any], reward: float) -> np.ndarray:
        """Return what a row holds besides the observation; zeros at an episode's start."""
        if part["name"] == "action_mask":
            masks = info["action_mask"]
            flat = [np.ravel(mask) for mask in (masks if isinstance(masks, tuple) else [masks])]
            return np.concatenate(flat).astype(np.float32)
        size = part["columns"][1] - part["columns"][0]
        if self.begins:
            return np.zeros(size, np.float32)
        return np.full(1, reward, np.float32) if part["name"] == "previous_reward" else self.before

    def _as_input(self, action: np.ndarray) -> np.ndarray:
        """Return an action as the next row holds it: one-hot, or within -1 and 1."""
        made = self.contract["outputs"][0]
        if made["choices"]:
            return one_hot(action - made["start"], np.array(made["choices"]))
        return ((action - made["offset"]) / made["stretch"]).astype(np.float32)


def leaves(space: dict[str, Any] | None, *value: Any) -> Iterator[Any]:
    """Yield the parts of a space that is JSON, or those of a value of it, in order."""
    parts = (space or {}).get("parts")
    if parts is None:
        yield value[0] if value else space
    for key, inner in parts.items() if isinstance(parts, dict) else enumerate(parts or ()):
        yield from leaves(inner, *(each[key] for each in value))


def rebuilt(space: dict[str, Any] | None, numbers: np.ndarray, parts: Iterator[Any]) -> Any:
    """Build an action of a space that is JSON out of its numbers."""
    inner = (space or {}).get("parts")
    if isinstance(inner, dict):
        return {name: rebuilt(each, numbers, parts) for name, each in inner.items()}
    if inner is not None:
        return tuple(rebuilt(each, numbers, parts) for each in inner)
    part = next(parts)
    return numbers[slice(*part["columns"])].reshape(part["shape"])[()]


def encode(part: dict[str, Any], value: Any) -> np.ndarray:
    """Return the numbers that a part of an observation is in a row."""
    if "one_hot" in part:
        first, sizes = (np.array(part["one_hot"][name]) for name in ("first", "sizes"))
        return one_hot(np.ravel(value) - first, sizes)
    if "image" in part:
        image = part["image"]
        value = np.transpose(value, image["axes"]).astype(np.float32) / image["divided_by"]
    return np.ravel(value).astype(np.float32)


def one_hot(digits: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return digits of so many choices each as zeros and ones."""
    numbers = np.zeros(int(sizes.sum()), np.float32)
    numbers[digits + np.cumsum(sizes) - sizes] = 1.0
    return numbers


def main(folder: Path) -> None:
    """Play, and print returns."""
    contract, step = load(folder)
    policy, env = DeployedPolicy(contract, step), make_env(contract)
    for episode in range(EPISODES):
        obs, info = env.reset(seed=episode)
        policy.begin()
        over, reward, total = False, 0.0, 0.0
        while not over:
            obs, gained, terminated, truncated, info = env.step(policy.act(obs, info, reward))
            over, reward = terminated or truncated, float(gained)
            total += reward
        print(f"episode {episode}: return {total:.1f}")


if __name__ == "__main__":
    main(Path(*sys.argv[1:]))
