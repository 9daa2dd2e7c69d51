"""The evaluation that ends a training, and its summary."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agents.evaluate.evaluation import Stopped, episode_figures, episode_text, stoppable
from agents.network.normalize import Normalizer, observation_normalizer
from agents.policy import Policy, check_weights
from agents.run.config import EVALUATING, RunConfig
from agents.trainer import Training
from envs import find_spec
from envs.task import GymTask
from rl_dist.checkpoint.store import BEST_FILE, CHECKPOINT_DIR, load_checkpoint
from rl_dist.files import path_to_write
from rl_dist.process_group.collectives import all_gather_json, parameter_hash
from rl_dist.process_group.process_ends import stopped_in_evaluation
from rl_dist.process_group.world import broadcast_from_rank0
from rl_dist.run_dir import RunDir

logger = logging.getLogger(__name__)
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
            summary, text = evaluate_run(config, task, training, run_dir)
            if world.is_main_process:
                finish(config, run_dir, training, summary, text)
    except Stopped as stopped:
        (signum,) = stopped.args
        if world.is_main_process:
            print(stopped_in_evaluation(signum, run_dir))
        return 128 + signum
    return 0


def evaluate_run(
    config: RunConfig, task: TradingTask | GymTask, training: Training, run_dir: Path
) -> tuple[dict[str, Any], str]:
    """Evaluate on markets or in whole episodes; the summary's figures and a text.

    The test span of real prices stays closed.
    """
    if isinstance(task, GymTask):
        return evaluate_last_and_best(config, task, training, run_dir)
    agents = {"policy": (training.policy, training.obs_normalizer)}
    markets, picture = task.markets("test"), path_to_write(run_dir, "plots/equity.png")
    from agents.evaluate.markets import open_spans, report

    spans = open_spans(task)
    figures, text = report(task, markets, spans, agents, training.world, run_dir, picture)
    return figures, f"last checkpoint, iteration {training.iteration}\n\n{text}"


def evaluate_last_and_best(
    config: RunConfig, task: GymTask, training: Training, run_dir: Path
) -> tuple[dict[str, Any], str]:
    """Evaluate the last policy in whole episodes, and best.pt if it is another one."""
    last = (training.policy, training.obs_normalizer)
    iteration, best = load_best(training, run_dir)
    agents = {"last, which is best.pt" if iteration == training.iteration else "last": last}
    if best:
        agents[f"best.pt (iteration {iteration})"] = best
    figures = {
        name: episode_figures(task, config, *agent, training.world, sampled=True)
        for name, agent in agents.items()
    }
    lines = [f"{name}: {episode_text(values)}" for name, values in figures.items()]
    threshold = find_spec(config.task.env).reward_threshold
    if threshold is not None:
        solved = [name for name, values in figures.items() if values["return"] >= threshold]
        counts = f"{config.task.env} is solved at a mean return of {threshold:g}"
        lines.append(f"{counts}: {' and '.join(solved) or 'not yet'}")
    of_last, *of_best = figures.values()
    summary: dict[str, Any] = {"test": of_last}
    if of_best:
        summary["best"] = {"iteration": iteration, **of_best[0]}
    return summary, "\n".join(lines)


def load_best(
    training: Training, run_dir: Path
) -> tuple[int | None, tuple[Policy, Normalizer] | None]:
    """Return the iteration of best.pt (None: no file), and its agent if not the last.

    All ranks call; the main process alone reads the file, which other hosts may lack.
    """
    world, path = training.world, run_dir / CHECKPOINT_DIR / BEST_FILE
    last = training.policy
    policy = Policy(last.config, last.layout, training.action_space)
    state = None
    if world.is_main_process and path.exists():
        try:
            saved = load_checkpoint(path)
            # not training.policy: reading the state of a sharded one drops its whole parameters
            check_weights(policy, saved["policy"])
            state = saved
        except ValueError as error:  # damaged, or of another shape
            logger.warning("best.pt is not evaluated: %s", error)
    iteration = all_gather_json(state and state["iteration"], world)[0]
    if iteration in (None, training.iteration):
        return iteration, None
    policy.to(world.device, training.job.dtype).low_precision = last.low_precision
    normalizer = observation_normalizer(last.layout, training.job.train.normalize_obs)
    normalizer.to(world.device)
    for module, name in ((policy, "policy"), (normalizer, "obs_normalizer")):
        if state:
            module.load_state_dict(state[name])
        for tensor in module.state_dict().values():
            broadcast_from_rank0(tensor)
    return iteration, (policy, normalizer)


def randomness_warning(run_dir: Path) -> str:
    """Return a warning where actions are nearly as random as at first, or nothing."""
    last = next(iter(RunDir(run_dir).records(last=1)), {})
    entropy, most = (last.get(f"loss/{name}") for name in ("entropy", "entropy_max"))
    # 0: masks leave nothing to choose; continuous actions have none
    if not most or entropy is None or entropy < NEARLY_RANDOM * most:
        return ""
    return (
        f"warning: the policy is nearly as random as at the start (entropy {entropy:.2f} of at "
        f"most {most:.2f} nats): its return without noise may be luck; train longer, or with a "
        "smaller --batch_size, more --update_epochs or a higher --learning_rate"
    )


def finish(config: RunConfig, run_dir: Path, training: Training, summary: dict, text: str) -> None:
    """Write the learning curve and summary.json, and print the result."""
    from agents.evaluate.pictures import (
        plot_learning_curve,  # matplotlib: half a second, needed here
    )

    simulated = config.task.is_trading and config.data.data == "simulated"
    title = f"{config.task.env}, {config.policy.policy}, seed {config.train.seed}"
    curve = path_to_write(run_dir, "plots/learning_curve.png")
    plot_learning_curve(run_dir, curve, title, simulated)

    counters = {name: getattr(training, name) for name in ("iteration", "global_step", "episodes")}
    found = counters | {"parameter_sha256": parameter_hash(training.policy)} | summary
    scaling = None
    if training.ppo.strategy.mode == "ddp" and training.world.size > 1:
        from rl_dist.speedup.model import audit, describe

        if scaling := audit(RunDir(run_dir).records()):
            found["scaling"] = scaling
    RunDir(run_dir).write_summary(found)
    print(f"\n{text}\n")
    if warning := randomness_warning(run_dir):
        print(warning)
    if scaling:
        print(describe(scaling))
    print(f"run directory: {run_dir} (plots/, metrics.jsonl, summary.json, checkpoints/)")
