"""One Python environment of a batch: its faults are located, it can begin anew."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import numpy as np

from envs.vector.faults import (
    CLOSED,
    MAX_OBSERVATION,
    MAX_REWARD,
    LocatedFault,
    are_flags,
    has_closed_descriptors,
    is_own_fault,
    one_line,
    one_word,
)
from envs.vector.hangs import HangWatch, HungError, end_process

_LOGGER = logging.getLogger(__name__)


class GuardedEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A sub-environment that says which row it is when it fails, and begins anew.

    A fault (it raised, hung, returned NaN, infinity, a wrong shape or type) is raised as LocatedFault. With restarts
    left, the environment is made anew instead and the step is truncated: reward 0, the last good observation.
    Its info goes no further: nobody reads it, and a batch of many kinds of it may not stack.

    Args:
        make: makes the environment anew.
        row: its place in the batch.
        max_restarts: how often at most.
        describe: names the environment of a row and its problem, in one line.
        watch: notices calls that do not come back.
        beat: says that work goes on, at every call.
        end: ends the process, where its files and connections were closed.
    """

    def __init__(
        self,
        env: gymnasium.Env[Any, Any],
        make: Callable[[], gymnasium.Env[Any, Any]],
        row: int,
        max_restarts: int,
        describe: Callable[[int | None, str], str],
        watch: HangWatch | None,
        beat: Callable[[], None] = lambda: None,
        end: Callable[[str], None] = end_process,
    ) -> None:
        super().__init__(env)
        self.restarts = 0
        self._make, self._row, self._max_restarts = make, row, max_restarts
        self._describe, self._watch, self._beat, self._end = describe, watch, beat, end
        self._shape = env.observation_space.shape
        self._life_seed = 0
        self._new_seed: int | None = None  # of an environment made anew and not yet reset
        self._last_obs: Any = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset, after a restart with its new seed; LocatedFault as the class says."""
        if seed is not None:
            self._life_seed, self._new_seed = seed, None
        while True:
            try:
                chosen = seed if self._new_seed is None else self._new_seed
                obs = self._call(self._checked_reset, seed=chosen, options=options)
            except LocatedFault as fault:
                self._begin_anew(fault)
            else:
                self._new_seed = None
                return obs, {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step; raises LocatedFault as the class says."""
        try:
            return self._call(self._checked_step, action)
        except LocatedFault as fault:
            self._begin_anew(fault)
            return self._last_obs, 0.0, False, True, {}

    def close(self) -> None:
        """Close; what is broken may not even do that, and nothing depends on it."""
        try:
            self._call(self.env.close)
        except LocatedFault as fault:
            _LOGGER.warning(self._describe(self._row, f"{fault}, when it was closed"))

    def guard_state(self) -> dict[str, Any]:
        """What a restart after this depends on; the environment's own state is not in it."""
        kept = {"restarts": self.restarts, "life_seed": self._life_seed}
        return kept | ({"last_obs": self._last_obs} if self._max_restarts else {})

    def restore_guard(self, state: dict[str, Any]) -> None:
        """Inverse of `guard_state`."""
        self.restarts, self._life_seed = state["restarts"], state["life_seed"]
        if "last_obs" in state:
            self._last_obs = np.asarray(state["last_obs"], self.env.observation_space.dtype)

    def _checked_reset(self, **kwargs: Any) -> Any:
        obs, info = self.env.reset(**kwargs)
        self._check(obs, info)
        return obs

    def _checked_step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self.env.step(action)
        self._check(obs, info, reward)
        for what, flag in (("terminated", terminated), ("truncated", truncated)):
            if not isinstance(flag, bool | np.bool_) and not (np.size(flag) == 1 and are_flags(flag)):
                raise LocatedFault(self._row, f"{what} is {one_word(flag)}, neither true nor false")
        return obs, reward, terminated, truncated, {}

    def _call(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call into the environment under watch; whatever it raises becomes a LocatedFault."""
        self._beat()
        try:
            if self._watch is None:
                return call(*args, **kwargs)
            self._watch.begin(self._row)
            try:
                return call(*args, **kwargs)
            finally:
                self._watch.end()
        except LocatedFault:
            raise
        except HungError as error:
            raise LocatedFault(self._row, str(error)) from error
        except BaseException as error:
            if not is_own_fault(error):
                raise
            raise LocatedFault(self._row, f"raised {one_line(error)}") from error
        finally:
            if has_closed_descriptors():  # gloo aborts the process in a few milliseconds
                self._end(self._describe(self._row, CLOSED))

    def _check(self, obs: Any, info: Any, reward: Any = 0.0) -> None:
        """Refuse wrong shapes and types; where restarts are allowed infinity too, else the batch is looked over."""
        shape = np.shape(obs)
        if shape != self._shape:
            raise LocatedFault(self._row, f"observation has shape {shape}, not {self._shape}")
        if not isinstance(reward, float):
            reward = np.asarray(reward, np.float64)  # raises for what is no number; None becomes NaN
            if reward.size != 1:
                raise LocatedFault(self._row, f"reward has shape {reward.shape}, not ()")
        if not isinstance(info, Mapping):
            raise LocatedFault(self._row, f"info is {one_word(info)}, not a dict")
        if self._max_restarts:
            for what, values, limit in (("observation", obs, MAX_OBSERVATION), ("reward", reward, MAX_REWARD)):
                array = np.asarray(values)
                usable = np.abs(array) <= limit if array.dtype.kind == "f" else np.True_
                if not usable.all():
                    raise LocatedFault(self._row, f"{what} is {array[~usable].flat[0]}")
            self._last_obs = np.array(obs)

    def _begin_anew(self, fault: LocatedFault) -> None:
        """Make the environment anew, to be reset with a seed of its own; the fault, where that is used up.

        A fault while it is made counts like any other.
        """
        self._count_restart(fault)
        self.close()
        while True:
            try:
                self.env = self._call(self._make)
                break
            except LocatedFault as another:
                self._count_restart(LocatedFault(self._row, f"could not be made anew: {another}"))
        words = np.random.SeedSequence([self._life_seed, self.restarts]).generate_state(1, np.uint64)
        self._new_seed = int(words[0]) >> 1

    def _count_restart(self, fault: LocatedFault) -> None:
        """Spend one restart and say so; the fault, where none is left."""
        if self.restarts >= self._max_restarts:
            used = f" (after {self.restarts} restarts, --env_restarts)" if self._max_restarts else ""
            raise LocatedFault(self._row, f"{fault}{used}") from fault.__cause__
        self.restarts += 1
        problem = f"{fault}; made anew, {self.restarts} of {self._max_restarts}"
        _LOGGER.warning(self._describe(self._row, problem))
