"""Episodes of an evaluation as animated GIFs; the environment draws itself."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor

from agents.evaluate.evaluation import PolicyController, evaluate_episodes
from agents.run.saved import LoadedAgent
from envs.task import GymTask
from envs.vector.layout import TorchEnv
from rl_dist.errors import UserError, one_line
from rl_dist.process_group.world import World

NUM_EPISODES = 3
MAX_FRAMES = 2000  # of an episode: what is longer is cut
MAX_SIDE = 400  # pixels: larger pictures are scaled down


class FilmingController(PolicyController):
    """Draws every environment before it acts, until its first episode has ended."""

    frames: list[list[Image.Image]] | None = None  # of each environment
    first = 0  # the number of the first environment
    fps = 30

    def __call__(self, env: TorchEnv, obs: Tensor, episode_start: Tensor) -> Tensor:
        """Actions [B, A] or [B] for observations [B, F]."""
        singles = [guard.env for guard in env.guards]  # type: ignore[attr-defined]
        if self.frames is None:
            self.frames, self._running = [[] for _ in singles], set(range(len(singles)))
            self.first = env.env_offset
            self.fps = singles[0].metadata.get("render_fps") or self.fps
        else:
            self._running -= set(episode_start.nonzero().flatten().tolist())
        for row in self._running:
            if len(self.frames[row]) < MAX_FRAMES:
                self.frames[row].append(draw(singles[row], env.env_id))  # type: ignore[attr-defined]
        return super().__call__(env, obs, episode_start)

    def write(self, folder: Path) -> None:
        """Write episode_N.gif for every environment."""
        for number, (head, *rest) in zip(count(self.first), self.frames or [], strict=False):
            path = folder / f"episode_{number}.gif"
            head.save(path, save_all=True, append_images=rest, duration=1000 / self.fps, loop=0)


def draw(env: object, env_id: str) -> Image.Image:
    """Return the picture of an environment, in 256 colors; refuse one without."""
    try:
        pixels = np.asarray(env.render(), np.uint8)  # type: ignore[attr-defined]  # [H, W, 3]
        picture = Image.fromarray(pixels)
    except Exception as error:  # environments are foreign code
        raise UserError(
            f"--video: {env_id} cannot be drawn with render_mode rgb_array: {one_line(error)}"
        ) from error
    picture.thumbnail((MAX_SIDE, MAX_SIDE))
    return picture.convert("P", palette=Image.Palette.ADAPTIVE)


def film(agent: LoadedAgent, task: GymTask, folder: Path, seed: int, world: World) -> str:
    """Write the first episodes of an evaluation; return what was written."""
    own = task.config
    kwargs = json.dumps(own.kwargs() | {"render_mode": "rgb_array"})
    steps = {"vectorization": "sync", "env_workers": 0, "env_groups": 1, "env_restarts": 0}
    drawn = replace(task, config=replace(own, env_kwargs=kwargs, **steps))  # type: ignore[arg-type]
    controller = FilmingController(agent.policy, agent.normalizer)
    num_episodes = min(NUM_EPISODES, own.eval_episodes)

    def make_env(count: int, first: int) -> TorchEnv:
        with warnings.catch_warnings(action="ignore"):  # of Gymnasium, about the render_mode
            return drawn.evaluation_env(count, first)

    evaluate_episodes(make_env, controller, num_episodes, seed, world)
    folder.mkdir(parents=True, exist_ok=True)
    controller.write(folder)
    return f"first {num_episodes} episodes: {folder}/episode_*.gif"
