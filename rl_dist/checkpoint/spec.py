"""Check the content of a checkpoint: plain values, and all entries of a run.

The checksum detects damaged files. The checks here detect values that someone has changed, or that
became invalid during training.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

# programs that write checkpoints
RUN = "train_distributed.py"
FIT = "rl_dist.supervised.fit"
MEASURED = "measured"  # entry with {metric: value}; this metric selects best.pt
LARGEST_COUNT = 10**15
_PLAIN_TYPES = (str, int, float, bool, type(None))
# entries that show which program wrote a checkpoint
_MARKS = {"carry": RUN, "global_step": RUN, "module": FIT, "best_epoch": FIT}
_TENSORS = ("policy", "carry", "obs_normalizer", "reward_normalizer")  # contain only tensors
_COUNTS = ("iteration", "global_step", "episodes", "num_obs", "num_actions", "bad_in_a_row")
_TYPES: dict[str, dict[str, type]] = {
    RUN: {
        **dict.fromkeys(_COUNTS, int),
        **dict.fromkeys((*_TENSORS, "optimizer"), dict),
        "action_sizes": list,
        "config": str,
        "discrete": bool,
        "layout": str,
        "spaces": str,
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
    """A checkpoint cannot be written, read or trusted; the message is one line."""


def kind_of(state: Mapping[str, Any]) -> str:
    """Return the program that wrote a state: RUN, FIT, or "" if it is neither."""
    return next((_MARKS[name] for name in state if name in _MARKS), "")


def flatten(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, value) for each value in nested dicts, lists and tuples.

    An empty container is a value, too. A dict key that a checkpoint cannot store is also yielded.
    """
    if type(value) in (list, tuple):
        value = dict(enumerate(value)) or value
    if not isinstance(value, dict) or not value:
        yield place, value
        return
    for key, entry in value.items():
        inner = f"{place}/{key}" if place else str(key)
        if type(key) not in _PLAIN_TYPES:
            yield f"{inner} (the key)", key
        yield from flatten(entry, inner)


def check_plain(state: Any) -> None:
    """Refuse a value that `torch.load(weights_only=True)` would not return unchanged."""
    for place, value in flatten(state):
        is_empty = isinstance(value, dict) or type(value) in (list, tuple)
        if not is_empty and type(value) not in _PLAIN_TYPES and not isinstance(value, Tensor):
            kind = type(value).__name__
            raise CheckpointError(f"{place} is a {kind}; make it a tensor or a plain value")


def check_state(state: Any) -> None:
    """Check the types, the counts and the tensors in a checkpoint.

    Raises:
        CheckpointError: an entry is missing, has the wrong type, is out of range, or is NaN or
            infinite.
    """
    if not isinstance(state, dict):
        raise CheckpointError(f"it holds a {type(state).__name__}, not a state")
    kind = kind_of(state)
    for name, wanted in _TYPES[kind].items():
        value: Any = state.get(name)
        fits = isinstance(value, wanted) and isinstance(value, bool) == (wanted is bool)
        if not fits or (wanted is int and not 0 <= value <= LARGEST_COUNT):
            raise CheckpointError(f"its {name} is not of type {wanted.__name__}, or out of range")
    measured = state.get(MEASURED, {})
    if type(measured) is not dict or any(type(value) is not float for value in measured.values()):
        raise CheckpointError(f"its {MEASURED} values are not numbers")
    for name, tensor in flatten({key: state[key] for key in state.keys() - {"environments"}}):
        if not isinstance(tensor, Tensor):
            if kind == RUN and name.startswith(_TENSORS):
                raise CheckpointError(f"{name!r:.80} is not a tensor")
            continue
        # An expanded tensor has more elements than it stores; reading it could use all memory.
        if tensor.is_sparse or tensor.numel() * tensor.itemsize > tensor.untyped_storage().nbytes():
            raise CheckpointError(f"{name!r:.80} is not a plain tensor")
        if kind == RUN and not tensor.isfinite().all():
            raise CheckpointError(f"{name!r:.80} is not finite: NaN or inf")
    if kind == RUN and not getattr(state["carry"].get("obs"), "ndim", 0):
        raise CheckpointError("its carry holds no observations")
