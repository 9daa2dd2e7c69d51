"""Draw learning curves, equity curves, and episodes as animated GIFs."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from PIL import Image
from torch import Tensor

from agents.evaluate.episodes import PolicyController, evaluate_episodes
from agents.run.saved import LoadedAgent
from envs.task import GymTask
from envs.vector.layout import TorchEnv
from rl_dist.errors import UserError, one_line
from rl_dist.files import path_to_write
from rl_dist.process_group.world import World
from rl_dist.run_dir import RunDir

ORANGE = "#d2691e"
COLORS = {
    "policy": "#1f5fbf",
    "equal weight": "#555555",
    "reference": "#2ca02c",
    "memoryless rule": ORANGE,
}
MAX_FRAMES = 2000  # later steps of a longer episode are not drawn
MAX_SIDE = 400  # pixels: larger pictures are scaled down


def plot_learning_curve(directory: RunDir, title: str, simulated: bool) -> None:
    """Draw the return of training (and figures of validation) over environment steps."""
    records = directory.records()

    def points(name: str) -> np.ndarray:  # [2, n] steps and values
        pairs = [(record["global_step"], record.get(name)) for record in records]
        return np.array([pair for pair in pairs if pair[1] is not None]).reshape(-1, 2).T

    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    steps, returns = points("episode/return")
    axis.plot(steps, returns, ".-", color="#b9c9e2", label="each iteration")
    window = len(steps) // 20
    if window > 1:
        smooth = np.convolve(returns, np.ones(window) / window, "valid")
        label = f"mean of {window} iterations"
        axis.plot(steps[window - 1 :], smooth, color=COLORS["policy"], label=label)
    axis.set(xlabel="environment steps, all ranks", ylabel="return of training episodes")
    axis.set_title(title)

    # returns of validation are comparable; a Sharpe ratio has another axis
    valid, sharpe = points("valid/return"), points("valid/sharpe")
    if valid.size:
        axis.plot(*valid, "o-", color=ORANGE, label="validation, without noise")
    if sharpe.size:
        twin = axis.twinx()
        twin.plot(*sharpe, "o-", color=ORANGE)
        twin.plot(*points("valid/equal_weight_sharpe"), "--", color=ORANGE)
        twin.set_ylabel("Sharpe ratio in validation (dashed: equal weight)")
    axis.legend(loc="center right")
    _save(figure, path_to_write(directory.path, "plots/learning_curve.png"), simulated)


def plot_equity(
    records: dict[str, dict[str, np.ndarray]],  # of markets.py
    dates: np.ndarray,  # [D+1]
    path: Path,
    span: str,
    simulated: bool,
) -> None:
    """Draw median portfolio values over markets, and the policy's middle half."""
    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    for name, record in records.items():
        growth = record["values"] / record["values"][:, :1]
        axis.plot(dates, np.median(growth, axis=0), color=COLORS.get(name), label=name)
        if name == "policy":
            low, high = np.quantile(growth, [0.25, 0.75], axis=0)
            axis.fill_between(dates, low, high, color=COLORS[name], alpha=0.15)
    axis.set_title(f"{span}: {dates[0]} to {dates[-1]}")
    axis.set_ylabel("value / initial cash, median over markets")
    axis.legend(loc="upper left")
    figure.autofmt_xdate()
    _save(figure, path, simulated)


def _save(figure: Any, path: Path, simulated: bool) -> None:
    axis = figure.axes[0]
    axis.grid()
    if simulated:
        place = {"transform": axis.transAxes, "ha": "right"}
        axis.text(0.99, 0.03, "SIMULATED", fontsize=20, color="#c0392b", alpha=0.45, **place)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)


# ---- films


@dataclass
class FilmingController(PolicyController):
    """Draw every environment before it acts, until its first episode has ended."""

    films: dict[int, list[Image.Image]] = field(default_factory=dict)  # by number of the episode
    ended: set[int] = field(default_factory=set)
    fps: float = 30.0

    def __call__(self, env: TorchEnv, obs: Tensor, episode_start: Tensor) -> Tensor:
        """Return actions [B, A] or [B] for observations [B, F]."""
        guards = env.guards  # type: ignore[attr-defined]
        for row, (guard, starts) in enumerate(zip(guards, episode_start.tolist(), strict=True)):
            number = env.env_offset + row
            if starts and number in self.films:
                self.ended.add(number)
            frames = self.films.setdefault(number, [])
            if number not in self.ended and len(frames) < MAX_FRAMES:
                frames.append(draw(guard.env, env.env_id))  # type: ignore[attr-defined]
                self.fps = guard.env.metadata.get("render_fps") or self.fps
        return super().__call__(env, obs, episode_start)


def draw(env: Any, env_id: str) -> Image.Image:
    """Return the picture of an environment in 256 colours; refuse one that has none."""
    try:
        picture = Image.fromarray(np.asarray(env.render(), np.uint8))  # [H, W, 3]
    except Exception as error:  # environments are foreign code
        raise UserError(
            f"--video: {env_id} cannot be drawn with render_mode rgb_array: {one_line(error)}"
        ) from error
    picture.thumbnail((MAX_SIDE, MAX_SIDE))
    return picture.convert("P", palette=Image.Palette.ADAPTIVE)


def film(agent: LoadedAgent, task: GymTask, folder: Path, seed: int, world: World) -> None:
    """Write the first 3 episodes of an evaluation as episode_N.gif."""
    kwargs = json.dumps(task.config.kwargs() | {"render_mode": "rgb_array"})
    config = replace(
        task.config,
        env_kwargs=kwargs,
        vectorization="sync",
        env_workers=0,
        env_groups=1,
        env_restarts=0,
    )
    drawn_task = replace(task, config=config)
    controller = FilmingController(agent.policy, agent.normalizer)
    num_episodes = min(3, config.eval_episodes)
    with warnings.catch_warnings(action="ignore"):  # Gymnasium's, about the render_mode
        evaluate_episodes(drawn_task.evaluation_env, controller, num_episodes, seed, world)
    folder.mkdir(parents=True, exist_ok=True)
    for number, (first, *others) in controller.films.items():
        path, duration = folder / f"episode_{number}.gif", 1000 / controller.fps
        first.save(path, save_all=True, append_images=others, duration=duration, loop=0)
