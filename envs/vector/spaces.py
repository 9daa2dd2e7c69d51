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

from envs.vector.layout import Part

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


def _refusal(env_id: str, kind: str, space: Any, fix: str, path: Path = ()) -> ValueError:
    where = f": {kind} part {named(path)!r} has" if path else f" has {kind}"
    return ValueError(f"environment {env_id}{where} space {space!s:.160}, not supported: {fix}")


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
    if isinstance(space, spaces.Discrete):
        return np.array([int(space.start)]), np.array([int(space.n)])
    if isinstance(space, spaces.MultiDiscrete):
        return space.start.ravel().astype(np.int64), space.nvec.ravel().astype(np.int64)
    return None


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
    if not _is_box(space) or space.dtype != np.uint8 or not 2 <= len(shape) <= 4:
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
    """Return the largest pixel that a space allows, or 1; pixels are divided by it."""
    assert isinstance(space, spaces.Box)
    return max(int(space.high.max()), 1)


class _Leaf:
    """One part of an observation, and its encoding."""

    def __init__(self, path: Path, space: Space, is_mask: bool) -> None:
        self.path, self.space = path, space
        self.categories = categories_of(space)
        self.axes = None if is_mask else image_axes(space)
        self.shape = space.shape or ()  # of the values
        self.types = "biu" if self.axes or self.categories else "biuf"
        shape: tuple[int, ...] = (math.prod(self.shape),)
        kind: Any = "vector" if _is_box(space) else "plain"
        if is_mask:
            kind = "mask"
        elif self.categories:
            shape = (int(self.categories[1].sum()),)
        elif self.axes:
            *channels, height, width = (self.shape[axis] for axis in self.axes)
            self.scale = np.float32(image_scale(space))
            kind, shape = "image", (math.prod(channels), height, width)
        self.part = Part(named(path) or "observation", kind, shape)

    def encode(self, raw: Any, count: int) -> np.ndarray:
        """Return a fresh array [count, n] float32 of values [count, ...]."""
        values = np.asarray(raw)
        if values.shape != (count, *self.shape):
            problem = f"{self.part.name} has shape {values.shape[1:]}, not {self.shape}"
            raise RowFaultError(None, problem)
        if values.dtype.kind not in self.types:
            problem = f"{self.part.name} has type {values.dtype}, not {self.space.dtype}"
            raise RowFaultError(None, problem)
        if self.axes:
            channels_first = values.transpose(0, *(axis + 1 for axis in self.axes))
            return channels_first.reshape(count, -1).astype(np.float32) / self.scale
        if self.categories is None:
            if values.dtype == np.float32:
                return values.reshape(count, -1).copy()
            with np.errstate(over="ignore"):  # becomes infinity, which is refused
                return values.astype(np.float32).reshape(count, -1)
        start, sizes = self.categories
        digits = values.astype(np.int64).reshape(count, -1) - start
        outside = ((digits < 0) | (digits >= sizes)).any(axis=1)  # [count]
        if outside.any():
            problem = f"{self.part.name} has a value outside {self.space}"
            raise RowFaultError(int(outside.argmax()), problem)
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
            is_supported = categories_of(space) or isinstance(space, spaces.MultiBinary)
            if not (is_supported or _is_box(space)):
                fix = "its parts must be Box, Discrete, MultiDiscrete, MultiBinary, Dict or Tuple"
                fix += "; a gymnasium.wrappers.TransformObservation can make it so"
                raise _refusal(env_id, "observation", space, fix, path)
            leaf = _Leaf(path, space, len(mask_sizes) > 0 and path == (MASK_KEY,))
            if leaf.part.kind == "mask" and leaf.part.size != sum(mask_sizes):
                fix = f"a mask has {sum(mask_sizes)} numbers, one for each option of each choice"
                raise _refusal(env_id, "observation", space, fix, path)
            self._leaves.append(leaf)
        self.parts = tuple(leaf.part for leaf in self._leaves)

    @property
    def warnings(self) -> list[str]:
        """Warnings of Boxes of three or more axes that the policy does not see as images."""
        return [
            f"{leaf.part.name} {list(leaf.space.shape or ())} of {leaf.space.dtype} is read as "
            f"{leaf.part.size} numbers without a CNN: images are uint8 [H, W], [H, W, C] or "
            f"[C, H, W], or frames [N, ...] of them, with sides of {MIN_IMAGE_SIDE} or more and "
            f"at most {MAX_CHANNELS} channels in all"
            for leaf in self._leaves
            if leaf.part.kind == "vector" and len(leaf.space.shape or ()) > 2
        ]

    def __call__(self, raw: Any, count: int) -> np.ndarray:
        """Return a fresh array [count, F] of a batch, or of a list of single observations.

        Raises RowFaultError: a part is missing or unlike its space, a number is not finite, or a
        mask allows nothing.
        """
        encoded = []
        for leaf in self._leaves:
            try:
                values = pick(raw, leaf.path) if not isinstance(raw, list) else None
                if values is None:
                    values = [pick(single, leaf.path) for single in raw]
            except (LookupError, TypeError):
                raise RowFaultError(None, f"observation has no part {leaf.part.name!r}") from None
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
    and nested ones of them are one MultiDiscrete. Boxes are one flat Box, whose [-1, 1] is
    stretched over the bounds where both are finite.
    """

    def __init__(self, target: Space, env_id: str) -> None:
        self.space: spaces.Discrete | spaces.MultiDiscrete | spaces.Box
        self.target = target
        self.sizes = np.zeros(0, np.int64)  # options of each choice, [D]
        self.is_bounded = True
        parts = [space for _, space in leaves(target)]
        self._ends = np.cumsum([math.prod(space.shape or ()) for space in parts])[:-1]
        digits = [_digits_of(space) for space in parts]
        if parts and all(digits):
            self.start, self.sizes = (  # [D] each
                np.concatenate(column) for column in zip(*filter(None, digits), strict=True)
            )
            self.space = spaces.MultiDiscrete(self.sizes)
            if isinstance(target, spaces.Discrete):
                self.space = spaces.Discrete(int(self.sizes[0]))
        elif parts and all(_is_box(s) and np.issubdtype(s.dtype, np.floating) for s in parts):  # type: ignore[arg-type]
            self._set_bounds(parts)
        else:
            fix = "its parts must be all categories (Discrete, MultiDiscrete, MultiBinary), or all "
            fix += "Boxes of floats; a gymnasium.wrappers.TransformAction can make it so"
            raise _refusal(env_id, "action", target, fix)

    def _set_bounds(self, boxes: list[Any]) -> None:
        low = np.concatenate([box.low.astype(np.float64).ravel() for box in boxes])
        high = np.concatenate([box.high.astype(np.float64).ravel() for box in boxes])
        finite = np.isfinite(low) & np.isfinite(high)
        self.is_bounded = bool(finite.all())
        self.low = np.where(finite, -1.0, low)
        self.high = np.where(finite, 1.0, high)
        self.scale = np.ones_like(low)
        self.offset = np.zeros_like(low)
        self.scale[finite] = 0.5 * (high[finite] - low[finite])
        self.offset[finite] = 0.5 * (high[finite] + low[finite])
        self.space = spaces.Box(self.low.astype(np.float32), self.high.astype(np.float32))

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


def _digits_of(space: Space) -> tuple[np.ndarray, np.ndarray] | None:
    """Return first values and numbers of choices of an action; None: it has no choices."""
    if isinstance(space, spaces.MultiBinary):
        count = math.prod(space.shape)
        return np.zeros(count, np.int64), np.full(count, 2, np.int64)
    return categories_of(space)


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


def _is_box(space: Space) -> bool:
    """Return whether a space is a Box with at least one number."""
    return isinstance(space, spaces.Box) and space.low.size > 0


# ---- spaces as JSON, so that checkpoints bring those of their task


def to_json(observation: Space, action: Space) -> str:
    """Return both spaces of an environment as JSON; "" if one has no such form."""
    try:
        return json.dumps([_plain(observation), _plain(action)])
    except TypeError:
        return ""


def from_json(text: str) -> tuple[Space, Space]:
    """Invert `to_json`. Raises ValueError: the text is something else."""
    try:
        observation, action = map(_space, json.loads(text))
    except (ValueError, TypeError, LookupError, AssertionError) as error:
        raise ValueError(f"the saved spaces cannot be read: {error}") from None
    return observation, action


def _plain(space: Space) -> dict[str, Any]:
    if isinstance(space, spaces.Dict):
        if not all(isinstance(key, str) for key in space.spaces):
            raise TypeError("JSON has no keys but text")
        return {"kind": "Dict", "parts": {k: _plain(inner) for k, inner in space.spaces.items()}}
    if isinstance(space, spaces.Tuple):
        return {"kind": "Tuple", "parts": [_plain(inner) for inner in space.spaces]}
    if isinstance(space, spaces.Discrete):
        return {"kind": "Discrete", "n": int(space.n), "start": int(space.start)}
    if isinstance(space, spaces.MultiDiscrete):
        nvec, start = space.nvec.tolist(), space.start.tolist()
        return {"kind": "MultiDiscrete", "nvec": nvec, "start": start}
    if isinstance(space, spaces.MultiBinary):
        return {"kind": "MultiBinary", "n": space.n if isinstance(space.n, int) else list(space.n)}
    if isinstance(space, spaces.Box):
        bounds = {"low": _bound(space.low), "high": _bound(space.high)}
        return {"kind": "Box", **bounds, "shape": list(space.shape), "dtype": str(space.dtype)}
    raise TypeError(f"{space} has no JSON")


def _bound(values: np.ndarray) -> Any:
    """Return a bound as one number if all are the same: images have many."""
    same = values.size and (values == values.flat[0]).all()
    return values.flat[0].item() if same else values.ravel().tolist()


def _space(plain: dict[str, Any]) -> Space:
    fields = dict(plain)
    kind = fields.pop("kind")
    if kind == "Dict":
        # pairs keep their order, by which rows are laid out; a dict would be sorted
        return spaces.Dict([(name, _space(inner)) for name, inner in fields["parts"].items()])
    if kind == "Tuple":
        return spaces.Tuple([_space(inner) for inner in fields["parts"]])
    if kind == "Box":
        dtype, shape = np.dtype(fields["dtype"]), tuple(fields["shape"])
        low, high = (
            np.broadcast_to(np.array(fields[b], dtype), math.prod(shape)) for b in ("low", "high")
        )
        return spaces.Box(low.reshape(shape), high.reshape(shape), shape, dtype.type)
    if kind in ("Discrete", "MultiDiscrete", "MultiBinary"):
        return getattr(spaces, kind)(**fields)
    raise ValueError(f"{kind!r:.40} is no kind of space")
