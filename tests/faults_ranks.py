"""The ranks of the fault tests."""

import functools
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from agents_ranks import Recording, make_job

import agents.ppo
from agents.ppo import PPOConfig, ppo_loss
from agents.trainer import train
from envs import make_vector_env
from rl_dist.errors import UserError
from rl_dist.process_group.collectives import all_reduce_max
from rl_dist.process_group.world import StopFlag, close_world, open_world
from rl_dist.telemetry.metrics import NullWriter, close_logging, setup_logging

MISDEEDS = {1: "raise", 2: "nan", 4: "hang", 6: "reward", 7: "shape"}
JOB = "recall, clstm"  # 8 environments, rollouts of 16 steps, 2 epochs of 2 minibatches


class Keeping(NullWriter):
    """Keeps the records."""

    def __init__(self):
        self.records = []

    def write(self, record, *, done):
        self.records.append(record)


def run(job, world, loss=ppo_loss, **hooks):
    """Train, with other functions than Training's; the training, its records and its error."""
    training, writer, error = type("Odd", (Recording,), hooks)(job, world), Keeping(), ""
    with mock.patch.object(agents.ppo, "ppo_loss", loss):
        try:
            train(training, writer, StopFlag())
        except UserError as raised:
            error = str(raised)
    return training, writer.records, error


def restarts(world, folder):
    """Five environments misbehave in their step 20, the fourth of iteration 2, and begin again."""

    def make_env(num_envs, env_offset):
        return make_vector_env(
            "misbehaving_envs:Misbehaving-v0",
            num_envs,
            env_kwargs={"misdeeds": MISDEEDS, "at": 20},
            env_offset=env_offset,
            env_timeout=0.5,
            env_restarts=1,
        )

    job = replace(make_job(JOB, folder, iterations=3), make_env=make_env)
    training, records, _ = run(job, world)
    rollout = training.rollouts[2]  # the first only fills the normalisers
    return training.record() | {
        "truncated": rollout.truncated,
        "plain rewards": rollout.rewards,
        "counts": [record["env/restarts"] for record in records],
    }


def bad_steps(world, folder, bad_from=6, bad_to=7, **options):
    """The loss of rank 1 is NaN from one gradient step to another."""
    calls = []

    def loss(*args):
        calls.append(1)
        parts = ppo_loss(*args)
        bad = world.rank == 1 and bad_from <= len(calls) < bad_to
        return parts._replace(total=parts.total * torch.nan) if bad else parts

    training, records, error = run(make_job(JOB, folder, **options), world, loss)
    return {
        "error": error,
        "steps": [int(record["optim/steps"]) for record in records],
        "skipped": [record["optim/skipped_steps"] for record in records],
        "finite": all(torch.tensor(r["loss/policy"]).isfinite() for r in records),
        "hashes": training.hashes,
        "last": training.parameters[-1],
    }


def drift(world, folder, what="parameter", **options):
    """Something changes on rank 1, by a hair, in iteration 1."""

    def update(training, rollout):
        losses = Recording.update(training, rollout)
        if world.rank == 1 and training.iteration == 1:
            weight = training.policy.critic_head.weight
            tensors = {"mean": training.normalizers.obs.moments.mean, "parameter": weight.data[0]}
            state = training.ppo.optimizer.state[weight]
            (tensors[what] if what in tensors else state[what][0])[1] += 1e-12
        return losses

    training, _, error = run(make_job(JOB, folder, iterations=6, **options), world, update=update)
    return {"error": error, "iteration": training.iteration}


def slow(world, folder, phase, victim):
    """A rank takes 10 s longer to collect, or for its part of a gradient step, by its clock."""
    ahead_s = [0.0]
    clock = SimpleNamespace(perf_counter=lambda: time.perf_counter() + ahead_s[0])

    def collect(training, lifetime_step):
        ahead_s[0] += 10.0 * (world.rank == victim and phase == "collect")
        return Recording.collect(training, lifetime_step)

    def loss(*args):
        ahead_s[0] += 10.0 * (world.rank == victim and phase == "update")
        return ppo_loss(*args)

    job = make_job(JOB, folder, iterations=4, ppo=PPOConfig(update_epochs=1))
    with ExitStack() as held:
        for module in ("agents.recorder", "rl_dist.process_group.clock"):
            held.enter_context(mock.patch(f"{module}.time", clock))
        return {"error": run(job, world, loss, collect=collect)[2]}


def other_call(world, folder, before="update"):
    """Rank 1 makes one more collective call in iteration 2: before the update, or within it."""
    calls = []

    def update(training, rollout):
        if before == "update" and world.rank == 1 and training.iteration == 2:
            all_reduce_max(0, world)
        return Recording.update(training, rollout)

    def loss(*args):
        calls.append(1)
        if before == "step" and world.rank == 1 and len(calls) == 7:
            all_reduce_max(0, world)
        return ppo_loss(*args)

    error = run(make_job(JOB, folder, iterations=5), world, loss, update=update)[2]
    world.doing.calls = 0  # the ranks continue together
    return {"error": error}


SCENARIOS = {
    "restarts": restarts,
    # the second of four steps of iteration 2; then all from the third of iteration 2 on
    "one_bad_step": functools.partial(bad_steps, iterations=3),
    "bad_steps": functools.partial(
        bad_steps,
        bad_from=7,
        bad_to=1000,
        iterations=5,
        checkpoint_every=1,
        ppo=PPOConfig(update_epochs=2, max_bad_steps=3),
    ),
    "drift": functools.partial(drift, sync_check_every=4),
    "drift_saved": functools.partial(drift, sync_check_every=0, checkpoint_every=3),
    "drift_optimizer": functools.partial(drift, what="exp_avg", sync_check_every=1),
    "drift_normalizer": functools.partial(drift, what="mean", sync_check_every=4),
    "slow_collect": functools.partial(slow, phase="collect", victim=1),
    "slow_update": functools.partial(slow, phase="update", victim=0),
    "other_call": other_call,
    "other_call_in_step": functools.partial(other_call, before="step"),
}


def survived(out_dir):
    """All faults after which this process continues, one after the other."""
    world = open_world("cpu", timeout_s=60)
    results = {}
    for name, scenario in SCENARIOS.items():
        setup_logging(Path(out_dir, name), world.rank)
        results[name] = scenario(world, Path(out_dir, name))
    close_logging()
    torch.save(results, Path(out_dir, f"rank_{world.rank}.pt"))
    all_reduce_max(0, world)  # no rank leaves before the others have read its message
    close_world(world)
    return 0
