"""How numpy environments look to agents: flat observations, actions in [-1, 1]."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from torch import Tensor

from envs.vector.faults import RowFaultError, are_flags
from envs.vector.layout import Part

MASK_KEY = "action_mask"
SMALLEST_IMAGE = 8  # pixels along each side; less is a vector
MOST_CHANNELS = 64
KINDS = ("Dict", "Tuple", "Discrete", "MultiDiscrete", "MultiBinary", "Box")  # that have JSON
Space = spaces.Space[Any]
Path = tuple[Any, ...]  # keys from the top of a nested observation to one part of it


def _refusal(env_id: str, kind: str, space: Any, fix: str, path: Path = ()) -> ValueError:
    shown = " ".join(str(space).split())[:160]
    where = f": {kind} part {named(path)!r} has" if path else f" has {kind}"
    return ValueError(f"environment {env_id}{where} space {shown}, which is not supported: {fix}")


def mask_words(sizes: Sequence[int]) -> str:
    """Say how many numbers a mask has, of choices of so many options."""
    if len(sizes) == 1:
        return f"{sizes[0]}, one per action"
    shown = " + ".join(map(str, sizes[:6])) + " + ..." * (len(sizes) > 6)
    return f"{sum(sizes)} ({shown}: one for each option of each choice, in order)"


def leaves(space: Space, path: Path = ()) -> Iterator[tuple[Path, Space]]:
    """Yield the parts of nested Dict and Tuple spaces, in order."""
    if isinstance(space, spaces.Dict):
        for key, inner in space.spaces.items():
            yield from leaves(inner, (*path, key))
    elif isinstance(space, spaces.Tuple):
        for index, inner in enumerate(space.spaces):
            yield from leaves(inner, (*path, index))
    else:
        yield path, space


def pick(values: Any, path: Path) -> Any:
    """Return one part of a nested observation."""
    for key in path:
        values = values[key]
    return values


def rebuilt(space: Space, parts: Mapping[Path, Any], path: Path = ()) -> Any:
    """Invert `pick`: build a single observation out of its parts."""
    if isinstance(space, spaces.Dict):
        return {k: rebuilt(inner, parts, (*path, k)) for k, inner in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        inner = enumerate(space.spaces)
        return tuple(rebuilt(each, parts, (*path, index)) for index, each in inner)
    return np.asarray(parts[path], space.dtype)


def named(path: Path) -> str:
    """Return how messages and layouts call a part."""
    return "/".join(map(str, path))


def categories_of(space: Space) -> tuple[np.ndarray, np.ndarray] | None:
    """Return first value and number of choices of each digit; None: no choices."""
    if isinstance(space, spaces.Discrete):
        return np.array([int(space.start)]), np.array([int(space.n)])
    if isinstance(space, spaces.MultiDiscrete):
        start = np.broadcast_to(getattr(space, "start", 0), space.nvec.shape)
        return start.ravel().astype(np.int64), space.nvec.ravel().astype(np.int64)
    return None


def one_hot(digits: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Encode digits [count, D] of so many choices as [count, sum of sizes] float32."""
    encoded = np.zeros((len(digits), int(sizes.sum())), dtype=np.float32)
    firsts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    encoded[np.arange(len(digits))[:, None], digits + firsts] = 1.0
    return encoded


def image_axes(space: Space) -> tuple[int, ...] | None:
    """Return the axes of (frames,) channels, height and width; None: no image."""
    shape = space.shape or ()
    if not _is_box(space) or space.dtype != np.uint8 or not 2 <= len(shape) <= 4:
        return None
    axes = _axes_of(shape)
    *channels, height, width = (shape[axis] for axis in axes)
    fits = min(height, width) >= SMALLEST_IMAGE and math.prod(channels) <= MOST_CHANNELS
    return axes if fits else None


def image_scale(space: Space) -> int:
    """Return what pixels are divided by: the largest that the space allows."""
    assert isinstance(space, spaces.Box)
    return max(int(space.high.max()), 1)


