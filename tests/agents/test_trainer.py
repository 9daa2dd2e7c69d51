"""Test the training loop: counts, checkpoints, resume and metrics."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from agents_ranks import (
    JOBS,
    NUM_ENVS,
    NUM_STEPS,
    STEPS_PER_ITERATION,
    Recording,
    make_job,
    parameters_of,
)
from scripted_env import TERMINATED, TRUNCATED, ScriptedEnv
from torch.utils._pytree import tree_flatten

from agents.config import RunConfig
from agents.policy import PolicyConfig
from agents.ppo import PPOConfig
from agents.run.saved import check_shapes
from agents.trainer import Training, train
from rl_dist.checkpoint.store import load_checkpoint
from rl_dist.errors import UserError
from rl_dist.launch.config import LaunchConfig
from rl_dist.process_group.world import StopFlag
from rl_dist.telemetry.metrics import NullWriter


class Listening(NullWriter):
    """Writer that keeps all records; sets a stop signal during iteration `stop_at`."""

    def __init__(self, stop_at=0):
        self.stop, self.stop_at = StopFlag(), stop_at
        self.records, self.done = [], []

    def write(self, record, *, done):
        self.records.append(dict(record))
        self.done.append(done)
        if record["iteration"] + 1 == self.stop_at:
            self.stop.signum = 15


def run(job, world, stop_at=0, restore_from=None):
    """Train a job, optionally from a checkpoint; return the Training and its writer."""
    training, writer = Recording(job, world), Listening(stop_at)
    if restore_from is not None:
        training.restore(load_checkpoint(restore_from))
    signal = train(training, writer, writer.stop)
    assert signal == (15 if stop_at else 0)
    return training, writer


LONG = [[(100, TERMINATED)]]
SCRIPTS = [[(5, TERMINATED)], [(16, TRUNCATED)], *LONG * (NUM_ENVS - 2)]


def scripted(job, scripts=SCRIPTS, env=ScriptedEnv):
    """Return the job with a scripted environment in place of its own."""
    return replace(job, make_env=lambda num_envs, env_offset: env(scripts))


def assert_same_state(one, other):
    """Assert that two nested states are equal bit for bit."""
    leaves, form = tree_flatten(one)
    others, other_form = tree_flatten(other)
    assert form == other_form
    for left, right in zip(leaves, others, strict=True):
        if isinstance(left, torch.Tensor | np.ndarray):
            assert left.dtype == right.dtype and np.array_equal(left, right)
        else:
            assert left == right


def test_a_short_training_changes_all_parameters_and_times_its_phases(world, tmp_path):
    job = make_job("trading, clstm", tmp_path, iterations=2, dtype=torch.float32)
    before = Training(job, world).policy.state_dict()
    training, writer = run(job, world)
    for key, value in training.policy.state_dict().items():
        assert not torch.equal(value, before[key]), key
        assert torch.isfinite(value).all()
    for record in writer.records:
        json.dumps(record)  # fails if a value is a tensor
        assert record["time/sps"] > 0 and record["time/collect_s"] > 0
        phases = [record[f"time/{name}_s"] for name in ("forward", "backward", "optimizer")]
        own, whole = record["time/update_own_s"], record["time/update_s"]
        assert min(phases) > 0 and sum(phases) <= own <= whole
    assert [record["iteration"] for record in writer.records] == [1, 2]
    assert [record["global_step"] for record in writer.records] == [128, 256] == writer.done


@pytest.mark.parametrize("name", JOBS)
def test_a_run_that_was_stopped_and_resumed_equals_one_that_was_not_bit_for_bit(
    name, world, tmp_path
):
    whole, _ = run(make_job(name, tmp_path / "whole", iterations=4, dtype=torch.float32), world)
    job = make_job(name, tmp_path / "parts", iterations=4, dtype=torch.float32)
    first, _ = run(job, world, stop_at=2)
    saved = job.run_dir / "checkpoints" / "iteration_00000002.pt"
    assert first.iteration == 2 and list(saved.parent.iterdir()) == [saved]
    resumed, _ = run(job, world, restore_from=saved)
    assert resumed.iteration == 4
    assert torch.equal(parameters_of(resumed), parameters_of(whole))
    assert not torch.equal(parameters_of(resumed), parameters_of(first))
    # The state holds the carry, environments, optimizer, normalisers and counters.
    assert_same_state(resumed.state(), whole.state())
    for part, wanted in zip(resumed.rollouts, whole.rollouts[3:], strict=True):
        assert_same_state(vars(part), vars(wanted))


def test_another_seed_begins_on_other_days(world):
    jobs = [make_job("trading, clstm", seed=seed) for seed in (1, 2)]
    first, other = (Training(job, world).carry.obs for job in jobs)
    assert not torch.equal(first, other)


def test_the_warm_up_is_not_counted_and_all_environments_reset_after_it(world, tmp_path):
    training = Recording(make_job("trading, clstm", tmp_path), world)
    before = {name: value.clone() for name, value in vars(training.carry).items()}
    parameters = parameters_of(training).clone()
    training.warm_up_normalizers()
    assert (training.iteration, training.global_step, training.episodes) == (0, 0, 0)
    assert_same_state(vars(training.carry), before)
    assert torch.equal(parameters_of(training), parameters)
    assert float(training.normalizers.obs.moments.count) == STEPS_PER_ITERATION
    assert float(training.normalizers.rewards.moments.count) == STEPS_PER_ITERATION
    first = training.collect(lifetime_step=NUM_STEPS)
    assert torch.equal(first.raw_obs[0], before["obs"])
    # The first rollout does not reuse the noise of the warm-up.
    assert not torch.equal(first.actions[0], training.rollouts[0].actions[0])


def advantages_of(world, steps, **options):
    """Return advantages passed to updates, and the warm-up's deviation of returns."""
    ppo = PPOConfig(**{"min_adv_std": 100.0} | options.pop("ppo", {}))
    training = Training(make_job("trading, mlp", ppo=ppo, **options), world)
    training.warm_up_normalizers()
    found, deviation = [], training.normalizers.return_deviation()
    training.ppo.update = lambda batch: found.append(batch.sequences.advantages) or {}
    for step in range(1, steps + 1):
        training.update(training.collect(lifetime_step=step))
    return found, deviation


