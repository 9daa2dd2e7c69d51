"""Three small tasks: masked actions, images to remember, and nested spaces with both.

python train_distributed.py --env examples.many_spaces:MaskedCartPole-v0 --info_mask
python train_distributed.py --env examples.many_spaces:PatchRecall-v0 --policy gru
python train_distributed.py --env examples.many_spaces:Orders-v0 --policy lstm
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

from envs.vector.batched import pack_generator, unpack_generator

MOST_PUSHES = 5  # pushes in a row to the same side
QUESTION = 5  # step at which the two memory tasks ask


class Snapshots:
    """The two methods of exact resume, for environments that name what changes in them."""

    changing: tuple[str, ...] = ()

    def get_state(self: Any) -> dict[str, Any]:
        """Return all that the future depends on."""
        state = {name: getattr(self, name) for name in self.changing}
        return state | {"rng": pack_generator(self.np_random)}

    def set_state(self: Any, state: dict[str, Any]) -> None:
        """Continue from `get_state`."""
        unpack_generator(self.np_random, state["rng"])
        for name in self.changing:
            setattr(self, name, state[name])


class MaskedCartPole(Snapshots, CartPoleEnv):
    """CartPole-v1 with a third action that ends it, and a limit of pushes to one side.

    info["action_mask"] always forbids the third action, and a sixth push to the same side.
    """

    changing = ("state", "pushes")

    def __init__(self) -> None:
        super().__init__()
        self.action_space = spaces.Discrete(3)  # type: ignore[assignment]

    def reset(self, **options: Any) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin an episode."""
        obs, _ = super().reset(**options)
        self.pushes = np.zeros(2, np.int64)  # consecutive pushes to the left or to the right
        return obs, self.info()

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Push left (0) or right (1); anything forbidden ends the episode."""
        allowed = self.info()["action_mask"][action]
        obs, reward, terminated, truncated, _ = super().step(min(int(action), 1))
        self.pushes = np.where(np.arange(2) == action, self.pushes + 1, 0)
        return obs, float(reward) * allowed, terminated or not allowed, truncated, self.info()

    def info(self) -> dict[str, Any]:
        """Return the mask of the next action."""
        return {"action_mask": np.array([*(self.pushes < MOST_PUSHES), False], np.int8)}


class MemoryTask(Snapshots, gymnasium.Env[Any, Any]):
    """Shows something in the first observation, and scores the answer to the last one."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        super().reset(seed=seed)
        self.age = 0
        self.draw()
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Wait; after the question, score the answer and end the episode."""
        over = self.age == QUESTION
        self.age += 1
        return self.observe(), self.score(action) * over, over, False, {}

    def draw(self) -> None:
        """Draw what is to be remembered."""

    def observe(self) -> Any:
        """Return the observation of this step."""

    def score(self, action: Any) -> float:
        """Return the reward of an answer."""
        raise NotImplementedError


class PatchRecall(MemoryTask):
    """Name the quarter of the first image that had the bright patch.

    All images are noise, with a white patch of 3 x 3 pixels in the first; the last is white.
    """

    changing = ("age", "quarter")
    observation_space = spaces.Box(0, 255, (12, 12, 1), np.uint8)
    action_space = spaces.Discrete(4)

    def draw(self) -> None:
        """Draw the quarter."""
        self.quarter = int(self.np_random.integers(4))

    def observe(self) -> np.ndarray:
        """Return an image."""
        image = self.np_random.integers(0, 128, (12, 12, 1), np.uint8)
        if self.age == 0:
            row, column = self.np_random.integers(0, 4, 2) + 6 * np.array(divmod(self.quarter, 2))
            image[row : row + 3, column : column + 3] = 255
        if self.age == QUESTION:
            image[:] = 255
        return image

    def score(self, action: Any) -> float:
        """Return 1 for the right quarter."""
        return float(action == self.quarter)


class Orders(MemoryTask):
    """Deliver the size and the colour that were ordered.

    The first observation shows the order, and each of the two right choices earns 0.5. One wrong
    size and one wrong colour are out of stock: the mask forbids them.
    """

    changing = ("age", "order", "missing")
    SIZES = np.array([4, 3])
    observation_space = spaces.Dict(
        order=spaces.MultiDiscrete(SIZES + 1),  # 0: nothing is shown
        door=spaces.Discrete(2),  # 1: somebody waits for the delivery
        action_mask=spaces.MultiBinary(int(SIZES.sum())),
    )
    action_space = spaces.MultiDiscrete(SIZES)

    def draw(self) -> None:
        """Draw an order, and what is out of stock."""
        self.order = self.np_random.integers(self.SIZES)
        self.missing = (self.order + self.np_random.integers(1, self.SIZES)) % self.SIZES

    def observe(self) -> dict[str, Any]:
        """Return order, door and mask."""
        mask = np.ones(int(self.SIZES.sum()), np.int8)
        mask[[self.missing[0], self.SIZES[0] + self.missing[1]]] = 0
        shown = (self.order + 1) * (self.age == 0)
        return {"order": shown, "door": int(self.age == QUESTION), "action_mask": mask}

    def score(self, action: Any) -> float:
        """Return the share of right choices."""
        return float((action == self.order).mean())


gymnasium.register("MaskedCartPole-v0", f"{__name__}:MaskedCartPole", max_episode_steps=500)
gymnasium.register("PatchRecall-v0", f"{__name__}:PatchRecall")
gymnasium.register("Orders-v0", f"{__name__}:Orders")
