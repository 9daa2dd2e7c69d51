"""Estimate the speedup of training on more GPUs: the functions for Python."""

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
from rl_dist.launch.child import without
from rl_dist.machine import duration
from rl_dist.run_dir import RunDir
from rl_dist.speedup.measure import Measurements, measure
from rl_dist.speedup.model import (
    CARDS,
    CARDS_PER_MACHINE,
    PRICES_OF,
    UPDATE,
    Card,
    Network,
    Prediction,
    bottleneck,
    predict,
)

COLUMNS = ("ranks", "scaling", "theoretical", "predicted (95 %)", "efficiency", "lost most in",
           "source", "steps/s", "time", "cost")  # fmt: skip
EPISODES = 5000  # default length of a training


@dataclass(frozen=True)
class SpeedupReport:
    """All predictions of one call, as JSON values; unknown ones are None."""

    title: str  # job, machine, date
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
    """Measure short runs and predict training on each number of GPUs.

        report = estimate_training_speedup(["--env", "CartPole-v1"], gpus=[1, 2])
        report.rows[-1]["speedup"]

    Args:
        flags: of train_distributed.py, on top of those of `run_dir` if there is one.
        run_dir: directory of a run that has the job to estimate.
        gpus: numbers of GPUs (ranks).
        scaling: strong (the job's sizes are totals), weak (they are per rank) or both.
        gpu: name of a card to estimate instead of this machine.
        sps: steps/s of one rank, from a run here or on `gpu`; 0: as measured here.
        num_episodes: length of the training; 0: the run's, or 5000.
        total_steps: environment steps instead of episodes.
        price_per_hour: of one GPU; 0: the lowest list price of `gpu` in US dollars.
        device: auto, cpu or cuda.

    Raises:
        UserError: impossible arguments, in one line.
        ChildError: a short run failed, or its rate kept changing.
    """
    if min(gpus, default=0) < 1:
        raise UserError(f"--gpus must be numbers from 1, got {list(gpus)}")
    if gpu and gpu not in CARDS:
        raise UserError(f"--gpu {gpu!r} is not known; choose from {', '.join(CARDS)}")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no CUDA GPU on this machine; use --device cpu")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    job = list(flags)
    if run_dir:
        saved = _job_of(RunDir(run_dir), flags)
        job = [*(f"--{name}={value}" for name, value in saved.items()), *flags]
        if not num_episodes and not total_steps:
            num_episodes, total_steps = int(saved["num_episodes"]), int(saved["total_steps"])
    scalings = ("strong", "weak") if scaling == "both" else (scaling,)
    measured = measure(job, gpus, scalings, device, rate_is_known=bool(sps))
    env_steps = total_steps or (num_episodes or EPISODES) * measured.steps_per_episode
    return report_of(measured, gpu, sps=sps, env_steps=env_steps, price_per_hour=price_per_hour)


def _has(flags: Sequence[str], name: str) -> bool:
    return without(flags, [name]) != list(flags)


def _job_of(run: RunDir, flags: Sequence[str]) -> dict[str, str]:
    """Return the flags of a run by name, if the user trusts the modules that they name."""
    saved = run.flags()
    if not {"env", "core", "num_episodes", "total_steps"} <= saved.keys():
        raise UserError(f"{run.config_path} names no env, core and length: give flags instead")
    for section, name in (("task", "env"), ("policy", "core")):
        own = {name: saved[name]} | {k: v for k, v in saved.items() if k == f"{name}_kwargs"}
        check_named(run.path, section, own, saved[name] if _has(flags, name) else None)
    return saved


def print_training_speedup_estimates(flags: Sequence[str] = (), **options: Any) -> None:
    """Print the table of `estimate_training_speedup`, which takes the same arguments.

    print_training_speedup_estimates(["--env", "CartPole-v1"], gpus=[1, 2])
    """
    print(as_text(estimate_training_speedup(flags, **options)))


# ---- the report


def report_of(
    measured: Measurements,
    gpu: str = "",
    *,
    sps: float = 0.0,
    env_steps: float = math.nan,
    price_per_hour: float = 0.0,
) -> SpeedupReport:
    """Return rows for this machine, or for a card; see `estimate_training_speedup`.

    Args:
        env_steps: length of the training; NaN: unknown.
    """
    card, notes = CARDS.get(gpu), list(measured.notes)
    predictions = _predict(measured, card, sps)
    one = predictions[0]
    if card and not price_per_hour:
        price_per_hour = card.usd_per_hour
    is_known = bool(sps) or (measured.is_steady and not card)
    rows = []
    for point, prediction in zip(measured.points, predictions, strict=True):
        source = "measured" if point.is_measured else "modelled"
        row = {"scaling": point.scaling, "source": "estimate" if card else source}
        row |= _speedup(prediction, one)
        rows.append(row | _time(prediction if is_known else None, env_steps, price_per_hour))
    machine = gpu or measured.hardware
    if card:
        notes.append(
            f"{gpu}: an estimate by data sheet and the lowest list price of {PRICES_OF} in US "
            "dollars: rollouts as measured here, the rest scaled by peak fp32 rates, "
            f"{CARDS_PER_MACHINE} cards to a machine, InfiniBand NDR between machines"
        )
    if not is_known:
        notes.append(f"no time or cost: give --sps N, the steps/s of a run on one {machine}")
    if math.isnan(env_steps):
        notes.append("no time or cost: no episode ended in the short runs; give --total_steps")
    title = f"{measured.job}; {machine}, {time.strftime('%Y-%m-%d')}"
    return SpeedupReport(title, rows, notes)


