"""Functions that the ranks of the fault tests run."""

import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from agents_ranks import Recording, bad_losses, changed_losses, make_job, run_loop

from agents.learner.settings import PPOConfig
from envs import make_vector_env
from rl_dist.checkpoint.store import latest_checkpoint, load_checkpoint
from rl_dist.errors import UserError
from rl_dist.process_group.collectives import all_gather_json, all_reduce_max
from rl_dist.process_group.world import close_world, open_world
from rl_dist.telemetry.metrics import NullWriter, close_logging, setup_logging

MISDEEDS = {1: "raise", 2: "nan", 4: "hang", 6: "reward", 7: "shape"}
DRIFTED = (
    "policy/critic_head.weight",
    "optimizer/state/16/exp_avg",
    "normalizers/obs.moments.mean",
)
JOB = "recall, clstm"  # 8 environments, rollouts of 16 steps, 2 epochs of 2 minibatches


class RecordKeeper(NullWriter):
    """Writer that keeps metric records in memory."""

    def __init__(self):
        self.records = []

    def write(self, record, *, done):
        self.records.append(record)


def run(job, world, losses=None, *, validate=None, **hooks):
    """Train with changed methods and losses; return the Training, records and error."""
    training, writer, error = type("Odd", (Recording,), hooks)(job, world), RecordKeeper(), ""
    with losses or nullcontext():
        try:
            run_loop(training, writer, validate=validate)
        except UserError as raised:
            error = str(raised)
    return training, writer.records, error


def log_of(folder, rank):
    return (folder / "logs" / f"rank_{rank}.log").read_text()


def restarts(world, folder):
    """Train while 5 environments fail in step 20 (step 4 of iteration 2) and restart."""

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
    rollout = training.rollouts[2]  # the rollout of iteration 2: number 0 is the warm-up
    return training.record() | {
        "truncated": rollout.truncated,
        "plain rewards": rollout.rewards,
        "counts": [record["env/restarts"] for record in records],
    }


def bad_steps(world, folder, bad, **options):
    """Train; on rank 1, the loss is NaN in the gradient steps that `bad` lists."""
    losses = bad_losses(bad if world.rank == 1 else ())
    return run(make_job(JOB, folder, **options), world, losses)


def one_bad_step(world, folder):
    """Check that all ranks skip one bad gradient step: step 2 of 4 in iteration 2."""
    training, records, error = bad_steps(world, folder, [6], iterations=3)
    assert error == "" and [record["optim/skipped_steps"] for record in records] == [0, 1, 0]
    assert all(torch.tensor(record["loss/policy"]).isfinite() for record in records)
    assert len(training.hashes) == len(set(training.hashes)) == 3 * 4 - 1
    assert all_gather_json(training.hashes, world) == [training.hashes] * 2
    assert log_of(folder, world.rank).count("step(s) skipped") == 1


def many_bad_steps(world, folder):
    """Check that more than 3 bad steps in a row end the run.

    All gradient steps from number 7 on are bad. The newest checkpoint is that of iteration 2, the
    last iteration that ended before the limit was exceeded.
    """
    ppo = PPOConfig(update_epochs=2, max_bad_steps=3)
    options = {"iterations": 5, "checkpoint_every": 1, "ppo": ppo}
    training, records, error = bad_steps(world, folder, range(7, 1000), **options)
    path = latest_checkpoint(folder)
    assert path.name == "iteration_00000002.pt"
    assert "--max_bad_steps 3" in error and len(records) == 2 and len(training.hashes) == 4 + 2
    saved = torch.cat([value.flatten() for value in load_checkpoint(path)["policy"].values()])
    assert torch.equal(saved, training.parameters[-1])


