"""Train with several seeds, and report the mean of their scores."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agents.api.training import train
from agents.evaluate.markets import Interval, mean_interval
from agents.run.choice import RUNS
from rl_dist.errors import UserError
from rl_dist.files import write_whole
from rl_dist.flags import ParsedFlags
from rl_dist.run_dir import RunDir


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
