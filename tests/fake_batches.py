"""Batches of environments in the forms that simulators have, for --env fake_batches:NAME."""

import time
from collections import UserDict
from functools import partial
from types import SimpleNamespace

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv

from envs.vector.tensors import random_int63, seed_keys

LIMIT = 7  # steps after which an episode is truncated


class Walk:
    """Random walks in torch; an episode is terminated 3 steps away from its centre.

    All random numbers follow from the seed and the step of an environment. The tensors that `step`
    returns are used again by the next step, as in Isaac Lab.
    """

    single_action_space = spaces.Discrete(2)
    max_episode_length = LIMIT
    seeds_each = True

    def __init__(self, num_envs, device="cpu", final="final_obs", nan_at=None):
        self.num_envs, self.device, self.final, self.nan_at = num_envs, device, final, nan_at
        self.episode_length_buf = torch.zeros(num_envs, dtype=torch.int64)
        self.steps = torch.zeros(num_envs, dtype=torch.int64)
        self.place = torch.zeros(num_envs)
        self.keys = seed_keys([0] * num_envs)
        self.out = {}  # the tensors that `step` uses again

    def random(self, count):
        """Return a number below `count` for each environment and step."""
        return random_int63(self.keys, self.steps) % count

    def again(self, name, values):
        """Return `values` in the tensor of this name, which the last step returned."""
        return self.out.setdefault(name, values.clone()).copy_(values)

    def seen(self, name):
        columns = [self.place, self.episode_length_buf / LIMIT, self.random(100) / 100]
        return self.again(name, torch.stack(columns, dim=1))

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.keys = seed_keys(seed)
            self.steps = torch.zeros_like(self.steps)
        mask = (options or {}).get("reset_mask", np.ones(self.num_envs, bool))
        self.begin(torch.from_numpy(mask))
        return self.seen("obs"), {}

    def begin(self, rows):
        self.place = torch.where(rows, self.random(3) - 1.0, self.place)
        self.episode_length_buf.masked_fill_(rows, 0)

    def step(self, actions):
        self.steps += 1
        self.place += 2 * actions - 1 + (self.random(3) - 1)
        self.episode_length_buf += 1
        rewards = self.again("rewards", self.place.clone())
        if self.steps[0] == self.nan_at:
            rewards[2] = torch.nan
        terminated = self.again("terminated", self.place.abs() >= 3)
        truncated = self.again("truncated", self.episode_length_buf >= LIMIT)
        last = self.seen("last")
        info = {"log": {"/far": terminated.float().mean(), "walks": 2.0, "text": "none"}}
        if self.metadata["autoreset_mode"] is not AutoresetMode.SAME_STEP:
            return last, rewards, terminated, truncated, info
        self.begin(terminated | truncated)
        if self.final:
            info[self.final] = last
        return self.seen("obs"), rewards, terminated, truncated, info

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}

    def get_state(self):
        names = ("keys", "steps", "place", "episode_length_buf")
        return {name: getattr(self, name) for name in names}

    def set_state(self, state):
        for name, values in state.items():
            setattr(self, name, values.to(getattr(self, name).dtype))


