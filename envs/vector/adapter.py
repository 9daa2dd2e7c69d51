"""The adapter that lets a numpy vector environment speak torch, and guards it.

Everything agents rely on is held here: SAME_STEP autoreset with a full `final_obs`, one seed per environment,
flat float32 observations, actions in [-1, 1], faults named by environment and step, and snapshots.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space
from torch import Tensor

from envs.vector.faults import (
    CLOSED,
    MAX_OBSERVATION,
    MAX_REWARD,
    EnvironmentFault,
    LocatedFault,
    are_flags,
    has_closed_descriptors,
    is_own_fault,
    one_line,
)
from envs.vector.guards import GuardedEnv
from envs.vector.hangs import HangWatch, HungError, end_process
from envs.vector.snapshots import Stateful, find_stateful, get_states, set_states
from envs.vector.spaces import ActionDecoder, ObservationEncoder

_LOGGER = logging.getLogger(__name__)
_STEP_KEY = "lifetime_step"


class TorchVectorEnv(VectorEnv[Tensor, Tensor, Tensor]):
    """A vector environment of torch tensors around a numpy one.

    `given_up` lists in plain words what a native environment forced upon us does not offer.
    """

    def __init__(
        self,
        env: VectorEnv[Any, Any, Any],
        *,
        env_id: str,
        first_global_index: int = 0,
        default_seeds: Sequence[int] | None = None,
        device: str | torch.device = "cpu",
        force_native: bool = False,
        takes_seed_list: bool = True,
        env_timeout: float = 0.0,
        env_restarts: int = 0,
        end: Callable[[str], None] = end_process,
        beat: Callable[[], None] = lambda: None,
        kind: str = "environment",
    ) -> None:
        """Wrap `env`, a SAME_STEP vector environment (NEXT_STEP only with `force_native`).

        Args:
            env_timeout: seconds after which a call into an environment hangs; 0 = never.
            env_restarts: how often each environment is made anew after a fault.
            end: ends the process if a call that hangs cannot be interrupted.
            beat: says that work goes on: at every call and, from a thread, while one may still come back.
            kind: what messages call it.

        Raises:
            ValueError: an autoreset mode or a space that is not supported; restarts of a native environment.
        """
        self.env = env
        self.env_id, self.kind = env_id, kind
        self.first_global_index = first_global_index
        self.device = torch.device(device)
        self.num_envs = env.num_envs
        self._default_seeds = None if default_seeds is None else list(default_seeds)
        self._takes_seed_list = takes_seed_list
        self._started = False
        self._lifetime_step = 0
        self.given_up = self._accept(env.metadata.get("autoreset_mode"), force_native)
        self._encoder = ObservationEncoder(env.single_observation_space, env_id)
        self._decoder = ActionDecoder(env.single_action_space, env_id)
        self.single_observation_space = self._encoder.space
        self.single_action_space = self._decoder.space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.metadata = {**env.metadata, "autoreset_mode": AutoresetMode.SAME_STEP}
        self._watch = HangWatch(env_timeout, self._describe, end, beat) if env_timeout else None
        self._end = end
        self._guards = self._guard(env, env_restarts, beat)
        self.can_snapshot = find_stateful(env) is not None
        for loss in self.given_up:
            _LOGGER.warning("environment %s, native vectorization: %s", env_id, loss)

    def _accept(self, mode: Any, force_native: bool) -> tuple[str, ...]:
        """Return what using this environment gives up; refuse what cannot be used at all."""
        given_up = []
        if mode is AutoresetMode.NEXT_STEP and force_native:
            given_up.append("each episode but the first begins with a step that ignores the action (NEXT_STEP)")
        elif mode is not AutoresetMode.SAME_STEP:
            name = mode.name if isinstance(mode, AutoresetMode) else repr(mode)
            raise ValueError(
                f"environment {self.env_id} has autoreset mode {name}, but SAME_STEP is needed: "
                f"choose vectorization 'sync', or construct it with AutoresetMode.SAME_STEP"
            )
        if not self._takes_seed_list:
            given_up.append("environments share one generator, so another number of ranks trains differently")
        return tuple(given_up)

    def _guard(self, env: VectorEnv[Any, Any, Any], max_restarts: int, beat: Callable[[], None]) -> list[GuardedEnv]:
        """Guard every environment of its own; a native batch has none."""
        if not isinstance(env, SyncVectorEnv):
            if max_restarts:
                raise ValueError(
                    f"env_restarts {max_restarts}: {self.env_id} is a native vector environment, which cannot begin "
                    "anew in part; leave it out, or use --vectorization sync"
                )
            return []
        pairs = zip(env.envs, env.env_fns, strict=True)
        guards = [
            GuardedEnv(one, make, row, max_restarts, self._describe, self._watch, beat, self._end)
            for row, (one, make) in enumerate(pairs)
        ]
        env.envs = list(guards)
        return guards

    @property
    def restarts(self) -> list[int]:
        """How often each environment was made anew, [B]."""
        return [guard.restarts for guard in self._guards] or [0] * self.num_envs

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        """Start all environments; one seed for each begins new lives at step 0.

        Without seeds the first reset uses the default seeds, later ones continue their generators.

        Returns:
            obs [B, F] float32, and an empty info.

        Raises:
            ValueError: not one seed per environment.
            EnvironmentFault: an environment raised, or returned NaN, infinity or a wrong shape.
        """
        seeds = self._seeds(seed)
        if seeds is not None or not self._started:
            self._lifetime_step = 0
        numpy_seed = seeds if self._takes_seed_list or seeds is None else seeds[0]
        obs = self._guarded(self._reset, seed=numpy_seed, options=options)
        self._started = True
        return self._tensor(obs), {}

    def _reset(self, **kwargs: Any) -> np.ndarray:
        raw, _ = self.env.reset(**kwargs)
        return self._encode(raw, "observation")

    def _seeds(self, seed: int | Sequence[int | None] | None) -> list[int | None] | None:
        if seed is None:
            return None if self._started or self._default_seeds is None else list(self._default_seeds)
        if isinstance(seed, int):
            raise ValueError(f"seed must be a list of {self.num_envs} integers, got {seed}: see rl_dist/seeding.py")
        if len(seed) != self.num_envs:
            raise ValueError(f"seed must hold {self.num_envs} integers, one per environment, got {len(seed)}")
        return [None if one is None else int(one) for one in seed]

    def step(
        self,
        actions: Tensor,  # [B] int64, or [B, A] float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
        """Step all environments; those that end start anew within the same step.

        Returns:
            obs [B, F] float32, rewards [B] float64, terminated [B] bool, truncated [B] bool, and info with
            `final_obs` [B, F]: the last observation of episodes that ended, elsewhere obs. All are fresh.

        Raises:
            ValueError: actions of a wrong shape, or not finite.
            EnvironmentFault: an environment raised, or returned NaN, infinity or a wrong shape.
        """
        numpy_actions = self._decoder(actions, self.num_envs)
        self._lifetime_step += 1
        *columns, final_obs = (self._tensor(array) for array in self._guarded(self._step, numpy_actions))
        obs, rewards, terminated, truncated = columns
        return obs, rewards, terminated, truncated, {"final_obs": final_obs}

    def _step(self, actions: np.ndarray) -> tuple[np.ndarray, ...]:
        """Observations, rewards, terminated, truncated and final observations, checked and fresh."""
        raw, raw_rewards, raw_terminated, raw_truncated, info = self.env.step(actions)
        obs = self._encode(raw, "observation")
        rewards = self._column(raw_rewards, np.float64, "reward")
        self._require_usable(rewards[:, None], "reward", MAX_REWARD)
        terminated = self._column(raw_terminated, np.bool_, "terminated flag")
        truncated = self._column(raw_truncated, np.bool_, "truncated flag")
        return obs, rewards, terminated, truncated, self._final_obs(obs, terminated | truncated, info)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def _final_obs(self, obs: np.ndarray, ended: np.ndarray, info: Mapping[str, Any]) -> np.ndarray:
        final_obs = obs.copy()
        (rows,) = np.nonzero(ended)
        if len(rows) == 0 or self.env.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP:
            return final_obs
        given = info.get("final_obs")
        missing = rows if given is None else [row for row in rows if given[row] is None]
        if len(missing):
            self._fail(int(missing[0]), "ended an episode without a final_obs, which SAME_STEP promises")
        assert given is not None
        final_obs[rows] = self._encode([given[row] for row in rows], "final observation", rows)
        return final_obs

    def _encode(self, raw: Any, what: str, rows: np.ndarray | None = None) -> np.ndarray:
        """Return observations of these rows (default: all), checked, as a fresh array [len(rows), F]."""
        count = self.num_envs if rows is None else len(rows)
        try:
            encoded = self._encoder(raw, count)
        except (TypeError, ValueError) as error:
            self._fail(None, f"{what} is unusable: {one_line(error)}", error)
        self._require_usable(encoded, what, MAX_OBSERVATION, rows)
        return encoded

    def _column(self, raw: Any, dtype: Any, what: str) -> np.ndarray:
        column = np.array(raw, dtype=dtype)
        if column.shape != (self.num_envs,):
            self._fail(None, f"{what}s have shape {column.shape}, not ({self.num_envs},)")
        if dtype is np.bool_ and not are_flags(raw):
            self._fail(None, f"a {what} is neither true nor false")
        return column

    def _require_usable(self, values: np.ndarray, what: str, limit: float, rows: np.ndarray | None = None) -> None:
        usable = np.abs(values) <= limit  # NaN is not
        if usable.all():
            return
        bad_rows = np.flatnonzero(~usable.all(axis=1))
        first = bad_rows[0]
        position = int(np.flatnonzero(~usable[first])[0])
        where = f" at position {position}" if what != "reward" else ""
        others = f" ({len(bad_rows) - 1} more environments too)" if len(bad_rows) > 1 else ""
        row = int(first if rows is None else rows[first])
        self._fail(row, f"{what} is {values[first, position]}{where}{others}")

    def _guarded(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a call into the environments, naming the one that fails."""
        native = self._watch if not self._guards else None
        try:
            if native is not None:
                native.begin(None)
            try:
                return call(*args, **kwargs)
            finally:
                if native is not None:
                    native.end()
        except LocatedFault as fault:
            self._fail(fault.row, str(fault), fault.__cause__)
        except HungError as error:
            self._fail(None, str(error), error)
        except BaseException as error:
            if not is_own_fault(error):
                raise
            self._fail(None, f"raised {one_line(error)}", error)
        finally:
            if has_closed_descriptors():
                self._end(self._describe(None, CLOSED))

    def _fail(self, row: int | None, problem: str, cause: BaseException | None = None) -> NoReturn:
        raise self._fault(row, problem) from cause

    def _fault(self, row: int | None, problem: str) -> EnvironmentFault:
        first = self.first_global_index
        number = f"one of {first}..{first + self.num_envs - 1}" if row is None else str(first + row)
        return EnvironmentFault(self.env_id, number, self._lifetime_step, problem, self.kind)

    def _describe(self, row: int | None, problem: str) -> str:
        return str(self._fault(row, problem))

    def get_state(self) -> dict[str, Tensor]:
        """Return all the future depends on: CPU tensors [B, ...], float64 or int64.

        Raises:
            ValueError: a sub-environment offers no `get_state` and `set_state`.
        """
        state = self._guarded(get_states, self._stateful())
        return state | {_STEP_KEY: torch.full((self.num_envs,), self._lifetime_step, dtype=torch.int64)}

    def set_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue exactly where `get_state` was called, on this or an equal environment.

        Raises:
            ValueError: no snapshots here, or a state of another number of environments.
        """
        self._stateful()
        for name, tensor in state.items():
            if len(tensor) != self.num_envs:
                raise ValueError(f"state {name!r} must hold {self.num_envs} environments, got {len(tensor)}")
        if not self._started:
            self.reset(seed=[0] * self.num_envs)  # makes what environments build on their first reset
        own = {name: tensor for name, tensor in state.items() if name != _STEP_KEY}
        self._guarded(set_states, self._stateful(), own)
        self._lifetime_step = int(state[_STEP_KEY][0])

    def _stateful(self) -> Stateful:
        """What can be saved, looked for each time: restarts put other objects in its place."""
        found = find_stateful(self.env)
        if found is None:
            raise ValueError(f"environment {self.env_id} cannot be saved: it has no get_state and set_state")
        return found

    def render(self) -> Any:
        """Render as the wrapped environment does."""
        return self.env.render()

    def close_extras(self, **kwargs: Any) -> None:
        """Close the wrapped environment; nothing depends on its success."""
        try:
            self._guarded(self.env.close, **kwargs)
        except EnvironmentFault as fault:
            _LOGGER.warning("%s, when it was closed", fault)
        finally:
            if self._watch is not None:
                self._watch.close()


def seeds_are_per_environment(env: Any) -> bool:
    """Probe whether a native batch of two takes one seed for each; closes it.

    Environments whose seeds are exchanged must exchange their first observations.
    """
    try:
        first = np.array(env.reset(seed=[11, 12])[0])
        second = np.array(env.reset(seed=[12, 11])[0])
    except Exception:  # environments are foreign code and refuse a list in many ways
        return False
    finally:
        env.close()
    return np.array_equal(first, second[::-1])