def _axes_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Put the axes of an image [H, W], [H, W, C] or [C, H, W], or of frames of it, in order.

    Of its first and last axis the one is of channels without which the image is a square, or else
    the shorter.
    """
    if len(shape) == 2:
        return (0, 1)
    frames, (first, middle, last) = len(shape) - 3, shape[-3:]
    if (first == middle) != (middle == last):
        channels_first = middle == last
    else:
        channels_first = first <= last
    own = (0, 1, 2) if channels_first else (2, 0, 1)
    return (*range(frames), *(frames + axis for axis in own))


class _Leaf:
    """One part of an observation: what it must be, and its encoding."""

    def __init__(self, path: Path, space: Space, env_id: str, is_mask: bool) -> None:
        self.path, self.space = path, space
        self.categories = categories_of(space)
        self.axes = None if is_mask else image_axes(space)
        if not (self.categories or _is_box(space) or isinstance(space, spaces.MultiBinary)):
            fix = "its parts must be Box, Discrete, MultiDiscrete, MultiBinary, Dict or Tuple"
            fix += "; a gymnasium.wrappers.TransformObservation can make it so"
            raise _refusal(env_id, "observation", space, fix, path)
        flat = spaces.flatten_space(space)
        assert isinstance(flat, spaces.Box)
        with np.errstate(over="ignore"):  # float64 bounds may be beyond float32
            self.low, self.high = flat.low.astype(np.float32), flat.high.astype(np.float32)
        name = named(path) or "observation"
        self.part = Part(name, "vector" if _is_box(space) else "plain", self.low.shape)
        if is_mask:
            self.part = Part(name, "mask", self.low.shape)
        if self.axes:
            *channels, height, width = (int(space.shape[axis]) for axis in self.axes)  # type: ignore[index]
            self.part = Part(name, "image", (math.prod(channels), height, width))
            self.scale = np.float32(image_scale(space))
            bounds = (bound.reshape(space.shape or ()) for bound in (self.low, self.high))
            self.low, self.high = (b.transpose(self.axes).ravel() / self.scale for b in bounds)

    def encode(self, raw: Any, count: int) -> np.ndarray:
        """Return a fresh array [count, n] float32 of values [count, ...]."""
        values = np.asarray(raw)
        wanted = (count, *(self.space.shape or ()))
        if values.shape != wanted:
            raise ValueError(f"{self._where}shape {values.shape} is not {wanted}")
        if (self.axes or self.categories) and values.dtype.kind not in "biu":
            raise ValueError(
                f"{self._where}numbers of type {values.dtype} are not {self.space.dtype}"
            )
        if self.axes:
            channels_first = values.transpose(0, *(axis + 1 for axis in self.axes))
            return channels_first.reshape(count, -1).astype(np.float32) / self.scale
        if self.categories is None:
            with np.errstate(over="ignore"):  # becomes infinity, which the caller reports
                return np.array(values, dtype=np.float32).reshape(count, -1)
        start, sizes = self.categories
        digits = values.astype(np.int64).reshape(count, -1) - start
        outside = ((digits < 0) | (digits >= sizes)).any(axis=1)  # [count]
        if outside.any():
            problem = f"{self._where}a value is outside {self.space}"
            raise RowFaultError(int(outside.argmax()), problem)
        return one_hot(digits, sizes)

    @property
    def warning(self) -> str:
        """Warn of a Box of three or more axes that is no image for the policy; "" for others."""
        shape = self.space.shape or ()
        if self.part.kind != "vector" or len(shape) < 3:
            return ""
        return (
            f"{self.part.name} {list(shape)} of {self.space.dtype} is read as {self.part.size} "
            "numbers without a CNN: images are uint8 [H, W], [H, W, C] or [C, H, W], or frames "
            f"[N, ...] of them, with sides of {SMALLEST_IMAGE} or more and at most {MOST_CHANNELS} "
            "channels in all"
        )

    @property
    def _where(self) -> str:
        return f"{named(self.path)}: " if self.path else ""


class ObservationEncoder:
    """Encode observations, nested ones too, as rows [B, F] float32.

    Categories become one-hot, and images channels first, divided by their largest value. With
    `mask_sizes`, the options of each choice, a part called action_mask of a Dict is a mask of all.
    """

    def __init__(self, source: Space, env_id: str, mask_sizes: Sequence[int] = ()) -> None:
        self._leaves = [
            _Leaf(path, space, env_id, bool(mask_sizes) and path == (MASK_KEY,))
            for path, space in leaves(source)
        ]
        self.parts = tuple(leaf.part for leaf in self._leaves)
        self.warnings = [leaf.warning for leaf in self._leaves if leaf.warning]
        for leaf in self._leaves:
            if leaf.part.kind == "mask" and leaf.part.size != sum(mask_sizes):
                fix = f"it has {leaf.part.size} numbers, not {mask_words(mask_sizes)}"
                raise _refusal(env_id, "observation", leaf.space, fix, leaf.path)
        low, high = (
            np.concatenate([getattr(leaf, bound) for leaf in self._leaves])
            for bound in ("low", "high")
        )
        self.space = spaces.Box(low, high)
        self.spaces = {leaf.path: leaf.space for leaf in self._leaves}

    def __call__(self, raw: Any, count: int) -> np.ndarray:
        """Return a fresh array [count, F] float32 of a batch, or a list of single ones.

        A wrong shape is a ValueError, a category outside its space a RowFaultError.
        """
        encoded = []
        for leaf in self._leaves:
            single = isinstance(raw, list)
            values = [pick(one, leaf.path) for one in raw] if single else pick(raw, leaf.path)
            encoded.append(leaf.encode(values, count))
        return encoded[0] if len(encoded) == 1 else np.concatenate(encoded, axis=1)


class ActionDecoder:
    """Turn agents' actions into an environment's, nested ones too.

    Categories count from 0: Discrete stays Discrete; MultiDiscrete, MultiBinary (two choices each)
    and nested ones of them are one MultiDiscrete. Boxes are one flat Box, whose [-1, 1] is
    stretched over the bounds where both are finite.
    """

    def __init__(self, target: Space, env_id: str) -> None:
        self.space: spaces.Discrete | spaces.MultiDiscrete | spaces.Box
        self.is_bounded = True
        self.target = target
        parts = [space for _, space in leaves(target)]
        self._ends = np.cumsum([int(np.prod(space.shape or ())) for space in parts])[:-1]
        digits = [_digits_of(space) for space in parts]
        boxes = [_is_box(s) and np.issubdtype(s.dtype, np.floating) for s in parts]  # type: ignore[arg-type]
        if parts and all(each is not None for each in digits):
            self.start = np.concatenate([each[0] for each in digits if each])  # [D]
            self.sizes = np.concatenate([each[1] for each in digits if each])
            discrete = isinstance(target, spaces.Discrete)
            self.space = (
                spaces.Discrete(int(self.sizes[0]))
                if discrete
                else spaces.MultiDiscrete(self.sizes)
            )
        elif parts and all(boxes):
            self.sizes = np.zeros(0, np.int64)
            self._set_bounds(parts)
        else:
            fix = "its parts must be all categories (Discrete, MultiDiscrete, MultiBinary), or all "
            fix += "Boxes of floats; a gymnasium.wrappers.TransformAction can make it so"
            raise _refusal(env_id, "action", target, fix)

    def _set_bounds(self, boxes: list[Any]) -> None:
        low, high = (
            np.concatenate([getattr(box, bound).astype(np.float64).ravel() for box in boxes])
            for bound in ("low", "high")
        )
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
        """Numbers in a mask of actions: one per choice; 0: actions have no choices."""
        return int(self.sizes.sum())

    def check_masks(self, masks: np.ndarray) -> None:
        """Refuse masks [B, n] that allow nothing, or hold other numbers than 0 and 1."""
        if not are_flags(masks):
            row = int(np.argwhere((masks != 0) & (masks != 1))[0, 0])
            raise RowFaultError(row, f"{MASK_KEY} holds another number than 0 and 1")
        firsts = np.concatenate([[0], np.cumsum(self.sizes)[:-1]])
        allowed = np.add.reduceat(masks, firsts, axis=1) > 0  # [B, D]
        if not allowed.all():
            row, digit = np.argwhere(~allowed)[0]
            where = f" of part {digit}" if allowed.shape[1] > 1 else ""
            raise RowFaultError(int(row), f"{MASK_KEY} allows no action{where}")

    def encode(self, actions: Tensor) -> np.ndarray:
        """Return actions as inputs [count, n] float32: one-hot, or clipped."""
        given = actions.detach().cpu().numpy()
        if self.mask_size:
            return one_hot(given.reshape(len(given), -1), self.sizes)
        return np.clip(given, self.low, self.high).astype(np.float32)

    def __call__(self, actions: Tensor, count: int) -> Any:
        """Return [count, ...] finite actions in the environment's structure and bounds."""
        wanted = (count, *(self.space.shape or ()))
        if tuple(actions.shape) != wanted:
            raise ValueError(f"actions must have shape {wanted}, got {tuple(actions.shape)}")
        given = actions.detach().cpu().numpy()
        if self.mask_size:
            flat = given.astype(np.int64).reshape(count, -1) + self.start
        elif not np.isfinite(given).all():
            raise ValueError("actions must be finite, got NaN or infinity: the policy has diverged")
        else:
            clipped = np.clip(given.astype(np.float64), self.low, self.high)
            flat = clipped * self.scale + self.offset
        return _unflatten(self.target, iter(np.split(flat, self._ends, axis=1)))