class NextStep(Walk):
    """A walk whose next episodes start only in a reset with `reset_mask`."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}


class ColumnWalk(Walk):
    """A walk whose results are [B, 1], with 4-tuples and information that is not a dict."""

    def reset(self, **kwargs):
        return super().reset(**kwargs)

    def step(self, actions):
        obs, rewards, terminated, truncated, info = super().step(actions)
        ended = (terminated | truncated).long()[:, None]
        logged = {"none": None, "nested": {}, "good": 1}
        time_outs = truncated.float()[:, None]
        infos = UserDict(time_outs=time_outs, final_obs=info["final_obs"], log=logged)
        return obs, rewards[:, None], ended, infos


class PartWalk(Walk):
    """A walk that observes its age and a mask; last observations have only the rows that ended."""

    age = spaces.Discrete(LIMIT + 1)
    single_observation_space = spaces.Dict({"age": age, "action_mask": spaces.MultiBinary(2)})
    mask = (1.0, 1.0)

    def parts(self, ages):
        masks = torch.tensor(self.mask).expand(self.num_envs, 2)
        return {"age": ages, "action_mask": masks}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        return self.parts(self.episode_length_buf), {}

    def step(self, actions):
        ages = self.episode_length_buf + 1
        _, *outputs, _ = super().step(actions)
        ended = outputs[1] | outputs[2]
        info = {"final_obs": {"age": torch.where(ended, ages, -1)} if ended.any() else None}
        return self.parts(self.episode_length_buf), *outputs, info


def mask_of(num_envs, first):
    """Make a batch with a mask whose first entry is `first`."""
    walk = PartWalk(num_envs)
    walk.mask = (first, 1.0)
    return walk


def pixels(num_envs, dtype, value):
    """Make a batch that declares bytes but returns pixels of another type."""
    walk = Walk(num_envs)
    walk.single_observation_space = spaces.Box(0, 255, (40, 40), np.uint8)
    walk.seen = lambda name: torch.full((num_envs, 40, 40), value, dtype=getattr(torch, dtype))
    return walk


def changed(num_envs, outputs, maker="Walk"):
    """Make a batch whose `step` returns other outputs, given as a Python expression."""
    batch = globals()[maker](num_envs)
    step = batch.step

    def other_step(actions):
        names = ("obs", "rewards", "terminated", "truncated", "info")
        return eval(f"({outputs})", globals() | dict(zip(names, step(actions), strict=True)))

    batch.step = other_step
    return batch


def with_attributes(num_envs, **attributes):
    """Make a batch of arrays with other attributes."""
    batch = SameStepArrays(num_envs)
    vars(batch).update(attributes)
    return batch


def with_state(num_envs, shape):
    """Make a batch with a part of its state that has no row per environment."""
    walk = Walk(num_envs)
    walk.get_state = lambda: {"place": walk.place, "part": torch.zeros(shape)}
    return walk


def deaf(num_envs):
    """Make a batch whose `reset` has the argument `options`, but does not read it."""
    walk = NextStep(num_envs)
    reset = walk.reset
    walk.reset = lambda seed=None, options=None: reset(seed=seed)
    return walk


def simulator_state(num_envs):
    """Make a batch whose `get_state` returns a tensor, as in ManiSkill."""
    walk = Walk(num_envs)
    walk.get_state = lambda: walk.place
    return walk


def unreset(num_envs):
    """Make a batch in the form of rsl_rl that has no `reset`."""
    batch = RslWalk(num_envs)
    names = ("num_actions", "num_envs", "max_episode_length", "episode_length_buf", "step")
    attributes = {name: getattr(batch, name) for name in names}
    return SimpleNamespace(get_observations=batch.reset, **attributes)


def with_actions(num_envs, **attributes):
    """Make a batch whose space of actions is not Gymnasium's but has the given attributes."""
    walk = Walk(num_envs)
    walk.single_action_space = SimpleNamespace(**attributes)
    return walk


class RslWalk:
    """A walk in the form of rsl_rl: groups, 4-tuples, time-outs, one action number, no seed."""

    num_actions = 1

    def __init__(self, num_envs, device="cpu"):
        self.walk = Walk(num_envs, device, final=None)
        self.num_envs, self.max_episode_length = num_envs, LIMIT
        self.episode_length_buf = self.walk.episode_length_buf

    def groups(self, obs):
        return {"critic": 1e6 + torch.rand(self.num_envs, 5), "policy": {"seen": obs}}

    def reset(self):
        return self.groups(self.walk.reset(seed=torch.randint(2**31, (self.num_envs,)).tolist())[0])

    def step(self, actions):
        assert actions.shape == (self.num_envs, 1) and actions.dtype == torch.float32
        choices = (actions[:, 0] > 0).long()
        obs, rewards, terminated, truncated, info = self.walk.step(choices)
        extras = {"time_outs": (truncated & ~terminated).float(), "log": info["log"]}
        return self.groups(obs), rewards, (terminated | truncated).long(), extras


class ArrayWalk(VectorEnv):
    """The walk as a Gymnasium vector environment of arrays; `seeds` is the form of its seeds."""

    single_observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
    single_action_space = spaces.Discrete(2)

    def __init__(self, num_envs, autoreset_mode=AutoresetMode.NEXT_STEP, seeds="array", masks=True):
        same_step = AutoresetMode(autoreset_mode) is AutoresetMode.SAME_STEP
        self.walk = (Walk if same_step else NextStep)(num_envs, final="final_observation")
        self.metadata = {"autoreset_mode": AutoresetMode(autoreset_mode)}
        self.num_envs, self.seeds, self.masks = num_envs, seeds, masks
        self.action_space = spaces.MultiDiscrete([2] * num_envs)

    def reset(self, *, seed=None, options=None):
        if isinstance(seed, int):
            seed = [seed + i for i in range(self.num_envs)]
        elif seed is not None:
            expected = {"array": np.ndarray, "list": list, "one": int}[self.seeds]
            if not isinstance(seed, expected):
                raise TypeError(f"seeds are {type(seed)}")
        return self.walk.reset(seed=seed, options=options if self.masks else None)[0].numpy(), {}

    def step(self, actions):
        *arrays, info = self.walk.step(torch.from_numpy(actions))
        finals = {k: v.numpy() for k, v in info.items() if k == "final_observation"}
        return *(array.numpy() for array in arrays), finals


