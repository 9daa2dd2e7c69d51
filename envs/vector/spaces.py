"""Spaces as a learner sees them: rows of numbers, actions in [-1, 1] or from 0.

`ObservationEncoder` makes rows, `ActionDecoder` makes an environment's actions, and `to_json` keeps
the spaces in a checkpoint.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces

from envs.vector.layout import Kind, Part

if TYPE_CHECKING:
    from torch import Tensor

MASK_KEY = "action_mask"
MIN_IMAGE_SIDE = 8  # pixels; a smaller array is a vector
MAX_CHANNELS = 64
Space = Any  # a space of Gymnasium
Path = tuple[Any, ...]  # keys from the top of a nested observation to one part of it

# The kinds of spaces that a row is made of, and the arguments that make each again. The order of
# the parts of a Dict is the order of a row.
_ARGUMENTS: dict[type[Any], tuple[str, ...]] = {
    spaces.Dict: ("spaces",),
    spaces.Tuple: ("spaces",),
    spaces.Box: ("low", "high", "shape", "dtype"),
    spaces.Discrete: ("n", "start"),
    spaces.MultiDiscrete: ("nvec", "start"),
    spaces.MultiBinary: ("n",),
}
_KINDS: Any = tuple(_ARGUMENTS)


class RowFaultError(ValueError):
    """A problem with one row of a batch (None: with all rows), not yet located."""

    def __init__(self, row: int | None, problem: str) -> None:
        super().__init__(problem)
        self.row = row


def _refusal(env_id: str, kind: str, space: Space, fix: str) -> ValueError:
    return ValueError(f"environment {env_id} has {kind} space {space!s:.160}, not supported: {fix}")


def _leaves(space: Space, path: Path = ()) -> Iterator[tuple[Path, Space]]:
    """Yield the parts of nested Dict and Tuple spaces, in order."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        inner = space.spaces
        for key, part in inner.items() if isinstance(inner, dict) else enumerate(inner):
            yield from _leaves(part, (*path, key))
    else:
        yield path, space


def _named(path: Path) -> str:
    """Return the name of a part in messages and layouts."""
    return "/".join(map(str, path)) or "observation"


def _choices(space: Space) -> np.ndarray:
    """Return first value and number of options of each choice, [2, D]; D is 0 without choices."""
    if isinstance(space, spaces.Discrete):
        return np.array([[space.start], [space.n]], np.int64)
    if isinstance(space, spaces.MultiDiscrete):
        return np.array([space.start.ravel(), space.nvec.ravel()], np.int64)
    if isinstance(space, spaces.MultiBinary):
        return np.array([[0], [2]]).repeat(math.prod(space.shape), axis=1)
    return np.zeros((2, 0), np.int64)


