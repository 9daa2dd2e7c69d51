"""The entries that a checkpoint of training must have to be resumed.

The checksum guards against damage; this guards against contents that were changed or went wrong:
every entry has its type, range and shape, and trained tensors are finite. What only the owner of an
entry knows, such as the shapes that follow from a configuration, it compares itself.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

RUN = "train_distributed.py"
FIT = "rl_dist.fit"
# one of them shows who wrote it
_MARKS = {RUN: {"carry", "global_step"}, FIT: {"module", "best_epoch"}}
_COUNTS = ("iteration", "global_step", "episodes", "epoch", "best_epoch", "bad_in_a_row")
_MOST = 10**15  # that anything counts
_LOSS_SCALER = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}
State = Mapping[str, Any]
Checks = Iterator[tuple[str, bool]]  # name of an entry, whether it is good


class StateError(ValueError):
    """A state that no training of ours has written; one line."""


def check_state(state: State) -> None:
    """Check the entries of a checkpoint, as far as they are known."""
    of_kind: dict[str, Callable[[State], Checks]] = {RUN: _run, FIT: _fit}
    name = ""
    try:
        for checks in (_any, of_kind.get(kind_of(state), lambda state: iter(()))):
            for name, good in checks(state):
                if not good:
                    raise StateError(f"{name!r:.80} is not as training writes it")
    except StateError:
        raise
    except KeyError as error:
        raise StateError(f"it has no {error}") from None
    except Exception as error:  # whatever torch raises at what cannot be looked at
        cause = " ".join(f"{type(error).__name__}: {error}".split())[:160]
        raise StateError(f"an entry after {name!r:.80} is of another type ({cause})") from None


def kind_of(state: State) -> str:
    """Return who wrote a state: RUN, FIT or "" (somebody else)."""
    return next((kind for kind, marks in _MARKS.items() if state.keys() & marks), "")


def _any(state: State) -> Checks:
    for name in _COUNTS:
        yield name, _is_count(state.get(name, 0))
    measured = {} if state.get("measured") is None else state["measured"]
    yield "measured", all(_is_number(value) and math.isfinite(value) for value in measured.values())
    sections = json.loads(state.get("config", "{}")).values()
    yield "config", all(isinstance(section, dict) for section in sections)


def _run(state: State) -> Checks:
    for name in ("iteration", "global_step", "episodes", "config", "bad_in_a_row", "strategy"):
        state[name]
    num_obs, num_actions = state["num_obs"], state["num_actions"]
    yield "num_obs", _is_count(num_obs, 1)
    yield "num_actions", _is_count(num_actions, 1)
    yield "discrete", type(state["discrete"]) is bool
    yield "layout", type(state["layout"]) is str
    sizes = state["action_sizes"]
    yield "action_sizes", type(sizes) is list and all(_is_count(size, 1) for size in sizes)
    yield "action_sizes", not sizes or (state["discrete"] and sum(sizes) == num_actions)

    # Adam's state is of the weights, in the order of the parameters
    weights = list(_tensors(state, "policy").values())
    yield "policy", all(weight.is_floating_point() for weight in weights)
    yield "policy", any(num_actions in weight.shape for weight in weights)
    optimizer = state["optimizer"]
    yield "optimizer", isinstance(optimizer, dict)
    groups = optimizer["param_groups"]
    yield "optimizer", type(groups) is list and len(groups) == 1 and isinstance(groups[0], dict)
    yield "optimizer", groups[0]["params"] == list(range(len(weights)))
    for number, entry in optimizer["state"].items():
        name = f"optimizer of weight {number}"
        moments = _tensors({name: entry}, name)
        step, mean, square = (moments[key] for key in ("step", "exp_avg", "exp_avg_sq"))
        yield name, number in range(len(weights)) and step.numel() == 1
        yield name, mean.shape == square.shape == weights[number].shape
        yield name, not bool((step < 0).any() or (square < 0).any())

    for name, size in (("obs_normalizer", num_obs), ("reward_normalizer", 1)):
        moments = _tensors(state, name)
        shapes = {"moments.count": (), "moments.mean": (size,), "moments.variance": (size,)}
        yield name, {key: tuple(value.shape) for key, value in moments.items()} == shapes
        positive = (moments["moments.count"], moments["moments.variance"])
        yield name, not any((value < 0).any() for value in positive)

    carry = _tensors(state, "carry")
    num_envs, num_carried = carry["obs"].shape
    yield "carry", num_envs > 0 and num_carried == num_obs
    environments = {} if state["environments"] is None else state["environments"]
    for name, value in [*carry.items(), *environments.items()]:
        yield name, isinstance(value, Tensor) and value.shape[:1] == (num_envs,)
    yield from _strategy(state)


def _fit(state: State) -> Checks:
    for name in ("epoch", "best_epoch", "bad_in_a_row", "module", "optimizer"):
        state[name]
    module = _tensors(state, "module", finite=False)  # a mask may hold infinities
    yield "module", not any(value.isnan().any() for value in module.values())
    yield "best_loss", _is_number(state["best_loss"])
    history = state["history"]
    yield "history", type(history) is list and len(history) == state["epoch"]
    yield "history", all(_is_number(value) for record in history for value in record.values())
    optimizer = state["optimizer"]
    yield "optimizer", isinstance(optimizer, dict) and isinstance(optimizer["state"], dict)
    yield "optimizer", isinstance(optimizer["param_groups"], list)
    yield "extra", isinstance(state["extra"], dict)
    yield "facts", isinstance(state["facts"], dict)
    yield from _strategy(state)


def _strategy(state: State) -> Checks:
    strategy = state["strategy"]
    yield "strategy", isinstance(strategy, dict)
    if "loss_scaler" in strategy:
        scaler = strategy["loss_scaler"]
        yield "loss_scaler", scaler.keys() == _LOSS_SCALER and scaler["scale"] > 0
        numbers = scaler.values()
        yield "loss_scaler", all(_is_number(value) and 0 <= value < math.inf for value in numbers)


def _is_count(value: Any, least: int = 0) -> bool:
    return type(value) is int and least <= value <= _MOST


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _tensors(state: State, name: str, *, finite: bool = True) -> dict[str, Tensor]:
    """Return the tensors of an entry by name."""
    found = state[name]
    if not isinstance(found, dict) or not found:
        raise StateError(f"{name!r:.80} is no tensors by name")
    for key, value in found.items():
        # nothing that takes more memory to look at than it has, or cannot be computed with
        good = isinstance(key, str) and isinstance(value, Tensor)
        good = good and value.device.type == "cpu" and value.layout is torch.strided
        good = good and not value.is_quantized and not value.is_complex()
        good = good and value.numel() * value.element_size() <= value.untyped_storage().nbytes()
        if not good:
            raise StateError(f"{f'{name} {key}'!r:.80} is no plain tensor")
        if finite and not torch.isfinite(value).all():
            raise StateError(f"{f'{name} {key}'!r:.80} is not finite: NaN or inf")
    return found
