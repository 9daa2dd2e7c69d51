"""Estimate the speedup of training on more GPUs."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.benchmark import Timer

from rl_dist.checkpoint.trust import check_named
from rl_dist.errors import UserError, table
from rl_dist.run_dir import RunDir
from rl_dist.speedup.measure import MeasuredJob
from rl_dist.speedup.model import CARDS, Card, Prediction, bottleneck, predict, steps_per_episode

COLUMNS = {  # heading: (name of the value in a row, format)
    "ranks": ("gpus", "{}"),
    "scaling": ("scaling", "{}"),
    "theoretical": ("gpus", "{}x"),
    "predicted": ("speedup", "{:.2f}x"),
    "95 %": ("speedup_interval", "{0[0]:.2f}-{0[1]:.2f}"),
    "efficiency": ("efficiency", "{:.0%}"),
    "lost most in": ("bottleneck", "{}"),
    "source": ("source", "{}"),
    "steps/s": ("steps_per_s", "{:,.0f}"),
    "hours": ("hours", "{:.3g}"),
    "cost": ("cost", "{:,.2f}"),
}
EPISODES = 5000  # default length of a training run
CARD_ESTIMATE = (
    "an estimate from data sheets and the lowest list price of 2026-11 in US dollars: rollouts as "
    "measured here, the rest scaled by peak fp32 rates, 8 cards in a machine, InfiniBand NDR "
    "between machines"
)


@dataclass(frozen=True)
class SpeedupReport:
    """All predictions of one call, as JSON values; None marks an unknown value."""

    title: str  # names the job, the machine and the date
    rows: list[dict[str, Any]]
    notes: list[str]


def estimate_training_speedup(
    flags: Sequence[str] = (),
    *,
    run_dir: str | Path = "",
    gpus: Sequence[int] = (1, 2),
    scaling: str = "both",
    gpu: str = "",
    sps: float = 0.0,
    num_episodes: int = 0,
    total_steps: int = 0,
    price_per_hour: float = 0.0,
    device: str = "auto",
) -> SpeedupReport:
    """Measure short runs and predict the training speed on each number of GPUs.

        report = estimate_training_speedup(["--env", "CartPole-v1"], gpus=[1, 2])
        report.rows[-1]["speedup"]

    Args:
        flags: flags of train_distributed.py; they override the flags from `run_dir`.
        run_dir: directory of an earlier run whose job is estimated.
        gpus: numbers of GPUs (ranks).
        scaling: strong (batch sizes etc. are totals), weak (they are per rank) or both.
        gpu: name of a GPU model to estimate for, instead of this machine.
        sps: steps/s of one rank, from a run here or on `gpu`; 0: measure them here.
        num_episodes: length of the training run; 0: the length of `run_dir`, else 5000.
        total_steps: length of the training run in environment steps, not episodes.
        price_per_hour: price of one GPU hour; 0: the lowest list price of `gpu` in US dollars.
        device: device of the short runs: auto, cpu or cuda.

    Raises:
        UserError: wrong arguments, or flags that training refuses.
        ChildError: a short run failed, or its rate kept changing.
    """
    # check the arguments and measure the job
    if min(gpus, default=0) < 1:
        raise UserError(f"--gpus must be numbers from 1, got {list(gpus)}")
    lengths = {"num_episodes": num_episodes, "total_steps": total_steps}
    for name, value in {**lengths, "sps": sps, "price_per_hour": price_per_hour}.items():
        if not 0 <= value < math.inf:
            raise UserError(f"--{name} must be a number from 0, got {value}")
    if gpu and gpu not in CARDS:
        raise UserError(f"--gpu {gpu!r} is not known; choose from {', '.join(CARDS)}")
    card = CARDS.get(gpu)
    if card and not price_per_hour:
        price_per_hour = card.usd_per_hour
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    saved = _job_of(RunDir(run_dir), flags) if run_dir else {}
    job_flags = [*(f"--{name}={value}" for name, value in saved.items()), *flags]
    if not num_episodes and not total_steps:
        num_episodes = int(saved.get("num_episodes", EPISODES))
        total_steps = int(saved.get("total_steps", 0))
    job = MeasuredJob(job_flags, device, gpus, rate_is_known=bool(sps))
    env_steps = total_steps or num_episodes * steps_per_episode(job.records)

    # make the report
    scalings = ("strong", "weak") if scaling == "both" else (scaling,)
    rows = _rows(job, scalings, card, sps, env_steps, price_per_hour)
    if card:
        job.notes.append(f"{gpu}: {CARD_ESTIMATE}")
    if card and not sps:
        job.notes.append(f"no time or cost: give --sps N, the steps/s of a run on one {gpu}")
    if math.isnan(env_steps):
        job.notes.append("no time or cost: no episode ended in the short runs; give --total_steps")
    title = f"{job.title}; {gpu or job.hardware}, {time.strftime('%Y-%m-%d')}"
    return SpeedupReport(title, rows, job.notes)


def _job_of(run: RunDir, flags: Sequence[str]) -> dict[str, str]:
    """Return the flags of a saved run by name.

    Raise UserError if the run names Python modules that the user did not name as well.
    """
    saved = run.flags()
    if not {"env", "core", "num_episodes", "total_steps"} <= saved.keys():
        raise UserError(f"{run.config_path} names no env, core and length: give flags instead")
    for section, name in (("task", "env"), ("policy", "core")):
        settings = {key: saved[key] for key in (name, f"{name}_kwargs") if key in saved}
        is_given = any(flag.split("=")[0] == f"--{name}" for flag in flags)
        check_named(run.path, section, settings, saved[name] if is_given else None)
    return saved


def print_training_speedup_estimates(flags: Sequence[str] = (), **options: Any) -> None:
    """Print the result of `estimate_training_speedup`, with the same arguments.

    print_training_speedup_estimates(["--env", "CartPole-v1"], gpus=[1, 2])
    """
    print(as_text(estimate_training_speedup(flags, **options)))


# ---- the rows of the report


def _rows(
    job: MeasuredJob,
    scalings: Sequence[str],
    card: Card | None,
    sps: float,
    env_steps: float,
    usd_per_hour: float,
) -> list[dict[str, Any]]:
    """Return a row for each number of ranks, on this machine or on other cards.

    Args:
        card: GPU model to estimate for; None: this machine.
        sps: steps/s of one rank; 0: as measured.
        env_steps: length of the training run in environment steps; NaN: unknown.
    """
    rows = []
    baseline: Prediction | None = None  # the first prediction, which is for one rank
    slower = 1.0  # time per step at the rate `sps`, divided by the measured time
    network = card.network if card else job.network()
    # time on the card divided by the time on one CPU thread or GPU of this machine
    ratio = _fp32_tflops(job.device_type) / card.fp32_tflops if card else 1.0
    for share in job.shares(scalings):
        work = share.work.scaled(1.0, share.processors * ratio) if card else share.work
        crowding = 1.0 if card else share.crowding  # ranks on other cards share no cores
        if sps and not baseline:
            slower = work.env_steps / sps / work.seconds
        work = work.scaled(crowding * slower, crowding * slower)
        talk_s = network.iteration_s(work.gradient_steps, job.gradient_bytes, share.ranks)
        prediction = predict(work, share.ranks, talk_s * crowding)
        baseline = baseline or prediction
        row = {"scaling": share.scaling, "source": "estimate" if card else share.source}
        # NaN means that the rate is unknown, which makes time and cost NaN as well
        rate = prediction.steps_per_s if sps or not card else math.nan
        times = {"steps_per_s": rate, "iteration_s": prediction.env_steps / rate}
        times["hours"] = hours = env_steps / rate / 3600
        times["cost"] = hours * share.ranks * usd_per_hour or math.nan
        known = {name: None if math.isnan(value) else value for name, value in times.items()}
        rows.append(row | _speedup(prediction, baseline) | known)
    return rows


def _fp32_tflops(device_type: str) -> float:
    """Measure the fp32 TFLOP/s of one CPU thread, or of the GPU."""
    matrix = torch.randn(768, 768, device=device_type)
    timer = Timer("matrix @ matrix", globals={"matrix": matrix}, num_threads=1)
    return 2 * 768**3 / timer.timeit(8).median / 1e12


def _speedup(prediction: Prediction, baseline: Prediction) -> dict[str, Any]:
    speedup = prediction.steps_per_s / baseline.steps_per_s
    where, fix = bottleneck(baseline, prediction)
    error = math.hypot(baseline.relative_error, prediction.relative_error)
    margin = min(0.9, 1.96 * error) if prediction.ranks > 1 else 0.0
    return {
        "gpus": prediction.ranks,
        "speedup": speedup,
        "speedup_interval": [speedup * (1 - margin), speedup * (1 + margin)],
        "efficiency": speedup / prediction.ranks,
        "bottleneck": where,
        "fix": fix,
        "shares": {name: s / prediction.iteration_s for name, s in prediction.parts_s.items()},
    }


def as_text(report: SpeedupReport) -> str:
    """Format a report as title, table, fixes and notes; omit columns without values."""
    # With one rank, strong and weak scaling are the same job: show it once.
    first = report.rows[0]["scaling"]
    rows = [row for row in report.rows if row["gpus"] > 1 or row["scaling"] == first]
    columns = {
        heading: [form.format(row[name]) for row in rows]
        for heading, (name, form) in COLUMNS.items()
        if rows[0][name] is not None
    }
    fixes = dict.fromkeys(row["fix"] for row in rows if row["fix"])
    notes = [f"to lose less: {'; '.join(fixes)}"] if fixes else []
    notes += [f"note: {note}" for note in report.notes]
    cells = zip(*columns.values(), strict=True)
    return "\n".join([report.title, "", table([*columns], cells), "", *notes])
