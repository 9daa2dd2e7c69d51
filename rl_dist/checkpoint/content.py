"""Check the content of a checkpoint: the type, shape and range of every entry.

The checksum detects damaged files. These checks detect values that someone has changed, or that
became invalid during training, before any of them is used.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, Json, ValidationError
from torch import Tensor

# programs that write checkpoints
RUN = "train_distributed.py"
FIT = "rl_dist.supervised.fit"
MEASURED = "measured"  # entry with the name and value of the metric that selects best.pt
FORMS = "forms"  # entry with the type and shape of every other value, by path
_PLAIN_TYPES = (str, int, float, bool, type(None))
# entry of a checkpoint -> the only program that writes this entry
_MARKS = {"carry": RUN, "global_step": RUN, "module": FIT, "best_epoch": FIT}
State = dict[str, Any]  # the content of a checkpoint


class CheckpointError(ValueError):
    """A checkpoint cannot be written, read or trusted; the message is one line."""


# ---- types and ranges of the entries

Count = Annotated[int, Field(ge=0, le=10**15)]
Tensors = Annotated[dict[str, Tensor], Field(min_length=1)]


class _Entries(BaseModel):
    model_config = ConfigDict(strict=True, arbitrary_types_allowed=True)


class _Group(_Entries):
    params: list[Count]


class _Optimizer(_Entries):
    state: dict[Count, dict[str, Any]]
    param_groups: Annotated[list[_Group], Field(min_length=1)]


class _Any(_Entries):
    measured: dict[str, float] = {}
    forms: dict[str, str] = {}


class _Fit(_Any):
    """State of a supervised training."""

    epoch: Count
    best_epoch: Count
    bad_in_a_row: Count
    best_loss: float
    history: list[dict[str, Any]]
    module: dict[str, Any]
    optimizer: _Optimizer
    strategy: dict[str, dict[str, Any]]
    extra: dict[str, Any]


class _Run(_Any):
    """State of a run of the training script."""

    iteration: Count
    global_step: Count
    episodes: Count
    validated: dict[Literal["steps", "longest"], Count] = {}
    bad_in_a_row: Count
    policy: Tensors
    optimizer: _Optimizer
    strategy: dict[str, dict[str, Any]]
    normalizers: Tensors
    carry: Tensors
    environments: dict[str, Tensor] | None
    num_obs: Count
    num_actions: Count
    action_sizes: list[Count]
    discrete: bool
    layout: Json[list[Any]]
    config: Json[dict[str, dict[str, Any]]]
    spaces: Literal[""] | Json[list[Any]]


_SCHEMAS: dict[str, type[_Any]] = {RUN: _Run, FIT: _Fit, "": _Any}


# ---- checks


def kind_of(state: State) -> str:
    """Return the program that wrote a state: RUN or FIT, or "" if unknown."""
    return next((_MARKS[name] for name in state if name in _MARKS), "")


def flatten(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, value) for each value in nested dicts, lists and tuples.

    An empty container counts as a value. Dict keys that a checkpoint cannot store are yielded, too.
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


def tensors_in(state: Any) -> dict[str, Tensor]:
    """Return the tensors in nested dicts, lists and tuples, as path -> tensor."""
    return {name: value for name, value in flatten(state) if isinstance(value, Tensor)}


def check_plain(state: Any) -> None:
    """Refuse a value that `torch.load(weights_only=True)` would not return unchanged."""
    for place, value in flatten(state):
        is_empty = isinstance(value, dict) or type(value) in (list, tuple)
        if not is_empty and type(value) not in _PLAIN_TYPES and not isinstance(value, Tensor):
            kind = type(value).__name__
            raise CheckpointError(f"{place} is a {kind}: convert it to a tensor or a plain value")


def check_state(state: Any) -> None:
    """Refuse a state whose entries are missing, of a wrong type, out of range or NaN."""
    if not isinstance(state, dict):
        raise CheckpointError(f"it contains a {type(state).__name__}, not a dict")
    kind = kind_of(state)
    try:
        _SCHEMAS[kind].model_validate(state)
    except ValidationError as error:
        first = error.errors()[0]
        place = "/".join(map(str, first["loc"]))
        raise CheckpointError(f"its {place!r:.80} is wrong: {first['msg']:.80}") from None
    for name, tensor in tensors_in(state).items():
        # An expanded tensor has more elements than it stores; reading it could use all memory.
        if tensor.is_sparse or tensor.numel() * tensor.itemsize > tensor.untyped_storage().nbytes():
            raise CheckpointError(f"{name!r:.80} is not a plain tensor")
    now = forms_of(state)
    saved = state.get(FORMS, now)  # older versions wrote none
    for name in now | saved:
        form, before = now.get(name, "missing"), saved.get(name, "missing")
        # an environment may use NaN and inf in its state
        if kind == RUN and "not finite" in form and not name.startswith("environments/"):
            raise CheckpointError(f"{name!r:.80} is not finite: NaN or inf")
        if form != before:
            raise CheckpointError(f"{name!r:.80} is {form:.60}, but {before:.60} was saved")


def forms_of(state: State) -> dict[str, str]:
    """Return the type of each value by path; of a tensor, also its shape and whether it is finite.

    Saved with the values, they show that an entry was changed or is missing.
    """
    forms = {}
    for name, value in flatten({key: state[key] for key in state.keys() - {MEASURED, FORMS}}):
        forms[name] = type(value).__name__
        if isinstance(value, Tensor):
            is_finite = bool(value.isfinite().all())
            forms[name] = f"{[*value.shape]} of {value.dtype}" + ", not finite" * (not is_finite)
    return forms
