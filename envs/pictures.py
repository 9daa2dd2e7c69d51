"""Save plots, and an episode as an animated GIF."""

from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from PIL import Image
from torch import Tensor

from rl_dist.errors import UserError

MAX_FRAMES = 2000  # the video stops after this many steps
FPS = 30  # pictures per second of a video if the environment does not specify them


def save_plot(path: Path, watermark: str = "") -> None:
    """Save the current plot, with a watermark across it, and close the plot."""
    if watermark:
        plt.figtext(0.6, 0.2, watermark, fontsize=20, alpha=0.4)
    path.parent.mkdir(parents=True, exist_ok=True)
    plt.savefig(path, bbox_inches="tight")
    plt.close()


class Filmed:
    """Wraps an agent and records pictures of the first environment of its batch."""

    def __init__(self, agent: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        self.agent = agent
        self.frames: list[Image.Image] = []
        self.fps = FPS

    def __call__(self, env: Any, obs: Tensor, episode_start: Tensor) -> Tensor:
        """Record a picture of the first environment, then return the agent's actions."""
        if len(self.frames) < MAX_FRAMES:
            drawn = env.watch.call(0, env.env[0].render)
            self.frames.extend(map(picture, drawn if isinstance(drawn, list) else [drawn]))
            self.fps = env.env[0].metadata.get("render_fps") or FPS
        return self.agent(env, obs, episode_start)

    def save(self, folder: Path) -> None:
        """Save the pictures as a GIF in a folder; do not overwrite an earlier GIF."""
        folder.mkdir(parents=True, exist_ok=True)
        number = next(n for n in count() if not (folder / f"episode_{n}.gif").exists())
        path = folder / f"episode_{number}.gif"
        first, *others = self.frames
        duration_ms = 10 * round(100 / self.fps)  # GIFs store durations in units of 10 ms
        first.save(path, save_all=True, append_images=others, duration=duration_ms, loop=0)
        print(f"first episode: {path}")


def picture(drawn: object) -> Image.Image:
    """Convert a picture that `render` returned; scale floats in [0, 1] to [0, 255]."""
    array = np.asarray(drawn)
    with suppress(IndexError, TypeError, ValueError):
        if array.dtype.kind in "bf" and array.max() <= 1:
            array = array * 255
        # Pillow expects [H, W], not [H, W, 1].
        return Image.fromarray(np.clip(array.squeeze(), 0, 255).astype(np.uint8))
    raise UserError(
        "render must return a picture, [H, W, 3] of uint8 or of floats from 0 to 1; it returned "
        f"{array.dtype}{list(array.shape)}"
    )
