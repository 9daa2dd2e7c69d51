"""List the metrics of a training run.

The reference page of the documentation is generated from this table. A test compares the table
with the metrics of real runs.
"""

import re
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
# Metrics by the kind of run that records them, one row each: mark, key, [unit], meaning. Mark "*":
# the metric is in the record and in each entry of `ranks`; "-": only in the entries of `ranks`.
ROWS = {
    "": """
 iteration number of this iteration (one rollout and one update), counted from 1
 global_step [steps] environment steps of all ranks so far
*episode/return mean return (sum of unscaled rewards) of ended episodes; null if none ended
 episode/length [steps] mean length of the episodes that ended; null if none ended
*episode/count [episodes] episodes that ended in this iteration
 episode/total [episodes] episodes that have ended since the start
 env/restarts [restarts] environments rebuilt since the last record, including during warm-up
 loss/policy clipped surrogate loss; losses are means over ranks and steps, null without steps
 loss/value half of the mean squared error of the critic, in units of scaled rewards
 loss/entropy [nats] entropy of the action distribution
 ppo/approx_kl [nats] estimated KL divergence from the policy that collected the rollout
 ppo/clip_fraction [share] share of steps whose probability ratio was clipped
 ppo/explained_variance [share] share of the returns' variance that the critic explains; 1 means all
 optim/grad_norm norm of the gradient, after the reduction over ranks and before clipping
 optim/learning_rate learning rate after scaling, warm-up and annealing
 optim/steps [steps] gradient steps taken
 optim/skipped_steps [steps] gradient steps skipped, because loss or gradient was not finite
*time/collect_s [s] time of the rollout; most times in the record are maxima over ranks
*time/update_s [s] time of the update: all epochs, with reductions and waiting
*time/update_own_s [s] time of the update without waiting for other ranks
*time/forward_s [s] time of the forward passes of the update
*time/backward_s [s] time of the backward passes without waiting for gradients of other ranks
*time/optimizer_s [s] time of gradient clipping and optimizer steps
*time/gradient_wait_s [s] time spent waiting for gradients of other ranks
*time/reduction_s [s] shortest wait for gradients in any step on any rank: time of one reduction
*time/step_spread_s [s] standard deviation of a rank's time per gradient step without waiting
*time/idle_share [share] share of the iteration that a rank spends waiting for others
 time/sync_s [s] time that rank 0 waits in collective calls other than gradient reductions
 time/sps [steps/s] environment steps of all ranks per second, excluding validation and checkpoints
 ranks list with one object per rank, ordered by rank
-rank number of the rank
""",
    FP16: """
 optim/loss_scale factor by which the loss is multiplied before the backward pass
""",
    CHOICES: """
 loss/entropy_max [nats] largest possible loss/entropy: all allowed actions equally likely
""",
    TRADING: """
 valid/sharpe mean Sharpe ratio on the validation span, annualised if the span has 60 days or more
 valid/equal_weight_sharpe mean Sharpe ratio of stocks bought on day 1 with equal weights and held
 valid/annual_return [share] mean return of the policy, annualised like valid/sharpe
 valid/exposure [share] mean share of the portfolio that is invested
""",
    OTHER_TASKS: """
 valid/return mean return of the evaluation episodes
 valid/return_std standard deviation of the returns of the evaluation episodes
 valid/return_min lowest return of an evaluation episode
 valid/length [steps] mean length of the evaluation episodes
 valid/episodes [episodes] number of evaluation episodes
 valid/episodes_cut [episodes] number of evaluation episodes cut off at the maximum length
 valid/env_restarts [restarts] environments rebuilt during the evaluation
 valid/total_steps [steps] environment steps of all evaluations so far
""",
    MONITORED: """
-cpu/percent [%] CPU use of the rank's process; 100 is one fully used core
-cpu/wait_percent [%] share of the main thread's busy time that it spent waiting for a core
-ram/used_gib [GiB] memory of the rank's process
-ram/free_gib [GiB] lowest free memory, within the container's limit
""",
    GPU: """
-gpu/utilization_percent [%] share of time in which the GPU was busy
-gpu/memory_allocated_gib [GiB] GPU memory of the rank's tensors
-gpu/memory_reserved_gib [GiB] GPU memory that torch's allocator holds
-gpu/memory_peak_gib [GiB] highest GPU memory of the rank's tensors so far
-gpu/memory_free_gib [GiB] lowest free GPU memory, counting the use of all processes
-gpu/temperature_c [°C] temperature of the GPU
-gpu/power_w [W] power that the GPU draws
""",
}


ROW = re.compile(r"^([ *-])(\S+) (?:\[(\S+)\] )?(.*)$", re.MULTILINE)
METRIC_TABLE = {
    key: Metric(meaning, unit, when, per_rank=mark in "*-", overall=mark != "-")
    for when, rows in ROWS.items()
    for mark, key, unit, meaning in ROW.findall(rows)
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
