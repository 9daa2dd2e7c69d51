"""Evaluate trained policies; the test span of real prices needs --open_test.

examples:
  python -m agents.evaluate runs/my_run --which last
  python -m agents.evaluate runs/my_cartpole --episodes 200 --num_gpus 2
  python -m agents.evaluate runs/my_cartpole --video videos
  python -m agents.evaluate runs/my_run --compare runs/my_mlp --num_worlds 50
  python -m agents.evaluate runs/my_prices --open_test
exit codes: 0 done, 1 failed, 2 bad usage, 130 stopped by Ctrl-C, 143 stopped by SIGTERM
"""

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from agents.config import check_data
from agents.evaluate.trials import options_of, run_trial, until_stopped
from agents.learner.checkpoint_schema import RunSchema
from agents.learner.controller import PolicyController
from agents.learner.network.seeds import EVALUATION_STREAM, stream_seeds
from agents.learner.trainer import Training
from agents.run.saved import load_agent, share_checkpoint
from agents.run.start import Run, faults_as_user_errors
from envs.task import EvaluationOptions, Report, Task
from rl_dist.checkpoint.content import CheckpointError
from rl_dist.checkpoint.store import load_checkpoint
from rl_dist.checkpoint.trust import check_named
from rl_dist.errors import UserError, explains_errors, message_and_code, one_line
from rl_dist.flags import Field, PathText, Text, configuration, parse_flags
from rl_dist.launch.ranks import launch
from rl_dist.process_group.collectives import all_gather_json, check_settings, parameter_hash
from rl_dist.process_group.world import World, open_world


@configuration
class EvaluateConfig:
    """Checkpoint to evaluate, days or episodes to evaluate on, and files to write."""

    which: Literal["auto", "best", "last"] = "auto"
    """Checkpoint to load from a run directory; auto: the last one for runs on real prices
    or if there is no best one, otherwise the best one."""
    open_test: bool = False
    """Evaluate on the test span of real prices; each such evaluation is recorded in
    RUN_DIR/test_looks.jsonl."""
    num_worlds: int = Field(50, ge=1, le=100_000)
    """Number of simulated markets to evaluate on."""
    market_seed: int = -1
    """Seed of the simulated markets; -1 uses the run's seed."""
    market_edge: float = -1.0
    """Size of the planted drift, in basis points a day; -1 uses the run's drift."""
    env: Text = ""
    """Environment of the run, as module:id; needed if another user owns its config.json."""
    core: Text = ""
    """Core of the run, as module:Class; needed if another user owns its config.json."""
    encoder: Text = ""
    """Encoder of the run, as module:Class; needed if another user owns its config.json."""
    episodes: int = Field(0, ge=0, le=10**7)
    """Number of episodes to evaluate, not used in trading; 0 uses the run's setting, or one episode
    with --video."""
    seed: int = -1
    """Seed for the evaluation episodes; -1 uses the run's seed."""
    num_gpus: int = Field(1, ge=1, le=1024)
    """Number of CPU processes that share the work."""
    data: PathText = ""
    """Price file of the run; needed only if its path has changed since training."""
    plot: PathText = ""
    """PNG file for the equity curves; by default, RUN_DIR/plots/evaluation.png."""
    video: PathText = ""
    """Folder for a GIF of the first episode; existing files are not overwritten; not available in
    trading."""
    json: PathText = ""
    """JSON file for all results."""


def evaluate(paths: list[str], options: EvaluateConfig, world: World) -> None:
    """Evaluate saved policies on all ranks; the main process prints the results."""
    load = partial(
        load_agent,
        which=options.which.replace("auto", ""),  # type: ignore[arg-type]
        core=options.core,
        encoder=options.encoder,
    )
    loaded = {"policy": load(paths[0])} | {path: load(path) for path in paths[1:]}
    agent = loaded["policy"]
    overrides = {
        "seed": options.seed,
        "market_seed": options.market_seed,
        "market_edge": options.market_edge,
        "eval_episodes": options.episodes
        or (1 if options.video else agent.config.task.eval_episodes or 100),
        "data": options.data,
    }
    config = agent.config.changed({n: v for n, v in overrides.items() if v not in (-1, "")})
    # Evaluation batches are no larger than training batches, so more threads would not help.
    torch.set_num_threads(min(config.launch.threads or 1, torch.get_num_threads()))
    say = print if world.is_main_process else lambda text: None
    say(f"{agent.path}, iteration {agent.iteration}")
    # Before the environment's module is imported, check that the user trusts it.
    saved = {"env": config.task.env, "env_kwargs": config.task.env_kwargs}
    check_named(agent.directory.path, "task", saved, options.env)
    with faults_as_user_errors(agent.directory, world):
        task = config.prepare_task(world.heartbeat, str(world.device))
        if options.data or not Path(config.data.data).exists():
            check_data(config, task)
        figures, text = run_tests(
            task,
            {name: PolicyController(a.policy, a.normalizer) for name, a in loaded.items()},
            EvaluationOptions(
                seeds=partial(stream_seeds, config.train.seed, EVALUATION_STREAM),
                counts=agent.counts,
                directory=agent.directory,
                picture=Path(options.plot) if options.plot else None,
                writes=world.is_main_process,
                open_test=options.open_test,
                num_worlds=options.num_worlds,
                video=Path(options.video) if options.video else None,
                sources={name: (a.directory, a.iteration) for name, a in loaded.items()},
            ),
            world,
        )
    say(text)
    if options.json and world.is_main_process:
        Path(options.json).write_text(json.dumps(figures, indent=2) + "\n")