@pytest.mark.parametrize("scaled", [True, False])
def test_the_least_deviation_of_advantages_is_a_part_of_that_of_returns(scaled, world):
    (raw,), _ = advantages_of(world, 1, ppo={"norm_adv": False}, normalize_rewards=scaled)
    (divided,), deviation = advantages_of(world, 1, normalize_rewards=scaled)
    torch.testing.assert_close(divided, (raw - raw.mean()) / (100.0 * deviation))

    # Without normalisers no returns are known in update 1, so it uses the advantages' deviation.
    nothing = {"normalize_obs": False, "normalize_rewards": False}
    (first, second), _ = advantages_of(world, 2, **nothing)
    assert first.std(correction=0) == pytest.approx(1.0) and second.std(correction=0) < 0.1


def test_plain_rewards_and_episodes_are_counted_until_there_are_enough(world, tmp_path):
    job = scripted(make_job("trading, clstm", tmp_path, total_steps=0, num_episodes=5))
    _, writer = run(job, world)
    first, second = writer.records
    # Environment 0 has episodes of 5 steps; a plain reward is 2 * (10 * episode + age).
    returns = [2 * (5 * 10 * episode + 10) for episode in (0, 1, 2)]
    returns.append(2 * (16 * 100 + 120))  # environment 1 has one episode of 16 steps
    assert first["episode/return"] == pytest.approx(np.mean(returns))
    for record in (first, second):  # an episode that began in rollout 1 counts in rollout 2
        assert record["episode/count"] == 4
        assert record["episode/length"] == pytest.approx((3 * 5 + 16) / 4)
    assert writer.done == [first["episode/total"], second["episode/total"]] == [4, 8]


def test_environments_that_cannot_be_saved_start_other_episodes_at_every_resume(world, tmp_path):
    seeds = []

    class Remembering(ScriptedEnv):
        def reset(self, *, seed=None, options=None):
            seeds.append(tuple(seed))
            return super().reset()

    job = make_job("recall, clstm", tmp_path, iterations=3)
    job = scripted(job, [[(6, TERMINATED)]] * NUM_ENVS, Remembering)
    run(job, world, stop_at=2)
    path = tmp_path / "checkpoints" / "iteration_00000002.pt"
    assert load_checkpoint(path)["environments"] is None
    fresh_run = seeds.copy()
    assert fresh_run == [fresh_run[0]] * 2  # reset at the start and after the warm-up
    resumed, _ = run(job, world, restore_from=path)
    assert resumed.rollouts[0].episode_start[0].all()
    again, _ = run(job, world, restore_from=path)
    lives = seeds[2:]
    assert lives[1] == lives[3] != fresh_run[0]  # every resume has the same new seeds
    assert set(lives[1]).isdisjoint(fresh_run[0])
    assert torch.equal(parameters_of(resumed), parameters_of(again))


def test_validation_runs_when_asked_and_its_figures_join_the_metrics(world, tmp_path):
    def validate(policy, normalizer):
        assert policy.critic_head.weight.shape == (1, 8)
        return {"valid/sharpe": float(normalizer.moments.count)}

    job = make_job("recall, clstm", tmp_path, iterations=5, validate_every=2)
    _, writer = run(replace(job, validate=validate), world)
    found = {record["iteration"]: record.get("valid/sharpe") for record in writer.records}
    assert found == {
        1: None,
        2: 3.0 * 128,
        3: None,
        4: 5.0 * 128,
        5: 6.0 * 128,
    }  # every second iteration and the last


def test_a_checkpoint_of_another_shape_is_refused_in_one_line(world, tmp_path):
    state = Training(make_job("recall, clstm", tmp_path), world).state()
    launch = LaunchConfig(precision="fp64")
    for other in (PolicyConfig(hidden_size=16), PolicyConfig(hidden_size=8, policy="mlp")):
        with pytest.raises(UserError, match="damaged: .*(core|lstm_state)"):
            check_shapes(state, RunConfig(policy=other, launch=launch))


def test_learning_learns(world, tmp_path):
    """Training finds within 12 iterations that a larger action gives a larger reward."""

    class Sign(ScriptedEnv):
        def step(self, actions):
            obs, _, terminated, truncated, info = super().step(actions)
            rewards = actions[:, 0].clamp(-1, 1).double()
            return obs, rewards, terminated, truncated, info | {"raw_rewards": rewards}

    job = make_job("trading, clstm", tmp_path, iterations=12, ppo=PPOConfig(learning_rate=0.01))
    _, writer = run(scripted(job, [[(8, TRUNCATED)]] * NUM_ENVS, Sign), world)
    returns = [record["episode/return"] for record in writer.records]
    assert returns[0] < 3.0 and returns[-1] > 6.0  # the highest possible return is 8
