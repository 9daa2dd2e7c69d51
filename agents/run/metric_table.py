"""The metrics of a training run, each with its unit and meaning.

The reference page of docs/ is made from this table, and `tests/test_metric_table.py` compares it
with what runs write. To add a metric, return it where it is computed and add its row here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """One key of a record in metrics.jsonl."""

    meaning: str
    unit: str = ""
    when: str = ""  # runs that write it; "" is every run
    per_rank: bool = False  # every entry of `ranks` holds this rank's own value
    overall: bool = True  # the record itself holds a value of all ranks


TRADING, OTHER_TASKS, FP16, MONITORED, GPU = (
    "StockTrading-v0",
    "other environments",
    "fp16",
    "--monitor_every",
    "GPU",
)

METRICS: dict[str, Metric] = {
    "iteration": Metric("number of this iteration, from 1: one rollout and one update"),
    "global_step": Metric("environment steps of all ranks so far", "steps"),
    "episode/return": Metric(
        "mean sum of plain rewards of the episodes that ended; null if none did", per_rank=True
    ),
    "episode/length": Metric("mean length of these episodes; null if none ended", "steps"),
    "episode/count": Metric("episodes that ended in this iteration", "episodes", per_rank=True),
    "episode/total": Metric("episodes that have ended since the start", "episodes"),
    "env/restarts": Metric(
        "environments made again since the last record, the warm-up included", "restarts"
    ),
    "loss/policy": Metric(
        "clipped surrogate loss; losses are means over all ranks and gradient steps"
    ),
    "loss/value": Metric(
        "half of the mean squared error of the critic, in units of scaled rewards"
    ),
    "loss/entropy": Metric("entropy of the action distribution", "nats"),
    "ppo/approx_kl": Metric(
        "estimated KL divergence from the policy that collected the rollout", "nats"
    ),
    "ppo/clip_fraction": Metric("share of steps whose probability ratio was clipped", "share"),
    "ppo/explained_variance": Metric(
        "share of the returns' variance that the critic explains; 1 is all of it", "share"
    ),
    "optim/grad_norm": Metric(
        "norm of the gradient, after the reduction over ranks and before clipping"
    ),
    "optim/learning_rate": Metric("learning rate after scaling, warm-up and annealing"),
    "optim/steps": Metric("gradient steps taken", "steps"),
    "optim/skipped_steps": Metric(
        "gradient steps skipped, because loss or gradient was not finite", "steps"
    ),
    "optim/loss_scale": Metric(
        "factor by which the loss is multiplied before the backward pass", when=FP16
    ),
    "time/collect_s": Metric(
        "rollout; of all ranks the slowest, as every time below", "s", per_rank=True
    ),
    "time/update_s": Metric("update: all epochs, with reductions and waiting", "s", per_rank=True),
    "time/update_own_s": Metric("update without waiting for other ranks", "s", per_rank=True),
    "time/forward_s": Metric("forward passes of the update", "s", per_rank=True),
    "time/backward_s": Metric(
        "backward passes without waiting for gradients of other ranks", "s", per_rank=True
    ),
    "time/optimizer_s": Metric("clipping and optimizer steps", "s", per_rank=True),
    "time/gradient_wait_s": Metric("waiting for gradients of other ranks", "s", per_rank=True),
    "time/reduction_s": Metric(
        "the shortest such wait: what a reduction costs the last rank to come", "s", per_rank=True
    ),
    "time/step_spread_s": Metric(
        "standard deviation of the rank's own time of a gradient step", "s", per_rank=True
    ),
    "time/idle_share": Metric(
        "share of the iteration that a rank waits for others", "share", per_rank=True
    ),
    "time/sync_s": Metric("waiting in the trainer's own collectives, gradients excluded", "s"),
    "time/sps": Metric(
        "environment steps of all ranks per second, without validation and checkpoints", "steps/s"
    ),
    "valid/sharpe": Metric(
        "mean annual Sharpe ratio of the policy on the validation span", when=TRADING
    ),
    "valid/equal_weight_sharpe": Metric("the same of equal weight, bought at once", when=TRADING),
    "valid/annual_return": Metric("mean annual return of the policy", "share", TRADING),
    "valid/exposure": Metric("mean share of the portfolio that is invested", "share", TRADING),
    "valid/return": Metric("mean return of the evaluation episodes", when=OTHER_TASKS),
    "valid/return_std": Metric("their standard deviation", when=OTHER_TASKS),
    "valid/return_min": Metric("the lowest of them", when=OTHER_TASKS),
    "valid/length": Metric("their mean length", "steps", OTHER_TASKS),
    "valid/episodes": Metric("how many there were", "episodes", OTHER_TASKS),
    "valid/episodes_cut": Metric(
        "how many reached the evaluation's longest length", "episodes", OTHER_TASKS
    ),
    "valid/env_restarts": Metric(
        "environments made again during the evaluation", "restarts", OTHER_TASKS
    ),
    "ranks": Metric("a list with one object per rank, in the order of ranks"),
    "rank": Metric("number of the rank", per_rank=True, overall=False),
    "cpu/percent": Metric(
        "CPU time of the rank's process; 100 is one core", "%", MONITORED, True, False
    ),
    "ram/used_gib": Metric("memory of the rank's process", "GiB", MONITORED, True, False),
    "ram/free_gib": Metric("memory that is free on the machine", "GiB", MONITORED, True, False),
    "gpu/utilization_percent": Metric("time in which the GPU was busy", "%", GPU, True, False),
    "gpu/memory_allocated_gib": Metric("GPU memory of the rank's tensors", "GiB", GPU, True, False),
    "gpu/memory_reserved_gib": Metric(
        "GPU memory that torch's allocator holds", "GiB", GPU, True, False
    ),
    "gpu/memory_peak_gib": Metric("highest allocation so far", "GiB", GPU, True, False),
    "gpu/memory_free_gib": Metric(
        "GPU memory that is free for any process", "GiB", GPU, True, False
    ),
    "gpu/temperature_c": Metric("temperature of the GPU", "°C", GPU, True, False),
    "gpu/power_w": Metric("power that the GPU draws", "W", GPU, True, False),
}
