"""The contents of a checkpoint: plain values, and the entries that a job reads.

The checksum guards against damage; this guards against contents that were changed or went wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

RUN = "train_distributed.py"
FIT = "rl_dist.supervised.fit"
MEASURED = "measured"  # {metric: value} of the metric that chooses the best
LARGEST_COUNT = 10**15
_PLAIN_TYPES = (str, int, float, bool, type(None))
# entries that show which program wrote a checkpoint
_MARKS = {RUN: {"carry", "global_step"}, FIT: {"module", "best_epoch"}}
_PARTS = ("policy", "optimizer", "carry", "obs_normalizer", "reward_normalizer")
_COUNTS = ("iteration", "global_step", "episodes", "num_obs", "num_actions", "bad_in_a_row")
_TYPES: dict[str, dict[str, type]] = {
    RUN: {
        **dict.fromkeys(_COUNTS, int),
        **dict.fromkeys(_PARTS, dict),
        "action_sizes": list,
        "config": str,
        "discrete": bool,
        "layout": str,
    },
    FIT: {
        **dict.fromkeys(("epoch", "best_epoch", "bad_in_a_row"), int),
        **dict.fromkeys(("module", "optimizer", "extra"), dict),
        "best_loss": float,
        "history": list,
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


def tensors_in(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor in nested dicts and lists, with its place."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, dict | list | tuple):
        for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
            yield from tensors_in(entry, f"{name}/{key}" if name else str(key))


def check_state(state: Any) -> None:
    """Check types, counts and tensors of a checkpoint.

    Raises:
        CheckpointError: an entry is missing, has another type or range, or holds NaN.
    """
    if not isinstance(state, dict):
        raise CheckpointError(f"it holds a {type(state).__name__}, not a state")
    kind = kind_of(state)
    for name, wanted in _TYPES[kind].items():
        value: Any = state.get(name)
        fits = isinstance(value, wanted) and isinstance(value, bool) == (wanted is bool)
        if not fits or (wanted is int and not 0 <= value <= LARGEST_COUNT):
            raise CheckpointError(f"its {name} is no {wanted.__name__}, or out of range")
    measured = state.get(MEASURED, {})
    if type(measured) is not dict or any(type(value) is not float for value in measured.values()):
        raise CheckpointError(f"its {MEASURED} values are no numbers")
    for name, tensor in tensors_in({key: state[key] for key in state.keys() - {"environments"}}):
        # an expanded tensor would take more memory to look at than it has
        if tensor.is_sparse or tensor.numel() * tensor.itemsize > tensor.untyped_storage().nbytes():
            raise CheckpointError(f"{name!r:.80} is no plain tensor")
        if kind == RUN and not tensor.isfinite().all():
            raise CheckpointError(f"{name!r:.80} is not finite: NaN or inf")
