"""Convert between values of Gymnasium spaces and the learner's numbers.

`ObservationEncoder` turns observations into rows of numbers, which the learner reads. The learner's
actions are numbers in [-1, 1] or choices numbered from 0. `ActionDecoder` turns them into actions
for the environment.
"""

import math
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import reduce
from operator import getitem
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy import ndarray
from torch.utils._pytree import tree_leaves

from envs.vector.layout import Kind, Layout, Part
from envs.vector.space_json import ARGUMENTS, Space
from rl_dist.files import log_once

MASK_KEY = "action_mask"
# Matches other keys that environments often use for action masks, such as legal_moves.
LIKE_MASK = re.compile("mask|legal|valid|avail|allow|possib|permit|feasib", re.IGNORECASE)
MIN_IMAGE_SIDE = 8  # pixels; an array with a shorter side is treated as a vector
MAX_CHANNELS = 64
WHITE = 255  # the largest value of a pixel in a row
MAX_VALUE = float(np.finfo(np.float32).max)
FLOAT32_INTEGERS = 2**24  # float32 cannot represent all larger integers
Path = tuple[Any, ...]  # keys that lead to one part of a nested observation

_NESTED: Any = spaces.Dict, spaces.Tuple
_KINDS: Any = tuple(ARGUMENTS)


class RowFaultError(ValueError):
    """Raised if one row of a batch is invalid; `row` is None if the whole batch is invalid.

    The caller adds the environment's number to the message.
    """

    def __init__(self, row: int | None, problem: str) -> None:
        super().__init__(problem)
        self.row = row


def check_rows(usable: ndarray, problem: str, values: ndarray) -> None:
    """Raise a RowFaultError for the first of the values [B, ...] that is not usable.

    Args:
        usable: bool [B], or bool [B, ...] with one entry per value.
        problem: start of the error message, which ends with the value.
    """
    if not usable.all():
        place = np.unravel_index(usable.argmin(), usable.shape)
        value = " ".join(str(values[place]).split())
        raise RowFaultError(int(place[0]), f"{problem} {value:.60}")


def _parts(space: Space, path: Path = ()) -> Iterator[tuple[Path, Space]]:
    """Yield a space and all spaces nested in it, with their paths."""
    yield path, space
    if isinstance(space, _NESTED):
        inner = space.spaces
        for key, part in inner.items() if isinstance(inner, dict) else enumerate(inner):
            yield from _parts(part, (*path, key))


def _choices(space: Space) -> ndarray:
    """Return the smallest value and the number of options of each choice, [2, D].

    D is 0 if the space is not Discrete, MultiDiscrete or MultiBinary.
    """
    if isinstance(space, spaces.MultiBinary):
        space = spaces.MultiDiscrete(np.full(space.shape, 2))
    if isinstance(space, spaces.Discrete):
        space = spaces.MultiDiscrete([space.n], start=[space.start])
    if not isinstance(space, spaces.MultiDiscrete):
        return np.zeros((2, 0), np.int64)
    return np.array([space.start.ravel(), space.nvec.ravel()], np.int64)


def _one_hot(digits: ndarray, sizes: ndarray) -> ndarray:
    """Turn choices [count, D] into joined one-hot vectors [count, sum(sizes)]."""
    chosen = [digits[:, [i]] == np.arange(size) for i, size in enumerate(sizes)]
    return np.concatenate(chosen, axis=1).astype(np.float32)


def _image_axes(space: Space) -> list[int]:
    """Return an image's axes in the order frames, channels, height, width.

    Return [] if the space is not an image. An image is uint8 [H, W], [H, W, C] or [C, H, W].
    Stacked frames are [N, H, W, C] or [N, C, H, W]. The channel axis is the last axis if that is
    shorter than the third axis from the end, otherwise the third axis from the end.
    """
    shape = space.shape
    if not isinstance(space, spaces.Box) or space.dtype != np.uint8 or not 2 <= len(shape) <= 4:
        return []
    axes = list(range(len(shape)))
    if len(shape) > 2 and shape[-1] < shape[-3]:  # channels last
        axes.insert(-2, axes.pop())
    *channels, height, width = (shape[axis] for axis in axes)
    fits = min(height, width) >= MIN_IMAGE_SIDE and math.prod(channels) <= MAX_CHANNELS
    return axes if fits else []


