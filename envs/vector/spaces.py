"""Spaces as a learner sees them: rows of numbers, actions in [-1, 1] or from 0.

`ObservationEncoder` makes rows, `ActionDecoder` makes an environment's actions, and `to_json` keeps
the spaces in a checkpoint.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces

from envs.vector.layout import Kind, Part

if TYPE_CHECKING:
    from torch import Tensor

MASK_KEY = "action_mask"
MIN_IMAGE_SIDE = 8  # pixels; a smaller array is a vector
MAX_CHANNELS = 64
Space = spaces.Space[Any]
Path = tuple[Any, ...]  # keys from the top of a nested observation to one part of it


class RowFaultError(ValueError):
    """A problem with one row of a batch (None: with all rows), not yet located."""

    def __init__(self, row: int | None, problem: str) -> None:
        super().__init__(problem)
        self.row = row


def _refusal(env_id: str, kind: str, space: Any, fix: str) -> ValueError:
    return ValueError(f"environment {env_id} has {kind} space {space!s:.160}, not supported: {fix}")


def leaves(space: Space, path: Path = ()) -> Iterator[tuple[Path, Space]]:
    """Yield the parts of nested Dict and Tuple spaces, in order."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        inner = space.spaces
        for key, part in inner.items() if isinstance(inner, dict) else enumerate(inner):
            yield from leaves(part, (*path, key))
    else:
        yield path, space


def pick(values: Any, path: Path) -> Any:
    """Return one part of a nested observation."""
    for key in path:
        values = values[key]
    return values


def named(path: Path) -> str:
    """Return the name of a part in messages and layouts."""
    return "/".join(map(str, path))


def categories_of(space: Space) -> tuple[np.ndarray, np.ndarray] | None:
    """Return first value and number of choices of each digit; None: no choices."""
    if not isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        return None
    sizes = space.n if isinstance(space, spaces.Discrete) else space.nvec
    return np.array(space.start, np.int64).ravel(), np.array(sizes, np.int64).ravel()


