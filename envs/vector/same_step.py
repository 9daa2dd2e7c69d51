"""Bring batches of environments, as users and simulators write them, into one form.

Batches differ in how they are seeded, how they report the end of an episode, and when they start
the next one. The adapters in `envs.vector` read only the form of `SameStep`.
"""

import inspect
import math
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from envs.vector.layout import Metrics
from envs.vector.spaces import MASK_KEY
from envs.vector.tensors import MISSING_FINALS, MISSING_TIME_OUTS
from rl_dist.files import log_once

# Simulators return groups of observations, such as one for the policy and one for the critic.
ACTOR_GROUPS = ("policy", "actor", "state")
FINAL_KEYS = ("final_obs", "final_observation")
TIME_OUT_KEYS = ("time_outs", "truncation")  # of rsl_rl and of Brax
# forms in which batches accept one seed per environment
SeedForm = Callable[[Sequence[int]], Any]
SEED_FORMS: tuple[SeedForm, ...] = (list, partial(np.array, dtype=np.int32))
TRIAL_STEPS = 5
OUTPUTS = "(obs, rewards, terminated, truncated, info) or (obs, rewards, ended, extras)"
OTHER_FLAGS = f"an end flag is neither 0 nor 1: does step return {OUTPUTS}?"


class SameStep:
    """A batch in which the next episode starts in the step that ends an episode.

    Attributes that are not defined here are those of the batch, or of the environment inside its
    wrappers.
    """

    single_observation_space: spaces.Space
    single_action_space: spaces.Space
    mark: Callable[[str, Any], None]  # the adapter's `ArrayEnv.mark`

    def __init__(
        self,
        env: Any,
        num_envs: int,
        seed_form: SeedForm | None,
        starts_by_mask: bool,
        part: Callable[[Any], Any],
    ) -> None:
        """Wrap a batch of arrays or tensors.

        Args:
            seed_form: turns a list with one seed per environment into the argument of `reset`;
                None: the batch takes one seed or none.
            starts_by_mask: whether `reset` must start the next episodes, in the rows of reset_mask.
            part: returns the part of the observations that is read.
        """
        self.env = env
        self.num_envs = num_envs
        self.seed_form = seed_form
        self.starts_by_mask = starts_by_mask
        self.part = part
        reset = getattr(env, "reset", None)
        self.reset_arguments = argument_names(reset, ("seed", "options"))
        self.logged: Any = defaultdict(lambda: [0.0, 0])  # sum and count of each logged value

    def __getattr__(self, name: str) -> Any:
        env = self.__dict__["env"]
        return getattr(env if hasattr(env, name) else getattr(env, "unwrapped", env), name)

    def reset(self, *, seed: Sequence[int]) -> tuple[Any, dict]:
        """Start new episodes in all environments; return their observations and {}.

        A batch that does not take one seed per environment gets the first seed. Because it may draw
        from global generators, they are seeded too.
        """
        if self.seed_form is None:
            seed_generators(seed[0])
        if not hasattr(self.env, "reset"):
            raw = self.env.get_observations()
        elif "seed" in self.reset_arguments:
            raw = self.env.reset(seed=self.seed_form(seed) if self.seed_form else seed[0])
        else:
            raw = self.env.reset()
        return self.part(plain(raw[0] if isinstance(raw, tuple) else raw)), {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict]:
        """Step all environments; return observations, rewards, two flags and info.

        info["final_obs"], if known, has the last observations of the episodes that ended; its other
        rows have no meaning.
        """
        outputs = self.env.step(actions)
        if len(outputs) not in (4, 5):
            raise ValueError(f"step returned {len(outputs)} values, not {OUTPUTS}")
        raw, raw_rewards, *raw_flags, info = outputs
        info = plain(info) if hasattr(info, "items") else {}
        obs = plain(raw)
        column = partial(column_of, self.num_envs, tree_leaves(obs)[0])
        rewards = column("rewards", raw_rewards)
        numbers = [column("an end flag", flag) for flag in raw_flags]
        for flag in numbers:
            if "bool" not in str(flag.dtype):
                self.mark(OTHER_FLAGS, (flag != 0) & (flag != 1))
        flags = [flag != 0 for flag in numbers]
        if len(flags) == 1:  # as in rsl_rl: ended episodes, some of them because of a time limit
            time_outs = [column(key, info[key]) != 0 for key in TIME_OUT_KEYS if key in info]
            if not time_outs:
                self.mark(MISSING_TIME_OUTS, flags[0])
            timed_out = flags[0] & (time_outs or [~flags[0]])[0]
            flags = [flags[0] & ~timed_out, timed_out]
        finals = [info[key] for key in FINAL_KEYS if info.get(key) is not None]
        ended = flags[0] | flags[1]
        if self.starts_by_mask and ended.any():
            finals = [tree_map(copied, obs)]  # the reset may write into the arrays of `obs`
            mask = np.asarray(ended)
            fresh = plain(self.env.reset(options={"reset_mask": mask})[0])
            obs = tree_map(partial(with_rows, mask), finals[0], fresh)
        for name, value in info.get("log", {}).items():
            with suppress(TypeError, ValueError, RuntimeError):  # not a number
                mean = torch.as_tensor(value).double().mean()
                self.logged[name][0] += mean
                self.logged[name][1] += 1
        if not finals:
            self.mark(MISSING_FINALS, flags[1] & ~flags[0])  # after a termination, the value is 0
        last = {"final_obs": self.part(finals[0])} if finals else {}
        return self.part(obs), rewards, *flags, last

    def close(self) -> None:
        """Close the batch if it can be closed."""
        if hasattr(self.env, "close"):
            self.env.close()

    def take_metrics(self) -> Metrics:
        """Return sum and count of every value in info["log"] since the last call."""
        metrics = {name: (float(total), count) for name, (total, count) in self.logged.items()}
        self.logged.clear()
        return {name: pair for name, pair in metrics.items() if np.isfinite(pair[0])}


