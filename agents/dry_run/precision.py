"""--precision auto: gradient steps in fp32 and in bf16, before training."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

from agents.dry_run.batch_size import UpdateDryRun, random_minibatch, saved_section
from agents.run.config import RunConfig, save_config
from agents.run.limits import free_for_each_rank
from agents.sizes import shard_sizes
from agents.trainer import Job, MakeEnv
from rl_dist.machine import cpu_has_bf16
from rl_dist.process_group.collectives import all_gather_json
from rl_dist.process_group.world import World
from rl_dist.strategies.config import Precision
from rl_dist.telemetry.state_file import update_state

ROUNDS = 5
WORTH = 1.1  # bf16 rounds to 8 bits: it has to be this many times as fast


def resolve_precision(
    config: RunConfig, make_env: MakeEnv, run_dir: Path, world: World
) -> RunConfig:
    """Return the configuration with precision auto decided; all ranks call.

    bf16 on CPUs that have units for it, if a gradient step is so much faster on every rank; fp32 on
    all others. config.json keeps it, and ranks that start again take it from there.
    """
    precision = saved_section("launch", run_dir, world)["precision"]
    reason = ""
    if precision == "auto":
        units = world.device.type == "cpu" and cpu_has_bf16()
        if all(all_gather_json(units, world)):
            own = bf16_speedup(config.job(make_env, run_dir), world)
            speedup = min(all_gather_json(own, world))
            precision = "bf16" if speedup >= WORTH else "fp32"
            reason = f"a gradient step in bf16 is {speedup:.2f} times as fast as in fp32"
        else:
            precision, reason = "fp32", "measured on CPUs with units for bf16 only"
    config = replace(config, launch=replace(config.launch, precision=precision))
    if world.is_main_process and reason:
        save_config(config, run_dir)
        update_state(run_dir, precision=precision)
        print(f"precision auto: {precision}, {reason}", flush=True)
    return config


def bf16_speedup(job: Job, world: World) -> float:
    """Time of a gradient step in fp32 over that in bf16: medians, in turns."""
    sizes = shard_sizes(job.train, world.rank, world.size)
    seconds: dict[Precision, list[float]] = {"fp32": [], "bf16": []}
    with torch.random.fork_rng([]):
        torch.manual_seed(job.train.seed)
        runs = {}
        for name in seconds:
            of_type = replace(job, strategy=replace(job.strategy, precision=name))
            runs[name] = UpdateDryRun(of_type, world, free_for_each_rank(world.device, world.size))
        shapes = runs["fp32"].shapes
        sequences = sizes.batch_size // sizes.num_microbatches
        minibatch = random_minibatch(
            runs["fp32"].policy, job.train.bptt_steps, sequences, shapes.episode_length
        )
        for _ in range(ROUNDS):
            for name, run in runs.items():
                start = time.perf_counter()
                run.ppo.step(minibatch)
                seconds[name].append(time.perf_counter() - start)
                world.heartbeat()
    return median(seconds["fp32"][1:]) / median(seconds["bf16"][1:])
