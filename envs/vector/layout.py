"""The learner's view of environments: layouts of rows, and the base TorchEnv.

The learner sees an observation as a row [F] of float32, which consists of parts. Policies and
checkpoints keep the layout of these parts, so a policy works without its environment. This module
imports neither torch nor Gymnasium.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import PositiveInt, TypeAdapter

from rl_dist.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

# vector: the policy normalises it by running statistics; plain: the policy reads it unchanged, as
# one-hots; image: [C, H, W] in [0, 1], for a CNN; mask: 1 where an action is allowed, else 0
Kind = Literal["vector", "plain", "image", "mask"]
# Observations, rewards, terminated, truncated and info, see `TorchEnv.step`.
StepResult = tuple["Tensor", "Tensor", "Tensor", "Tensor", dict[str, Any]]
MAX_NUMBERS = 10**9  # largest row; a damaged checkpoint may claim more
_FIELDS = TypeAdapter(list[tuple[str, Kind, tuple[PositiveInt, ...]]])


@dataclass(frozen=True)
class Part:
    """Neighbouring numbers of a row that belong together."""

    name: str
    kind: Kind
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of values in the part."""
        return math.prod(self.shape)

    def describe(self) -> str:
        """Return kind and shape, for example vector[4]."""
        return f"{self.kind}{list(self.shape)}"


@dataclass(frozen=True)
class Layout:
    """The parts of a row, in order."""

    parts: tuple[Part, ...]

    @staticmethod
    def vector(size: int) -> Layout:
        """Return the layout of a row that is one vector of `size` numbers."""
        return Layout((Part("observation", "vector", (size,)),))

    @property
    def size(self) -> int:
        """Number of values in a row."""
        return sum(part.size for part in self.parts)

    def slices(self) -> Iterator[tuple[Part, slice]]:
        """Yield each part with its place in a row."""
        first = 0
        for part in self.parts:
            yield part, slice(first, first + part.size)
            first += part.size

    def columns(self, kind: Kind) -> list[int]:
        """Return the columns of all parts of a kind."""
        places = [place for part, place in self.slices() if part.kind == kind]
        return [column for place in places for column in range(place.start, place.stop)]

    def describe(self) -> str:
        """Return names, kinds and shapes of the parts."""
        return "; ".join(f"{part.name} {part.describe()}" for part in self.parts)

    def kinds(self) -> str:
        """Return kinds and shapes of the parts, which a policy depends on."""
        return " ".join(part.describe() for part in self.parts)

    def to_json(self) -> str:
        """Return the layout as JSON, for a checkpoint."""
        return json.dumps([[part.name, part.kind, part.shape] for part in self.parts])

    @staticmethod
    def from_json(text: str) -> Layout:
        """Return the layout that `to_json` wrote; any other text is a UserError."""
        parts: list[Part] = []
        with suppress(ValueError):
            parts = [Part(*fields) for fields in _FIELDS.validate_json(text)]
        layout = Layout(tuple(parts))
        fits = all(len(part.shape) == (3 if part.kind == "image" else 1) for part in parts)
        if not parts or not fits or layout.size > MAX_NUMBERS:
            raise UserError(f"the checkpoint is damaged: its layout is {text[:80]!r}")
        return layout


class TorchEnv:
    """A batch of environments as the learner uses it, with tensors in and out.

    Every environment has its own seed. Autoreset is SAME_STEP: when an episode ends, the next one
    starts in the same step. A subclass may keep the defaults below.
    """

    num_envs: int  # B
    single_observation_space: Any  # Box [F]
    single_action_space: Any  # Discrete, MultiDiscrete or Box
    layout: Layout
    env_offset: int = 0  # global number of the first environment
    can_snapshot: bool = False  # True if get_state and set_state work
    spaces_json: str = ""  # Gymnasium's spaces of an environment, see `spaces.to_json`; "": unknown

    @property
    def groups(self) -> Sequence[slice]:
        """Rows of each group; the environments of a group step together."""
        return [slice(0, self.num_envs)]

    @property
    def restarts(self) -> Sequence[int]:
        """Number of times that each environment was made again, [B]."""
        return [0] * self.num_envs

    def reset(self, *, seed: Sequence[int] | None = None) -> tuple[Tensor, dict[str, Any]]:
        """Start all environments; return observations [B, F] and an empty info."""
        raise NotImplementedError

    def step(self, actions: Tensor) -> StepResult:
        """Step all environments with actions [B] or [B, A].

        Returns observations [B, F] float32, rewards [B] float64, terminated [B], truncated [B] and
        info: "final_obs" [B, F] holds the last observation of episodes that ended and equals the
        observations elsewhere; "raw_rewards" [B], if present, are the rewards to report.
        """
        raise NotImplementedError

    def send(self, actions: Tensor, group: int = 0) -> None:
        """Start the step of a group with its actions [rows of the group, ...]."""
        self._sent = actions

    def recv(self, group: int = 0) -> StepResult:
        """Wait for the step of a group after `send`; return what `step` returns."""
        return self.step(self._sent)

    def take_metrics(self) -> dict[str, tuple[float, int]]:
        """Return sum and count of every metric reported since the last call."""
        return {}

    def get_state(self) -> dict[str, Tensor]:
        """Return all that the future depends on: CPU tensors [B, ...], float64 or int64."""
        raise NotImplementedError

    def set_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue exactly where `get_state` was called on an equal batch."""
        raise NotImplementedError

    def close(self) -> None:
        """Release the resources of all environments."""


def random_actions(env: Any, rows: Any) -> Any:
    """Return an allowed action for each of the rows [B, F].

    Without masks it is random, with masks the first one.
    """
    columns = env.layout.columns("mask")
    if not columns:
        return env.action_space.sample()
    space = env.single_action_space
    sizes = space.nvec if space.shape else [space.n]  # number of options of each choice
    masks = np.split(np.asarray(rows)[:, columns], np.cumsum(sizes)[:-1], axis=1)
    digits = [mask.argmax(axis=1) for mask in masks]
    return np.stack(digits, axis=1).reshape(-1, *space.shape)
