"""Base class for adapters from arrays to tensors; stateless random numbers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from envs.vector.guards import EnvironmentFaultError
from envs.vector.layout import StepResult, TorchEnv
from rl_dist.files import log_once

# Names of the arrays of one step, ordered from the largest item size to the smallest, because
# `to_tensors` requires this order.
STEP_FIELDS = ("rewards", "obs", "final_obs", "terminated", "truncated")
# Fields of the record that is stored for each environment. A record survives restarts of its
# environment and the death of a worker process.
LIFE = [
    ("restarts", "i8"),
    ("life_seed", "i8"),  # seed of the last reset
    ("lifetime_step", "i8"),  # steps since the last reset
    ("age", "i8"),  # steps in the current episode, counted by `OneByOne`
]
Snapshot = dict[str, np.ndarray]  # arrays [B, ...] of float64 or int64
# Lines to log, because the batch may be right as it is; see `ArrayEnv.mark`.
MISSING_FINALS = (
    "{} returns no last observations (final_obs): after a time limit, the value of the observation "
    "before the last step stands in"
)
MISSING_TIME_OUTS = (
    "{} returns no time_outs: every end of an episode counts as a termination, so if it was a time "
    "limit, values are too low"
)
MISSING_RESETS = (
    "{}: step returns the last observation of ended episodes as the first of the next: does it "
    "reset them?"
)
RESETS = "resets"  # marks rows where the next episode begins with another observation
NEVER = 2**40  # step of what has not occurred
GOLDEN_STEP = 0x9E3779B97F4A7C15 - 2**64  # splitmix64's increment, as int64


@dataclass(eq=False, kw_only=True)
class ArrayEnv(TorchEnv):
    """A TorchEnv whose subclasses work with numpy arrays."""

    env_id: str
    env_offset: int = 0
    device: Any = "cpu"
    # Reports progress. The adapter calls `heartbeat` before every call into an environment, and a
    # watcher thread calls it during long calls.
    heartbeat: Callable[[], None] = lambda: None
    env_timeout: float = 0.0  # see `envs.task.TaskConfig`
    env_restarts: int = 0

    lives: Any = field(init=False)  # structured array [B] with the fields LIFE
    # for each text, NEVER minus the step [B] of its first occurrence since the last `check`
    marks: dict[str, Tensor] = field(init=False, default_factory=dict)
    # methods that subclasses define
    reset_arrays: ClassVar[Callable[..., np.ndarray]]  # returns new observations [B, F]
    get_arrays: ClassVar[Callable[..., Snapshot]]
    set_arrays: ClassVar[Callable[..., None]]

    @property
    def restarts(self) -> list[int]:
        """Number of restarts of each environment, [B]."""
        return self.lives["restarts"].tolist()

    def describe(self, row: int | None, problem: str, rows: slice | None = None) -> str:
        """Return one line that names an environment, its step and its problem.

        If the row is unknown (None), the line names all environments in `rows`.
        """
        rows = rows or slice(0, self.num_envs)
        first = rows.start if row is None else row
        number = str(self.env_offset + first)
        if row is None:
            number = f"{number}..{self.env_offset + rows.stop - 1} (one of these)"
        step = self.lives["lifetime_step"][first]
        return f"environment {self.env_id} number {number} at its step {step}: {problem}"

    def mark(self, text: str, rows: Any) -> None:
        """Remember, for `check`, when something occurs first; read nothing from the device.

        Args:
            text: one of the lines above; any other text is a fault.
            rows: bool array or tensor [B], True where it occurs in this step.
        """
        steps_left = NEVER - int(self.lives["lifetime_step"][0])
        # Arrays stay on the CPU: copying them to a GPU in every step would take time.
        places = rows.to(self.device) if isinstance(rows, Tensor) else torch.from_numpy(rows)
        new = places * steps_left  # 0 where it does not occur
        self.marks[text] = torch.maximum(new, self.marks.get(text, new))

    def check(self) -> None:
        """Log or raise what was marked since the last call; see `TorchEnv.check`."""
        if not self.marks:
            return
        steps_left = torch.stack([*self.marks.values()])  # [texts, B]
        largest, rows = torch.stack(steps_left.max(1)).tolist()
        firsts = sorted(zip(largest, self.marks, rows, strict=True), reverse=True)
        places = {text: (NEVER - left, row) for left, text, row in firsts if left}
        self.marks = {}
        if RESETS in places:
            del places[RESETS], places[MISSING_RESETS]
        for text, (step, row) in places.items():
            if "{}" not in text:
                self.lives["lifetime_step"] = step
                raise EnvironmentFaultError(self.describe(row, text))
            log_once(text.format(self.env_id))

    def reset(self, *, seed: Sequence[int]) -> tuple[Tensor, dict]:
        """Start all environments, store their seeds, and set their step counts to 0."""
        self.lives["life_seed"] = seed
        self.lives["lifetime_step"] = 0
        return to_tensors([self.reset_arrays(seed)], self.device)[0], {}

    def get_state(self) -> dict[str, Tensor]:
        """Return a complete snapshot, see `TorchEnv.get_state`."""
        return {name: torch.from_numpy(array) for name, array in self.get_arrays().items()}

    def set_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore a snapshot that this batch or one with the same settings has returned."""
        self.set_arrays({name: tensor.numpy() for name, tensor in state.items()})


def to_tensors(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Convert arrays to tensors on a device.

    For a GPU, all arrays are packed into one buffer, which is copied asynchronously. Every array
    must be aligned inside the buffer, so pass arrays with larger item sizes first.
    """
    tensors = [torch.from_numpy(array) for array in arrays]
    if device.type != "cuda":
        return tensors
    raw = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]
    packed = torch.cat(raw).pin_memory().to(device, non_blocking=True)
    parts = packed.split([len(part) for part in raw])
    return [part.view(t.dtype).view(t.shape) for part, t in zip(parts, tensors, strict=True)]


def step_result(arrays: Sequence[np.ndarray], device: torch.device) -> StepResult:
    """Turn arrays in the order of STEP_FIELDS into the return value of `TorchEnv.step`."""
    rewards, obs, final_obs, terminated, truncated = to_tensors(arrays, device)
    return obs, rewards, terminated, truncated, {"final_obs": final_obs}


# ---- random numbers, computed as hashes of a key and a counter


def seed_keys(seeds: Sequence[int]) -> Tensor:
    """Hash the seeds of `reset` into one int64 key per environment, [B]."""
    return _mix(torch.from_numpy(np.array(seeds, np.uint64).view(np.int64)))


def random_int63(keys: Tensor, counter: Tensor) -> Tensor:
    """Return a uniform int64 number >= 0 for each pair of key and counter."""
    return _mix(keys + counter * GOLDEN_STEP) & (2**63 - 1)


def _mix(bits: Tensor) -> Tensor:
    """Mix bits as splitmix64 does (https://prng.di.unimi.it/splitmix64.c)."""
    for shift, factor in (
        (30, 0xBF58476D1CE4E5B9 - 2**64),
        (27, 0x94D049BB133111EB - 2**64),
        (31, 1),
    ):
        # torch's shift repeats the sign bit; the mask turns it into a logical shift.
        bits = (bits ^ ((bits >> shift) & (2 ** (64 - shift) - 1))) * factor
    return bits