def run_tests(
    task: Task, agents: dict[str, PolicyController], options: EvaluationOptions, world: World
) -> Report:
    """Run all trials of an evaluation on all ranks; return a summary and a text to print."""
    trials = task.tests(agents, options)
    results = {name: run_trial(trial, world) for name, trial in trials.items()}
    task.close()
    return task.report(results, options)


def run_rank(paths: list[str], options: EvaluateConfig) -> int:
    """Evaluate on this rank; return the exit code.

    Raises:
        UserError: an environment failed, or a file cannot be read or written.
    """
    world = open_world("cpu")
    check_settings({}, world)
    try:
        return until_stopped(partial(evaluate, paths, options, world), world)
    except OSError as error:
        message, code = message_and_code(error)
        raise UserError(message, exit_code=code) from error


def add_paths(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for the paths of the policies to evaluate."""
    parser.add_argument("path", metavar="RUN_DIR_OR_CHECKPOINT")
    text = "other policies to compare the first one with"
    parser.add_argument("--compare", nargs="+", default=[], metavar="RUN_DIR", help=text)


@explains_errors
def main() -> int:
    """Run the command; return the exit code."""
    parsed = parse_flags(
        {"evaluation": EvaluateConfig()},
        prog="python -m agents.evaluate RUN_DIR_OR_CHECKPOINT",
        description=__doc__ or "",
        extra=add_paths,
    )
    options = parsed.configs["evaluation"]
    paths = [parsed.extra.path, *parsed.extra.compare]
    return launch(run_rank, (paths, options), options.num_gpus)


# ---- the evaluation at the end of training


def evaluate_and_finish(run: Run, task: Task, training: Training) -> int:
    """Evaluate the trained policy, write the results, and return the exit code.

    A stop signal ends the evaluation immediately, because training is already saved.
    """
    config = run.config
    world = training.world

    def work() -> None:
        report: Report = ({}, "no final test: --eval_episodes is 0")
        if config.task.eval_episodes:
            agents = {"policy": PolicyController(training.policy, training.normalizers.obs)}
            if task.tests_best and (best := best_agent(run, training)):
                agents["best"] = best
            picture = run.directory.picture("equity")
            options = options_of(training, EVALUATION_STREAM, picture=picture, after_training=True)
            report = run_tests(task, agents, options, world)
        if world.is_main_process:
            finish(run, task, training, *report)

    world.set_phase("final evaluation")
    return until_stopped(work, world, run.path)


def best_agent(run: Run, training: Training) -> PolicyController | None:
    """Load best.pt; return None if there is none, or if it equals the final policy.

    Every rank must call this.
    """
    world = training.world
    path = run.directory.best
    usable = ""  # path of best.pt, if this rank can load it
    if path.exists():
        try:
            load_checkpoint(path, RunSchema)
            usable = str(path)
        except CheckpointError as error:
            print(f"best.pt is not evaluated: {error}", flush=True)
    if not share_checkpoint(run.directory, all_gather_json(usable, world), world):
        return None
    policy = run.config.policy
    best = load_agent(path, world.device, core=policy.core, encoder=policy.encoder)
    if best.iteration == training.iteration:
        return None
    return PolicyController(best.policy, best.normalizer)


def finish(run: Run, task: Task, training: Training, summary: dict, text: str) -> None:
    """Draw the learning curve, write summary.json, and print the result."""
    config = run.config
    directory = run.directory
    title = f"{config.task.env}, {config.policy.policy}, seed {config.train.seed}"
    try:
        # Imported late, because matplotlib takes 0.5 s to load.
        from agents.evaluate.pictures import plot_learning_curve

        plot_learning_curve(directory, title, task)
    except Exception as error:  # the result must be written even if the picture fails
        print(f"the learning curve cannot be drawn: {one_line(error)}", flush=True)

    summary = training.counters | {"parameter_sha256": parameter_hash(training.policy)} | summary
    if training.ppo.strategy.mode == "ddp":
        from rl_dist.speedup.model import audit, describe

        if scaling := audit(directory.records()):
            summary["scaling"] = scaling
            text += f"\n{describe(scaling)}"
    directory.write_summary(summary)
    print(f"\niteration {training.iteration}\n{text}\n")
    print(f"run directory: {directory.path} (plots/, metrics.jsonl, summary.json, checkpoints/)")
