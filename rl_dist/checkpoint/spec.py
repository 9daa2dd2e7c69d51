"""The contents of a checkpoint: plain values, and the entries that a job reads.

The checksum guards against damage; this guards against contents that were changed or went wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

RUN = "train_distributed.py"
FIT = "rl_dist.supervised.fit"
LARGEST_COUNT = 10**15
_PLAIN_TYPES = (str, int, float, bool, type(None))
# entries that show which program wrote a checkpoint
_MARKS = {RUN: {"carry", "global_step"}, FIT: {"module", "best_epoch"}}

# Paths, and the type of what stands there; of a tensor the shape. `*`: every key of a dictionary or
# list. A named size equals the count of that name, else all other sizes of that name. `...`: any.
Spec = dict[str, Any]
_BOTH: Spec = {
    "bad_in_a_row": int,
    "measured/*": float,
    "optimizer/param_groups/*/params/*": int,
    # the loss scaler of fp16
    "strategy/*/scale": float,
    "strategy/*/growth_factor": float,
    "strategy/*/backoff_factor": float,
    "strategy/*/growth_interval": int,
    "strategy/*/_growth_tracker": int,
}
SPECS: dict[str, Spec] = {
    RUN: {
        **dict.fromkeys(("iteration", "global_step", "episodes", "num_obs", "num_actions"), int),
        "action_sizes/*": int,
        "discrete": bool,
        "layout": str,
        "config": str,
        "policy/*": (...,),
        "optimizer/state/*/step": (),
        "optimizer/state/*/exp_avg": (...,),
        "optimizer/state/*/exp_avg_sq": (...,),
        "obs_normalizer/moments.count": (),
        "obs_normalizer/moments.mean": ("num_obs",),
        "obs_normalizer/moments.variance": ("num_obs",),
        "reward_normalizer/moments.count": (),
        "reward_normalizer/moments.mean": (1,),
        "reward_normalizer/moments.variance": (1,),
        "carry/obs": ("num_envs", "num_obs"),
        "carry/*": ("num_envs", ...),
        "environments": object,
        **_BOTH,
    },
    FIT: {
        "epoch": int,
        "best_epoch": int,
        "best_loss": float,
        "history/*/*": float,
        "module/*": (...,),
        "optimizer/state": dict,
        "extra": dict,
        "facts": dict,
        **_BOTH,
    },
    "": {},
}


class CheckpointError(ValueError):
    """A checkpoint that cannot be written or trusted; one line."""


def kind_of(state: Mapping[str, Any]) -> str:
    """Return which program wrote a state: RUN, FIT or "" (another one)."""
    return next((kind for kind, marks in _MARKS.items() if state.keys() & marks), "")


def check_plain(value: Any, where: str = "state") -> None:
    """Refuse a value that `torch.load(weights_only=True)` would not return as it is."""
    if isinstance(value, dict):
        for key, entry in value.items():
            check_plain(key, f"{where} key {key!r}")
            check_plain(entry, f"{where}[{key!r}]")
    elif type(value) in (list, tuple):
        for index, entry in enumerate(value):
            check_plain(entry, f"{where}[{index}]")
    elif not isinstance(value, Tensor) and type(value) not in _PLAIN_TYPES:
        kind = type(value).__name__
        raise CheckpointError(f"{where} is a {kind}; make it a tensor or a plain value")


def check_state(state: Any) -> None:
    """Check the entries of a checkpoint against the spec of its program.

    Raises:
        CheckpointError: an entry is missing, has another type, range or shape, or holds NaN.
    """
    if not isinstance(state, dict):
        raise CheckpointError(f"it holds a {type(state).__name__}, not a state")
    path = ""
    try:
        kind = kind_of(state)
        sizes = {name: value for name, value in state.items() if type(value) is int}
        for path, wanted in SPECS[kind].items():
            for name, value in _entries(state, path):
                if problem := _problem(value, wanted, sizes, may_be_infinite=kind == FIT):
                    raise CheckpointError(f"{name!r:.80} {problem}")
        if kind == RUN:
            weights = list(state["policy"].values())
            path = "optimizer of these weights"
            moments = state["optimizer"]["state"].items()
            fits = all(weights[number].shape == entry["exp_avg"].shape for number, entry in moments)
            if not fits or not any(state["num_actions"] in weight.shape for weight in weights):
                raise CheckpointError("its weights have other shapes than optimizer or actions")
        elif kind == FIT and not state["best_epoch"] <= state["epoch"] == len(state["history"]):
            raise CheckpointError("its history has not one record for every epoch")
    except CheckpointError:
        raise
    except Exception as error:  # torch raises many kinds for a tensor that it cannot look at
        cause = f"({type(error).__name__})"
        raise CheckpointError(f"it has no {path} as training writes it {cause}") from None


def _entries(value: Any, path: str, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the names and values of all entries at a path."""
    if not path:
        yield name, value
        return
    first, _, rest = path.partition("/")
    inner = dict(enumerate(value)) if isinstance(value, list) else value
    for key in inner.keys() if first == "*" else [first]:
        yield from _entries(inner[key], rest, f"{name} {key}".lstrip())


def _problem(value: Any, wanted: Any, sizes: dict[str, int], *, may_be_infinite: bool) -> str:
    """Return what is wrong with an entry, or ""; learns the sizes that it is the first to show."""
    if not isinstance(wanted, tuple):
        if type(value) is bool and wanted in (int, float):
            return "is True or False, not a number"
        if not isinstance(value, (int, float) if wanted is float else wanted):
            return f"is a {type(value).__name__}"
        return "is out of range" * (wanted is int and not 0 <= value <= LARGEST_COUNT)
    # an expanded tensor would take more memory to look at than it has
    if value.numel() * value.element_size() > value.untyped_storage().nbytes():
        return "is no plain tensor"
    if not (~value.isnan() if may_be_infinite else value.isfinite()).all():
        return "is not finite: NaN or inf"
    shape, expected = list(value.shape), list(wanted)
    if ... in expected:
        expected = [*expected[:-1], *shape[len(expected) - 1 :]]
    expected = [
        sizes.setdefault(size, length) if isinstance(size, str) else size
        for size, length in zip(expected, [*shape, *expected[len(shape) :]], strict=False)
    ]
    return "" if shape == expected else f"has the shape {shape}, not {expected}"
