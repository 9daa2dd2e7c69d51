"""Store the spaces of an environment as JSON, for checkpoints."""

import json
from typing import Any

import numpy as np
from gymnasium import spaces

Space = Any  # a Gymnasium space
# Supported space types, and the constructor arguments that `to_json` saves for each type.
ARGUMENTS: dict[type, tuple[str, ...]] = {
    spaces.Dict: ("spaces",),
    spaces.Tuple: ("spaces",),
    spaces.Box: ("low", "high", "shape", "dtype"),
    spaces.Discrete: ("n", "start"),
    spaces.MultiDiscrete: ("nvec", "start"),
    spaces.MultiBinary: ("n",),
}


def to_json(observation: Space, action: Space) -> str:
    """Return the two spaces of an environment as JSON."""
    return json.dumps([observation, action], default=_plain)


def from_json(text: str) -> tuple[Space, Space]:
    """Read two spaces from the JSON that `to_json` wrote; other text raises ValueError."""
    try:
        observation, action = json.loads(text, object_hook=_space)
    except Exception as error:  # damaged or malicious text can fail in many ways
        raise ValueError(f"the saved spaces cannot be read: {error}") from None
    return observation, action


def _plain(value: Any) -> Any:
    """Return the JSON form of a space, or of an array, number or dtype in a space."""
    for kind, names in ARGUMENTS.items():
        if isinstance(value, kind):
            return {"kind": kind.__name__} | {name: getattr(value, name) for name in names}
    return str(value) if isinstance(value, np.dtype) else value.tolist()


def _space(plain: dict) -> object:
    """Turn a JSON object into a space, or into the (key, space) pairs of a Dict."""
    name = plain.get("kind")
    if not isinstance(name, str):
        # Return pairs: Gymnasium would sort the keys of a dict, but rows need the saved order.
        return list(plain.items())
    kind = {kind.__name__: kind for kind in ARGUMENTS}[name]
    arguments = {name: plain[name] for name in ARGUMENTS[kind]}
    for bound in {"low", "high"} & plain.keys():
        arguments[bound] = np.array(plain[bound], plain["dtype"])
    return kind(**arguments)
