"""Check the content of a checkpoint: the type, shape and range of every entry.

The checksum of a file detects damage. The checks in this module detect values that someone has
changed, or that became invalid during training. All checks are made before a value is used.
"""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, Json, TypeAdapter, ValidationError
from torch import Tensor

MEASURED = "measured"  # entry with the name and value of the metric that selects best.pt
FORMS = "forms"  # entry with the result of `forms_of` at the time of saving
_PLAIN_TYPES = (str, int, float, bool, type(None))
_NOT_FINITE = ", not finite"
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


class OptimizerState(_Entries):
    """State of an optimizer of torch."""

    state: dict[Count, State]
    param_groups: Annotated[list[_Group], Field(min_length=1)]


class Schema(_Entries):
    """Entries that the checkpoint of any program may have.

    A program derives a schema with its own entries from this class.
    """

    program: ClassVar[str] = ""  # program that writes these checkpoints, for messages
    # names of entries that only this program writes; they identify the program
    marks: ClassVar[tuple[str, ...]] = ()
    # A tensor may contain NaN or inf if its path begins with one of these texts; "": any tensor.
    may_be_infinite: ClassVar[tuple[str, ...]] = ("",)

    measured: dict[str, float] = {}
    forms: dict[str, str] = {}
    config: Json[dict[str, dict]] = {}

    @classmethod
    def describes(cls, state: State) -> bool:
        """Return True if the program of this schema wrote the state."""
        return any(name in state for name in cls.marks)


class FitSchema(Schema):
    """State of a supervised training run."""

    program = "rl_dist.supervised.fit"
    marks = ("module", "best_epoch")

    epoch: Count
    best_epoch: Count
    bad_in_a_row: Count
    best_loss: float
    history: list[State]
    module: State
    optimizer: OptimizerState
    strategy: dict[str, State]
    extra: State


_COUNTS = TypeAdapter(dict[str, Count])


# ---- checks


def flatten(value: Any, place: str = "") -> Iterator[tuple[str, object]]:
    """Yield (path, value) for each value in nested dicts, lists and tuples.

    An empty dict, list or tuple is yielded as a value. A dict key that a checkpoint cannot store is
    yielded, too.
    """
    if type(value) in (list, tuple):
        value = dict(enumerate(value)) or value
    if not isinstance(value, dict) or not value:
        yield place, value
        return
    for key, entry in value.items():
        path = f"{place}/{key}" if place else str(key)
        if type(key) not in _PLAIN_TYPES:
            yield f"{path} (the key)", key
        yield from flatten(entry, path)


def tensors_in(state: object) -> dict[str, Tensor]:
    """Return the tensors in nested dicts, lists and tuples, as path -> tensor."""
    return {name: value for name, value in flatten(state) if isinstance(value, Tensor)}


def check_plain(state: object) -> None:
    """Refuse a value that `torch.load(weights_only=True)` would not return unchanged."""
    for place, value in flatten(state):
        # `flatten` yields a container only if it is empty
        is_empty = isinstance(value, dict) or type(value) in (list, tuple)
        if not is_empty and type(value) not in _PLAIN_TYPES and not isinstance(value, Tensor):
            kind = type(value).__name__
            raise CheckpointError(f"{place} is a {kind}: convert it to a tensor or a plain value")


def check_state(state: object, schema: type[Schema] = Schema) -> None:
    """Refuse a state whose entries are missing, of a wrong type, out of range or NaN.

    Args:
        schema: schema of the program that should have written the state. If another program wrote
            it, only the rules that hold for every program are checked.
    """
    if not isinstance(state, dict):
        raise CheckpointError(f"it contains a {type(state).__name__}, not a dict")
    if not schema.describes(state):
        schema = Schema
    try:
        schema.model_validate(state)
        # every integer at the top level is a count, so it must not be negative or too large
        numbers = {name: value for name, value in state.items() if type(value) is int}
        _COUNTS.validate_python(numbers, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        place = "/".join(map(str, first["loc"]))
        raise CheckpointError(f"its {place!r:.80} is wrong: {first['msg']:.80}") from None
    for name, tensor in tensors_in(state).items():
        # An expanded tensor has more elements than it stores; reading it could use all memory.
        if tensor.is_sparse or tensor.numel() * tensor.itemsize > tensor.untyped_storage().nbytes():
            raise CheckpointError(f"{name!r:.80} is not a plain tensor")
    current_forms = forms_of(state)
    saved_forms = state.get(FORMS, current_forms)  # older versions saved no forms
    for name in current_forms | saved_forms:
        form = current_forms.get(name, "missing")
        saved_form = saved_forms.get(name, "missing")
        may_be = _NOT_FINITE in saved_form and name.startswith(schema.may_be_infinite)
        if _NOT_FINITE in form and not may_be:
            raise CheckpointError(f"{name!r:.80} is not finite: NaN or inf")
        if form != saved_form:
            raise CheckpointError(f"{name!r:.80} is {form:.60}, but {saved_form:.60} was saved")


def forms_of(state: State) -> dict[str, str]:
    """Describe the type of each value, by path; for a tensor, also its shape and finiteness.

    A checkpoint contains these descriptions. When it is loaded, a different description shows that
    an entry was changed, added or removed.
    """
    forms = {}
    for name, value in flatten({key: state[key] for key in state.keys() - {MEASURED, FORMS}}):
        forms[name] = type(value).__name__
        if isinstance(value, Tensor):
            forms[name] = f"{[*value.shape]} of {value.dtype}"
            if not value.isfinite().all():
                forms[name] += _NOT_FINITE
    return forms