class Leaf:
    """Encodes one part of an observation as numbers in a row."""

    def __init__(self, path: Path, space: Space, masked: "ActionDecoder | None") -> None:
        """Choose how to encode the part.

        If the part is an action mask, `masked` is the decoder of the masked actions, else None.
        """
        self.path = path
        self.space = space
        self.masked = masked
        self.start, self.sizes = _choices(space)  # [D]; empty if the values are not one-hot encoded
        if masked or isinstance(space, spaces.MultiBinary):  # the values are already 0 or 1
            self.sizes = self.sizes[:0]
        self.axes = [] if masked else _image_axes(space)
        self.scale = 1.0  # factor of pixels: brings their largest possible value to 255
        kind: Kind = "vector" if isinstance(space, spaces.Box) else "plain"
        shape: tuple[int, ...] = (masked.mask_size if masked else math.prod(space.shape),)
        if masked:
            kind = "mask"
        elif len(self.sizes):
            shape = (int(self.sizes.sum()),)
        elif self.axes:
            kind = "image"
            *channels, height, width = (space.shape[axis] for axis in self.axes)
            shape = (math.prod(channels), height, width)
            self.scale = WHITE / max(int(space.high.max()), 1)
        elif len(space.shape) > 2 and space.dtype.kind == "f":
            log_once(
                f"observations {space.shape} of {space.dtype} are read as {shape[0]:,} numbers, "
                "without a CNN; images must be uint8 (docs/own_environment.md, Spaces)"
            )
        # Vectors that float32 cannot represent exactly, such as float64 or int64, remain float64.
        # They are converted to float32 after they have been normalised.
        is_wide = kind == "vector" and not np.can_cast(space.dtype, np.float32)
        self.dtype: Any = np.float64 if is_wide else np.float32
        if self.axes and self.scale.is_integer():
            self.dtype = np.uint8
        self.part = Part("/".join(map(str, path)) or "observation", kind, shape)

    def pick(self, nested: Any) -> Any:
        """Return this part of a nested observation."""
        return reduce(getitem, self.path, nested)

    def encode(self, raw: object, count: int) -> ndarray:
        """Encode raw values [count, ...] as a new array [count, n]."""
        if self.masked:
            rows = self.masked.flat_masks(raw, count)
            check_masks(rows, self.masked.sizes)
            return rows
        values = np.asarray(raw)
        name = self.part.name
        if values.shape != (count, *self.space.shape):
            problem = f"{name} has shape {values.shape[1:]}, not {self.space.shape}"
            raise RowFaultError(None, problem)
        if self.axes:
            if values.dtype.kind == "f":  # float pixels are probably in [0, 1], not in [0, 255]
                raise RowFaultError(None, f"{name} has type {values.dtype}, not {self.space.dtype}")
            if self.scale > 1 or values.dtype != np.uint8:  # a byte holds no larger values
                usable = (values >= 0) & (values <= self.space.high)
                check_rows(usable, f"{name} has a value outside its space:", values)
            values = values.transpose(0, *(axis + 1 for axis in self.axes))
        values = values.reshape(count, -1)
        if len(self.sizes):
            rows = _one_hot(values - self.start, self.sizes)
            usable = rows.sum(axis=1) == len(self.sizes)
            check_rows(usable, f"{name} has a value outside its space:", values)
            return rows
        is_narrowed = not (self.axes or np.can_cast(values.dtype, self.dtype))
        if is_narrowed and np.abs(values).max(initial=0) > FLOAT32_INTEGERS:
            log_once(
                f"{name} has values above {FLOAT32_INTEGERS:,}, which float32 rounds: to keep all "
                f"digits, declare {values.dtype} in its space, which has type {self.space.dtype}"
            )
        with np.errstate(over="ignore"):  # the caller refuses values that overflow to inf
            rows = values.astype(self.dtype)
        return rows * self.dtype(self.scale) if self.scale > 1 else rows


def _leaf(path: Path, space: Space, actions: "ActionDecoder") -> Leaf | None:
    """Return the leaf for a part of an observation.

    Return None if other leaves encode the part: its inner spaces, or the mask that contains it. A
    space that is not supported, or a mask that cannot be used, raises ValueError.
    """
    key = str(*path[-1:])
    if MASK_KEY in path[:-1]:  # a mask is a single leaf, even if it is nested
        return None
    if key == MASK_KEY:
        actions.flat_masks(space.sample(), 1)
        return Leaf(path, space, actions)
    # Refuse a mask that has another name: the policy would treat it as an ordinary observation.
    if LIKE_MASK.search(key) and not isinstance(space, spaces.Discrete):
        size = sum(math.prod(s.shape) for _, s in _parts(space) if s.shape is not None)
        word = re.sub("[^a-z]", "", key.lower())
        flat: Any = spaces.flatten_space(space)
        is_binary = not flat.low.any() and (flat.high == 1).all()
        fits = size == actions.mask_size and ("mask" in word or is_binary)
        if actions.mask_size and (fits or "actionmask" in word):
            raise ValueError(
                f"the observation's entry {key!r} looks like a mask of actions: call it "
                f"{MASK_KEY}, or use a name without {LIKE_MASK.pattern}"
            )
    if isinstance(space, _NESTED):
        return None
    if not isinstance(space, _KINDS) or 0 in space.shape:
        name = "/".join(map(str, path)) or "observation"
        raise ValueError(
            f"the observation space {space!s:.160} of {name} is not supported: convert it with "
            "gymnasium.wrappers.TransformObservation, or drop it with FilterObservation"
        )
    return Leaf(path, space, None)


