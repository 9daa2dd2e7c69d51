"""List the metrics of a training run.

The reference page of the documentation is generated from this table. A test compares the table
with the metrics of real runs.
"""

from collections.abc import Sequence
from typing import NamedTuple

from rl_dist.errors import UserError, did_you_mean


class Metric(NamedTuple):
    """One key of a record in metrics.jsonl."""

    meaning: str
    unit: str
    when: str  # kind of run that writes this metric; "": every run
    per_rank: bool  # each entry of `ranks` has a value for its rank
    overall: bool  # the record has one value for all ranks


TRADING = "StockTrading-v0"
OTHER_TASKS = "other environments"
FP16 = "fp16"
CHOICES = "discrete actions"
MONITORED = "--monitor_every"
GPU = "GPU"
# A metric is in the record of an iteration, in each entry of its list `ranks`, or in both.
RECORD = "record"
RANKS = "ranks"
BOTH = "both"
# kind of run -> metrics that it records: name, unit, place (see above), meaning
ROWS = {
    "": (
        ("iteration", "", RECORD,
            "number of this iteration (one rollout and one update), counted from 1"),
        ("global_step", "steps", RECORD, "environment steps of all ranks so far"),
        ("episode/return", "", BOTH,
            "mean return (sum of unscaled rewards) of ended episodes; null if none ended"),
        ("episode/length", "steps", RECORD,
            "mean length of the episodes that ended; null if none ended"),
        ("episode/count", "episodes", BOTH, "episodes that ended in this iteration"),
        ("episode/total", "episodes", RECORD, "episodes that have ended since the start"),
        ("env/restarts", "restarts", RECORD,
            "environments rebuilt since the last record, including during warm-up"),
        ("loss/policy", "", RECORD,
            "clipped surrogate loss; losses are means over ranks and steps, null without steps"),
        ("loss/value", "", RECORD,
            "half of the mean squared error of the critic, in units of scaled rewards"),
        ("loss/entropy", "nats", RECORD, "entropy of the action distribution"),
        ("ppo/approx_kl", "nats", RECORD,
            "estimated KL divergence from the policy that collected the rollout"),
        ("ppo/clip_fraction", "share", RECORD,
            "share of steps whose probability ratio was clipped"),
        ("ppo/explained_variance", "share", RECORD,
            "share of the returns' variance that the critic explains; 1 means all"),
        ("optim/grad_norm", "", RECORD,
            "norm of the gradient, after the reduction over ranks and before clipping"),
        ("optim/learning_rate", "", RECORD, "learning rate after scaling, warm-up and annealing"),
        ("optim/steps", "steps", RECORD, "gradient steps taken"),
        ("optim/skipped_steps", "steps", RECORD,
            "gradient steps skipped, because loss or gradient was not finite"),
        ("time/collect_s", "s", BOTH,
            "time of the rollout; most times in the record are maxima over ranks"),
        ("time/update_s", "s", BOTH, "time of the update: all epochs, with reductions and waiting"),
        ("time/update_own_s", "s", BOTH, "time of the update without waiting for other ranks"),
        ("time/forward_s", "s", BOTH, "time of the forward passes of the update"),
        ("time/backward_s", "s", BOTH,
            "time of the backward passes without waiting for gradients of other ranks"),
        ("time/optimizer_s", "s", BOTH, "time of gradient clipping and optimizer steps"),
        ("time/gradient_wait_s", "s", BOTH, "time spent waiting for gradients of other ranks"),
        ("time/reduction_s", "s", BOTH,
            "shortest wait for gradients in any step on any rank: time of one reduction"),
        ("time/step_spread_s", "s", BOTH,
            "standard deviation of a rank's time per gradient step without waiting"),
        ("time/idle_share", "share", BOTH,
            "share of the iteration that a rank spends waiting for others"),
        ("time/sync_s", "s", RECORD,
            "time that rank 0 waits in collective calls other than gradient reductions"),
        ("time/sps", "steps/s", RECORD,
            "environment steps of all ranks per second, excluding validation and checkpoints"),
        ("ranks", "", RECORD, "list with one object per rank, ordered by rank"),
        ("rank", "", RANKS, "number of the rank"),
    ),
    FP16: (
        ("optim/loss_scale", "", RECORD,
            "factor by which the loss is multiplied before the backward pass"),
    ),
    CHOICES: (
        ("loss/entropy_max", "nats", RECORD,
            "largest possible loss/entropy: all allowed actions equally likely"),
    ),
    TRADING: (
        ("valid/sharpe", "", RECORD,
            "mean Sharpe ratio on the validation span, annualised if the span has 60 days or more"),
        ("valid/equal_weight_sharpe", "", RECORD,
            "mean Sharpe ratio of stocks bought on day 1 with equal weights and held"),
        ("valid/annual_return", "share", RECORD,
            "mean return of the policy, annualised like valid/sharpe"),
        ("valid/exposure", "share", RECORD, "mean share of the portfolio that is invested"),
    ),
    OTHER_TASKS: (
        ("valid/return", "", RECORD, "mean return of the evaluation episodes"),
        ("valid/return_std", "", RECORD,
            "standard deviation of the returns of the evaluation episodes"),
        ("valid/return_min", "", RECORD, "lowest return of an evaluation episode"),
        ("valid/length", "steps", RECORD, "mean length of the evaluation episodes"),
        ("valid/episodes", "episodes", RECORD, "number of evaluation episodes"),
        ("valid/episodes_cut", "episodes", RECORD,
            "number of evaluation episodes cut off at the maximum length"),
        ("valid/env_restarts", "restarts", RECORD, "environments rebuilt during the evaluation"),
        ("valid/total_steps", "steps", RECORD, "environment steps of all evaluations so far"),
    ),
    MONITORED: (
        ("cpu/percent", "%", RANKS, "CPU use of the rank's process; 100 is one fully used core"),
        ("cpu/wait_percent", "%", RANKS,
            "share of the main thread's busy time that it spent waiting for a core"),
        ("ram/used_gib", "GiB", RANKS, "memory of the rank's process"),
        ("ram/free_gib", "GiB", RANKS, "lowest free memory, within the container's limit"),
    ),
    GPU: (
        ("gpu/utilization_percent", "%", RANKS, "share of time in which the GPU was busy"),
        ("gpu/memory_allocated_gib", "GiB", RANKS, "GPU memory of the rank's tensors"),
        ("gpu/memory_reserved_gib", "GiB", RANKS, "GPU memory that torch's allocator holds"),
        ("gpu/memory_peak_gib", "GiB", RANKS, "highest GPU memory of the rank's tensors so far"),
        ("gpu/memory_free_gib", "GiB", RANKS,
            "lowest free GPU memory, counting the use of all processes"),
        ("gpu/temperature_c", "°C", RANKS, "temperature of the GPU"),
        ("gpu/power_w", "W", RANKS, "power that the GPU draws"),
    ),
}  # fmt: skip
METRIC_TABLE = {
    name: Metric(meaning, unit, when, per_rank=place != RECORD, overall=place != RANKS)
    for when, rows in ROWS.items()
    for name, unit, place, meaning in rows
}


def check_metric(flag: str, name: str, validated: Sequence[str], precision: str) -> None:
    """Refuse a metric that this run will not record.

    Names that start with env/ are accepted: environments define these metrics during training.

    Args:
        validated: names of the metrics of the task's validation.
    """
    others = {TRADING, OTHER_TASKS, FP16} - {precision}
    known = [key for key, row in METRIC_TABLE.items() if row.overall and row.when not in others]
    known.remove("ranks")
    known += [f"valid/{metric}" for metric in validated]
    if name not in known and not name.startswith("env/"):
        fix = did_you_mean(name, known) or "docs/reference.md lists all"
        raise UserError(f"{flag} {name} is not a metric of this run: {fix}")
