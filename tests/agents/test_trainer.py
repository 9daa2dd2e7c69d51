"""Test the training loop: counts, resume, warm-up and validation."""

from dataclasses import replace

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
    run_loop,
)
from scripted_env import TERMINATED, TRUNCATED, ScriptedEnv

from agents.learner.callbacks import UserCallbacks
from agents.learner.settings import PPOConfig
from envs.trading.environment import TradingVectorEnv
from rl_dist.checkpoint.store import load_checkpoint
from rl_dist.process_group.world import StopFlag
from rl_dist.resume_check import differences
from rl_dist.run_dir import RunDir
from rl_dist.telemetry.metrics import NullWriter


class StoppingWriter(NullWriter):
    """Writer that keeps all records; sets the stop flag during iteration `stop_at`."""

    def __init__(self, stop_at=0):
        self.stop, self.stop_at = StopFlag(), stop_at
        self.records, self.done = [], []

    def write(self, record, *, done):
        self.records.append(dict(record))
        self.done.append(done)
        if record["iteration"] + 1 == self.stop_at:
            self.stop.signum = 15


def run(job, world, stop_at=0, restore_from=None, validate=None):
    """Train a job, optionally from a checkpoint; return the Training and its writer."""
    training, writer = Recording(job, world), StoppingWriter(stop_at)
    if restore_from is not None:
        training.restore(load_checkpoint(restore_from))
    signal = run_loop(training, writer, writer.stop, validate)
    assert signal == (15 if stop_at else 0)
    return training, writer


def scripted(job, scripts, env=ScriptedEnv):
    """Return a copy of the job that uses a scripted environment."""
    return replace(job, make_env=lambda num_envs, env_offset: env(scripts))


@pytest.fixture(scope="module")
def validated(world, tmp_path_factory):
    """Train 3 iterations; return the writer.

    Here valid/sharpe is the number of samples in the normaliser, including those of the warm-up.
    """

    def validate(training):
        return {"valid/sharpe": float(training.normalizers.obs.moments.count)}

    run_dir = tmp_path_factory.mktemp("validated")
    job = make_job("trading, clstm", run_dir, iterations=3, validate_every=2)
    _, writer = run(job, world, validate=validate)
    return writer


def test_the_phases_of_an_update_are_timed(validated):
    for record in validated.records:
        phases = [record[f"time/{name}_s"] for name in ("forward", "backward", "optimizer")]
        assert min(phases) > 0 and sum(phases) <= record["time/update_s"]


def test_the_steps_of_all_environments_count(validated):
    steps = [record["global_step"] for record in validated.records]
    assert steps == [128, 256, 384] == validated.done


def test_validation_runs_every_second_iteration_and_in_the_last(validated):
    figures = [record.get("valid/sharpe") for record in validated.records]
    assert figures == [None, 3.0 * 128, 4.0 * 128]


@pytest.mark.parametrize("name", JOBS)
def test_a_stopped_and_resumed_run_equals_an_uninterrupted_one_bit_for_bit(name, world, tmp_path):
    whole, _ = run(make_job(name, tmp_path / "whole", iterations=4, dtype=torch.float32), world)
    job = make_job(name, tmp_path / "parts", iterations=4, dtype=torch.float32)
    first, _ = run(job, world, stop_at=2)
    saved = job.run_dir / "checkpoints" / "iteration_00000002.pt"
    assert first.iteration == 2 and saved.exists()
    resumed, _ = run(job, world, restore_from=saved)
    assert not torch.equal(parameters_of(resumed), parameters_of(first))
    # The state holds policy, carry, environments, optimizer, normalisers and counters.
    assert differences(resumed.state(), whole.state()) == []


@pytest.fixture
def warmed_up(world):
    """Return a Training after its warm-up, and its carry and parameters before."""
    training = Recording(make_job("trading, clstm"), world)
    carry = {name: value.clone() for name, value in vars(training.carry).items()}
    parameters = parameters_of(training).clone()
    training.warm_up_normalizers()
    return training, carry, parameters


