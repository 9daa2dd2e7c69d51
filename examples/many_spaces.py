"""Three small tasks: masked actions, images, and nested spaces with a mask.

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

MOST_PUSHES = 5  # most consecutive pushes to the same side
QUESTION = 5  # step at which the memory tasks ask for the answer


class Snapshots:
    """The two methods of exact resume; `changing` names the attributes that change."""

    changing: tuple[str, ...] = ()

    def get_state(self: Any) -> dict[str, Any]:
        """Return a complete snapshot."""
        state = {name: getattr(self, name) for name in self.changing}
        return state | {"rng": pack_generator(self.np_random)}

    def set_state(self: Any, state: dict[str, Any]) -> None:
        """Restore a snapshot."""
        unpack_generator(self.np_random, state["rng"])
        for name in self.changing:
            setattr(self, name, state[name])


class MaskedCartPole(Snapshots, CartPoleEnv):
    """CartPole-v1 with a useless third action and a limit on pushes to one side.

    info["action_mask"] always forbids the third action, and forbids a sixth consecutive push to the
    same side. A forbidden action ends the episode.
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
        """Push left (0) or right (1); a forbidden action ends the episode."""
        allowed = self.info()["action_mask"][action]
        obs, reward, terminated, truncated, _ = super().step(min(int(action), 1))
        self.pushes = np.where(np.arange(2) == action, self.pushes + 1, 0)
        return obs, float(reward) * allowed, terminated or not allowed, truncated, self.info()

    def info(self) -> dict[str, Any]:
        """Return the mask for the next action."""
        return {"action_mask": np.array([*(self.pushes < MOST_PUSHES), False], np.int8)}


class MemoryTask(Snapshots, gymnasium.Env[Any, Any]):
    """A task that shows something at the first step and asks for it at the last step."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        super().reset(seed=seed)
        self.age = 0
        self.draw()
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Advance one step; after the question, score the answer and end the episode."""
        over = self.age == QUESTION
        self.age += 1
        return self.observe(), self.score(action) * over, over, False, {}

    def draw(self) -> None:
        """Draw the content that the agent must remember."""

    def observe(self) -> Any:
        """Return the observation of this step."""

    def score(self, action: Any) -> float:
        """Return the reward of an answer."""
        raise NotImplementedError


class PatchRecall(MemoryTask):
    """Task: name the quarter of the first image that contained the white patch.

    The first image is noise with a white patch of 3 x 3 pixels. Noise images follow. The last image
    is all white and asks for the answer.
    """

    changing = ("age", "quarter")
    observation_space = spaces.Box(0, 255, (12, 12, 1), np.uint8)
    action_space = spaces.Discrete(4)

    def draw(self) -> None:
        """Draw the quarter for the patch."""
        self.quarter = int(self.np_random.integers(4))

    def observe(self) -> np.ndarray:
        """Return the image of this step."""
        image = self.np_random.integers(0, 128, (12, 12, 1), np.uint8)
        if self.age == 0:
            row, column = self.np_random.integers(0, 4, 2) + 6 * np.array(divmod(self.quarter, 2))
            image[row : row + 3, column : column + 3] = 255
        if self.age == QUESTION:
            image[:] = 255
        return image

    def score(self, action: Any) -> float:
        """Return 1 for the right quarter, else 0."""
        return float(action == self.quarter)


class Orders(MemoryTask):
    """Task: deliver the size and the colour that were ordered.

    The first observation shows the order. At the end, the right size and the right colour earn 0.5
    each. One wrong size and one wrong colour are out of stock, and the mask forbids them.
    """

    changing = ("age", "order", "missing")
    SIZES = np.array([4, 3])
    observation_space = spaces.Dict(
        order=spaces.MultiDiscrete(SIZES + 1),  # 0: no order is shown
        door=spaces.Discrete(2),  # 1: deliver now
        action_mask=spaces.MultiBinary(int(SIZES.sum())),
    )
    action_space = spaces.MultiDiscrete(SIZES)

    def draw(self) -> None:
        """Draw an order, and the size and colour that are out of stock."""
        self.order = self.np_random.integers(self.SIZES)
        self.missing = (self.order + self.np_random.integers(1, self.SIZES)) % self.SIZES

    def observe(self) -> dict[str, Any]:
        """Return the order, the door and the mask."""
        mask = np.ones(int(self.SIZES.sum()), np.int8)
        mask[[self.missing[0], self.SIZES[0] + self.missing[1]]] = 0
        shown = (self.order + 1) * (self.age == 0)
        return {"order": shown, "door": int(self.age == QUESTION), "action_mask": mask}

    def score(self, action: Any) -> float:
        """Return the fraction of right choices."""
        return float((action == self.order).mean())


gymnasium.register("MaskedCartPole-v0", f"{__name__}:MaskedCartPole", max_episode_steps=500)
gymnasium.register("PatchRecall-v0", f"{__name__}:PatchRecall")
gymnasium.register("Orders-v0", f"{__name__}:Orders")