class SameStepArrays(ArrayWalk):
    """A batch of arrays that starts episodes in the step that ends others."""

    def __init__(self, num_envs):
        super().__init__(num_envs, AutoresetMode.SAME_STEP)


class MaskWalk(ArrayWalk):
    """A batch of arrays that cannot start episodes in the step that ends others."""

    def __init__(self, num_envs, seeds="array", masks=True):
        super().__init__(num_envs, seeds=seeds, masks=masks)


class GroupWalk(ArrayWalk):
    """A batch of arrays whose observations have a part "state" and another part."""

    single_observation_space = spaces.Dict(
        dict.fromkeys(("map", "state"), ArrayWalk.single_observation_space)
    )

    def both(self, obs):
        return {"map": -obs, "state": obs}

    def reset(self, **kwargs):
        return self.both(super().reset(**kwargs)[0]), {}

    def step(self, actions):
        obs, *outputs, info = super().step(actions)
        return self.both(obs), *outputs, {name: self.both(last) for name, last in info.items()}


class OneWalk(gymnasium.Env):
    """One walk as a Gymnasium environment, which ignores all options."""

    observation_space = ArrayWalk.single_observation_space
    action_space = ArrayWalk.single_action_space

    def __init__(self, **options):
        self.walk = NextStep(1)

    def reset(self, *, seed=None, options=None):
        return self.walk.reset(seed=None if seed is None else [seed])[0][0].numpy().copy(), {}

    def step(self, action):
        *tensors, _ = self.walk.step(torch.tensor([action]))
        obs, reward, terminated, truncated = (tensor[0].numpy().copy() for tensor in tensors)
        return obs, float(reward), bool(terminated), bool(truncated), {}


def make_walk(**options):
    """Make one walk inside a wrapper."""
    return gymnasium.wrappers.TransformReward(OneWalk(**options), lambda reward: 10 * reward)


def arrays(num_envs, **options):
    """Make a batch of arrays."""
    return ArrayWalk(num_envs, **options)


def foreign(num_envs):
    """Make a batch whose observations are neither arrays nor tensors."""
    walk = Walk(num_envs)
    walk.reset = lambda seed: ([1.0] * num_envs, {})
    return walk


def slow(num_envs, at):
    """Make a batch whose step number `at` takes 0.5 s."""
    walk = Walk(num_envs)
    step = walk.step

    def slow_step(actions):
        time.sleep(0.5 * (int(walk.steps[0]) + 1 == at))
        return step(actions)

    walk.step = slow_step
    return walk


def legal(num_envs):
    """Make a batch with a mask that has another name."""
    walk = Walk(num_envs)
    walk.reset = lambda seed: {"x": torch.zeros(num_envs, 3), "legal": torch.ones(num_envs, 2) > 0}
    return walk


def short(num_envs):
    """Make a batch that is too small."""
    walk = Walk(num_envs)
    walk.reset = lambda seed: (torch.zeros(num_envs - 1, 3), {})
    return walk


def nested_actions(num_envs):
    """Make a batch of tensors whose actions are a dict."""
    walk = Walk(num_envs)
    walk.single_action_space = spaces.Dict({"step": spaces.Discrete(2)})
    return walk


gymnasium.register("Walk-v0", entry_point=OneWalk, vector_entry_point=ArrayWalk)
gymnasium.register("MaskWalk-v0", entry_point=OneWalk, vector_entry_point=MaskWalk)
gymnasium.register("GroupWalk-v0", vector_entry_point=GroupWalk)
gymnasium.register("OnlyWalks-v0", vector_entry_point=MaskWalk)
SWAPPED = partial(
    changed, outputs="obs, terminated, rewards, truncated, info", maker="SameStepArrays"
)
gymnasium.register("SwappedWalks-v0", vector_entry_point=SWAPPED)
