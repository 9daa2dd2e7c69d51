"""Whether two runs ended alike: last checkpoint and metrics, exactly or nearly."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_dist.checkpoint.folder import load_latest
from rl_dist.errors import UserError
from rl_dist.telemetry.metrics import METRICS_FILE

ABOUT_THE_MACHINE = {"time", "host", "gpu", "cpu", "ram"}  # first parts of the names of metrics


def flatten(value: Any, path: str = "") -> dict[str, Any]:
    """Nested dicts and lists as one dict from path to tensor or plain value."""
    if isinstance(value, dict):
        entries = list(value.items())
    elif isinstance(value, list | tuple):
        entries = list(enumerate(value))
    else:
        entries = []
    if not entries:  # an empty one is something, too
        return {path: value}
    return {name: leaf for key, entry in entries for name, leaf in flatten(entry, f"{path}/{key}".strip("/")).items()}


def differences(left: Any, right: Any, tolerance: float = 0.0) -> list[str]:
    """What differs between two nested states, a line each; tolerance 0: bit for bit."""
    one, other = flatten(left), flatten(right)
    found = [f"{name} is in one of them only" for name in sorted(one.keys() ^ other.keys())]
    for name in (name for name in one if name in other):
        problem = _difference(one[name], other[name], tolerance)
        if problem:
            found.append(f"{name}: {problem}")
    return found


def _difference(left: Any, right: Any, tolerance: float) -> str:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return _tensor_difference(left, right, tolerance)
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        return "a tensor in one of them only"
    if type(left) is not type(right):
        return f"{left!r} and {right!r}"
    numbers = isinstance(left, float)
    if left == right or (numbers and math.isclose(left, right, rel_tol=tolerance, abs_tol=tolerance)):
        return ""
    return f"{left} and {right}"


def _tensor_difference(left: Tensor, right: Tensor, tolerance: float) -> str:
    for what in ("dtype", "shape"):
        if getattr(left, what) != getattr(right, what):
            return f"{what} {getattr(left, what)} and {getattr(right, what)}"
    if torch.equal(_bits(left), _bits(right)):
        return ""
    if tolerance and left.is_floating_point() and torch.allclose(left, right, rtol=tolerance, atol=tolerance):
        return ""
    gap = (left.double() - right.double()).abs()
    return f"{int((gap != 0).sum())} of {gap.numel()} numbers differ, by up to {float(gap.max()):.3g}"


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def metrics_of(run_dir: Path, with_ranks: bool) -> dict[str, Any]:
    """metrics.jsonl by iteration, without times and what is about the machine."""
    lines = [json.loads(line) for line in (run_dir / METRICS_FILE).read_text(encoding="utf-8").splitlines()]
    found: dict[str, Any] = {"metrics, iterations": [line["iteration"] for line in lines]}
    for line in lines:
        values = {name: value for name, value in line.items() if name != "ranks" or with_ranks}
        leaves = flatten(values, f"metrics, iteration {line['iteration']}")
        kept = {path: leaf for path, leaf in leaves.items() if not ABOUT_THE_MACHINE & set(path.split("/"))}
        found.update(kept)
    return found


def result_of(run_dir: Path, with_ranks: bool = True) -> dict[str, Any]:
    """What two equal runs share: last checkpoint (without config) and metrics.

    Raises:
        UserError: there is no checkpoint.
    """
    found = load_latest(run_dir)
    if found is None:
        raise UserError(f"{run_dir} holds no valid checkpoint")
    state = found.state
    del state["config"]  # where it runs may differ
    return flatten(state) | metrics_of(run_dir, with_ranks)


def parameter_sha256(run_dir: Path) -> str:
    """The hash of the final parameters that summary.json holds."""
    return str(json.loads((run_dir / "summary.json").read_text())["parameter_sha256"])