# ---- properties of a batch


def autoreset_mode(env: Any) -> AutoresetMode | None:
    """Return when a batch starts the next episode, or None if it does not say."""
    if getattr(env, "emulated", False):  # PufferLib resets single environments in the next step
        return AutoresetMode.NEXT_STEP
    mode = (getattr(env, "metadata", None) or {}).get("autoreset_mode")
    return mode and AutoresetMode(mode)


def argument_names(function: Any, others: Sequence[str] = ()) -> set[str]:
    """Return the names of a function's or class's arguments; {} if they are unknown.

    Args:
        others: names that are added if the function has **kwargs.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return set()
    takes_others = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    return {parameter.name for parameter in parameters} | set(others if takes_others else ())


def find_seed_form(env: Any, num_envs: int) -> SeedForm | None:
    """Return the form in which a batch of arrays takes one seed per environment, if any.

    Environments with equal seeds must start with equal observations. The batch is reset.
    """
    for form in SEED_FORMS:
        with suppress(Exception):  # a batch may refuse a form with any error
            obs = plain(env.reset(seed=form([11] * num_envs))[0])
            if all((np.asarray(rows) == np.asarray(rows)[:1]).all() for rows in tree_leaves(obs)):
                return form
    return None


def resets_by_mask(env: Any, num_envs: int, like: Any = None) -> bool:
    """Return whether a batch, which has been reset, can reset single rows.

    Args:
        like: a tensor if the batch takes tensors.
    """
    try:
        # EnvPool's action_space is that of a single environment
        actions = batch_space(action_space_of(env), num_envs).sample()
        if isinstance(like, Tensor):
            actions = torch.as_tensor(actions, device=like.device)
        for _ in range(TRIAL_STEPS):
            obs = tree_map(copied, plain(env.step(actions)[0]))
        mask = np.arange(num_envs) == 0
        fresh = plain(env.reset(options={"reset_mask": mask})[0])
    except Exception:  # a batch may fail with any error
        return False
    pairs = zip(tree_leaves(obs), tree_leaves(fresh), strict=True)
    return all(len(new) == 1 or np.array_equal(old[1:], new[1:]) for old, new in pairs)


def seed_generators(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002, because environments may use this generator
    torch.manual_seed(seed)


# ---- nested arrays and tensors


def plain(nested: Any) -> Any:
    """Return nested observations with a dict in place of every other mapping."""
    if hasattr(nested, "items"):
        return {key: plain(value) for key, value in nested.items()}
    return tuple(map(plain, nested)) if isinstance(nested, tuple) else nested


def actor_part(obs: Any) -> Any:
    """Return the group of observations for the actor, or everything if there are no groups.

    Works on observations and on spaces.
    """
    groups = obs.spaces if isinstance(obs, spaces.Dict) else obs
    if not isinstance(groups, dict):
        return obs
    group = next((name for name in ACTOR_GROUPS if name in groups), "")
    kept = {name: groups[name] for name in (group, MASK_KEY) if name in groups}
    if not group or len(kept) == len(groups):
        return obs
    unread = ", ".join(name for name in groups if name not in kept)
    log_once(f"the policy reads the observations {group!r}; it never reads {unread}")
    return spaces.Dict(kept) if isinstance(obs, spaces.Dict) else kept


def column_of(num_envs: int, like: Any, name: str, values: Any) -> Any:
    """Return an output of `step` as one value per environment, [B].

    Args:
        like: the observations: the output becomes a tensor on their device, or also an array.
        name: name of the output, for the error.
    """
    is_tensor = isinstance(like, Tensor)
    values = torch.as_tensor(values, device=like.device) if is_tensor else np.asarray(values)
    if math.prod(values.shape) != num_envs:
        raise ValueError(f"step returned {name} of shape {[*values.shape]}, not [{num_envs}]")
    return values.reshape(num_envs)


def row_of(nested: Any, row: int) -> Any:
    """Return the values of one environment in nested observations."""
    return tree_map(itemgetter(row), nested)


def copied(values: Any) -> Any:
    """Return a copy of an array or a tensor."""
    return values.clone() if isinstance(values, Tensor) else np.array(values)


def with_rows(mask: np.ndarray, old: Any, fresh: Any) -> Any:
    """Return a copy of `old` with the rows of `mask` from `fresh`, which may have only these."""
    new = copied(old)
    new[mask] = fresh[mask] if len(fresh) == len(mask) else fresh
    return new


def space_of(values: Any) -> spaces.Space:
    """Return a space that contains the rows of nested observations.

    Bytes of two or more dimensions are pixels.
    """
    if isinstance(values, dict):
        return spaces.Dict({key: space_of(part) for key, part in values.items()})
    if isinstance(values, tuple):
        return spaces.Tuple(list(map(space_of, values)))
    shape = tuple(values.shape[1:])
    name = str(values.dtype).removeprefix("torch.")
    if name == "uint8":
        return spaces.Box(0, 255, shape, np.uint8)
    if name == "bool":
        return spaces.Box(0, 1, shape, np.float32)
    # types that NumPy lacks, such as bfloat16, have no more digits than float32
    dtype: Any = np.float64 if name in ("float64", "int64", "int32") else np.float32
    return spaces.Box(-np.inf, np.inf, shape, dtype)


def action_space_of(env: Any) -> spaces.Space:
    """Return a batch's space of actions; unbounded numbers if only their count is known.

    Simulators have their own classes of spaces, with the attributes of Gymnasium's.
    """
    space: Any = getattr(env, "single_action_space", None)
    if isinstance(space, spaces.Space):
        return space
    if hasattr(space, "n"):
        return spaces.Discrete(int(space.n))
    if hasattr(space, "nvec"):
        return spaces.MultiDiscrete(np.asarray(space.nvec))
    if space is None and not hasattr(env, "num_actions"):
        raise ValueError("it has neither single_action_space nor num_actions")
    shape = (env.num_actions,) if space is None else tuple(space.shape)
    low, high = (
        np.broadcast_to(np.asarray(getattr(space, name, bound), np.float32), shape)
        for name, bound in (("low", -np.inf), ("high", np.inf))
    )
    return spaces.Box(low, high, dtype=np.float32)