def test_the_seed_chooses_the_first_day(world):
    first, other = (Recording(make_job("trading, clstm", seed=seed), world) for seed in (1, 2))
    assert not torch.equal(first.carry.obs, other.carry.obs)


def test_the_warm_up_is_not_counted(warmed_up):
    training, _, _ = warmed_up
    assert (training.iteration, training.global_step, training.episodes) == (0, 0, 0)


def test_all_environments_reset_after_the_warm_up(warmed_up):
    training, carry, _ = warmed_up
    assert differences(vars(training.carry), carry) == []


def test_the_warm_up_does_not_train(warmed_up):
    training, _, parameters = warmed_up
    assert torch.equal(parameters_of(training), parameters)


def test_the_warm_up_fills_both_normalisers(warmed_up):
    training, _, _ = warmed_up
    for normalizer in (training.normalizers.obs, training.normalizers.rewards):
        assert float(normalizer.moments.count) == STEPS_PER_ITERATION


def test_the_first_rollout_repeats_the_first_day_with_other_noise(warmed_up):
    training, carry, _ = warmed_up
    training.iteration = 1
    first = training.collect()
    assert torch.equal(first.raw_obs[0], carry["obs"])
    assert not torch.equal(first.actions[0], training.rollouts[0].actions[0])


def test_an_update_adds_raw_observations_and_discounted_returns_to_the_normalisers(warmed_up):
    training, _, _ = warmed_up
    training.iteration = 1
    training.update(training.collect())
    for normalizer, name in (
        (training.normalizers.obs, "raw_obs"),
        (training.normalizers.rewards, "discounted_returns"),
    ):
        samples = torch.cat([getattr(rollout, name) for rollout in training.rollouts])
        rows = samples.double().reshape(2 * STEPS_PER_ITERATION, -1)
        variance, mean = torch.var_mean(rows, dim=0, correction=0)
        torch.testing.assert_close(normalizer.moments.mean, mean, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(normalizer.moments.variance, variance, rtol=1e-9, atol=1e-12)


def advantages_of(world, steps, norm_adv=True, **options):
    """Return each update's advantages and the standard deviation of warm-up returns."""
    ppo = PPOConfig(min_adv_std=100.0, norm_adv=norm_adv)
    training = Recording(make_job("trading, mlp", ppo=ppo, **options), world)
    training.warm_up_normalizers()
    advantages, deviation = [], training.normalizers.return_deviation()
    training.ppo.update = lambda batch, *_: advantages.append(batch.steps["advantages"]) or {}
    for training.iteration in range(1, steps + 1):
        training.update(training.collect())
    return advantages, deviation


def test_the_lower_bound_of_the_advantage_deviation_is_a_multiple_of_that_of_returns(world):
    (raw,), _ = advantages_of(world, 1, norm_adv=False)
    (divided,), deviation = advantages_of(world, 1)
    torch.testing.assert_close(divided, (raw - raw.mean()) / (100.0 * deviation))


def test_before_returns_are_known_the_advantage_deviation_has_no_lower_bound(world):
    # Without normalisers, no returns are known before update 1.
    nothing = {"normalize_obs": False, "normalize_rewards": False}
    (first, second), _ = advantages_of(world, 2, **nothing)
    assert first.std(correction=0) == pytest.approx(1.0) and second.std(correction=0) < 0.1


@pytest.fixture(scope="module")
def five_episodes(world, tmp_path_factory):
    """Train until 5 episodes have ended; return the writer."""
    run_dir = tmp_path_factory.mktemp("five_episodes")
    job = make_job("trading, clstm", run_dir, total_steps=0, num_episodes=5)
    scripts = [[(5, TERMINATED)], [(16, TRUNCATED)], *[[(100, TERMINATED)]] * (NUM_ENVS - 2)]
    _, writer = run(scripted(job, scripts), world)
    return writer


def test_the_return_of_an_episode_sums_unnormalised_rewards(five_episodes):
    # Environment 0 has episodes of 5 steps; an unnormalised reward is 2 * (10 * episode + age).
    returns = [2 * (5 * 10 * episode + 10) for episode in (0, 1, 2)]
    returns.append(2 * (16 * 100 + 120))  # environment 1 has one episode of 16 steps
    assert five_episodes.records[0]["episode/return"] == pytest.approx(sum(returns) / 4)


def test_an_episode_counts_in_the_rollout_in_which_it_ends(five_episodes):
    for record in five_episodes.records:
        assert record["episode/count"] == 4
        assert record["episode/length"] == pytest.approx((3 * 5 + 16) / 4)


def test_training_ends_after_the_iteration_with_enough_episodes(five_episodes):
    totals = [record["episode/total"] for record in five_episodes.records]
    assert five_episodes.done == totals == [4, 8]


def test_training_improves_the_policy(world, tmp_path):
    """Within 12 iterations the policy learns that larger actions earn larger rewards."""

    class Sign(ScriptedEnv):
        def step(self, actions):
            obs, _, terminated, truncated, info = super().step(actions)
            rewards = actions[:, 0].clamp(-1, 1).double()
            return obs, rewards, terminated, truncated, info | {"raw_rewards": rewards}

    job = make_job("trading, clstm", tmp_path, iterations=12, ppo=PPOConfig(learning_rate=0.01))
    _, writer = run(scripted(job, [[(8, TRUNCATED)]] * NUM_ENVS, Sign), world)
    returns = [record["episode/return"] for record in writer.records]
    assert returns[0] < 3.0 and returns[-1] > 6.0  # the highest possible return is 8


def test_a_resume_without_snapshots_starts_new_episodes(world, tmp_path):
    seeds = []

    class Noting(ScriptedEnv):
        def reset(self, *, seed):
            seeds.append(seed)
            return super().reset()

    job = scripted(
        make_job("trading, clstm", tmp_path, iterations=3), [[(8, TRUNCATED)]] * NUM_ENVS, Noting
    )
    run(job, world, stop_at=2)
    run(job, world, restore_from=tmp_path / "checkpoints" / "iteration_00000002.pt")
    assert seeds[0] != seeds[-1] and len(set(seeds[-1])) == NUM_ENVS


def test_restarts_before_a_resume_are_not_counted_again(world, tmp_path, monkeypatch):
    job = make_job("trading, clstm", tmp_path, iterations=3)
    run(job, world, stop_at=2)
    monkeypatch.setattr(TradingVectorEnv, "restarts", [1] * NUM_ENVS)
    saved = tmp_path / "checkpoints" / "iteration_00000002.pt"
    _, writer = run(job, world, restore_from=saved)
    assert writer.records[0]["env/restarts"] == 0


def test_metrics_of_the_warm_up_are_not_in_the_first_record(world, tmp_path):
    class Counting(ScriptedEnv):
        steps = 0

        def step(self, actions):
            self.steps += 1
            return super().step(actions)

        def take_metrics(self):
            taken, self.steps = self.steps, 0
            return {"steps": (taken, 1)}

    job = make_job("trading, clstm", tmp_path, iterations=1)
    _, writer = run(scripted(job, [[(8, TRUNCATED)]] * NUM_ENVS, Counting), world)
    assert writer.records[0]["env/steps"] == NUM_STEPS


def test_training_stops_at_a_metric_that_equals_the_limit(world, tmp_path):
    callbacks = UserCallbacks({}, RunDir(tmp_path), None, world, ("valid/return", 500.0))
    decisive = [{"valid/return": value} for value in (499.0, 500.0)]
    reasons = [callbacks.on_iteration({}, metrics) for metrics in decisive]
    assert reasons == ["", "valid/return 500 has reached 500"]