def drift(world, folder, iteration, **options):
    """Change 3 tensors by 1e-12 on rank 1 in iteration 2; a check must name all 3."""

    def update(training, rollout):
        losses = Recording.update(training, rollout)
        if world.rank == 1 and training.iteration == 2:
            weight = training.policy.critic_head.weight
            weight.data[0, 1] += 1e-12
            training.ppo.optimizer.state[weight]["exp_avg"][0, 1] += 1e-12
            training.normalizers.obs.moments.mean[1] += 1e-12
        return losses

    job = make_job(JOB, folder, iterations=6, **options)
    training, _, error = run(job, world, update=update)
    assert training.iteration == iteration
    assert "rank 1 differs in " in error and all(name in error for name in DRIFTED), error
    saved = [path.name for path in (folder / "checkpoints").iterdir()]
    assert saved == ["iteration_00000001.pt"]


def slow(world, folder):
    """Add 1000 s per gradient step to rank 0's clock; the log must name it a straggler."""
    ahead_s = [0.0]
    clock = SimpleNamespace(perf_counter=lambda: time.perf_counter() + ahead_s[0])

    def wait(_, parts):
        ahead_s[0] += 1000.0 * world.is_main_process
        return parts

    job = make_job(JOB, folder, iterations=4, ppo=PPOConfig(update_epochs=1))
    with (
        mock.patch("agents.learner.recorder.time", clock),
        mock.patch("rl_dist.process_group.clock.time", clock),
    ):
        _, records, error = run(job, world, changed_losses(wait))
    assert error == ""
    for record in records:  # 2 gradient steps, and 128 environment steps of both ranks together
        assert 2000.0 <= record["time/update_s"] < 2200.0
        assert world.rank == 1 or 128 / 2200.0 < record["time/sps"] <= 128 / 2000.0
    line = "straggler: rank 0 is slow in update: "
    assert world.rank == 1 or log_of(folder, 0).count(line) == 1


def failed_save(world, folder, on_save_error, num_records):
    """Check that all ranks stop, or all continue with the same best value.

    The best policy is that of iteration 2, whose checkpoint cannot be saved.
    """
    if world.is_main_process:  # a folder where the file of this checkpoint should be
        (folder / "checkpoints/iteration_00000002.pt/full").mkdir(parents=True)
    options = {"keep_best": "valid/score", "validate_every": 1, "on_save_error": on_save_error}
    job = make_job(JOB, folder, iterations=5, **options)
    scores = iter([1.0, 9.0, 3.0, 2.0, 4.0])
    _, records, error = run(job, world, validate=lambda _: {"valid/score": next(scores)})
    assert len(records) == num_records and bool(error) == (on_save_error == "stop")
    all_reduce_max(0, world)  # both ranks have come here
    newest = latest_checkpoint(folder)
    assert newest.name == ("iteration_00000001.pt" if error else "iteration_00000005.pt")


def other_call(world, folder):
    """Let rank 1 make an extra collective call in a gradient step."""

    def call(number, parts):
        if world.rank == 1 and number == 7:
            all_reduce_max(0, world)
        return parts

    error = run(make_job(JOB, folder, iterations=5), world, changed_losses(call))[2]
    assert "rank 0 in 'gradient reduction" in error, error
    assert "rank 1 in 'gather of bytes' (collective " in error, error
    world.doing.calls = 0  # ranks must start the next scenario with equal call counts


SCENARIOS = {
    "restarts": restarts,
    "one bad step": one_bad_step,
    "many bad steps": many_bad_steps,
    "drift": partial(drift, iteration=4, sync_check_every=4),
    "drift before a save": partial(drift, iteration=3, sync_check_every=0, checkpoint_every=3),
    "slow": slow,
    "failed save": partial(failed_save, on_save_error="stop", num_records=2),
    "failed save, continued": partial(failed_save, on_save_error="continue", num_records=5),
    "other call": other_call,
}


def survived(out_dir):
    """Run all fault scenarios that the processes survive, one after the other."""
    world = open_world("cpu", timeout_s=60)
    for name, scenario in SCENARIOS.items():
        folder = Path(out_dir, name)
        setup_logging(folder, world.rank)
        if result := scenario(world, folder):
            torch.save(result, Path(out_dir, f"rank_{world.rank}.pt"))
    close_logging()
    all_reduce_max(0, world)  # no rank exits before the others have read its message
    close_world()
    return 0