def one_hot(digits: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Encode digits [count, D] of `sizes` choices as [count, sum of sizes] float32."""
    encoded = np.zeros((len(digits), int(sizes.sum())), dtype=np.float32)
    firsts = np.cumsum(sizes) - sizes
    encoded[np.arange(len(digits))[:, None], digits + firsts] = 1.0
    return encoded


def image_axes(space: Space) -> tuple[int, ...] | None:
    """Return the axes of (frames,) channels, height and width; None: no image.

    Images are uint8 [H, W], [H, W, C] or [C, H, W], or frames of the last two. Of first and last
    axis the one holds channels without which the image is a square, or else the shorter.
    """
    shape = space.shape or ()
    if not isinstance(space, spaces.Box) or space.dtype != np.uint8 or not 2 <= len(shape) <= 4:
        return None
    axes: tuple[int, ...] = (0, 1)
    if len(shape) > 2:
        frames = len(shape) - 3
        first, middle, last = shape[-3:]
        channels_first = first <= last
        if (first == middle) != (middle == last):
            channels_first = middle == last
        order = (0, 1, 2) if channels_first else (2, 0, 1)
        axes = (*range(frames), *(frames + axis for axis in order))
    *channels, height, width = (shape[axis] for axis in axes)
    fits = min(height, width) >= MIN_IMAGE_SIDE and math.prod(channels) <= MAX_CHANNELS
    return axes if fits else None


def image_scale(space: Space) -> int:
    """Return the divisor of pixels: their largest possible value, at least 1."""
    assert isinstance(space, spaces.Box)
    return max(int(space.high.max()), 1)


class _Leaf:
    """One part of an observation, and its encoding."""

    def __init__(self, path: Path, space: Space, is_mask: bool) -> None:
        self.path = path
        self.space = space
        self.shape = space.shape or ()
        self.categories = None if is_mask else categories_of(space)
        self.axes = None if is_mask else image_axes(space)
        shape: tuple[int, ...] = (math.prod(self.shape),)
        kind: Kind = "vector" if isinstance(space, spaces.Box) else "plain"
        if is_mask:
            kind = "mask"
        elif self.categories:
            shape = (int(self.categories[1].sum()),)
        elif self.axes:
            *channels, height, width = (self.shape[axis] for axis in self.axes)
            kind, shape = "image", (math.prod(channels), height, width)
            self.scale = np.float32(image_scale(space))
        self.part = Part(named(path) or "observation", kind, shape)

    def encode(self, raw: Any, count: int) -> np.ndarray:
        """Return a fresh array [count, n] float32 of values [count, ...]."""
        values = np.asarray(raw)
        if values.shape != (count, *self.shape):
            problem = f"{self.part.name} has shape {values.shape[1:]}, not {self.shape}"
            raise RowFaultError(None, problem)
        if self.axes:
            if values.dtype.kind == "f":
                problem = f"{self.part.name} has type {values.dtype}, not {self.space.dtype}"
                raise RowFaultError(None, problem)
            channels_first = values.transpose(0, *(axis + 1 for axis in self.axes))
            return channels_first.reshape(count, -1).astype(np.float32) / self.scale
        values = values.reshape(count, -1)
        if self.categories is None:
            with np.errstate(over="ignore"):  # infinity is refused later
                return values.astype(np.float32)
        start, sizes = self.categories
        digits = values.astype(np.int64) - start
        outside = (values != digits + start) | (digits < 0) | (digits >= sizes)
        if outside.any():
            problem = f"{self.part.name} has a value outside {self.space}"
            raise RowFaultError(int(outside.any(axis=1).argmax()), problem)
        return one_hot(digits, sizes)


class ObservationEncoder:
    """Encode observations, nested ones too, as finite rows [B, F] float32.

    Categories become one-hot, and images channels first, divided by their largest value. With
    `mask_sizes`, the options of each choice, a part called action_mask of a Dict is a mask of all.
    """

    def __init__(self, source: Space, env_id: str, mask_sizes: Sequence[int] = ()) -> None:
        self.source = source
        self._mask_sizes = np.array(mask_sizes, np.int64)
        self._leaves = []
        for path, space in leaves(source):
            numbers = spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary
            if not isinstance(space, numbers) or 0 in (space.shape or ()):
                fix = (
                    f"its part {named(path)!r} must be Box, Discrete, MultiDiscrete, MultiBinary, "
                )
                fix += "Dict or Tuple; gymnasium.wrappers.TransformObservation can make it so"
                raise _refusal(env_id, "observation", source, fix)
            self._leaves.append(_Leaf(path, space, len(mask_sizes) > 0 and path == (MASK_KEY,)))
        self.parts = tuple(leaf.part for leaf in self._leaves)
        if any(part.kind == "mask" and part.size != sum(mask_sizes) for part in self.parts):
            fix = (
                f"its {MASK_KEY} must have {sum(mask_sizes)} numbers, one per option of each choice"
            )
            raise _refusal(env_id, "observation", source, fix)

    @property
    def warnings(self) -> list[str]:
        """Warnings of Boxes of three or more axes that the policy does not see as images."""
        return [
            f"{leaf.part.name} {list(leaf.shape)} of {leaf.space.dtype} is read as "
            f"{leaf.part.size} numbers without a CNN, which reads uint8 images"
            for leaf in self._leaves
            if leaf.part.kind == "vector" and len(leaf.shape) > 2
        ]

    def __call__(self, raw: Any, count: int) -> np.ndarray:
        """Return a fresh array [count, F] of a batch, or of a list of single observations.

        Raises RowFaultError: a part is unlike its space, a number is not finite, or a mask allows
        nothing.
        """
        encoded = []
        for leaf in self._leaves:
            if isinstance(raw, list):
                values = [pick(single, leaf.path) for single in raw]
            else:
                values = pick(raw, leaf.path)
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
    wrong = ((masks != 0) & (masks != 1)).any(axis=1)  # [B]
    if wrong.any():
        problem = f"{MASK_KEY} holds another number than 0 and 1"
        raise RowFaultError(int(wrong.argmax()), problem)
    allowed = np.add.reduceat(masks, np.cumsum(sizes) - sizes, axis=1) > 0  # [B, D]
    if not allowed.all():
        row, digit = np.argwhere(~allowed)[0]
        raise RowFaultError(int(row), f"{MASK_KEY} allows no action of choice {digit}")


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
        self.is_bounded = True
        parts = [space for _, space in leaves(target)]
        self._ends = np.cumsum([math.prod(space.shape or ()) for space in parts])[:-1]
        digits = [
            categories_of(spaces.MultiDiscrete(np.full(space.shape, 2)))
            if isinstance(space, spaces.MultiBinary)
            else categories_of(space)
            for space in parts
        ]
        boxes = [space for space in parts if isinstance(space, spaces.Box)]
        if parts and all(digits):
            self.start, self.sizes = (  # [D] each
                np.concatenate(column) for column in zip(*filter(None, digits), strict=True)
            )
            self.space = spaces.MultiDiscrete(self.sizes)
            if isinstance(target, spaces.Discrete):
                self.space = spaces.Discrete(int(self.sizes[0]))
        elif boxes == parts and all(np.issubdtype(box.dtype, np.floating) for box in boxes):
            low, high = (
                np.concatenate([getattr(box, side).astype(np.float64).ravel() for box in boxes])
                for side in ("low", "high")
            )
            finite = np.isfinite(low) & np.isfinite(high)
            self.is_bounded = bool(finite.all())
            self.low = np.where(finite, -1.0, low)
            self.high = np.where(finite, 1.0, high)
            low = np.where(finite, low, -1.0)
            high = np.where(finite, high, 1.0)
            self.scale = 0.5 * (high - low)
            self.offset = 0.5 * (high + low)
            self.space = spaces.Box(self.low.astype(np.float32), self.high.astype(np.float32))
        else:
            fix = "its parts must be all categories (Discrete, MultiDiscrete, MultiBinary), or all "
            fix += "Boxes of floats; gymnasium.wrappers.TransformAction can make it so"
            raise _refusal(env_id, "action", target, fix)

    @property
    def mask_size(self) -> int:
        """Numbers in a mask of actions: one per option; 0: actions have no choices."""
        return int(self.sizes.sum())

    def encode(self, actions: Tensor) -> np.ndarray:
        """Return actions as inputs [count, n] float32: one-hot, or clipped."""
        values = actions.detach().cpu().numpy()
        if self.mask_size:
            return one_hot(values.reshape(len(values), -1), self.sizes)
        return np.clip(values, self.low, self.high).astype(np.float32)

    def __call__(self, actions: Tensor) -> Any:
        """Return actions [count, ...] in the environment's structure and bounds."""
        values = actions.detach().cpu().numpy().reshape(len(actions), -1)
        if self.mask_size:
            flat = values.astype(np.int64) + self.start
        elif not np.isfinite(values).all():
            raise ValueError("actions must be finite, got NaN or infinity: the policy has diverged")
        else:
            flat = np.clip(values.astype(np.float64), self.low, self.high)
            flat = flat * self.scale + self.offset
        return _nested(self.target, iter(np.split(flat, self._ends, axis=1)))


def _nested(target: Space, parts: Iterator[np.ndarray]) -> Any:
    """Return a batch of a space, given the numbers [count, n] of each of its parts."""
    if isinstance(target, spaces.Dict):
        return {key: _nested(inner, parts) for key, inner in target.spaces.items()}
    if isinstance(target, spaces.Tuple):
        return tuple(_nested(inner, parts) for inner in target.spaces)
    numbers = next(parts)
    shaped = numbers.reshape(len(numbers), *(target.shape or ())).astype(target.dtype)
    if isinstance(target, spaces.Box):
        return np.clip(shaped, target.low, target.high)  # rounding may exceed the bounds
    return shaped


# ---- spaces as JSON, so that a checkpoint brings those of its task

_ARGUMENTS = {
    spaces.Discrete: ("n", "start"),
    spaces.MultiDiscrete: ("nvec", "start"),
    spaces.MultiBinary: ("n",),
}


def to_json(observation: Space, action: Space) -> str:
    """Return both spaces of an environment as JSON."""
    return json.dumps([_plain(observation), _plain(action)])


def from_json(text: str) -> tuple[Space, Space]:
    """Invert `to_json`. Raises ValueError: the text is something else."""
    try:
        observation, action = map(_space, json.loads(text))
    except (ValueError, TypeError, LookupError, AssertionError, MemoryError) as error:
        raise ValueError(f"the saved spaces cannot be read: {error}") from None
    return observation, action


def _plain(space: Space) -> dict[str, Any]:
    if isinstance(space, spaces.Dict):
        return {"kind": "Dict", "parts": {key: _plain(part) for key, part in space.spaces.items()}}
    if isinstance(space, spaces.Tuple):
        return {"kind": "Tuple", "parts": [_plain(part) for part in space.spaces]}
    if isinstance(space, spaces.Box):
        bounds = {"low": _bound(space.low), "high": _bound(space.high)}
        return {"kind": "Box", **bounds, "shape": space.shape, "dtype": str(space.dtype)}
    kind, names = next(item for item in _ARGUMENTS.items() if isinstance(space, item[0]))
    fields = {name: np.asarray(getattr(space, name)).tolist() for name in names}
    return {"kind": kind.__name__, **fields}


def _bound(values: np.ndarray) -> Any:
    """Return a bound as one number if all are the same, as in images."""
    flat = values.ravel().tolist()
    return flat[0] if flat.count(flat[0]) == len(flat) else flat


def _space(plain: dict[str, Any]) -> Space:
    kind = plain.pop("kind")
    if kind == "Dict":
        # pairs keep their order, by which rows are laid out; a dict would be sorted
        return spaces.Dict([(name, _space(part)) for name, part in plain["parts"].items()])
    if kind == "Tuple":
        return spaces.Tuple([_space(part) for part in plain["parts"]])
    if kind == "Box":
        dtype = np.dtype(plain["dtype"])
        shape = plain["shape"]
        low, high = (
            np.broadcast_to(np.array(plain[end], dtype), math.prod(shape)).reshape(shape)
            for end in ("low", "high")
        )
        return spaces.Box(low, high, dtype=dtype.type)
    return {space.__name__: space for space in _ARGUMENTS}[kind](**plain)