class ObservationEncoder:
    """Encodes plain or nested observations as rows [B, F].

    Rows are float32, or float64 if float32 could not represent all values of the observation, or
    uint8 if all parts are images. Choices become one-hot vectors. The axes of images are put in the
    order channels, height, width, and pixels are scaled so that their largest possible value is
    255 (if that gives fractions, rows are float32). The entry action_mask of a Dict, at any
    depth of the observation, is the mask of allowed actions.
    """

    def __init__(self, source: Space, env_id: str, actions: "ActionDecoder") -> None:
        try:
            leaves = [_leaf(path, space, actions) for path, space in _parts(source)]
        except ValueError as error:
            raise ValueError(f"environment {env_id}: {error}") from None
        self.leaves = [leaf for leaf in leaves if leaf]
        if sum(bool(leaf.masked) for leaf in self.leaves) > 1:
            raise ValueError(f"environment {env_id} has several {MASK_KEY} entries: keep one")
        self.parts = tuple(leaf.part for leaf in self.leaves)
        self.actions = actions
        self.dtype = np.result_type(*(leaf.dtype for leaf in self.leaves))

    def row_type(self, layout: Layout) -> np.dtype:
        """Return the type of rows that begin with the observation and have this layout."""
        return self.dtype if layout.is_pixels else np.result_type(self.dtype, np.float32)

    def __call__(self, raw: Any, count: int, is_last: bool = False) -> ndarray:
        """Encode a batch, or a list of single observations, as rows [count, F].

        If `is_last` is set, the observations are the last of their episodes. No action follows, so
        their masks are not read, and the rows allow every action.

        Raises:
            RowFaultError: a part does not fit its space, a number is not finite, or a mask forbids
                every option of a choice.
        """
        is_list = isinstance(raw, list)
        encoded = []
        for leaf in self.leaves:
            if is_last and leaf.masked:
                encoded.append(np.ones((count, leaf.part.size), np.float32))
                continue
            values = [leaf.pick(single) for single in raw] if is_list else leaf.pick(raw)
            encoded.append(leaf.encode(values, count))
        rows = encoded[0] if len(encoded) == 1 else np.concatenate(encoded, axis=1)
        if rows.dtype.kind == "f":
            check_rows(np.abs(rows) <= MAX_VALUE, "observation is", rows)  # NaN fails, too
        return rows


def check_masks(masks: ndarray, sizes: ndarray) -> None:
    """Refuse masks with values other than 0 and 1, and masks that forbid all options of a choice.

    Args:
        masks: masks of a batch, [B, n].
        sizes: number of options of each choice, [D].

    Raises:
        RowFaultError: a mask is invalid; `row` is the first such row.
    """
    allowed = np.add.reduceat(masks, np.cumsum(sizes) - sizes, axis=1)  # [B, D]
    usable = ((masks == 0) | (masks == 1)).all(axis=1) & (allowed > 0).all(axis=1)  # [B]
    problem = f"{MASK_KEY} must hold only 0 and 1 and allow an option in each choice; got"
    check_rows(usable, problem, masks)


