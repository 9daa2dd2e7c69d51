"""The same training with several seeds, and what can be said of all of them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from agents.run.choice import RUNS
from rl_dist.errors import UserError
from rl_dist.files import write_whole
from rl_dist.flags import ParsedFlags
from rl_dist.launch.child import as_flags, launch_distributed_training
from rl_dist.run_dir import RunDir

SEEDS_FILE = "seeds.json"
RESAMPLES = 2000  # of the bootstrap
Interval = tuple[float, float, float]  # a value, and the ends of its 95 % interval


@dataclass(frozen=True)
class SeedsResult:
    """The scores of several trainings that differ by their seed."""

    run_dir: Path  # of all: seed_N below it is one run
    metric: str
    scores: dict[int, float]  # by seed, of the evaluation that ended each run
    intervals: dict[str, Interval]  # of "mean" and "interquartile_mean"

    def __str__(self) -> str:
        runs = ", ".join(f"{score:.4g}" for score in self.scores.values())
        seeds = ", ".join(map(str, self.scores))
        lines = [f"{self.metric} of seeds {seeds}: {runs}"]
        for name, (value, low, high) in self.intervals.items():
            words = name.replace("_", " ")
            # of three runs the bootstrap draws the lowest alone in 1 of 27 samples: more than 2.5 %
            kind = "95 % interval" if len(self.scores) > 3 else "lowest and highest"
            lines.append(f"  {words:<20}{value:>10.4g}   {kind} [{low:.4g}, {high:.4g}]")
        return "\n".join(lines)


def train_seeds(
    seeds: Sequence[int], run_dir: str | Path = "", flags: Sequence[str] = (), **settings: Any
) -> SeedsResult:
    """Train once with each seed, one after the other, and report all of them.

        >>> from agents import train_seeds
        >>> print(train_seeds([1, 2, 3], env="CartPole-v1", total_steps=20_000))

    Each is a training in processes of its own. Runs that are in `run_dir` already go on, those
    that have finished are evaluated again; other settings than theirs are refused.

    Args:
        run_dir: of all runs; "": a new one below runs/.
        flags: words of the command line, for all.
        settings: flags by name, see `agents.train`.

    Raises:
        UserError: a training failed; the others that have ended are kept.
    """
    if len(set(seeds)) < len(seeds) or len(seeds) < 2:
        raise UserError(f"seeds must be two or more different numbers, got {list(seeds)}")
    folder = Path(run_dir) if run_dir else RunDir.fresh(RUNS).path
    words = [*flags, *as_flags(settings)]
    scores: dict[int, float] = {}
    metric = ""
    for seed in seeds:
        own = folder / f"seed_{seed}"
        # also one that has finished: other settings are refused, and a longer one trains on
        print(f"seed {seed}: {own}", flush=True)
        run = [*words, f"--seed={seed}", f"--run_dir={own}"]
        run += ["--resume=auto"] if own.exists() else []
        done = launch_distributed_training(run)
        if done.exit_code:
            why = done.error or f"code {done.exit_code}"
            raise UserError(f"seed {seed} did not finish: {why}", exit_code=done.exit_code)
        metric, scores[seed] = score_of(RunDir(own).summary())
    intervals = score_intervals(np.array(list(scores.values())))
    result = SeedsResult(folder, metric, scores, intervals)
    found = asdict(result) | {"run_dir": str(folder)}
    write_whole(folder / SEEDS_FILE, json.dumps(found, indent=2) + "\n")
    return result


def interquartile_mean(scores: np.ndarray) -> np.ndarray:
    """Return the mean of the middle half; the scores at its ends count in part."""
    count = scores.shape[-1]
    ends = np.clip(np.arange(count + 1), count / 4, 3 * count / 4)  # of each score's share
    return (np.sort(scores) * np.diff(ends)).sum(-1) / (count / 2)


def score_intervals(scores: np.ndarray) -> dict[str, Interval]:
    """Return means of the scores of several runs [R], with bootstrap intervals.

    Source: Agarwal et al., "Deep reinforcement learning at the edge of the statistical precipice",
    NeurIPS 2021, https://arxiv.org/abs/2108.13264 (their library: rliable).
    """
    draws = np.random.default_rng(0).choice(scores, (RESAMPLES, len(scores)))
    intervals = {}
    for name, figure in (("mean", np.mean), ("interquartile_mean", interquartile_mean)):
        low, high = np.quantile([figure(draw) for draw in draws], [0.025, 0.975])
        intervals[name] = (float(figure(scores)), float(low), float(high))
    return intervals


def train_several(parsed: ParsedFlags) -> int:
    """Do what --seeds asks for; return the exit code."""
    extra = vars(parsed.extra)
    if "RANK" in os.environ:
        raise UserError("--seeds starts trainings of its own: run it without torchrun")
    if "seed" in parsed.given or extra["resume"]:
        raise UserError("--seeds begins runs of its own: leave --seed and --resume out")
    words = [f"--{name}={value}" for name, value in parsed.given.items()]
    words += [f"--preset={extra['preset']}"] * bool(extra["preset"]) + ["--quick"] * extra["quick"]
    print(train_seeds(extra["seeds"], extra["run_dir"], words))
    return 0


def score_of(summary: Mapping[str, Any]) -> tuple[str, float]:
    """Return the name and value of the figure that stands for a finished run."""
    span = next(name for name in ("test", "valid", "train") if name in summary)
    if "policies" in summary[span]:
        sharpe = summary[span]["policies"]["policy"]["sharpe"]
        return f"Sharpe ratio on the {span} span", float(sharpe)
    return "mean return without noise", float(summary[span]["return"])
