"""Draw learning curves, equity curves, and a video of an episode."""

import json
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from PIL import Image
from torch import Tensor

from agents.evaluate.episodes import evaluate_episodes
from agents.learner.controller import PolicyController
from envs.task import GymTask
from rl_dist.errors import UserError
from rl_dist.files import path_to_write
from rl_dist.process_group.world import World
from rl_dist.run_dir import RunDir

CURVES = {  # metric -> label of its axis
    "episode/return": "mean return of\ntraining episodes\n(sum of rewards)",
    "valid/return": "mean return of\nvalidation episodes\n(sum of rewards)",
    "valid/sharpe": "Sharpe ratio\non validation days",
}
EQUAL_WEIGHT = "valid/equal_weight_sharpe"
MAX_FRAMES = 2000  # the video stops after this many steps
FPS = 30  # pictures per second of a video if the environment does not name its rate


def plot_learning_curve(
    directory: RunDir, title: str, simulated: bool, threshold: float | None = None
) -> None:
    """Plot training returns and validation results over environment steps.

    Args:
        threshold: return from which the task counts as solved, if its registration says so.
    """
    table = pd.DataFrame(directory.records()).set_index("global_step")
    curves = table.filter(list(CURVES)).astype(float)
    _, rows = plt.subplots(curves.shape[1], sharex=True, squeeze=False, figsize=(8, 6))
    window = max(1, len(curves) // 20)  # iterations
    for (name, curve), (axes,) in zip(curves.items(), rows, strict=True):
        measured = curve.dropna()
        # lines connect the measurements, which dots show: most iterations have no validation
        axes.plot(
            measured, "." if len(measured) < 100 else "", linestyle="-", alpha=0.5, label="measured"
        )
        if name == "episode/return" and window > 1:
            smooth = measured.rolling(window).mean()
            axes.plot(smooth, linewidth=2, label=f"mean of {window} iterations")
        if name == "valid/sharpe" and EQUAL_WEIGHT in table:
            baseline = table[EQUAL_WEIGHT].astype(float)
            axes.plot(baseline.dropna(), linestyle="--", label="equal weight")
        if threshold is not None and name.endswith("return"):
            axes.axhline(threshold, color="gray", linestyle="--", label="solved (reward_threshold)")
        axes.legend()
        axes.set_ylabel(CURVES[name])
        axes.grid()
    rows[0, 0].set_title(title)
    rows[-1, 0].set_xlabel("environment steps")
    _save(path_to_write(directory.path, "plots/learning_curve.png"), simulated)


def plot_equity(
    records: dict[str, dict[str, np.ndarray]],  # see `Record` in markets.py
    dates: np.ndarray,  # [D+1]
    path: Path,
    span: str,
    simulated: bool,
) -> None:
    """For each strategy, plot the median growth of the portfolio over all markets."""
    medians = {
        name: np.median(record["values"] / record["values"][:, :1], axis=0)
        for name, record in records.items()
    }
    title = f"{span}: {dates[0]} to {dates[-1]}"
    pd.DataFrame(medians, dates).plot(title=title, grid=True, ylabel="median value / initial cash")
    _save(path, simulated)


def _save(path: Path, simulated: bool) -> None:
    if simulated:
        plt.figtext(0.6, 0.2, "SIMULATED", fontsize=20, alpha=0.4)
    path.parent.mkdir(parents=True, exist_ok=True)
    plt.savefig(path, bbox_inches="tight")
    plt.close()


def film(agent: PolicyController, task: GymTask, folder: Path, seed: int, world: World) -> None:
    """Run the first evaluation episode and save its pictures as a GIF, under a new name."""
    config = replace(
        task.config,
        env_kwargs=json.dumps(task.config.kwargs() | {"render_mode": "rgb_array"}),
        eval_episodes=1,
        vectorization="sync",
        env_workers=0,
        env_restarts=0,
    )
    policy = replace(agent)  # a copy, so that the state of `agent` does not change
    frames: list[Image.Image] = []
    fps = FPS

    def draw_and_act(env: Any, obs: Tensor, episode_start: Tensor) -> Tensor:
        nonlocal fps
        if len(frames) < MAX_FRAMES:
            drawn = env.watch.call(0, env.env[0].render)
            frames.extend(map(picture, drawn if isinstance(drawn, list) else [drawn]))
            fps = env.env[0].metadata.get("render_fps") or FPS
        return policy(env, obs, episode_start)

    evaluate_episodes(replace(task, config=config), draw_and_act, seed, world)
    if frames:  # only the rank that ran the episode has frames
        folder.mkdir(parents=True, exist_ok=True)
        number = next(n for n in count() if not (folder / f"episode_{n}.gif").exists())
        path = folder / f"episode_{number}.gif"
        duration_ms = 10 * round(100 / fps)  # GIFs count in steps of 10 ms
        frames[0].save(path, save_all=True, append_images=frames[1:], duration=duration_ms, loop=0)
        print(f"first episode: {path}")


def picture(drawn: Any) -> Image.Image:
    """Convert a picture that `render` returned; floats from 0 to 1 become 0 to 255."""
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
