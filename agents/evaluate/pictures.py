"""Draw learning curves, equity curves, and a video of an episode."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from PIL import Image
from torch import Tensor

from agents.evaluate.episodes import PolicyController, evaluate_episodes
from envs.task import GymTask
from rl_dist.errors import UserError, one_line
from rl_dist.files import path_to_write
from rl_dist.process_group.world import World
from rl_dist.run_dir import RunDir

CURVES = ("episode/return", "valid/return", "valid/sharpe")
MAX_FRAMES = 2000  # the video stops after this many steps
MAX_SIDE = 400  # in pixels; larger pictures are scaled down
FRAME_MS = 33  # time for which each picture is shown


def plot_learning_curve(directory: RunDir, title: str, simulated: bool) -> None:
    """Plot training returns and validation results over environment steps."""
    records = directory.records()
    curves: dict[str, np.ndarray] = {}  # [2, n]: steps, then values
    for name in CURVES:
        if points := [(r["global_step"], r[name]) for r in records if r.get(name) is not None]:
            curves[name] = np.transpose(points)
    num_panels = max(len(curves), 1)
    figure, axes = plt.subplots(num_panels, sharex=True, squeeze=False, layout="constrained")
    for axis, (name, curve) in zip(axes.flat, curves.items(), strict=False):
        axis.plot(*curve, ".-")
        axis.set_ylabel(name)
    figure.suptitle(title)
    figure.supxlabel("environment steps, all ranks")
    _save(figure, path_to_write(directory.path, "plots/learning_curve.png"), simulated)


def plot_equity(
    records: dict[str, dict[str, np.ndarray]],  # see `Record` in markets.py
    dates: np.ndarray,  # [D+1]
    path: Path,
    span: str,
    simulated: bool,
) -> None:
    """Plot the median and the quartiles of portfolio values over all markets."""
    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    for name, record in records.items():
        growth = record["values"] / record["values"][:, :1]
        low, median, high = np.quantile(growth, [0.25, 0.5, 0.75], axis=0)
        axis.plot(dates, median, label=name)
        axis.fill_between(dates, low, high, alpha=0.15)
    axis.set(title=f"{span}: {dates[0]} to {dates[-1]}", ylabel="value / initial cash")
    axis.legend(loc="upper left")
    figure.autofmt_xdate()
    _save(figure, path, simulated)


def _save(figure: Any, path: Path, simulated: bool) -> None:
    for axis in figure.axes:
        axis.grid()
    if simulated:
        figure.text(0.6, 0.2, "SIMULATED", fontsize=20, alpha=0.4)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)


def film(agent: PolicyController, task: GymTask, folder: Path, seed: int, world: World) -> None:
    """Run the first evaluation episode and save its pictures as episode_0.gif."""
    kwargs = json.dumps(task.config.kwargs() | {"render_mode": "rgb_array"})
    options: dict[str, Any] = {"vectorization": "sync", "env_workers": 0, "env_restarts": 0}
    drawn_task = replace(task, config=replace(task.config, env_kwargs=kwargs, **options))
    policy = replace(agent)  # a copy, so that the state of `agent` does not change
    frames: list[Image.Image] = []

    def draw_and_act(env: Any, obs: Tensor, episode_start: Tensor) -> Tensor:
        if len(frames) < MAX_FRAMES:
            picture = Image.fromarray(np.asarray(env.env[0].render(), np.uint8))  # [H, W, 3]
            picture.thumbnail((MAX_SIDE, MAX_SIDE))
            frames.append(picture.convert("P", palette=Image.Palette.ADAPTIVE))
        return policy(env, obs, episode_start)

    try:
        evaluate_episodes(drawn_task, draw_and_act, 1, seed, world)
    except Exception as error:  # environments may raise any error
        env_id = task.config.env
        raise UserError(
            f"--video cannot render {env_id} as rgb_array: {one_line(error)}"
        ) from error
    if frames:  # only the rank that ran the episode has frames
        folder.mkdir(parents=True, exist_ok=True)
        frames[0].save(
            folder / "episode_0.gif",
            save_all=True,
            append_images=frames[1:],
            duration=FRAME_MS,
            loop=0,
        )
