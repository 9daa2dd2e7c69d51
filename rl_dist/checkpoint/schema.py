"""The entries that a checkpoint of training must have to be resumed.

The checksum guards against damage; this guards against contents that were changed or went wrong:
every entry has its type, range and shape, and trained tensors are finite. What only the owner of an
entry knows, such as the shapes that follow from a configuration, it compares itself.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

RUN = "train_distributed.py"
FIT = "rl_dist.fit"
# one of them shows who wrote it
_MARKS = {RUN: {"carry", "global_step"}, FIT: {"module", "best_epoch"}}
_COUNTS = ("iteration", "global_step", "episodes", "epoch", "best_epoch", "bad_in_a_row")
_MOST = 10**15  # that anything counts
_ADAM = ("step", "exp_avg", "exp_avg_sq")
_LOSS_SCALER = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}


class StateError(ValueError):
    """A state that no training of ours has written; one line."""


def check_state(state: Mapping[str, Any]) -> None:
    """Check the entries of a checkpoint, as far as they are known.

    Raises:
        StateError: names the entry.
    """
    try:
        for name in _COUNTS:
            if name in state:
                _count(state, name)
        measured = {} if state.get("measured") is None else state["measured"]
        good = isinstance(measured, dict) and all(_is_number(value) for value in measured.values())
        _require(good, "measured", "no number by name of a metric")
        if "config" in state:
            _config(state["config"])
        kind = kind_of(state)
        if kind == RUN:
            _check_run(state)
        elif kind == FIT:
            _check_fit(state)
        if kind:
            _strategy(state.get("strategy"))
    except StateError:
        raise
    except KeyError as error:
        raise StateError(f"it has no {error}") from None
    except Exception as error:  # whatever torch raises at what cannot be looked at
        cause = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise StateError(f"it holds what cannot be compared ({cause})") from None


def kind_of(state: Mapping[str, Any]) -> str:
    """Return who wrote a state: RUN, FIT or "" (somebody else)."""
    return next((kind for kind, marks in _MARKS.items() if state.keys() & marks), "")


def _check_run(state: Mapping[str, Any]) -> None:
    for name in ("iteration", "global_step", "episodes", "config"):
        state[name]
    num_obs = _count(state, "num_obs", 1)
    num_actions = _count(state, "num_actions", 1)
    _require(type(state["discrete"]) is bool, "discrete", "neither true nor false")
    weights = _tensors(state, "policy")
    good = all(weight.is_floating_point() for weight in weights.values())
    _require(good, "policy", "not of floating point")
    good = any(num_actions in weight.shape for weight in weights.values())
    _require(good, "policy", f"without weights of {num_actions} actions")
    _adam(state["optimizer"], list(weights.values()))
    for name, size in (("obs_normalizer", num_obs), ("reward_normalizer", 1)):
        moments = _tensors(state, name)
        shapes = {"moments.count": (), "moments.mean": (size,), "moments.variance": (size,)}
        found = {key: tuple(value.shape) for key, value in moments.items()}
        _require(found == shapes, name, "of other shapes")
        negative = any((moments[key] < 0).any() for key in ("moments.count", "moments.variance"))
        _require(not negative, name, "negative")
    carry = _tensors(state, "carry")
    num_envs = len(carry["obs"]) if carry["obs"].ndim == 2 else 0
    good = num_envs > 0 and carry["obs"].shape[1] == num_obs
    _require(good, "carry", f"without observations of {num_obs} numbers")
    environments = state["environments"]
    _require(isinstance(environments, dict | None), "environments", "neither a dict nor None")
    entries = carry | {f"environments {key}": value for key, value in (environments or {}).items()}
    for name, value in entries.items():
        good = isinstance(value, Tensor) and value.shape[:1] == (num_envs,)
        _require(good, name, f"not of {num_envs} environments")


def _check_fit(state: Mapping[str, Any]) -> None:
    for name in ("epoch", "best_epoch", "history", "extra"):
        state[name]
    module = _tensors(state, "module", finite=False)  # a mask may hold infinities
    good = not any(value.isnan().any() for value in module.values())
    _require(good, "module", "not a number somewhere")
    _require(_is_number(state["best_loss"], finite=False), "best_loss", "no number")
    history = state["history"]
    good = isinstance(history, list) and all(isinstance(record, dict) for record in history)
    good = good and len(history) == state["epoch"]
    _require(good, "history", "not one record for each epoch")
    numbers = [value for record in history for value in record.values()]
    good = all(_is_number(value, finite=False) for value in numbers)
    _require(good, "history", "not of numbers")
    optimizer = state["optimizer"]
    good = isinstance(optimizer, dict) and isinstance(optimizer.get("state"), dict)
    good = good and isinstance(optimizer.get("param_groups"), list)
    _require(good, "optimizer", "no optimizer's state")
    _require(isinstance(state["extra"], dict), "extra", "no dict")
    _require(isinstance(state.get("facts"), dict | None), "facts", "no dict")


def _require(good: bool, name: str, otherwise: str) -> None:
    if not good:
        raise StateError(f"{name!r:.80} is {otherwise}")


def _count(state: Mapping[str, Any], name: str, least: int = 0) -> int:
    value = state[name]
    good = type(value) is int and least <= value <= _MOST
    _require(good, name, f"no whole number of {least}..{_MOST}")
    return value


def _is_number(value: Any, *, finite: bool = True) -> bool:
    return type(value) in (int, float) and (not finite or math.isfinite(value))


def _config(text: Any) -> None:
    try:
        config = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        config = None
    good = isinstance(config, dict) and all(isinstance(value, dict) for value in config.values())
    _require(good, "config", "no JSON object of sections")


def _tensors(state: Mapping[str, Any], name: str, *, finite: bool = True) -> dict[str, Tensor]:
    """Return the tensors of an entry by name."""
    found = state[name]
    _require(isinstance(found, dict) and bool(found), name, "no tensors by name")
    for key, value in found.items():
        place = f"{name} {key}"
        _require(isinstance(key, str) and isinstance(value, Tensor), place, "no tensor")
        # nothing that takes more memory to look at than it has, or cannot be computed with
        good = value.device.type == "cpu" and value.layout is torch.strided
        good = good and not value.is_quantized and not value.is_complex()
        good = good and value.numel() * value.element_size() <= value.untyped_storage().nbytes()
        _require(good, place, "no plain tensor")
        good = not finite or bool(torch.isfinite(value).all())
        _require(good, place, "not finite: NaN or inf")
    return found


def _adam(optimizer: Any, weights: list[Tensor]) -> None:
    """Check Adam's state of the weights, which stand in the order of the parameters."""
    other = "not of the weights in 'policy'"
    numbers = list(range(len(weights)))
    good = isinstance(optimizer, dict) and isinstance(optimizer.get("state"), dict)
    groups: Any = optimizer.get("param_groups") if good else None
    good = isinstance(groups, list) and len(groups) == 1 and isinstance(groups[0], dict)
    _require(good and groups[0].get("params") == numbers, "optimizer", other)
    for number, moments in optimizer["state"].items():
        name = f"optimizer of weight {number}"
        _require(number in numbers and isinstance(moments, dict), name, other)
        _require(set(_ADAM) <= moments.keys(), name, f"without {', '.join(_ADAM)}")
        moments = _tensors({name: moments}, name)
        shape = weights[number].shape
        good = moments["step"].numel() == 1 and all(
            moments[key].shape == shape for key in _ADAM[1:]
        )
        _require(good, name, "of another shape than the weight")
        negative = any((moments[key] < 0).any() for key in ("step", "exp_avg_sq"))
        _require(not negative, name, "negative")


def _strategy(strategy: Any) -> None:
    """Check the entry of a strategy; older checkpoints have none."""
    _require(isinstance(strategy, dict | None), "strategy", "no dict")
    if strategy and "loss_scaler" in strategy:
        scaler = strategy["loss_scaler"]
        good = isinstance(scaler, dict) and scaler.keys() == _LOSS_SCALER
        good = good and all(_is_number(value) and value >= 0 for value in scaler.values())
        _require(good and bool(scaler["scale"]), "loss_scaler", "no loss scale")
