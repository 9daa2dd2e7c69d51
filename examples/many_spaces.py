"""Two small memory tasks: one with images, one with nested spaces and an action mask.

Train on them with these commands:

python train_distributed.py --env examples.many_spaces:PatchRecall-v0 --policy gru
python train_distributed.py --env examples.many_spaces:Orders-v0 --policy lstm
"""

from collections.abc import Callable

import gymnasium
import numpy as np
from gymnasium import spaces

from envs.vector.batched import pack_generator, unpack_generator

QUESTION = 5  # step at which a task asks for the secret that it showed at step 0


class MemoryTask(gymnasium.Env):
    """A task that shows a secret at the first step and asks for it at the last step.

    Subclasses define three methods: `draw` returns a random secret, `observe` returns an
    observation, and `score` returns the reward for an answer.
    """

    draw: Callable
    observe: Callable
    score: Callable

    def reset(self, *, seed=None, options=None):
        """Choose a random secret and begin an episode."""
        super().reset(seed=seed)
        self.age = 0
        self.secret = self.draw()
        return self.observe(), {}

    def step(self, action):
        """Advance one step; after the question, score the answer and end the episode."""
        over = self.age == QUESTION
        self.age += 1
        return self.observe(), self.score(action) * over, over, False, {}

    def get_state(self):
        """Return a complete snapshot of the environment, for exact resume."""
        return {"age": self.age, "rng": pack_generator(self.np_random)} | self.secret

    def set_state(self, state):
        """Restore a snapshot."""
        unpack_generator(self.np_random, state["rng"])
        self.age = state["age"]
        self.secret = {name: state[name] for name in self.secret}


class PatchRecall(MemoryTask):
    """The task is to name the quarter of the first image that contained a white patch.

    The first image is noise with a white patch of 3 x 3 pixels. Noise images follow. The last image
    is all white and asks for the answer.
    """

    observation_space = spaces.Box(0, 255, (12, 12, 1), np.uint8)
    action_space = spaces.Discrete(4)

    def draw(self):
        """Choose at random the quarter that will contain the patch."""
        return {"quarter": int(self.np_random.integers(4))}

    def observe(self):
        """Return the image to show at this step."""
        image = self.np_random.integers(0, 128, (12, 12, 1), np.uint8)
        if self.age == 0:
            corner = 6 * np.array(divmod(self.secret["quarter"], 2))
            row, column = self.np_random.integers(0, 4, 2) + corner
            image[row : row + 3, column : column + 3] = 255
        if self.age == QUESTION:
            image[:] = 255
        return image

    def score(self, action):
        """Return 1 for the correct quarter, else 0."""
        return float(action == self.secret["quarter"])


class Orders(MemoryTask):
    """The task is to deliver an article in the size and the colour that a customer ordered.

    Only the first observation shows the order. At the end, the correct size and the correct colour
    earn 0.5 each. One wrong size and one wrong colour are out of stock, so the mask forbids them.
    """

    SIZES = np.array([4, 3])
    observation_space = spaces.Dict(
        order=spaces.MultiDiscrete(SIZES + 1),  # 0: no order is shown
        door=spaces.Discrete(2),  # 1: deliver now
        action_mask=spaces.MultiBinary(7),
    )
    action_space = spaces.MultiDiscrete(SIZES)

    def draw(self):
        """Choose a random order, and a wrong size and a wrong colour that are out of stock."""
        order = self.np_random.integers(self.SIZES)
        missing = (order + self.np_random.integers(1, self.SIZES)) % self.SIZES
        return {"order": order, "missing": missing}

    def observe(self):
        """Return the observation: order, door (1: deliver now) and mask of actions."""
        mask = np.ones(7, np.int8)
        mask[self.secret["missing"] + [0, 4]] = 0
        shown = (self.secret["order"] + 1) * (self.age == 0)
        return {"order": shown, "door": int(self.age == QUESTION), "action_mask": mask}

    def score(self, action):
        """Return 0.5 for each correct choice, so 1 if size and colour are correct."""
        return float((action == self.secret["order"]).mean())


gymnasium.register("PatchRecall-v0", f"{__name__}:PatchRecall")
gymnasium.register("Orders-v0", f"{__name__}:Orders")
