"""A plan for GPUs that are not here: every rank's sizes, shards and memory."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from agents.dry_run.measure import GIB, GPU_RESERVE, gradient_bytes
from agents.policy import Policy
from agents.run.config import RunConfig, probe_env
from agents.run.memory import MemoryNeed, compute_memory, observe_shapes
from agents.sizes import shard_sizes
from envs.vector.layout import Layout
from rl_dist.errors import UserError
from rl_dist.parallel.choice import Hardware, check_strategy, resolve_shard_size
from rl_dist.parallel.config import StrategyConfig
from rl_dist.parallel.strategy import Strategy
from rl_dist.process_group.world import World


@dataclass(frozen=True)
class RankPlan:
    """One rank's share; memory is in bytes."""

    environments: int
    sequences: int  # of each gradient step
    parameters: int  # whole: every rank acts with them
    sharded: int  # own parameters, gradients and Adam's moments, as far as they stay
    environment: int
    rollout: int
    activations: int  # or the gathered gradients after them, if those are more
    total: int  # with the process


@dataclass(frozen=True)
class TrainingPlan:
    """What all ranks will do."""

    num_ranks: int
    device_type: str
    strategy: str
    ranks: list[RankPlan]
    limit: int  # of memory, on each GPU

    @property
    def fits(self) -> bool:
        """Return whether every rank's memory is enough."""
        return max(rank.total for rank in self.ranks) <= self.limit

    def __str__(self) -> str:
        names = [item.name for item in dataclasses.fields(RankPlan)]
        lines = [
            f"{self.num_ranks} ranks on {self.device_type}, strategy {self.strategy}",
            f"memory in GiB, computed; of the total, {GPU_RESERVE / GIB:g} is a guess for CUDA",
            "".join(f"{name:>13}" for name in ("ranks", *names)),
        ]
        for rank, count in Counter(self.ranks).items():
            numbers = dataclasses.astuple(rank)
            words = [f"{number / GIB:.4f}" for number in numbers[2:]]
            row = (f"{count}", *map(str, numbers[:2]), *words)
            lines.append("".join(f"{word:>13}" for word in row))
        environments = sum(rank.environments for rank in self.ranks)
        sequences = sum(rank.sequences for rank in self.ranks)
        most = max(rank.total for rank in self.ranks) / GIB
        verdict = "fits" if self.fits else "does not fit: see --batch_size, --grad_accumulation"
        lines.append(f"{'all':>13}{environments:>13}{sequences:>13}")
        lines.append(f"{most:.2f} of {self.limit / GIB:g} GiB on the fullest: {verdict}")
        return "\n".join(lines)


def make_plan(config: RunConfig, limit_gib: float) -> TrainingPlan:
    """Plan a training on `--num_gpus` ranks, none of which need be here.

    Raises:
        UserError: these flags cannot go together, or sizes do not divide.
    """
    launch = config.launch
    if launch.num_gpus < 1:
        raise UserError("--plan needs --num_gpus, the number of GPUs to plan for")
    launch.check_hybrid()
    device_type = "cpu" if launch.device == "cpu" else "cuda"
    asked = launch.strategy_config
    if asked.mode == "dp":
        raise UserError("--plan is about one rank per GPU: use --strategy default, ddp or hybrid")
    # whether a GPU has these formats is asked where it is
    by_hardware = asked.precision in ("tf32", "bf16") and device_type == "cuda"
    checked = dataclasses.replace(asked, precision="auto") if by_hardware else asked
    mode = check_strategy(checked, Hardware(launch.num_gpus, device_type))
    mode = "ddp" if mode == "auto" else mode  # which needs the most memory

    # what one rank's share takes
    task = config.prepare_task()
    shapes = observe_shapes(lambda count, first: task.training_env(count, first, "cpu"))
    env = probe_env(task)
    sizes = [shard_sizes(config.train, rank, launch.num_gpus) for rank in range(launch.num_gpus)]
    need = compute_memory(
        config.policy, config.train, sizes[0], shapes,
        itemsize=launch.dtype.itemsize, device_type=device_type,
    )  # fmt: skip

    # what of it is sharded, by torch's own way of cutting
    shards = [gradient_bytes(config, env)]
    name = mode
    if mode == "hybrid" and asked.pipelined:
        name = "hybrid, two stages (memory as in ddp, an upper bound)"
    elif mode == "hybrid":
        size = resolve_shard_size(asked.shard_size, launch.num_gpus)
        name = f"hybrid, {launch.num_gpus // size} group(s) of {size} ranks"
        shards = shard_bytes(config, env, launch.num_gpus, size)
    env.close()
    ranks = [
        _share(need, own.num_envs, own.batch_size, shards[rank % len(shards)], len(shards) > 1)
        for rank, own in enumerate(sizes)
    ]
    return TrainingPlan(launch.num_gpus, device_type, name, ranks, int(limit_gib * GIB))


def _share(need: MemoryNeed, num_envs: int, batch_size: int, shard: int, sharded: bool) -> RankPlan:
    # gradients are whole at the end of a backward pass, and again as they are reduced
    activations = (
        max(need.parts["activations"], 2 * need.parts["parameters"])
        if sharded
        else need.parts["activations"]
    )
    kept = 3 * shard  # parameters' shards and Adam's moments, or gradients and moments
    parts = (
        need.parts["parameters"],
        kept,
        need.parts["environment"],
        need.parts["rollout"],
        activations,
    )
    return RankPlan(num_envs, batch_size, *parts, total=sum(parts) + GPU_RESERVE)


def shard_bytes(config: RunConfig, env: Any, num_ranks: int, shard_size: int) -> list[int]:
    """Return the bytes of parameters that each rank of a group holds, by its place.

    The policy is sharded as in training, in torch's fake process group, which sends nothing.
    """
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  # makes it known

    options = StrategyConfig(mode="hybrid", shard_size=shard_size)
    policy = Policy(config.policy, Layout.of(env), env.single_action_space).to(config.launch.dtype)
    found = []
    for place in range(shard_size):
        store = dist.HashStore()
        dist.init_process_group("fake", rank=place, world_size=num_ranks, store=store)
        try:
            world = World(place, place, num_ranks, torch.device("cpu"), "fake")
            strategy = Strategy(options, world)
            strategy.wrap(copy.deepcopy(policy))
            shards = (each for each in strategy.parameters if isinstance(each, DTensor))
            found.append(sum(shard.to_local().nbytes for shard in shards))
        finally:
            dist.destroy_process_group()
    return found