class ActionDecoder:
    """Turns the learner's actions into actions for a plain or nested action space.

    The learner's actions lie in `space`, where choices are numbered from 0. A Discrete space
    remains Discrete; MultiDiscrete, MultiBinary (2 options each) and nested spaces of choices
    become one MultiDiscrete. Boxes become one flat Box, in which every dimension with two finite
    bounds is scaled to [-1, 1].
    """

    def __init__(self, target: Space, env_id: str) -> None:
        self.space: Any  # Discrete, MultiDiscrete or Box
        self.target = target
        self.sizes = np.zeros(0, np.int64)  # number of options of each choice, [D]
        self.mask_lengths: list[list[Any]] = []
        leaves = {path: s for path, s in _parts(target) if not isinstance(s, _NESTED)}
        parts = [*leaves.values()]
        self.paths = [*leaves]
        # columns of a flat row at which its parts are divided
        self._boundaries = np.cumsum([math.prod(space.shape or ()) for space in parts])[:-1]
        choices = [_choices(space) for space in parts]  # each [2, D of the part]: starts, sizes
        if parts and all(choice.size for choice in choices):
            self.start, self.sizes = np.concatenate(choices, axis=1)  # [D] each
            # A mask may be one array, one array per space, or one array per choice. These are the
            # lengths of the arrays in each of the three forms.
            lengths_by_space = [sizes.sum() for _, sizes in choices]
            self.mask_lengths = [[self.sizes.sum()], lengths_by_space, self.sizes.tolist()]
            self.space = spaces.MultiDiscrete(self.sizes)
            if isinstance(target, spaces.Discrete):
                self.space = spaces.Discrete(int(self.sizes[0]))
        elif all(isinstance(box, spaces.Box) and box.dtype.kind == "f" for box in parts):
            lows_highs = [[box.low.ravel(), box.high.ravel()] for box in parts]
            self.bounds = bounds = np.concatenate(lows_highs, axis=1).astype(np.float64)  # [2, A]
            is_scaled = np.isfinite(bounds).all(axis=0)  # [A]
            unit_bounds = np.array([[-1.0], [1.0]])
            # bounds of the learner's actions
            self.low, self.high = np.where(is_scaled, unit_bounds, bounds)
            # The environment's values for the learner's -1 and 1. A dimension that is not scaled
            # gets scale 1 and offset 0.
            low, high = np.where(is_scaled, bounds, unit_bounds)
            self.scale = 0.5 * (high - low)
            self.offset = 0.5 * (high + low)
            self.space = spaces.Box(self.low.astype(np.float32), self.high.astype(np.float32))
        else:
            raise ValueError(
                f"environment {env_id}: the action space {target!s:.160} is not supported: its "
                "parts must all be Discrete, MultiDiscrete or MultiBinary, or all Boxes of floats; "
                "convert it with gymnasium.wrappers.TransformAction"
            )
        # Size of an action mask: one number per option, or 0 if actions are not choices.
        self.mask_size = int(self.sizes.sum())

    def flat_masks(self, masks: object, count: int) -> ndarray:
        """Flatten a batch of action masks, or a list of single masks, to [count, n] float32.

        A mask is one array, nested like the action space, or a tuple with one array per choice.
        Masks that do not fit the actions raise ValueError.
        """
        if isinstance(masks, list) and isinstance(masks[0], dict | tuple):
            return np.concatenate([self.flat_masks(mask, 1) for mask in masks])
        parts = [masks]
        if isinstance(masks, dict | tuple):
            # If `masks` is not nested like the actions, it may still be a tuple of all arrays.
            with suppress(LookupError, TypeError):
                parts = [reduce(getitem, path, masks) for path in self.paths]
        arrays = [a for part in parts for a in (part if isinstance(part, tuple) else [part])]
        # Refuse `masks` with further arrays, which belong to no action.
        mask_leaves = tree_leaves(masks, lambda part: not isinstance(part, dict | tuple))
        rows = [np.asarray(a, "f4").reshape(count, -1) for a in arrays if not isinstance(a, dict)]
        lengths = [row.shape[1] for row in rows]
        if lengths not in self.mask_lengths or len(arrays) != len(mask_leaves):
            raise ValueError(
                f"{MASK_KEY} must have {self.mask_size} numbers, one per option of a choice, in "
                f"one array or nested like the actions; got arrays of {lengths} numbers"
            )
        return np.concatenate(rows, axis=1)

    def encode(self, actions: ndarray) -> ndarray:
        """Encode actions as policy input [count, n]: one-hot choices or clipped numbers."""
        if self.mask_size:
            return _one_hot(actions.reshape(len(actions), -1), self.sizes)
        return np.clip(actions, self.low, self.high).astype(np.float32)

    def flat(self, actions: ndarray) -> ndarray:
        """Return actions in the environment's units as flat rows [count, n]."""
        values = actions.reshape(len(actions), -1)
        if self.mask_size:
            return values.astype(np.int64) + self.start
        scaled = values.astype(np.float64) * self.scale + self.offset
        return np.clip(scaled, self.bounds[0], self.bounds[1])

    def __call__(self, actions: ndarray) -> Any:
        """Convert actions [count, ...] to a batch in the environment's action space."""
        return _nested(self.target, iter(np.split(self.flat(actions), self._boundaries, axis=1)))


def _nested(target: Space, parts: Iterator[ndarray]) -> Any:
    """Build a batch of a nested space; `parts` yields each leaf's numbers [count, n]."""
    if isinstance(target, spaces.Dict):
        return {key: _nested(inner, parts) for key, inner in target.spaces.items()}
    if isinstance(target, spaces.Tuple):
        return tuple(_nested(inner, parts) for inner in target.spaces)
    numbers = next(parts)
    return numbers.reshape(len(numbers), *target.shape).astype(target.dtype)
