"""The ranks of the fault tests."""

import functools
import os
import time
from contextlib import contextmanager
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
from rl_dist.process_group.collectives import (
    DesyncError,
    all_reduce_max,
)
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


def run(job, world, kind=Recording):
    """Train; the training, its records and the error that ended it."""
    training, writer = kind(job, world), Keeping()
    try:
        train(training, writer, StopFlag())
    except (UserError, DesyncError) as error:
        return training, writer.records, str(error)
    return training, writer.records, ""


def restart_job(run_dir, env_id="Misbehaving-v0", at=20, env_restarts=1, iterations=3):
    """Five environments misbehave in a step; their step 20 is the fourth of iteration 2."""

    def make_env(num_envs, env_offset):
        kwargs = {"misdeeds": MISDEEDS, "at": at}
        options = {"env_kwargs": kwargs, "env_timeout": 0.5, "env_restarts": env_restarts}
        options["env_offset"] = env_offset
        return make_vector_env(f"misbehaving_envs:{env_id}", num_envs, **options)

    return replace(make_job(JOB, run_dir, iterations=iterations), make_env=make_env)


def restarts(world, folder):
    """Environments misbehave and begin again."""
    training, records, error = run(restart_job(folder), world)
    counts = [record["env/restarts"] for record in records]
    rollout = training.rollouts[2]  # the first only fills the normalisers
    ends = {"truncated": rollout.truncated, "terminated": rollout.terminated}
    ends["plain rewards"] = rollout.rewards
    return training.record() | ends | {"error": error, "counts": counts}


def poisoned(world, bad_from, bad_to):
    """`ppo_loss` that is NaN on rank 1 from one call to another."""
    calls = [0]

    def loss(*args):
        calls[0] += 1
        parts = ppo_loss(*args)
        bad = world.rank == 1 and bad_from <= calls[0] < bad_to
        return parts._replace(total=parts.total * torch.nan) if bad else parts

    return mock.patch.object(agents.ppo, "ppo_loss", loss)


def one_bad_step(world, folder):
    """The second of four steps of iteration 2 is bad, on one rank."""
    with poisoned(world, 6, 7):
        training, records, error = run(make_job(JOB, folder, iterations=3), world)
    skipped = [record["optim/skipped_steps"] for record in records]
    finite = all(torch.isfinite(torch.tensor(record["loss/policy"])) for record in records)
    return {"skipped": skipped, "finite": finite, "hashes": training.hashes, "error": error}


def bad_steps(world, folder):
    """From the third of the four steps of iteration 2 on, all are bad."""
    ppo = PPOConfig(update_epochs=2, max_bad_steps=3)
    with poisoned(world, 7, 1000):
        job = make_job(JOB, folder, iterations=5, ppo=ppo, checkpoint_every=1)
        training, records, error = run(job, world)
    last = training.parameters[-1]
    return {"error": error, "records": len(records), "last": last, "hashes": training.hashes}


def moved(training, what):
    """What changes on rank 1."""
    weight = training.policy.critic_head.weight
    tensors = {"mean": training.normalizers.obs.moments.mean, "parameter": weight.data[0]}
    return tensors[what] if what in tensors else training.ppo.optimizer.state[weight][what][0]


def drift(world, folder, what="parameter", **options):
    """Something changes on rank 1, by a hair, in iteration 1."""

    class Drifting(Recording):
        def update(self, rollout):
            losses = super().update(rollout)
            if self.world.rank == 1 and self.iteration == 1:
                moved(self, what)[1] += 1e-12
            return losses

    training, _, error = run(make_job(JOB, folder, iterations=6, **options), world, Drifting)
    return {"error": error, "iteration": training.iteration}


def kl_stop(world, folder):
    """The second step of six is bad on one rank; every estimate is above the target, not half."""
    with poisoned(world, 2, 3):
        poisoned_loss = agents.ppo.ppo_loss

        def loss(*args):
            parts = poisoned_loss(*args)
            return parts._replace(approx_kl=torch.full_like(parts.approx_kl, 0.03))

        with mock.patch.object(agents.ppo, "ppo_loss", loss):
            ppo = PPOConfig(update_epochs=3, target_kl=0.02)
            job = make_job(JOB, folder, iterations=2, ppo=ppo)
            training, records, error = run(job, world)
    steps = [record["optim/steps"] for record in records]
    return {"error": error, "steps": steps, "hashes": training.hashes}


@contextmanager
def clock_of_its_own():
    """By which this rank measures how long its work takes; `clock[0] += 10` puts it forward."""
    ahead_s = [0.0]
    clock = SimpleNamespace(perf_counter=lambda: time.perf_counter() + ahead_s[0])
    with (
        mock.patch("agents.recorder.time", clock),
        mock.patch("rl_dist.process_group.clock.time", clock),
    ):
        yield ahead_s


def slow_collect(world, folder):
    """Rank 1 takes 10 s longer to collect."""
    with clock_of_its_own() as ahead_s:

        class Slow(Recording):
            def collect(self, lifetime_step):
                ahead_s[0] += 10.0 * (world.rank == 1)
                return super().collect(lifetime_step)

        return {"error": run(make_job(JOB, folder, iterations=4), world, Slow)[2]}


def slow_update(world, folder):
    """Rank 0 takes 10 s longer for its part of a step; both wait for the reduction."""
    with clock_of_its_own() as ahead_s:

        def loss(*args):
            ahead_s[0] += 10.0 * (world.rank == 0)
            return ppo_loss(*args)

        job = make_job(JOB, folder, iterations=4, ppo=PPOConfig(update_epochs=1))
        with mock.patch.object(agents.ppo, "ppo_loss", loss):
            return {"error": run(job, world)[2]}


def other_call(world, folder, before="update"):
    """Rank 1 makes one more collective call in iteration 2: before the update, or within it."""

    class Other(Recording):
        def update(self, rollout):
            if before == "update" and world.rank == 1 and self.iteration == 2:
                all_reduce_max(0, world)
            return super().update(rollout)

    calls = [0]

    def loss(*args):
        calls[0] += 1
        if before == "step" and world.rank == 1 and calls[0] == 7:
            all_reduce_max(0, world)
        return ppo_loss(*args)

    with mock.patch.object(agents.ppo, "ppo_loss", loss):
        error = run(make_job(JOB, folder, iterations=5), world, Other)[2]
    world.doing.calls = 0  # the ranks go on together
    return {"error": error}


SCENARIOS = {
    "restarts": restarts,
    "one_bad_step": one_bad_step,
    "bad_steps": bad_steps,
    "drift": functools.partial(drift, sync_check_every=4),
    "drift_saved": functools.partial(drift, sync_check_every=0, checkpoint_every=3),
    "drift_optimizer": functools.partial(drift, what="exp_avg", sync_check_every=1),
    "drift_normalizer": functools.partial(drift, what="mean", sync_check_every=4),
    "kl_stop": kl_stop,
    "slow_collect": slow_collect,
    "slow_update": slow_update,
    "other_call": other_call,
    "other_call_in_step": functools.partial(other_call, before="step"),
}


def survived(out_dir):
    """All faults after which this process goes on, one after the other."""
    world = open_world("cpu", timeout_s=60)
    results = {"pid": os.getpid()}
    for name, scenario in SCENARIOS.items():
        setup_logging(Path(out_dir, name), world.rank)
        results[name] = scenario(world, Path(out_dir, name))
    close_logging()
    torch.save(results, Path(out_dir, f"rank_{world.rank}.pt"))
    all_reduce_max(0, world)  # nobody leaves before the others have read what he sent
    close_world(world)
    return 0
