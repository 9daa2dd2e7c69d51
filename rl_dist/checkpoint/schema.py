"""What a checkpoint of training holds, so that nothing else is gone on from.

The checksum guards against damage; this guards against contents that were changed or went wrong: every entry has its
type, range and shape, and what is trained is finite. What only the owner of an entry knows, such as the shapes that
follow from a configuration, it compares itself.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

RUN, FIT = "train_distributed.py", "rl_dist.fit"
_MARKS = {RUN: {"carry", "global_step"}, FIT: {"module", "best_epoch"}}  # one of them tells who wrote it
_MOST = 10**15  # that anything counts
_ADAM = ("step", "exp_avg", "exp_avg_sq")
_LOSS_SCALER = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}


class StateError(ValueError):
    """A state that no training of ours has written; one line."""


def check_state(state: Mapping[str, Any]) -> None:
    """Check what a checkpoint holds, as far as it is known.

    Raises:
        StateError: names the entry.
    """
    try:
        for name in state.keys() & {"iteration", "global_step", "episodes", "epoch", "best_epoch", "bad_in_a_row"}:
            _count(state, name)
        measured = {} if state.get("measured") is None else state["measured"]
        good = isinstance(measured, dict) and all(_is_number(value) for value in measured.values())
        _refuse(not good, "measured", "no number by name of a metric")
        if "config" in state:
            _config(state["config"])
        if kind := kind_of(state):
            _CHECKS[kind](state)
    except StateError:
        raise
    except KeyError as error:
        raise StateError(f"it has no {error}") from None
    except Exception as error:  # whatever torch raises at what cannot be looked at
        told = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise StateError(f"it holds what cannot be compared ({told})") from None


def kind_of(state: Mapping[str, Any]) -> str:
    """Who wrote it: RUN, FIT or "" (somebody else)."""
    return next((kind for kind, marks in _MARKS.items() if state.keys() & marks), "")


def _check_run(state: Mapping[str, Any]) -> None:
    for name in ("iteration", "global_step", "episodes", "config"):
        state[name]
    num_obs, num_actions = (_count(state, name, 1) for name in ("num_obs", "num_actions"))
    if type(state["discrete"]) is not bool:
        raise StateError("'discrete' is neither true nor false")
    weights = _tensors(state, "policy")
    _refuse(not all(weight.is_floating_point() for weight in weights.values()), "policy", "not of floating point")
    if not any(num_actions in weight.shape for weight in weights.values()):
        raise StateError(f"no weight of 'policy' has {num_actions} actions")
    _adam(state["optimizer"], list(weights.values()))
    for name, size in (("obs_normalizer", num_obs), ("reward_normalizer", 1)):
        moments = _tensors(state, name)
        shapes = {"moments.count": (), "moments.mean": (size,), "moments.variance": (size,)}
        _refuse({key: tuple(value.shape) for key, value in moments.items()} != shapes, name, "of other shapes")
        _refuse(any((moments[key] < 0).any() for key in ("moments.count", "moments.variance")), name, "negative")
    carry = _tensors(state, "carry")
    num_envs = len(carry["obs"]) if carry["obs"].ndim == 2 else 0
    _refuse(not num_envs or carry["obs"].shape[1] != num_obs, "carry", f"without observations of {num_obs} numbers")
    environments = state["environments"]
    if environments is not None:
        _refuse(not isinstance(environments, dict), "environments", "neither a dict nor None")
        carry = carry | {f"environments {name}": value for name, value in environments.items()}
    for name, value in carry.items():
        good = isinstance(value, Tensor) and value.shape[:1] == (num_envs,)
        _refuse(not good, name, f"not of {num_envs} environments")
    _strategy(state.get("strategy"))


def _check_fit(state: Mapping[str, Any]) -> None:
    for name in ("epoch", "best_epoch", "history", "extra"):
        state[name]
    module = _tensors(state, "module", finite=False)  # a mask may hold infinities
    _refuse(any(value.isnan().any() for value in module.values()), "module", "not a number somewhere")
    _refuse(not _is_number(state["best_loss"], finite=False), "best_loss", "no number")
    history = state["history"]
    good = isinstance(history, list) and all(isinstance(record, dict) for record in history)
    _refuse(not good or len(history) != state["epoch"], "history", "not one record for each epoch")
    numbers = [value for record in history for value in record.values()]
    _refuse(not all(_is_number(value, finite=False) for value in numbers), "history", "not of numbers")
    optimizer, extra = state["optimizer"], state["extra"]
    good = isinstance(optimizer, dict) and isinstance(optimizer.get("state"), dict)
    _refuse(not good or not isinstance(optimizer.get("param_groups"), list), "optimizer", "no optimizer's state")
    _refuse(not isinstance(extra, dict), "extra", "no dict")
    _refuse(not isinstance(state.get("facts"), dict | None), "facts", "no dict")
    _strategy(state.get("strategy"))


_CHECKS = {RUN: _check_run, FIT: _check_fit}


def _refuse(bad: bool, name: str, what: str) -> None:
    if bad:
        raise StateError(f"{name!r:.80} is {what}")


def _count(state: Mapping[str, Any], name: str, least: int = 0) -> int:
    value = state[name]
    _refuse(type(value) is not int or not least <= value <= _MOST, name, f"no whole number of {least}..{_MOST}")
    return value


def _is_number(value: Any, *, finite: bool = True) -> bool:
    return type(value) in (int, float) and (not finite or math.isfinite(value))


def _config(text: Any) -> None:
    try:
        config = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        config = None
    good = isinstance(config, dict) and all(isinstance(section, dict) for section in config.values())
    _refuse(not good, "config", "no JSON object of sections")


def _tensors(state: Mapping[str, Any], name: str, *, finite: bool = True) -> dict[str, Tensor]:
    """The tensors of an entry by name."""
    found = state[name]
    _refuse(not isinstance(found, dict) or not found, name, "no tensors by name")
    for key, value in found.items():
        _refuse(not isinstance(key, str) or not isinstance(value, Tensor), f"{name} {key}", "no tensor")
        _plain_tensor(value, f"{name} {key}")
        _refuse(finite and not torch.isfinite(value).all(), f"{name} {key}", "not finite: NaN or inf")
    return found


def _plain_tensor(value: Tensor, name: str) -> None:
    """Refuse what would take more memory to look at than it has, or cannot be computed with."""
    odd = value.device.type != "cpu" or value.layout is not torch.strided or value.is_quantized or value.is_complex()
    _refuse(odd or value.numel() * value.element_size() > value.untyped_storage().nbytes(), name, "no plain tensor")


def _adam(optimizer: Any, weights: list[Tensor]) -> None:
    """Adam's state of the weights, which stand in the order of the parameters."""
    good = isinstance(optimizer, dict) and isinstance(optimizer.get("state"), dict)
    groups: Any = optimizer.get("param_groups") if good else None
    numbers = list(range(len(weights)))
    good = isinstance(groups, list) and len(groups) == 1 and isinstance(groups[0], dict)
    _refuse(not good or groups[0].get("params") != numbers, "optimizer", "not of the weights in 'policy'")
    for number, moments in optimizer["state"].items():
        name = f"optimizer of weight {number}"
        _refuse(number not in numbers or not isinstance(moments, dict), name, "not of the weights in 'policy'")
        _refuse(not set(_ADAM) <= moments.keys(), name, f"without {', '.join(_ADAM)}")
        moments = _tensors({name: moments}, name)
        shape = weights[number].shape
        fits = moments["step"].numel() == 1 and all(moments[key].shape == shape for key in _ADAM[1:])
        _refuse(not fits, name, "of another shape than the weight")
        _refuse(any((moments[key] < 0).any() for key in ("step", "exp_avg_sq")), name, "negative")


def _strategy(strategy: Any) -> None:
    """What a strategy keeps; older checkpoints have none."""
    _refuse(not isinstance(strategy, dict | None), "strategy", "no dict")
    if strategy and "loss_scaler" in strategy:
        scaler = strategy["loss_scaler"]
        good = isinstance(scaler, dict) and scaler.keys() == _LOSS_SCALER
        good = good and all(_is_number(value) and value >= 0 for value in scaler.values())
        _refuse(not good or not scaler["scale"], "loss_scaler", "no loss scale")