def _digits_of(space: Space) -> tuple[np.ndarray, np.ndarray] | None:
    """Return first values and numbers of choices of an action; None: it has no choices."""
    if isinstance(space, spaces.MultiBinary):
        count = int(np.prod(space.shape))
        return np.zeros(count, np.int64), np.full(count, 2, np.int64)
    return categories_of(space)


def _unflatten(target: Space, parts: Iterator[np.ndarray]) -> Any:
    """Build a batch of a space out of the numbers [count, n] of each of its parts."""
    if isinstance(target, spaces.Dict):
        return {key: _unflatten(inner, parts) for key, inner in target.spaces.items()}
    if isinstance(target, spaces.Tuple):
        return tuple(_unflatten(inner, parts) for inner in target.spaces)
    own = next(parts)
    shaped = own.reshape(len(own), *(target.shape or ())).astype(target.dtype)
    if not isinstance(target, spaces.Box):
        return shaped
    return np.clip(shaped, target.low, target.high)  # rounding may exceed the bounds


def flat_mask(mask: Any) -> np.ndarray:
    """Return a mask of actions, or a tuple of masks, as one array [n]."""
    parts = mask if isinstance(mask, tuple | list) else [mask]
    return np.concatenate([np.asarray(part).ravel() for part in parts])


def _is_box(space: Space) -> bool:
    """Return whether a space is a Box with at least one number."""
    return isinstance(space, spaces.Box) and space.low.size > 0