def _one_hot(digits: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Encode digits [count, D] of `sizes` options as [count, sum of sizes] float32."""
    chosen = [digits[:, [i]] == np.arange(size) for i, size in enumerate(sizes)]
    return np.concatenate(chosen, axis=1).astype(np.float32)


def _image_axes(space: Space) -> list[int]:
    """Return the axes of (frames,) channels, height and width; empty: no image.

    Images are uint8 [H, W], [H, W, C] or [C, H, W], or frames of the last two. Of first and last
    axis the one holds channels without which the image is a square, or else the shorter.
    """
    shape = space.shape
    if not isinstance(space, spaces.Box) or space.dtype != np.uint8 or not 2 <= len(shape) <= 4:
        return []
    axes = list(range(len(shape)))
    if len(shape) > 2:
        first, middle, last = shape[-3:]
        if (first == middle, first) > (middle == last, last):  # the last axis holds channels
            axes.insert(-2, axes.pop())
    *channels, height, width = (shape[axis] for axis in axes)
    fits = min(height, width) >= MIN_IMAGE_SIDE and math.prod(channels) <= MAX_CHANNELS
    return axes if fits else []


class Leaf:
    """One part of an observation, and its encoding."""

    def __init__(self, path: Path, space: Space, is_mask: bool) -> None:
        self.path = path
        self.space = space
        # those of a part that becomes one-hot, [2, D]
        is_plain = is_mask or isinstance(space, spaces.MultiBinary)
        self.choices = _choices(None if is_plain else space)
        self.axes = [] if is_mask else _image_axes(space)
        self.scale = 1  # divisor of pixels: their largest possible value
        kind: Kind = "vector" if isinstance(space, spaces.Box) else "plain"
        shape: tuple[int, ...] = (math.prod(space.shape),)
        if is_mask:
            kind = "mask"
        elif self.choices.size:
            shape = (int(self.choices[1].sum()),)
        elif self.axes:
            kind = "image"
            *channels, height, width = (space.shape[axis] for axis in self.axes)
            shape = (math.prod(channels), height, width)
            self.scale = max(int(space.high.max()), 1)
        self.part = Part(_named(path), kind, shape)

    def pick(self, nested: Any) -> Any:
        """Return this part of a nested observation."""
        for key in self.path:
            nested = nested[key]
        return nested

    def encode(self, raw: Any, count: int) -> np.ndarray:
        """Return a fresh array [count, n] float32 of values [count, ...]."""
        values = np.asarray(raw)
        if values.shape != (count, *self.space.shape):
            problem = f"{self.part.name} has shape {values.shape[1:]}, not {self.space.shape}"
            raise RowFaultError(None, problem)
        if self.axes:
            if values.dtype.kind == "f":
                problem = f"{self.part.name} has type {values.dtype}, not {self.space.dtype}"
                raise RowFaultError(None, problem)
            values = values.transpose(0, *(axis + 1 for axis in self.axes))
        values = values.reshape(count, -1)
        if not self.choices.size:
            with np.errstate(over="ignore"):  # infinity is refused later
                numbers = values.astype(np.float32)
            return numbers / np.float32(self.scale) if self.axes else numbers
        start, sizes = self.choices
        digits = values.astype(np.int64) - start
        outside = (values != digits + start) | (digits < 0) | (digits >= sizes)
        if outside.any():
            problem = f"{self.part.name} has a value outside {self.space}"
            raise RowFaultError(int(outside.any(axis=1).argmax()), problem)
        return _one_hot(digits, sizes)


class ObservationEncoder:
    """Encode observations, nested ones too, as finite rows [B, F] float32.

    Categories become one-hot, and images channels first, divided by their largest value. With
    `mask_sizes` [D], the options of each choice, a part called action_mask of a Dict is a mask.
    """

    def __init__(self, source: Space, env_id: str, mask_sizes: np.ndarray) -> None:
        self._mask_sizes = mask_sizes
        self.leaves: list[Leaf] = []
        for path, space in _leaves(source):
            if not isinstance(space, _KINDS) or 0 in space.shape:
                names = ", ".join(kind.__name__ for kind in _KINDS)
                fix = f"its part {_named(path)!r} must be of {names}; "
                fix += "gymnasium.wrappers.TransformObservation can make it so"
                raise _refusal(env_id, "observation", source, fix)
            self.leaves.append(Leaf(path, space, len(mask_sizes) > 0 and path == (MASK_KEY,)))
        self.parts = tuple(leaf.part for leaf in self.leaves)
        size = mask_sizes.sum()
        if any(part.kind == "mask" and part.size != size for part in self.parts):
            fix = f"its {MASK_KEY} must have {size} numbers, one per option of each choice"
            raise _refusal(env_id, "observation", source, fix)

    def __call__(self, raw: Any, count: int) -> np.ndarray:
        """Return a fresh array [count, F] of a batch, or of a list of single observations.

        Raises RowFaultError: a part is unlike its space, a number is not finite, or a mask allows
        nothing.
        """
        encoded = []
        for leaf in self.leaves:
            is_list = isinstance(raw, list)
            values = [leaf.pick(single) for single in raw] if is_list else leaf.pick(raw)
            encoded.append(leaf.encode(values, count))
            if leaf.part.kind == "mask":
                check_masks(encoded[-1], self._mask_sizes)
        rows = encoded[0] if len(encoded) == 1 else np.concatenate(encoded, axis=1)
        usable = np.isfinite(rows)
        if not usable.all():
            row, column = np.argwhere(~usable)[0]
            raise RowFaultError(int(row), f"observation is {rows[row, column]} at {column}")
        return rows


def check_masks(masks: np.ndarray, sizes: np.ndarray) -> None:
    """Refuse masks [B, n] that allow nothing, or hold other numbers than 0 and 1.

    `sizes` [D] are the options of each choice. Raises RowFaultError.
    """
    if masks.shape[1] != sizes.sum():
        problem = f"{MASK_KEY} has {masks.shape[1]} numbers, not {sizes.sum()}, one per option"
        raise RowFaultError(None, problem)
    allowed = np.add.reduceat(masks, np.cumsum(sizes) - sizes, axis=1)  # [B, D]
    usable = ((masks == 0) | (masks == 1)).all(axis=1) & (allowed > 0).all(axis=1)  # [B]
    if not usable.all():
        problem = f"{MASK_KEY} allows no option of a choice, or holds another number than 0 and 1"
        raise RowFaultError(int(usable.argmin()), problem)


def flat_mask(mask: Any) -> np.ndarray:
    """Return a mask of actions, or a tuple of masks, as one array [n] float32."""
    parts = mask if isinstance(mask, tuple | list) else [mask]
    return np.concatenate([np.asarray(part, np.float32).ravel() for part in parts])


class ActionDecoder:
    """Turn agents' actions into an environment's, nested ones too.

    Categories count from 0: Discrete stays Discrete; MultiDiscrete, MultiBinary (two choices each)
    and nested ones of them are one MultiDiscrete. Boxes are one flat Box: [-1, 1] is
    stretched over the bounds where both are finite.
    """

    def __init__(self, target: Space, env_id: str) -> None:
        self.space: spaces.Discrete | spaces.MultiDiscrete | spaces.Box
        self.target = target
        self.sizes = np.zeros(0, np.int64)  # options of each choice, [D]
        parts = [space for _, space in _leaves(target)]
        self._ends = np.cumsum([math.prod(space.shape or ()) for space in parts])[:-1]
        choices = [_choices(space) for space in parts]
        if parts and all(pairs.size for pairs in choices):
            self.start, self.sizes = np.concatenate(choices, axis=1)  # [D] each
            self.space = spaces.MultiDiscrete(self.sizes)
            if isinstance(target, spaces.Discrete):
                self.space = spaces.Discrete(int(self.sizes[0]))
        elif all(isinstance(box, spaces.Box) and box.dtype.kind == "f" for box in parts):
            ends = [[box.low.ravel(), box.high.ravel()] for box in parts]
            bounds = np.concatenate(ends, axis=1).astype(np.float64)  # [2, A]
            finite = np.isfinite(bounds).all(axis=0)
            units = np.array([[-1.0], [1.0]])
            self.low, self.high = np.where(finite, units, bounds)
            low, high = np.where(finite, bounds, units)
            self.scale = 0.5 * (high - low)
            self.offset = 0.5 * (high + low)
            self.space = spaces.Box(self.low.astype(np.float32), self.high.astype(np.float32))
        else:
            fix = "its parts must be all categories (Discrete, MultiDiscrete, MultiBinary), or all "
            fix += "Boxes of floats; gymnasium.wrappers.TransformAction can make it so"
            raise _refusal(env_id, "action", target, fix)
        # numbers in a mask of actions: one per option; 0: actions have no choices
        self.mask_size = int(self.sizes.sum())

    def encode(self, actions: Tensor) -> np.ndarray:
        """Return actions as inputs [count, n] float32: one-hot, or clipped."""
        values = actions.detach().cpu().numpy()
        if self.mask_size:
            return _one_hot(values.reshape(len(values), -1), self.sizes)
        return np.clip(values, self.low, self.high).astype(np.float32)

    def flat(self, actions: Tensor) -> np.ndarray:
        """Return actions [count, ...] in the environment's units, as rows [count, n]."""
        values = actions.detach().cpu().numpy().reshape(len(actions), -1)
        if self.mask_size:
            return values.astype(np.int64) + self.start
        if not np.isfinite(values).all():
            raise ValueError("actions must be finite, got NaN or infinity: the policy has diverged")
        return np.clip(values.astype(np.float64), self.low, self.high) * self.scale + self.offset

    def __call__(self, actions: Tensor) -> Any:
        """Return actions [count, ...] in the environment's structure and bounds."""
        return _nested(self.target, iter(np.split(self.flat(actions), self._ends, axis=1)))


def _nested(target: Space, parts: Iterator[np.ndarray]) -> Any:
    """Return a batch of a space, given the numbers [count, n] of each of its parts."""
    if isinstance(target, spaces.Dict):
        return {key: _nested(inner, parts) for key, inner in target.spaces.items()}
    if isinstance(target, spaces.Tuple):
        return tuple(_nested(inner, parts) for inner in target.spaces)
    numbers = next(parts)
    shaped = numbers.reshape(len(numbers), *target.shape).astype(target.dtype)
    if isinstance(target, spaces.Box):
        shaped = np.clip(shaped, target.low, target.high)  # rounding may exceed the bounds
    return shaped


# ---- spaces as JSON, so that a checkpoint brings those of its task


def to_json(observation: Space, action: Space) -> str:
    """Return both spaces of an environment as JSON."""
    return json.dumps([observation, action], default=_plain)


def from_json(text: str) -> tuple[Space, Space]:
    """Invert `to_json`. Raises ValueError: the text is something else."""
    try:
        observation, action = json.loads(text, object_hook=_space)
    except Exception as error:  # hostile text fails in many ways
        raise ValueError(f"the saved spaces cannot be read: {error}") from None
    return observation, action


def _plain(value: Any) -> Any:
    """Return what JSON holds of a space, or of an array, a number or a type in it."""
    for kind, names in _ARGUMENTS.items():
        if isinstance(value, kind):
            plain = {"kind": kind.__name__} | {name: getattr(value, name) for name in names}
            for end in {"low", "high"} & plain.keys():
                first = plain[end].flat[0]
                if (plain[end] == first).all():  # as in images
                    plain[end] = first
            return plain
    return str(value) if isinstance(value, np.dtype) else value.tolist()


def _space(plain: dict[str, Any]) -> Any:
    """Return the space that JSON holds, or the parts of a Dict as pairs, which keep their order."""
    name = plain.get("kind")
    if not isinstance(name, str):
        return list(plain.items())
    kind = {kind.__name__: kind for kind in _ARGUMENTS}[name]
    arguments = {name: plain[name] for name in _ARGUMENTS[kind]}
    for end in {"low", "high"} & plain.keys():
        arguments[end] = np.resize(np.array(plain[end], plain["dtype"]), plain["shape"])
    return kind(**arguments)
