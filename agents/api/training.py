"""Train from Python, with one seed or several, as train_distributed.py does."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agents.api.policy import LoadedPolicy, load_policy
from agents.evaluate.episodes import Interval, mean_interval
from agents.rank import run_rank
from agents.run.callbacks import Callback
from agents.run.choice import RUNS, parse_training
from agents.run.start import start
from rl_dist.errors import UserError, explains_errors, reported
from rl_dist.files import write_whole
from rl_dist.flags import ParsedFlags
from rl_dist.launch.child import as_flags
from rl_dist.process_group.process_ends import SCRIPT_RAN_AGAIN
from rl_dist.run_dir import RunDir
from rl_dist.telemetry.metrics import close_logging


@dataclass(frozen=True, kw_only=True)
class TrainedRun:
    """A run whose training is finished or stopped."""

    run_dir: Path
    exit_code: int  # 0, or 128 + the signal that stopped it after saving

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Return the metrics of every iteration, as in metrics.jsonl."""
        return RunDir(self.run_dir).records()

    @property
    def test(self) -> dict[str, Any]:
        """Return the results of the final evaluation; empty if the run was stopped.

        They are also empty for real prices, because the test span stays closed. summary.json has
        the results on the spans "train" and "valid".
        """
        return RunDir(self.run_dir).summary().get("test", {})

    @property
    def policy(self) -> LoadedPolicy:
        """Load the policy from the run directory, see `load_policy`."""
        return load_policy(self.run_dir)


def train(
    env: str | None = None,
    *,
    num_ranks: int | None = None,
    on_iteration: Callback | None = None,
    on_evaluation: Callback | None = None,
    on_checkpoint: Callback | None = None,
    **settings: Any,
) -> TrainedRun:
    """Train as train_distributed.py does when given the same flags.

        >>> from agents import train
        >>> run = train(env="CartPole-v1", total_steps=20_000)
        >>> run.test["return"], run.metrics[-1]["loss/entropy"]
        >>> action, state = run.policy.predict(observation)

    A single rank trains in this process. Several ranks run in new processes, which import the main
    module again: put the call below `if __name__ == "__main__":`, and define callbacks in a module.

    Args:
        env: Gymnasium id, or module:id.
        num_ranks: number of training processes, the same as num_gpus.
        on_iteration, on_evaluation, on_checkpoint: called by every rank with a `Moment`. If a
            callback returns False, all ranks stop after this iteration.
        settings: flags by name: True and False become true and false, None is skipped, and a
            mapping becomes JSON.

    Raises:
        UserError: the settings are wrong, or training failed. The reason is also printed.
    """
    # A new rank reaches this line if it imports a script that has no such guard.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise SystemExit(SCRIPT_RAN_AGAIN)
    callbacks = {
        "iteration": on_iteration,
        "evaluation": on_evaluation,
        "checkpoint": on_checkpoint,
    }
    flags = {"env": env, "num_gpus": num_ranks} | settings
    for name, value in flags.items():
        if isinstance(value, list | tuple):  # stop_at=("valid/return", 475)
            flags[name] = " ".join(map(str, value))
    reported.clear()  # it may hold the error of an earlier call
    try:
        parsed = parse_training(as_flags(flags))
        code = explains_errors(start)(parsed, run_rank, callbacks)
    except SystemExit as leaving:  # the parser has already printed the reason
        raise leaving.__cause__ or UserError("the settings do not fit") from None
    finally:
        close_logging()
    if 0 < code < 128:
        # Under torchrun, this rank may have no error to report: another rank prints it.
        raise UserError(reported.get("error", "the lines above say why"), exit_code=code)
    return TrainedRun(run_dir=Path(reported["run_dir"]).absolute(), exit_code=code)


# ---- several seeds


@dataclass(frozen=True)
class SeedsResult:
    """The scores of several runs that differ only in their seeds."""

    run_dir: str  # its folder seed_N holds the run with seed N
    metric: str  # name of the score
    scores: dict[int, float]  # result of the final evaluation, by seed
    interval: Interval  # mean score, and lower and upper end of its 95 % interval


def train_seeds(seeds: Sequence[int], run_dir: str | Path = "", **settings: Any) -> SeedsResult:
    """Train once with each seed, one after the other, and report all scores.

        >>> from agents import train_seeds
        >>> print(train_seeds([1, 2, 3], env="CartPole-v1", total_steps=20_000))

    Runs that already exist in `run_dir` are resumed; finished runs are only evaluated again. Their
    settings must not change, except those that a resumed run may change.

    Args:
        run_dir: directory that holds all these runs; "": a new one below runs/.
        settings: flags by name, see `agents.train`.

    Raises:
        UserError: a run failed or was stopped; finished runs are kept.
    """
    if len(set(seeds)) < max(len(seeds), 2):
        raise UserError(f"seeds must be two or more different numbers, got {list(seeds)}")
    folder = Path(run_dir) if run_dir else RunDir.fresh(RUNS).path
    scores: dict[int, float] = {}
    for seed in seeds:
        path = folder / f"seed_{seed}"
        print(f"seed {seed}: {path}", flush=True)
        resume = "auto" if path.exists() else None
        run = train(**settings, seed=seed, run_dir=path, resume=resume)
        if run.exit_code:
            raise UserError(f"seed {seed} was stopped", exit_code=run.exit_code)
        metric, scores[seed] = score_of(RunDir(path).summary())
    result = SeedsResult(str(folder), metric, scores, mean_interval([*scores.values()]))
    write_whole(folder / "seeds.json", json.dumps(asdict(result), indent=2) + "\n")
    return result


def train_several(parsed: ParsedFlags) -> int:
    """Train once with each seed of --seeds; return the exit code."""
    given: dict[str, Any] = dict(parsed.given)
    seeds = given.pop("seeds")
    if "RANK" in os.environ or given.keys() & {"seed", "resume"}:
        raise UserError("--seeds starts new runs: use neither --seed, --resume nor torchrun")
    if not seeds.replace(" ", "").isdecimal():
        raise UserError(f"seeds must be whole numbers, got {seeds!r}")
    result = train_seeds([*map(int, seeds.split())], **given)
    mean, low, high = result.interval
    print(
        f"{result.metric} by seed: {result.scores}\n"
        f"  mean {mean:.4g}, 95 % interval [{low:.4g}, {high:.4g}]"
    )
    return 0


def score_of(summary: Mapping[str, Any]) -> tuple[str, float]:
    """Return the name and the value of the score in a finished run's summary."""
    span = next(name for name in ("test", "valid", "train") if name in summary)
    if "policies" in summary[span]:
        return f"Sharpe ratio on the {span} span", summary[span]["policies"]["policy"]["sharpe"]
    return "mean return without noise", summary[span]["return"]