# ---- spaces as JSON, so that checkpoints bring those of their task


def to_json(observation: spaces.Space[Any], action: spaces.Space[Any]) -> str:
    """Return both spaces of an environment as JSON; "" where one has no such form."""
    try:
        return json.dumps([_plain(observation), _plain(action)])
    except TypeError:
        return ""


def from_json(text: str) -> tuple[spaces.Space[Any], spaces.Space[Any]]:
    """Invert `to_json`; refuse what is no such text."""
    try:
        observation, action = map(_space, json.loads(text))
    except (ValueError, TypeError, KeyError, AssertionError) as error:
        raise ValueError(f"the saved spaces cannot be read: {error}") from None
    return observation, action


def _plain(space: spaces.Space[Any]) -> dict[str, Any]:
    # of a subclass the kind that it is made from
    kind = next((k for k in KINDS if isinstance(space, getattr(spaces, k))), type(space).__name__)
    found: dict[str, Any] = {"kind": kind}
    if isinstance(space, spaces.Dict):
        if not all(isinstance(key, str) for key in space.spaces):
            raise TypeError("keys of a Dict that are no text have no JSON")
        return found | {"parts": {key: _plain(inner) for key, inner in space.spaces.items()}}
    if isinstance(space, spaces.Tuple):
        return found | {"parts": [_plain(inner) for inner in space.spaces]}
    if isinstance(space, spaces.Discrete):
        return found | {"n": int(space.n), "start": int(space.start)}
    if isinstance(space, spaces.MultiDiscrete):
        start = np.broadcast_to(getattr(space, "start", 0), space.nvec.shape)
        return found | {"nvec": space.nvec.tolist(), "start": start.tolist()}
    if isinstance(space, spaces.MultiBinary):
        return found | {"n": space.n if isinstance(space.n, int) else list(space.shape)}
    if isinstance(space, spaces.Box):
        bounds = {"low": _bound(space.low), "high": _bound(space.high)}
        return found | bounds | {"shape": list(space.shape), "dtype": str(space.dtype)}
    raise TypeError(f"{found['kind']} has no JSON")


def _bound(values: np.ndarray) -> Any:
    """Return a bound as one number where all are the same: images have many."""
    flat = values.ravel()
    return flat[0].item() if flat.size and (flat == flat[0]).all() else flat.tolist()


def _space(plain: dict[str, Any]) -> spaces.Space[Any]:
    kind = plain["kind"]
    if kind == "Dict":
        # pairs keep their order, by which rows are laid out; a dict would be sorted
        return spaces.Dict([(name, _space(inner)) for name, inner in plain["parts"].items()])
    if kind == "Tuple":
        return spaces.Tuple([_space(inner) for inner in plain["parts"]])
    if kind == "Discrete":
        return spaces.Discrete(plain["n"], start=plain["start"])
    if kind == "MultiDiscrete":
        return spaces.MultiDiscrete(plain["nvec"], start=plain["start"])
    if kind == "MultiBinary":
        return spaces.MultiBinary(plain["n"])
    if kind != "Box":
        raise ValueError(f"{kind!r:.40} is no kind of space")
    dtype, shape = np.dtype(plain["dtype"]), tuple(plain["shape"])
    low, high = (
        np.broadcast_to(np.array(plain[name], dtype).reshape(-1), _size(shape)).reshape(shape)
        for name in ("low", "high")
    )
    return spaces.Box(low, high, shape, dtype.type)


def _size(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape))
