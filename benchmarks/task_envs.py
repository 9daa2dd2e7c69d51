"""Register tasks of the table of results.

PocMemory-v0 and MemoryLength-v0 are published memory tasks, written here. The ids of MiniGrid and
MinAtar name environments of the packages minigrid and minatar:

    python train_distributed.py --env benchmarks.task_envs:PocMemory-v0 --preset memory
    python train_distributed.py --env benchmarks.task_envs:DoorKey-5x5-v0
    python train_distributed.py --env benchmarks.task_envs:MinAtar/Breakout-v1
"""

from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from envs.vector.batched import BatchedEnv, Outcome, SingleEnv

GRIDS = ("DoorKey-5x5", "Unlock", "MemoryS7")
FROZEN_STEPS = 2  # number of steps in which PocMemory shows the signs
END_PLACE = 5  # distance of each end from the middle of the corridor, in steps of 0.2
FARTHEST_START = 2  # an episode begins at most this many steps from the middle
PRIZE = 1.6
STEP_COST = 0.1


class PocMemoryVectorEnv(BatchedEnv):
    """PocMemory-v0: only the first steps show which end of a corridor is good.

    Each observation has the left sign, the position and the right sign, [B, 3]. For two steps, the
    agent cannot move and sees the signs of both ends: +1 for the good end, -1 for the bad end. Then
    the agent walks and sees only its position. A step costs 0.1, the good end earns 1.6, and the
    bad end costs 1.6. The episode terminates at either end. The best possible mean return is 1.2.

    Source of the rules: MarcoMeter/recurrent-ppo-truncated-bptt, environments/poc_memory_env.py,
    with freeze=True, as in the experiments of that project.
    """

    state_names = ("place", "right")

    def __init__(self, num_envs: int = 1) -> None:
        super().__init__(num_envs, spaces.Box(-1.0, 1.0, (3,), np.float32), spaces.Discrete(2))
        self.place = np.zeros(num_envs, dtype=np.int64)  # positions, from -END_PLACE to END_PLACE
        self.right = np.ones(num_envs, dtype=np.int64)  # sign of the end on the right

    def draw(self, generator: np.random.Generator) -> np.ndarray:
        """Choose a random start place and a random sign for the end on the right."""
        start = generator.integers(-FARTHEST_START, FARTHEST_START + 1)
        good = generator.integers(2)
        return np.array([start, 2 * good - 1], dtype=np.float64)

    def begin(self, rows: np.ndarray, draws: np.ndarray) -> None:
        """Start new episodes."""
        self.place[rows], self.right[rows] = draws.T.astype(np.int64)

    def observe(self) -> np.ndarray:
        """Return the observations."""
        signs = self.right * (self.elapsed <= FROZEN_STEPS)
        return np.stack([-signs, self.place / END_PLACE, signs], axis=1).astype(np.float32)

    def advance(self, actions: np.ndarray) -> Outcome:
        """Move every agent: action 0 walks left, action 1 walks right."""
        walks = self.elapsed >= FROZEN_STEPS
        self.place += np.where(actions == 1, 1, -1) * walks
        over = np.abs(self.place) == END_PLACE
        at_good = np.sign(self.place) == self.right
        rewards = np.where(over, np.where(at_good, PRIZE, -PRIZE), -STEP_COST * walks)
        return rewards, over


class MemoryLengthVectorEnv(BatchedEnv):
    """MemoryLength-v0: remember one bit for some steps, as in bsuite's memory_len.

    Each observation has the time left, the query and the bit, [B, 3]. The first observation is
    shown twice and contains the bit as -1 or +1. The last action of the episode earns 1 if it names
    the bit, otherwise -1.

    Source of the rules: google-deepmind/bsuite, bsuite/environments/memory_chain.py, with one bit.
    """

    state_names = ("bit",)

    def __init__(self, num_envs: int = 1, *, length: int = 30) -> None:
        low = np.array([0.0, 0.0, -1.0], np.float32)
        super().__init__(num_envs, spaces.Box(low, np.ones_like(low)), spaces.Discrete(2))
        self.length = length
        self.bit = np.zeros(num_envs, dtype=np.int64)

    def draw(self, generator: np.random.Generator) -> np.ndarray:
        """Choose a random bit, which the agent has to remember."""
        return generator.integers(2, size=1).astype(np.float64)

    def begin(self, rows: np.ndarray, draws: np.ndarray) -> None:
        """Start new episodes."""
        self.bit[rows] = draws[:, 0].astype(np.int64)

    def observe(self) -> np.ndarray:
        """Return the observations; as in the original task, they lag by one step."""
        shown = np.maximum(self.elapsed - 1, 0)
        obs = np.zeros((self.num_envs, 3), dtype=np.float32)  # with one bit the query is always 0
        obs[:, 0] = 1.0 - shown / self.length
        obs[:, 2] = np.where(shown == 0, 2 * self.bit - 1, 0)
        return obs

    def advance(self, actions: np.ndarray) -> Outcome:
        """Reward the action of the last step only."""
        over = self.elapsed == self.length
        rewards = np.where(actions == self.bit, 1.0, -1.0) * over
        return rewards, over


BATCHES: dict[str, Any] = {
    "PocMemory-v0": PocMemoryVectorEnv,
    "MemoryLength-v0": MemoryLengthVectorEnv,
}
for env_id, batch in BATCHES.items():
    gymnasium.register(env_id, entry_point=partial(SingleEnv, batch), vector_entry_point=batch)


def make_minigrid(name: str, **kwargs: Any) -> gymnasium.Env:
    """Return a MiniGrid environment whose observation is the grid that the agent sees."""
    import minigrid  # noqa: F401, registers the environments
    from minigrid.wrappers import ImgObsWrapper

    return ImgObsWrapper(gymnasium.make(f"MiniGrid-{name}-v0", **kwargs))


for name in GRIDS:
    gymnasium.register(f"{name}-v0", entry_point=partial(make_minigrid, name))
if find_spec("minatar"):
    import_module("minatar.gym").register_envs()
