"""The evaluation that ends a training, and its summary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agents.evaluate.evaluation import Stopped, episode_figures, episode_text, stoppable
from agents.run.config import EVALUATING, SUMMARY, RunConfig
from agents.trainer import Training
from envs.task import GymTask
from rl_dist.launch.short_run import ended_lines
from rl_dist.process_group.collectives import parameter_hash
from rl_dist.process_group.process_ends import stopped_in_evaluation
from rl_dist.telemetry.metrics import write_whole

NEARLY_RANDOM = 0.95  # share of the largest entropy from which on a policy counts as random

if TYPE_CHECKING:
    from envs.trading.task import TradingTask


def evaluate_and_finish(
    config: RunConfig, task: TradingTask | GymTask, training: Training, run_dir: Path
) -> int:
    """Evaluate the trained policy, write the result, and return the exit code.

    Everything is saved: a signal simply ends this.
    """
    world = training.world
    world.set_phase(EVALUATING)
    try:
        with stoppable(world):
            summary, text = evaluate_run(config, task, training, run_dir / "plots")
            if world.is_main_process:
                finish(config, run_dir, training, summary, text)
    except Stopped as stopped:
        (signum,) = stopped.args
        if world.is_main_process:
            print(stopped_in_evaluation(signum, run_dir))
        return 128 + signum
    return 0


def evaluate_run(
    config: RunConfig, task: TradingTask | GymTask, training: Training, plots: Path
) -> tuple[dict[str, Any], str]:
    """Evaluate on the test span, once, or in whole episodes; a summary and its text."""
    agent = training.policy, training.obs_normalizer
    if isinstance(task, GymTask):
        figures = episode_figures(task, config, *agent, training.world, sampled=True)
        return figures, episode_text(figures)
    markets, picture = task.markets("test"), plots / "equity.png"
    from agents.evaluate.markets import report

    return report(task, markets, task.spans.test, {"policy": agent}, training.world, picture)


def randomness_warning(run_dir: Path) -> str:
    """Return a warning where actions are nearly as random as at first, or nothing."""
    lines = ended_lines(run_dir)
    last = json.loads(lines[-1]) if lines else {}
    entropy, most = (last.get(f"loss/{name}") for name in ("entropy", "entropy_max"))
    # 0: masks leave nothing to choose; continuous actions and runs of older versions have none
    if not most or entropy is None or entropy < NEARLY_RANDOM * most:
        return ""
    return (
        f"warning: the policy is nearly as random as at the start (entropy {entropy:.2f} of at "
        f"most {most:.2f} nats): its return without noise may be luck; train longer, or with a "
        "smaller --batch_size, more --update_epochs or a higher --learning_rate"
    )


def finish(config: RunConfig, run_dir: Path, training: Training, summary: dict, text: str) -> None:
    """Write the learning curve and summary.json, and print the result."""
    from agents.evaluate.plots import plot_learning_curve  # matplotlib: half a second, needed here

    simulated = config.task.is_trading and config.data.data == "simulated"
    title = f"{config.task.env}, {config.policy.policy}, seed {config.train.seed}"
    plot_learning_curve(run_dir, run_dir / "plots" / "learning_curve.png", title, simulated)

    # the summary is the last file: who finds it, finds all
    counters = {name: getattr(training, name) for name in ("iteration", "global_step", "episodes")}
    found = counters | {"parameter_sha256": parameter_hash(training.policy), "test": summary}
    scaling = None
    if training.ppo.strategy.mode == "ddp" and training.world.size > 1:
        from rl_dist.speedup.outcome import describe, outcome_of

        if scaling := outcome_of(run_dir):
            found["scaling"] = scaling
    write_whole(run_dir / SUMMARY, json.dumps(found, indent=2) + "\n")
    print(f"\n{text}\n")
    if warning := randomness_warning(run_dir):
        print(warning)
    if scaling:
        print(describe(scaling))
    print(f"run directory: {run_dir} (plots/, metrics.jsonl, summary.json, checkpoints/)")
