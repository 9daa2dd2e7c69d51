"""Evaluate at the end of a training, and write its summary."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agents.config import RunConfig
from agents.evaluate.episodes import episode_figures, episode_text, until_stopped
from agents.run.limits import EVALUATING
from agents.run.saved import LoadedAgent, load_agent, share_checkpoint
from envs.task import GymTask
from rl_dist.checkpoint.store import BEST_FILE
from rl_dist.files import path_to_write
from rl_dist.process_group.collectives import all_gather_json, parameter_hash
from rl_dist.run_dir import RunDir

if TYPE_CHECKING:
    from agents.trainer import Training
    from envs.trading.task import TradingTask

logger = logging.getLogger(__name__)


def evaluate_and_finish(
    config: RunConfig, task: TradingTask | GymTask, training: Training, run_dir: Path
) -> int:
    """Evaluate the trained policy, write the result, and return the exit code.

    Everything is saved already: a signal simply ends this.
    """

    def evaluate() -> None:
        if isinstance(task, GymTask):
            summary, text = evaluate_last_and_best(config, task, training, run_dir)
        else:
            summary, text = evaluate_on_markets(task, training, run_dir)
        if training.world.is_main_process:
            finish(config, run_dir, training, summary, text)

    training.world.set_phase(EVALUATING)
    return until_stopped(evaluate, training.world, run_dir)


def evaluate_on_markets(
    task: TradingTask, training: Training, run_dir: Path
) -> tuple[dict[str, Any], str]:
    """Evaluate on markets; the test span of real prices stays closed."""
    from agents.evaluate.markets import open_spans, report

    agents = {"policy": (training.policy, training.normalizers.obs)}
    picture = path_to_write(run_dir, "plots/equity.png")
    markets, spans = task.markets("test"), open_spans(task)
    figures, text = report(task, markets, spans, agents, training.world, run_dir, picture)
    return figures, f"last checkpoint, iteration {training.iteration}\n\n{text}"


def evaluate_last_and_best(
    config: RunConfig, task: GymTask, training: Training, run_dir: Path
) -> tuple[dict[str, Any], str]:
    """Evaluate the last policy in whole episodes, and best.pt if it differs."""
    world = training.world
    last = episode_figures(task, config, training.policy, training.normalizers.obs, world)
    summary: dict[str, Any] = {"test": last}
    figures = {"last": last}
    if best := load_best(training, run_dir):
        if best.iteration == training.iteration:
            figures = {"last, which is best.pt": last}
        else:
            of_best = episode_figures(task, config, best.policy, best.normalizer, world)
            figures[f"best.pt (iteration {best.iteration})"] = of_best
            summary["best"] = {"iteration": best.iteration, **of_best}
    lines = [f"{name}: {episode_text(values)}" for name, values in figures.items()]
    return summary, "\n".join(lines)


def load_best(training: Training, run_dir: Path) -> LoadedAgent | None:
    """Load best.pt on every rank; None: it is missing or damaged. All ranks call."""
    world, directory = training.world, RunDir(run_dir)
    path = directory.checkpoints / BEST_FILE
    offers = all_gather_json(str(path) if path.exists() else "", world)
    if not share_checkpoint(directory, offers, world):
        return None
    best = None
    try:
        best = load_agent(path, world.device, core=training.policy.config.core)
    except ValueError as error:
        logger.warning("best.pt is not evaluated: %s", error)
    return best if all(all_gather_json(best is not None, world)) else None


def finish(config: RunConfig, run_dir: Path, training: Training, summary: dict, text: str) -> None:
    """Draw the learning curve, write summary.json, and print the result."""
    from agents.evaluate.pictures import plot_learning_curve  # matplotlib: half a second

    directory = RunDir(run_dir)
    simulated = config.task.is_trading and config.data.data == "simulated"
    title = f"{config.task.env}, {config.policy.policy}, seed {config.train.seed}"
    plot_learning_curve(directory, title, simulated)

    counters = {name: getattr(training, name) for name in ("iteration", "global_step", "episodes")}
    summary = counters | {"parameter_sha256": parameter_hash(training.policy)} | summary
    if training.ppo.strategy.mode == "ddp" and training.world.size > 1:
        from rl_dist.speedup.model import audit, describe

        if scaling := audit(directory.records()):
            summary["scaling"] = scaling
            text += f"\n{describe(scaling)}"
    directory.write_summary(summary)
    print(f"\n{text}\n")
    print(f"run directory: {run_dir} (plots/, metrics.jsonl, summary.json, checkpoints/)")
