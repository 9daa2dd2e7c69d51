"""Play episodes with an exported policy: numpy and gymnasium alone, or ONNX Runtime.

python -m agents.export runs/my_run --format onnx
python examples/deployment.py runs/my_run/export/onnx

It takes tasks whose observations are one Box; contract.json says how rows of others are made.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

EPISODES = 3


def load(folder: Path) -> tuple[dict[str, Any], Callable[..., Any]]:
    """Return the contract, and the step (obs, state, episode_start) -> (action, next_state)."""
    contract = json.loads((folder / "contract.json").read_text())
    path = folder / contract["file"]
    if path.suffix == ".safetensors":
        sys.path.insert(0, str(folder))
        from numpy_policy import NumpyPolicy  # the file beside it

        return contract, NumpyPolicy(path)
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [each["name"] for each in contract["inputs"]]
    return contract, lambda *inputs: session.run(None, dict(zip(names, inputs, strict=True)))


def main(folder: Path) -> None:
    """Play, and print returns."""
    contract, policy = load(folder)
    env = gymnasium.make(contract["env"]["id"], **json.loads(contract["env"]["kwargs"] or "{}"))
    if not isinstance(env.observation_space, gymnasium.spaces.Box):
        sys.exit("this example takes observations of one Box: contract.json says how rows are made")
    state = np.zeros((1, contract["inputs"][1]["shape"][1]), np.float32)
    for episode in range(EPISODES):
        obs, _ = env.reset(seed=episode)
        begins, over, total = True, False, 0.0
        while not over:
            row = np.asarray(obs, np.float32).reshape(1, -1)
            action, state = policy(row, state, np.array([begins]))
            obs, reward, terminated, truncated, _ = env.step(action[0])
            begins, over, total = False, terminated or truncated, total + float(reward)
        print(f"episode {episode}: return {total:.1f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
