"""Layout of observations, and TorchEnv, the learner's interface to environments.

The learner sees an observation as one row [F] of numbers, made of named parts. Policies and
checkpoints store the layout of these parts, so a policy can be used without its environment. This
module imports neither torch nor Gymnasium.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic import PositiveInt, TypeAdapter

from rl_dist.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

# vector: numbers that the policy normalises with running statistics
# plain: numbers that the policy reads unchanged, such as one-hot vectors
# image: pixels [C, H, W] from 0 to 255, for a CNN
# mask: 1 where an action is allowed, else 0
Kind = Literal["vector", "plain", "image", "mask"]
# Observations, rewards, terminated, truncated and info; see `TorchEnv.step`.
StepResult = tuple["Tensor", "Tensor", "Tensor", "Tensor", dict]
Metrics = dict[str, tuple[float, int]]  # sum and count of each metric of the environments
MAX_NUMBERS = 10**9  # largest accepted row size; a larger one means a damaged checkpoint
_FIELDS = TypeAdapter(list[tuple[str, Kind, tuple[PositiveInt, ...]]])


@dataclass(frozen=True)
class Part:
    """A named group of adjacent numbers in a row."""

    name: str
    kind: Kind
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of values in the part."""
        return math.prod(self.shape)

    def describe(self) -> str:
        """Return the kind and shape as text, for example vector[4]."""
        return f"{self.kind}{list(self.shape)}"


@dataclass(frozen=True)
class Layout:
    """The parts of an observation row, in order."""

    parts: tuple[Part, ...]

    @staticmethod
    def vector(size: int) -> Layout:
        """Return the layout of a row that is one vector of `size` numbers."""
        return Layout((Part("observation", "vector", (size,)),))

    @property
    def size(self) -> int:
        """Number of values in a row."""
        return sum(part.size for part in self.parts)

    @property
    def is_pixels(self) -> bool:
        """Whether all parts are images; such rows may be uint8."""
        return all(part.kind == "image" for part in self.parts)

    def slices(self) -> Iterator[tuple[Part, slice]]:
        """Yield each part with its slice of the row."""
        first = 0
        for part in self.parts:
            yield part, slice(first, first + part.size)
            first += part.size

    def columns(self, kind: Kind) -> list[int]:
        """Return the column indices of all parts of one kind."""
        places = [place for part, place in self.slices() if part.kind == kind]
        return [column for place in places for column in range(place.start, place.stop)]

    def describe(self) -> str:
        """Return the names, kinds and shapes of all parts as text."""
        return "; ".join(f"{part.name} {part.describe()}" for part in self.parts)

    def kinds(self) -> str:
        """Return the kinds and shapes of all parts as text; a policy needs the same text."""
        return " ".join(part.describe() for part in self.parts)

    def to_json(self) -> str:
        """Return the layout as JSON, for a checkpoint."""
        return json.dumps([[part.name, part.kind, part.shape] for part in self.parts])

    @staticmethod
    def from_json(text: str) -> Layout:
        """Read a layout from the JSON that `to_json` wrote.

        Raises:
            UserError: the text is not such JSON.
        """
        parts: list[Part] = []
        with suppress(ValueError):
            parts = [Part(*fields) for fields in _FIELDS.validate_json(text)]
        layout = Layout(tuple(parts))
        fits = all(len(part.shape) == (3 if part.kind == "image" else 1) for part in parts)
        if not parts or not fits or layout.size > MAX_NUMBERS:
            raise UserError(f"the checkpoint is damaged: its layout is {text[:80]!r}")
        return layout


class TorchEnv:
    """Interface of a batch of environments that takes and returns tensors.

    Every environment has its own seed. Autoreset is SAME_STEP: when an episode ends, the next one
    starts in the same step. Subclasses may omit attributes and methods that have a default.
    """

    num_envs: int  # B
    single_action_space: Any  # Discrete, MultiDiscrete or Box, usually Box(-1, 1)
    layout: Layout
    env_offset: int = 0  # global number of the first environment
    can_snapshot: bool = False  # True if get_state and set_state work
    note: str = ""  # a line to print when the environments are made for the first time
    spaces_json: str = ""  # Gymnasium spaces as JSON, see `spaces.to_json`; "": unknown

    @property
    def groups(self) -> Sequence[slice]:
        """One slice of rows per group; the environments of a group step together."""
        return [slice(0, self.num_envs)]

    @property
    def restarts(self) -> Sequence[int]:
        """Number of restarts of each environment, [B]."""
        return [0] * self.num_envs

    def reset(self, *, seed: Sequence[int]) -> tuple[Tensor, dict]:
        """Start all environments with new seeds; return observations [B, F] and {}."""
        raise NotImplementedError

    def step(self, actions: Tensor) -> StepResult:
        """Step all environments with actions [B] or [B, A].

        Box actions come from the policy without clipping. `step` must clip them to [-1, 1], as an
        exported policy does, and then scale them to the environment's units.

        Returns observations [B, F], rewards [B] float64, terminated [B], truncated [B] and info.
        Observations are float32 or float64, or uint8 if all parts are images. info["final_obs"]
        [B, F] contains the last observation of each episode that ended; its other rows equal the
        observations. If info["raw_rewards"] [B] is present, the policy is trained on `rewards`, but
        these raw rewards are reported.
        """
        raise NotImplementedError

    def send(self, actions: Tensor, group: int = 0) -> None:
        """Start a step of one group; `actions` is [rows in the group, ...]."""
        self._sent = actions

    def recv(self, group: int = 0) -> StepResult:
        """Wait for the step that `send` started; return the same values as `step`."""
        return self.step(self._sent)

    def check(self) -> None:
        """Raise an EnvironmentFaultError if a step since the last call returned unusable values.

        The trainer calls this after each rollout. Environments that check their values in each step
        need not define it.
        """

    def take_metrics(self) -> Metrics:
        """Return (sum, count) of every metric that was reported since the last call."""
        return {}

    def get_state(self) -> dict[str, Tensor]:
        """Return a complete snapshot: tensors [B, ...] of float64 or int64, on any device."""
        raise NotImplementedError

    def snapshot(self) -> Mapping[str, Tensor]:
        """Return `get_state`, or {} if the environments have no snapshots.

        Raises:
            UserError: an entry has another number of rows.
        """
        state = self.get_state() if self.can_snapshot else {}
        for name, values in state.items():
            if values.shape[:1] != (self.num_envs,):
                raise UserError(
                    f"get_state: {name} has shape {list(values.shape)}, not [{self.num_envs}, "
                    "...]: every entry needs one row per environment"
                )
        return state

    def set_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore a snapshot taken from a batch with the same size and settings."""
        raise NotImplementedError

    def close(self) -> None:
        """Release the resources of all environments."""
