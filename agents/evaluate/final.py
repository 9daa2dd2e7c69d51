"""Evaluate the policy at the end of training, and write summary.json."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agents.config import RunConfig
from agents.evaluate.episodes import PolicyController, compare_on_episodes, until_stopped
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
    """Evaluate the trained policy, write the results, and return the exit code.

    Training is already saved, so a stop signal ends the evaluation immediately.
    """

    def evaluate() -> None:
        if isinstance(task, GymTask):
            summary, text = evaluate_last_and_best(config, task, training, run_dir)
        else:
            from agents.evaluate.markets import report  # imported late: pandas takes 0.4 s

            picture = path_to_write(run_dir, "plots/equity.png")
            agents = {"policy": PolicyController(training.policy, training.normalizers.obs)}
            summary, text = report(task, agents, training.world, run_dir, picture)
        if training.world.is_main_process:
            finish(config, run_dir, training, summary, text)

    training.world.set_phase(EVALUATING)
    return until_stopped(evaluate, training.world, run_dir)


def evaluate_last_and_best(
    config: RunConfig, task: GymTask, training: Training, run_dir: Path
) -> tuple[dict[str, Any], str]:
    """Evaluate the last policy, and best.pt if it is from another iteration."""
    agents = {"test": PolicyController(training.policy, training.normalizers.obs)}
    best = load_best(training, run_dir)
    if best and best.iteration != training.iteration:
        agents["best"] = PolicyController(best.policy, best.normalizer)
    summary, text = compare_on_episodes(task, config, agents, training.world)
    if best and "best" in summary:
        summary["best"]["iteration"] = best.iteration
    return summary, text


def load_best(training: Training, run_dir: Path) -> LoadedAgent | None:
    """Load best.pt on every rank; return None on all ranks if one cannot load it."""
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
    # Imported late, because matplotlib takes 0.5 s to load.
    from agents.evaluate.pictures import plot_learning_curve

    directory = RunDir(run_dir)
    simulated = config.task.is_trading and config.data.data == "simulated"
    title = f"{config.task.env}, {config.policy.policy}, seed {config.train.seed}"
    plot_learning_curve(directory, title, simulated)

    counters = {name: getattr(training, name) for name in ("iteration", "global_step", "episodes")}
    summary = counters | {"parameter_sha256": parameter_hash(training.policy)} | summary
    if training.ppo.strategy.mode == "ddp":
        from rl_dist.speedup.model import audit, describe

        if scaling := audit(directory.records()):
            summary["scaling"] = scaling
            text += f"\n{describe(scaling)}"
    directory.write_summary(summary)
    print(f"\niteration {training.iteration}\n{text}\n")
    print(f"run directory: {run_dir} (plots/, metrics.jsonl, summary.json, checkpoints/)")
