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


class Snapshots:
    """The two methods of exact resume, for environments that name all their changing attributes."""

    changing: tuple[str, ...] = ()

    def get_state(self: Any) -> dict[str, Any]:
        """Return all that the future depends on."""
        state = {name: getattr(self, name) for name in self.changing}
        return state | {"rng": pack_generator(self.np_random)}

    def set_state(self: Any, state: dict[str, Any]) -> None:
        """Continue from `get_state`."""
        for name in self.changing:
            setattr(self, name, state[name])
        unpack_generator(self.np_random, state["rng"])


class MaskedCartPole(Snapshots, CartPoleEnv):
    """CartPole-v1 with a third action that ends it, and a limit of pushes the same way.

    info["action_mask"] forbids the third action always, and a sixth push the same way.
    """

    changing = ("state", "pushes")

    def __init__(self) -> None:
        super().__init__()
        self.action_space = spaces.Discrete(3)  # type: ignore[assignment]
        self.pushes = np.zeros(2, np.int64)  # the same way until now, by direction

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin an episode."""
        obs, _ = super().reset(seed=seed, options=options)
        self.pushes = np.zeros(2, np.int64)
        return obs, self._info()

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Push left (0) or right (1); anything forbidden ends the episode."""
        allowed = self._info()["action_mask"][action]
        obs, reward, terminated, truncated, _ = super().step(min(int(action), 1))
        self.pushes = np.where(np.arange(2) == action, self.pushes + 1, 0)
        return obs, float(reward) * allowed, terminated or not allowed, truncated, self._info()

    def _info(self) -> dict[str, Any]:
        return {"action_mask": np.array([*(self.pushes < MOST_PUSHES), False], np.int8)}


class PatchRecall(Snapshots, gymnasium.Env[Any, Any]):
    """Say in which quarter of the first image the bright patch was.

    Images of 12 x 12 bytes follow each other: one of noise with a patch of 3 x 3 white pixels,
    `delay` of noise alone, and a white one, at which the action earns 1 if it is the quarter.
    """

    changing = ("age", "quarter")
    observation_space = spaces.Box(0, 255, (12, 12, 1), np.uint8)
    action_space = spaces.Discrete(4)

    def __init__(self, delay: int = 4) -> None:
        self.delay = delay
        self.age = self.quarter = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Show the patch."""
        super().reset(seed=seed)
        self.age, self.quarter = 0, int(self.np_random.integers(4))
        image = self._noise()
        row, column = self.np_random.integers(0, 4, 2) + 6 * np.array(divmod(self.quarter, 2))
        image[row : row + 3, column : column + 3] = 255
        return image, {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Show the next image; the answer to the last one counts."""
        self.age += 1
        over = self.age > self.delay + 1
        image = self._noise()
        if self.age == self.delay + 1:
            image[:] = 255
        return image, float(over and action == self.quarter), over, False, {}

    def _noise(self) -> np.ndarray:
        return self.np_random.integers(0, 128, (12, 12, 1), np.uint8)


class Orders(Snapshots, gymnasium.Env[Any, Any]):
    """Deliver the size and the colour that were ordered `delay` steps ago.

    The first observation shows the order; the last one asks for it, and each of the two right
    choices earns 0.5. One wrong size and one wrong colour are out of stock: the mask forbids them.
    """

    changing = ("age", "order", "missing")
    SIZES = np.array([4, 3])
    observation_space = spaces.Dict(
        order=spaces.MultiDiscrete(SIZES + 1),  # 0: nothing is shown
        door=spaces.Discrete(2),  # 1: somebody waits for the delivery
        action_mask=spaces.MultiBinary(int(SIZES.sum())),
    )
    action_space = spaces.MultiDiscrete(SIZES)

    def __init__(self, delay: int = 5) -> None:
        self.delay, self.age = delay, 0
        self.order = self.missing = np.zeros(2, np.int64)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Show a new order."""
        super().reset(seed=seed)
        self.age = 0
        self.order = self.np_random.integers(self.SIZES)
        self.missing = (self.order + self.np_random.integers(1, self.SIZES)) % self.SIZES
        return self._observe(), {}

    def step(self, action: np.ndarray) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Wait, or deliver at the last step."""
        over = self.age == self.delay
        reward = float((np.asarray(action) == self.order).mean()) * over
        self.age += 1
        return self._observe(), reward, over, False, {}

    def _observe(self) -> dict[str, Any]:
        mask = np.ones(int(self.SIZES.sum()), np.int8)
        mask[[self.missing[0], self.SIZES[0] + self.missing[1]]] = 0
        shown = self.order + 1 if self.age == 0 else np.zeros(2, np.int64)
        return {"order": shown, "door": int(self.age == self.delay), "action_mask": mask}


_LIMITS = {"MaskedCartPole": 500, "PatchRecall": None, "Orders": None}
for _name, _limit in _LIMITS.items():
    if f"{_name}-v0" not in gymnasium.registry:
        gymnasium.register(f"{_name}-v0", f"{__name__}:{_name}", max_episode_steps=_limit)
