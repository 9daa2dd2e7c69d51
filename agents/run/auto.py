"""Measure the best values of auto flags; check that rollouts fit into memory."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from agents.config import RunConfig, probe
from agents.learner.controller import PolicyController
from agents.learner.network.sequences import cut_sequences
from agents.learner.policy import Policy
from agents.learner.ppo import PPO, Minibatch
from agents.learner.settings import AUTO_SIZE, TrainConfig
from agents.learner.sizes import batch_fits, shard_sizes
from agents.run.start import Run
from envs.task import AUTO_WORKERS, Task
from rl_dist.errors import UserError
from rl_dist.launch.ranks import restart_count
from rl_dist.machine import GIB, available_cores, free_memory_bytes, peak_memory_bytes
from rl_dist.process_group.collectives import all_gather_json
from rl_dist.process_group.world import World
from rl_dist.strategies.config import StrategyConfig
from rl_dist.strategies.measure import USABLE_SHARE, Candidate, doublings, fastest
from rl_dist.strategies.strategy import Strategy

# range of values that batch_size auto tries, in sequences per rank
SMALLEST, LARGEST = 8, 2**19
# precisions that `--precision auto` tries on each device, most precise first
PRECISIONS = {"cpu": ("fp32", "bf16"), "cuda": ("fp32", "tf32", "bf16")}


# ---- memory


def rollout_bytes(config: RunConfig, num_envs: int, policy: Policy | None = None) -> int:
    """Return a lower bound for the memory that a rollout needs on one rank, in bytes.

    The bound is tight if `policy` is given. Otherwise, the sizes of observations and actions are
    unknown, and each is counted as one number.
    """
    # numbers stored per step: observation twice (pixels once, as bytes), action, log-probability,
    # two values
    numbers = 5.0
    state = config.policy.hidden_size * (not config.policy.stateless)
    others = 27  # bytes stored per step: reward, return and length of the episode, three flags
    if policy:
        num_observed = policy.num_obs * (1 + max(config.policy.feature_window, 1))
        if policy.layout.is_pixels and not config.policy.feature_window:
            others += policy.num_obs
            num_observed = 0
        numbers = num_observed + policy.num_actions + 3
        state = policy.initial_state(1).numel()
    numbers += state / config.train.bptt_steps  # the state before every bptt_steps-th step
    bytes_per_step = config.launch.dtype.itemsize * numbers + others
    return int(num_envs * config.train.num_steps * bytes_per_step)


def check_rollouts(config: RunConfig, world: World) -> None:
    """Raise a UserError if rollouts cannot fit into memory.

    Call this before creating environments.
    """
    free = free_memory_bytes(world.device, world.local_size)
    needed = rollout_bytes(config, shard_sizes(config.train, 0, world.size).num_envs)
    if needed > free:
        raise UserError(
            f"a rollout needs at least {needed / GIB:.1f} GiB on each rank, only {free / GIB:.1f} "
            f"GiB are free on {world.device}: use a smaller --num_envs, --num_steps or "
            "--hidden_size"
        )


# ---- flags set to auto


def undecided(config: RunConfig) -> dict[str, bool]:
    """Return, for each flag that can be auto, True if its best value is not measured yet."""
    return {
        "batch_size": config.train.batch_size == AUTO_SIZE,
        "precision": config.launch.precision == "auto",
        "chosen_strategy": config.launch.strategy_config.mode == "auto",
        "env_workers": config.task.env_workers == AUTO_WORKERS,
    }


def choose(run: Run, world: World) -> Run:
    """Replace each auto value by the best measured one. Every rank must call this.

    The values are written to config.json when training begins. After a restart, the ranks read
    them from that file and do not measure again.
    """
    if not any(all_gather_json(any(undecided(run.config).values()), world)):
        return run
    saved = None
    if world.is_main_process:
        if not run.resume_from:
            run.directory.update_state(phase="dry_run")
        saved = run.directory.config() if restart_count() else run.config.to_dict()
    values_of_rank_0 = RunConfig.from_dict(all_gather_json(saved, world)[0]).values
    names = (*undecided(run.config), "chosen_on")
    config = run.config.changed({name: values_of_rank_0[name] for name in names})

    cores = max(1, available_cores() // world.local_size)
    values: dict[str, Iterable[Any]] = {
        "batch_size": doublings(allowed_batch_sizes(config.train, world.size)),
        "precision": PRECISIONS[world.device.type],
        "chosen_strategy": strategy_modes(world.size, len(run.resolved.gpu_ids)),
        "env_workers": (0, cores, 4 * cores),
    }
    trials = Trials(
        config.prepare_task(world.heartbeat, str(world.device)), run.resolved.gpu_ids, world
    )
    for flag, is_auto in undecided(config).items():
        if is_auto:
            config = trials.best(config, flag, values[flag])
    if config.launch.chosen_strategy:
        config = config.changed({"chosen_on": run.resolved.place})
    return replace(run, config=config)


def allowed_batch_sizes(train: TrainConfig, num_ranks: int) -> Iterator[int]:
    """Yield, in ascending order, batch sizes to try, which all divide evenly over the ranks."""
    ranks = num_ranks if train.scaling == "strong" else 1
    sequences_per_env = train.num_steps // train.bptt_steps
    largest = train.num_envs * sequences_per_env // train.grad_accumulation or LARGEST * ranks
    sizes = range(min(SMALLEST * ranks, largest), largest + 1)
    return (size for size in sizes if batch_fits(train, num_ranks, size))


def strategy_modes(num_ranks: int, num_devices: int) -> tuple[str, ...]:
    """Return the strategies that `--strategy auto` tries, simplest first."""
    if num_ranks > 1:
        return "ddp", "hybrid"
    return ("none", "dp") if num_devices > 1 else ("none",)


@dataclass
class Trials:
    """Finds the fastest value of a flag, by timing the steps that training would take."""

    task: Task
    gpu_ids: tuple[int, ...]
    world: World
    bytes_per_sequence: float = 0.0  # peak memory per sequence in the last trial

    def __post_init__(self) -> None:
        env = probe(self.task)
        if env is None:
            raise UserError(
                "nothing can be measured with a batch of your own: replace auto in --batch_size, "
                "--precision or --strategy by a value"
            )
        self.env = env
        self.free_bytes = free_memory_bytes(self.world.device, self.world.local_size)

    def best(self, config: RunConfig, flag: str, values: Iterable[Any]) -> RunConfig:
        """Return the configuration with the fastest value of a flag; print all times."""
        growing = flag == "batch_size"
        steps = self.env_steps if flag == "env_workers" else self.steps
        candidates = (
            Candidate(
                str(value),
                partial(steps, config.changed({flag: value})),
                value if growing else 1,
            )
            for value in values
        )
        best, results = fastest(candidates, self.world, growing=growing)
        figures = "; ".join(map(str, results)) or "no value divides evenly over the ranks"
        name = flag.removeprefix("chosen_")
        if best is None:
            raise UserError(f"{name} auto: no value works: {figures}", exit_code=1)
        if self.world.is_main_process:
            unit = "sequence" if growing else "step"
            print(f"{name} auto: {best.name} (time per {unit}: {figures})", flush=True)
        return config.changed({flag: best.name})

    def steps(self, config: RunConfig) -> Iterator[None]:
        """Take gradient steps on dummy data and yield after each one.

        The part before the first yield is only a test of the memory. It allocates as much as a
        rollout needs, and runs the forward and backward passes of a minibatch that is larger than
        the real one. Gradients are reduced over all ranks only when strategies are compared;
        otherwise, each rank takes its steps alone.
        """
        train = config.train
        world = self.world
        device = world.device
        sizes = shard_sizes(train, world.rank, world.size)
        policy = Policy(config.policy, self.env.layout, self.env.single_action_space)
        policy.to(device, config.launch.dtype)
        strategy = Strategy(
            StrategyConfig(mode="none", precision=config.launch.precision),
            replace(world, rank=0, size=1),
        )
        ppo = PPO(policy, config.ppo, strategy, train.grad_accumulation)

        # Test the memory.
        parts = train.grad_accumulation
        sequences = parts * math.ceil(sizes.batch_size / parts / USABLE_SHARE)
        rollout = rollout_bytes(config, sizes.num_envs, policy)
        needed = rollout + self.bytes_per_sequence * sequences
        if device.type == "cpu" and needed > USABLE_SHARE * self.free_bytes:
            raise MemoryError(  # otherwise, Linux would kill the process
                f"{needed / GIB:.2g} GiB are needed, only {self.free_bytes / GIB:.2g} GiB are free"
            )
        _rollout = torch.empty(rollout, dtype=torch.uint8, device=device)  # as large as a rollout
        minibatch = dummy_minibatch(policy, train.bptt_steps, sequences)
        pieces = cut_sequences(minibatch.episode_start.cpu().numpy())
        ppo.gradients(minibatch, ppo.plans(pieces, np.arange(sequences)))
        policy.zero_grad()
        self.bytes_per_sequence = peak_memory_bytes(device) / sequences
        yield

        # Take steps with a minibatch of the real size.
        try:
            if config.launch.strategy == "auto" and config.launch.chosen_strategy:
                options = replace(config.launch.strategy_config, device_ids=self.gpu_ids)
                strategy = Strategy(options, world)
                ppo = PPO(policy, config.ppo, strategy, train.grad_accumulation)
            minibatch = minibatch.select(Tensor.narrow, 0, sizes.batch_size)
            while True:
                ppo.step(minibatch, ppo.plans(pieces, np.arange(sizes.batch_size)))
                yield
        finally:
            strategy.close()

    def env_steps(self, config: RunConfig) -> Iterator[None]:
        """Step this rank's environments with an untrained policy; yield between steps."""
        sizes = shard_sizes(config.train, self.world.rank, self.world.size)
        device = self.world.device
        task = config.prepare_task(self.world.heartbeat, str(device))
        env = task.training_env(sizes.num_envs, sizes.env_offset)
        try:
            policy = Policy(config.policy, env.layout, env.single_action_space).to(device)
            controller = PolicyController(policy, nn.Identity())
            obs = env.reset(seed=list(range(sizes.num_envs)))[0]
            ended = torch.ones(len(obs), dtype=torch.bool, device=device)
            while True:
                yield
                obs, _, terminated, truncated, _ = env.step(controller(env, obs, ended))
                ended = terminated | truncated
        finally:
            env.close()


def dummy_minibatch(policy: Policy, length: int, sequences: int) -> Minibatch:
    """Return a minibatch of dummy data with the shapes that the policy expects.

    Episode starts are random, on average one per sequence.
    """
    width = policy.num_obs * max(policy.config.feature_window, 1)
    obs = policy.critic_head.weight.new_zeros(length, sequences, width)
    if policy.layout.is_pixels:
        obs = obs.byte()
    start = torch.rand(length, sequences, device=obs.device) < 1.0 / length
    state = policy.initial_state(sequences)
    step = policy.act(obs[0], state, start[0])
    # Only the shapes of these fields matter, so the values of the first step fill all of them.
    names = ("logprobs", "values", "advantages", "returns")
    placeholders = dict.fromkeys(names, torch.stack([step.values] * length))  # each [L, N]
    return Minibatch(
        obs=obs,
        actions=torch.stack([step.actions] * length),
        episode_start=start,
        lstm_state=state,
        **placeholders,
    )
