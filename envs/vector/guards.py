"""One Python environment of a batch: located, made again and saved."""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import gymnasium
import numpy as np
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

from envs.vector.faults import MAX_OBSERVATION, MAX_REWARD, RowFaultError, are_flags
from envs.vector.hangs import HangWatch
from envs.vector.snapshots import has_protocol
from envs.vector.spaces import MASK_KEY, Path, Space, flat_mask, mask_words, named, pick, rebuilt

_LOGGER = logging.getLogger(__name__)


class GuardedEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A sub-environment that says which row it is when it fails, and is made again.

    A fault is raised as RowFaultError. With restarts left, the environment is made again instead
    and the step is truncated: reward 0, the last good observation. Of its info only a mask of
    actions and metrics go further: a batch of many kinds of it may not stack.
    """

    def __init__(
        self,
        env: gymnasium.Env[Any, Any],
        make: Callable[[], gymnasium.Env[Any, Any]],
        row: int,
        max_restarts: int,
        watch: HangWatch,
        spaces: Mapping[Path, Space],
        mask_sizes: Sequence[int] = (),
    ) -> None:
        """Guard `env`, whose observations have parts of these spaces.

        Args:
            mask_sizes: options of each choice, for which info must have a mask; (): it need not.
        """
        super().__init__(env)
        self.restarts = 0
        self._make = make
        self._row = row
        self._max_restarts = max_restarts
        self._watch = watch
        self._spaces = spaces
        self._mask_sizes = mask_sizes
        self.life_seed = 0
        self._new_seed: int | None = None  # of an environment made again and not yet reset
        self._last_obs: Any = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset, after a restart with its new seed; RowFaultError as the class says."""
        if seed is not None:
            self.life_seed = seed
            self._new_seed = None
        while True:
            try:
                chosen = seed if self._new_seed is None else self._new_seed
                result = self._watch.call(
                    self._row, self._checked_reset, seed=chosen, options=options
                )
            except RowFaultError as fault:
                self._restart(fault)
            else:
                self._new_seed = None
                return result

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step; raises RowFaultError as the class says."""
        try:
            return self._watch.call(self._row, self._checked_step, action)
        except RowFaultError as fault:
            self._restart(fault)
            return self._last_obs, 0.0, False, True, {}

    def close(self) -> None:
        """Close; what is broken may not even do that, and nothing depends on it."""
        try:
            self._watch.call(self._row, self.env.close)
        except RowFaultError as fault:
            _LOGGER.warning(self._watch.describe(self._row, f"{fault}, when it was closed"))

    def _checked_reset(self, **kwargs: Any) -> Any:
        obs, info = self.env.reset(**kwargs)
        self._check(obs, info)
        return obs, self._mask_of(info)

    def _checked_step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self.env.step(action)
        self._check(obs, info, reward)
        if not isinstance(reward, float):  # numpy no longer takes arrays of one for a number
            reward = np.asarray(reward, np.float64).item()
        for name, flag in (("terminated", terminated), ("truncated", truncated)):
            if not (isinstance(flag, bool | np.bool_) or (np.size(flag) == 1 and are_flags(flag))):
                shown = " ".join(repr(flag).split())[:40]
                raise RowFaultError(self._row, f"{name} is {shown}, neither true nor false")
        # no action follows the last observation of an episode
        mask = {} if terminated or truncated else self._mask_of(info)
        return obs, reward, terminated, truncated, mask | self._metrics_of(info)

    def _mask_of(self, info: Mapping[str, Any]) -> dict[str, Any]:
        """Return the mask of actions in an info, where one is asked for."""
        if not self._mask_sizes:
            if MASK_KEY in info and (MASK_KEY,) not in self._spaces:
                _say_unused()
            return {}
        if MASK_KEY not in info:
            raise RowFaultError(self._row, f"info has no {MASK_KEY}, which --info_mask asks for")
        mask = flat_mask(info[MASK_KEY])
        if mask.shape != (sum(self._mask_sizes),):
            problem = f"{MASK_KEY} has {len(mask)} numbers, not {mask_words(self._mask_sizes)}"
            raise RowFaultError(self._row, problem)
        return {MASK_KEY: mask.astype(np.float32)}

    def _metrics_of(self, info: Mapping[str, Any]) -> dict[str, dict[str, float]]:
        """Return the numbers in info["metrics"], which the logs hold as env/NAME."""
        metrics = info.get("metrics")
        if not isinstance(metrics, Mapping):
            return {}
        numbers = {}
        for name, value in metrics.items():
            with suppress(ValueError):  # of a list whose parts differ in length
                array = np.asarray(value)
                if array.size == 1 and array.dtype.kind in "biuf":
                    numbers[str(name)] = float(array.item())
                    continue
            say_dropped(str(name), f"a {type(value).__name__}")
        return {"metrics": numbers}

    def _check(self, obs: Any, info: Any, reward: Any = 0.0) -> None:
        """Refuse wrong shapes and types, and infinity, which without restarts the batch refuses."""
        parts = {path: np.asarray(self._part(obs, path)) for path in self._spaces}
        for path, part in parts.items():
            space = self._spaces[path]
            if part.shape != (shape := space.shape or ()):
                problem = f"observation has shape {part.shape}, not {shape}"
                raise RowFaultError(self._row, f"{problem}{_at(path)}")
            # as the batch requires
            if space.dtype is not None and not np.can_cast(part.dtype, space.dtype, "same_kind"):
                problem = f"observation has type {part.dtype}, not {space.dtype}"
                raise RowFaultError(self._row, f"{problem}{_at(path)}")
        if not isinstance(reward, float):
            if reward is None:
                raise RowFaultError(self._row, "reward is None, not a number")
            reward = np.asarray(reward, np.float64)  # raises for what is no number
            if reward.size != 1:
                raise RowFaultError(self._row, f"reward has shape {reward.shape}, not ()")
        if not isinstance(info, Mapping):
            shown = None if info is None else f"a {type(info).__name__}"
            raise RowFaultError(self._row, f"info is {shown}, not a dict")
        if self._max_restarts:
            checks = [(f"observation{_at(p)}", part, MAX_OBSERVATION) for p, part in parts.items()]
            checks.append(("reward", reward, MAX_REWARD))
            for name, values, limit in checks:
                array = np.asarray(values)
                usable = np.abs(array) <= limit if array.dtype.kind == "f" else np.True_
                if not usable.all():
                    raise RowFaultError(self._row, f"{name} is {array[~usable].flat[0]}")
            self._last_obs = copy.deepcopy(obs)

    def _part(self, obs: Any, path: Path) -> Any:
        try:
            return pick(obs, path)
        except (KeyError, IndexError, TypeError):
            raise RowFaultError(self._row, f"observation has nothing{_at(path)}") from None

    def _restart(self, fault: RowFaultError) -> None:
        """Make the environment again; a fault meanwhile counts, the last one is raised."""
        for attempt in itertools.count():
            if self.restarts >= self._max_restarts:
                used = f" (after {self.restarts} restarts, --env_restarts)" * bool(self.restarts)
                raise RowFaultError(self._row, f"{fault}{used}") from fault.__cause__
            self.restarts += 1
            problem = f"{fault}; made again, {self.restarts} of {self._max_restarts}"
            _LOGGER.warning(self._watch.describe(self._row, problem))
            if attempt == 0:
                self.close()
            try:
                self.env = self._watch.call(self._row, self._make)
            except RowFaultError as another:
                fault = RowFaultError(self._row, f"could not be made again: {another}")
            else:
                break
        self.begin_again(self.life_seed, self.restarts)

    def begin_again(self, life_seed: int, restarts: int) -> None:
        """Let the next reset begin what follows so many restarts."""
        self.life_seed = life_seed
        self.restarts = restarts
        entropy = np.random.SeedSequence([life_seed, restarts])
        self._new_seed = int(entropy.generate_state(1, np.uint64)[0]) >> 1

    def _find_stateful(self) -> tuple[Any, list[TimeLimit[Any, Any]]]:
        """Return the environment with get_state and set_state (else None), its time limits."""
        env = self.env
        limits: list[TimeLimit[Any, Any]] = []
        while not has_protocol(env):
            if isinstance(env, TimeLimit):
                limits.append(env)
            elif not isinstance(env, OrderEnforcing | PassiveEnvChecker):
                # an environment without the protocol, or a wrapper that may hold state of its own
                return None, []
            env = env.env
        return env, limits

    @property
    def can_snapshot(self) -> bool:
        """Whether get_state and set_state work."""
        return self._find_stateful()[0] is not None

    def get_state(self) -> dict[str, Any]:
        """Return the state of the environment, its time limits and its restarts."""
        env, limits = self._find_stateful()
        counts = {f"time_limit/{i}": limit._elapsed_steps for i, limit in enumerate(limits)}
        state = {**env.get_state(), **counts}
        state |= {"guard/restarts": self.restarts, "guard/life_seed": self.life_seed}
        kept = self._spaces if self._max_restarts else ()
        return state | {_saved_as(path): pick(self._last_obs, path) for path in kept}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue where `get_state` was called; the guard's own entries may lack."""
        env, limits = self._find_stateful()
        self.restarts = state.pop("guard/restarts", self.restarts)
        self.life_seed = state.pop("guard/life_seed", self.life_seed)
        kept = {path: state.pop(_saved_as(path), None) for path in self._spaces}
        if self._max_restarts and all(values is not None for values in kept.values()):
            self._last_obs = rebuilt(self.env.observation_space, kept)
        for i, limit in enumerate(limits):
            limit._elapsed_steps = state.pop(f"time_limit/{i}")
        env.set_state(state)


@cache
def _say_unused() -> None:
    _LOGGER.warning("info has an %s that is not used: --info_mask uses it", MASK_KEY)


@cache
def say_dropped(name: str, what: str) -> None:
    """Say once that something in info["metrics"] is not one finite number."""
    _LOGGER.warning("info['metrics'][%r] is %s, not one finite number: it is left out", name, what)


def _at(path: Path) -> str:
    return f" at {named(path)!r}" if path else ""


def _saved_as(path: Path) -> str:
    return "/".join(["guard/last_obs", *map(str, path)])
