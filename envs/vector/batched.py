"""Batched numpy environments in which every environment has its own seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

_LOW_64_BITS = (1 << 64) - 1


def pack_generator(generator: np.random.Generator) -> np.ndarray:
    """Pack the state of a PCG64 generator, which Gymnasium uses, as [6] int64."""
    state: Mapping[str, Any] = generator.bit_generator.state
    if state["bit_generator"] != "PCG64":
        raise ValueError(f"generator must be PCG64 to be saved, got {state['bit_generator']}")
    words: list[int] = []
    for value in (state["state"]["state"], state["state"]["inc"]):
        words += [value >> 64, value & _LOW_64_BITS]
    words += [state["has_uint32"], state["uinteger"]]
    return np.array(words, dtype=np.uint64).view(np.int64)


def unpack_generator(generator: np.random.Generator, packed: np.ndarray) -> None:
    """Put a PCG64 generator into a state packed by `pack_generator`."""
    words = [int(word) for word in np.ascontiguousarray(packed, dtype=np.int64).view(np.uint64)]
    generator.bit_generator.state = {
        "bit_generator": "PCG64",
        "state": {"state": words[0] << 64 | words[1], "inc": words[2] << 64 | words[3]},
        "has_uint32": words[4],
        "uinteger": words[5],
    }


class BatchedEnv(VectorEnv[np.ndarray, np.ndarray, np.ndarray]):
    """A SAME_STEP vector environment with one generator per environment.

    A subclass gives `draw`, `begin`, `observe` and `advance`, and names in `state_names` its arrays
    of leading dimension num_envs: they and the generators are the whole state.
    """

    metadata: dict[str, Any] = {"render_modes": [], "autoreset_mode": AutoresetMode.SAME_STEP}
    state_names: tuple[str, ...] = ()

    def __init__(
        self, num_envs: int, observation_space: spaces.Box, action_space: spaces.Space
    ) -> None:
        self.num_envs = num_envs
        self.single_observation_space = observation_space
        self.single_action_space = action_space
        self.observation_space = batch_space(observation_space, num_envs)
        self.action_space = batch_space(action_space, num_envs)
        self.generators: list[np.random.Generator] = []

    def draw(self, generator: np.random.Generator) -> np.ndarray:
        """Draw all the randomness of one episode, [N] float64."""
        raise NotImplementedError

    def begin(self, rows: np.ndarray, draws: np.ndarray) -> None:
        """Start new episodes in these rows from their draws [len(rows), N]."""
        raise NotImplementedError

    def observe(self) -> np.ndarray:
        """Return the observations as a fresh array [B, F] float32."""
        raise NotImplementedError

    def advance(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Move one step on; return rewards, terminated and truncated, each [B]."""
        raise NotImplementedError

    def _begin_episodes(self, rows: np.ndarray) -> None:
        self.begin(rows, np.stack([self.draw(self.generators[row]) for row in rows]))

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start all environments; an integer seed s means s, s+1, ..., as in Gymnasium."""
        seeds = [seed + i for i in range(self.num_envs)] if isinstance(seed, int) else seed
        if seeds is not None or not self.generators:
            seeds = seeds or [None] * self.num_envs
            assert len(seeds) == self.num_envs, "one seed per environment"
            self.generators = [seeding.np_random(one)[0] for one in seeds]
        self._begin_episodes(np.arange(self.num_envs))
        return self.observe(), {}

    def step(
        self, actions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Step all environments; those that end start again at once (info: `final_obs`)."""
        rewards, terminated, truncated = self.advance(np.asarray(actions))
        obs = self.observe()
        ended = terminated | truncated
        if not ended.any():
            return obs, rewards, terminated, truncated, {}
        info = {"final_obs": obs, "_final_obs": ended}
        self._begin_episodes(np.flatnonzero(ended))
        return self.observe(), rewards, terminated, truncated, info

    def get_state(self) -> dict[str, np.ndarray]:
        """Return copies of everything the future depends on, each [B, ...]."""
        state = {name: getattr(self, name).copy() for name in self.state_names}
        return state | {"generator": np.stack([pack_generator(one) for one in self.generators])}

    def set_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue exactly where `get_state` was called, after a first reset."""
        for name in self.state_names:
            getattr(self, name)[...] = state[name]
        for generator, packed in zip(self.generators, state["generator"], strict=True):
            unpack_generator(generator, packed)


class SingleEnv(gymnasium.Env[np.ndarray, np.int64]):
    """One environment of a batched kind: a batch of one; takes its keyword arguments."""

    metadata: dict[str, Any] = {"render_modes": []}

    def __init__(self, batch_type: type[Any], **kwargs: Any) -> None:
        self._batch: BatchedEnv = batch_type(1, **kwargs)
        self.observation_space = self._batch.single_observation_space
        self.action_space = self._batch.single_action_space

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start an episode."""
        super().reset(seed=seed)
        self._batch.generators = [self.np_random]
        return self._batch.reset()[0][0], {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Take one step."""
        rewards, terminated, truncated = self._batch.advance(np.array([action]))
        ends = bool(terminated[0]), bool(truncated[0])
        return self._batch.observe()[0], float(rewards[0]), *ends, {}

    def get_state(self) -> dict[str, np.ndarray]:
        """Return everything the future depends on."""
        return {name: array[0] for name, array in self._batch.get_state().items()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where `get_state` was called."""
        self._batch.set_state({name: np.asarray(value)[None] for name, value in state.items()})
