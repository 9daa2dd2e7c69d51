"""Gymnasium spaces as JSON, so that checkpoints bring those of their task."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from gymnasium import spaces


def to_json(observation: spaces.Space[Any], action: spaces.Space[Any]) -> str:
    """Return both spaces of an environment as JSON; "" where one has no such form."""
    try:
        return json.dumps([_plain(observation), _plain(action)])
    except TypeError:
        return ""


def from_json(text: str) -> tuple[spaces.Space[Any], spaces.Space[Any]]:
    """Invert `to_json`.

    Raises:
        ValueError: the text is no such form.
    """
    try:
        observation, action = map(_space, json.loads(text))
    except (ValueError, TypeError, KeyError, AssertionError) as error:
        raise ValueError(f"the saved spaces cannot be read: {error}") from None
    return observation, action


def _plain(space: spaces.Space[Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"kind": type(space).__name__}
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
