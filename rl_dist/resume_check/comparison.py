"""Compare how two runs ended: last checkpoint and metrics, exactly or nearly."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_dist.checkpoint.store import load_latest
from rl_dist.errors import UserError
from rl_dist.run_dir import RunDir

ABOUT_THE_MACHINE = {"time", "host", "gpu", "cpu", "ram"}  # first parts of the names of metrics


def flatten(value: Any, path: str = "") -> dict[str, Any]:
    """Return nested dicts and lists as one dict from path to tensor or plain value."""
    entries: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        entries = list(value.items())
    elif isinstance(value, list | tuple):
        entries = list(enumerate(value))
    if not entries:  # an empty one is something, too
        return {path: value}
    found: dict[str, Any] = {}
    for key, entry in entries:
        found |= flatten(entry, f"{path}/{key}".strip("/"))
    return found


def differences(left: Any, right: Any, tolerance: float = 0.0) -> list[str]:
    """List what differs between two nested states; tolerance 0: bit for bit."""
    one = flatten(left)
    other = flatten(right)
    found = [f"{name} is in one of them only" for name in sorted(one.keys() ^ other.keys())]
    for name in (name for name in one if name in other):
        problem = _difference(one[name], other[name], tolerance)
        if problem:
            found.append(f"{name}: {problem}")
    return found


def _difference(left: Any, right: Any, tolerance: float) -> str:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return _tensor_difference(left, right, tolerance)
    near = {"rel_tol": tolerance, "abs_tol": tolerance}
    both_floats = isinstance(left, float) and isinstance(right, float)
    if both_floats and math.isclose(left, right, **near):
        return ""
    same = type(left) is type(right) and left == right
    return "" if same else f"{left!r:.80} and {right!r:.80}"


def _tensor_difference(left: Tensor, right: Tensor, tolerance: float) -> str:
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return f"{left.dtype} {tuple(left.shape)} and {right.dtype} {tuple(right.shape)}"
    if torch.equal(_bits(left), _bits(right)) or (
        tolerance and left.is_floating_point() and torch.allclose(left, right, tolerance, tolerance)
    ):
        return ""
    gap = (left.double() - right.double()).abs()
    number = int((gap != 0).sum())
    return f"{number} of {gap.numel()} numbers differ, by up to {float(gap.max()):.3g}"


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def metrics_of(run_dir: Path, with_ranks: bool) -> dict[str, Any]:
    """Return metrics.jsonl by iteration, without times and facts about the machine."""
    records = RunDir(run_dir).records()
    found: dict[str, Any] = {"metrics, iterations": [record["iteration"] for record in records]}
    for record in records:
        if not with_ranks:
            record.pop("ranks", None)
        leaves = flatten(record, f"metrics, iteration {record['iteration']}").items()
        found |= {path: leaf for path, leaf in leaves if not ABOUT_THE_MACHINE & {*path.split("/")}}
    return found


def result_of(run_dir: Path, with_ranks: bool = True) -> dict[str, Any]:
    """Return what two equal runs share: last checkpoint (without config) and metrics."""
    found = load_latest(run_dir)
    if found is None:
        raise UserError(f"{run_dir} holds no valid checkpoint")
    state = found.state
    del state["config"]  # where it runs may differ
    return flatten(state) | metrics_of(run_dir, with_ranks)


def parameter_sha256(run_dir: Path) -> str:
    """Return the hash of the final parameters, which summary.json holds."""
    return str(RunDir(run_dir).summary()["parameter_sha256"])