def _predict(measured: Measurements, card: Card | None, sps: float) -> list[Prediction]:
    """Predict all points here or on cards, at a rate of one rank unless it is 0."""
    network = Network(measured.link, measured.ranks_per_machine)
    if card:
        network = Network(card.link, CARDS_PER_MACHINE)
    thread_tflops = _fp32_tflops(measured.device_type) if card else 0.0
    predictions: list[Prediction] = []
    slower = 1.0
    for point in measured.points:
        work, crowding = point.work, point.crowding
        if card:  # its ranks share no cores
            threads = point.threads if measured.device_type == "cpu" else 1
            work, crowding = work.times(thread_tflops * threads / card.fp32_tflops, UPDATE), 1.0
        if sps and not predictions:
            slower = work.env_steps / sps / work.seconds
        talk_s = network.iteration_s(work.gradient_steps, measured.gradient_bytes, point.ranks)
        work = work.times(crowding * slower)
        predictions.append(predict(work, point.ranks, talk_s * crowding))
    return predictions


def _fp32_tflops(device_type: str) -> float:
    """Return the measured fp32 rate of one thread, or of the GPU."""
    matrix = torch.randn(768, 768, device=device_type)
    timer = Timer("matrix @ matrix", globals={"matrix": matrix}, num_threads=1)
    return 2 * 768**3 / timer.timeit(8).median / 1e12


def _speedup(prediction: Prediction, one: Prediction) -> dict[str, Any]:
    speedup = prediction.steps_per_s / one.steps_per_s
    where, fix, margin = "", "", 0.0
    if prediction.ranks > 1:
        where, fix = bottleneck(one, prediction)
        margin = min(0.9, 1.96 * math.hypot(one.relative_error, prediction.relative_error))
    return {
        "gpus": prediction.ranks,
        "speedup": speedup,
        "speedup_interval": [speedup * (1 - margin), speedup * (1 + margin)],
        "efficiency": speedup / prediction.ranks,
        "bottleneck": where,
        "fix": fix,
        "shares": {name: s / prediction.iteration_s for name, s in prediction.parts_s.items()},
    }


def _time(prediction: Prediction | None, env_steps: float, price_per_hour: float) -> dict[str, Any]:
    """Return rate, time and cost of a training; None: unknown."""
    times: dict[str, Any] = dict.fromkeys(("steps_per_s", "iteration_s", "hours", "cost"))
    if prediction:
        times |= {"steps_per_s": prediction.steps_per_s, "iteration_s": prediction.iteration_s}
        if not math.isnan(env_steps):
            times["hours"] = hours = env_steps / prediction.steps_per_s / 3600
            times["cost"] = hours * prediction.ranks * price_per_hour or None
    return times


def as_text(report: SpeedupReport) -> str:
    """Return title, table, fixes and notes: at most 25 lines for 4 numbers of GPUs."""
    # One rank is the same job for both ways of scaling.
    first = report.rows[0]["scaling"]
    rows = [row for row in report.rows if row["gpus"] > 1 or row["scaling"] == first]
    fixes = dict.fromkeys(row["fix"] for row in rows if row["fix"])
    notes = [f"to lose less: {'; '.join(fixes)}"] if fixes else []
    notes += [f"note: {note}" for note in report.notes]
    return "\n".join([report.title, "", table(COLUMNS, map(_cells, rows)), "", *notes])


def _cells(row: dict[str, Any]) -> Sequence[str]:
    return (
        str(row["gpus"]),
        row["scaling"] if row["gpus"] > 1 else "-",
        f"{row['gpus']}x",
        "{:.2f}x ({:.2f}-{:.2f})".format(row["speedup"], *row["speedup_interval"]),
        f"{row['efficiency']:.0%}",
        row["bottleneck"] or "-",
        row["source"],
        f"{row['steps_per_s']:,.0f}" if row["steps_per_s"] else "-",
        duration(row["hours"] * 3600) if row["hours"] else "-",
        f"{row['cost']:,.2f}" if row["cost"] else "-",
    )
