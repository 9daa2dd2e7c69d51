"""Test that environment workers, in 1 or 2 groups, do not change training."""

from dataclasses import replace

import pytest
import torch
from agents_ranks import make_job, parameters_of
from test_trainer import assert_same_state, run

from envs.workers.env import WorkerEnv


def in_workers(job, workers, groups=1):
    if not workers:
        return job

    def make_env(num_envs, env_offset):
        options = {"env_kwargs": {"delay": 3}}
        return WorkerEnv(
            num_envs, workers, groups, env_id="Recall-v0", env_offset=env_offset, options=options
        )

    return replace(job, make_env=make_env)


def trained(job, world, **options):
    training, _ = run(job, world, **options)
    state = training.state()
    training.env.close()
    return training, state


def test_training_is_the_same_on_any_number_of_workers_also_through_a_resume(world, tmp_path):
    job = make_job("recall, clstm", tmp_path / "in place", iterations=4, dtype=torch.float32)
    whole, wanted = trained(job, world)
    for number, (first, then) in enumerate([(1, 3), (3, 0), (0, 2)]):
        job = replace(job, run_dir=tmp_path / str(number))
        trained(in_workers(job, first), world, stop_at=2)
        saved = job.run_dir / "checkpoints" / "iteration_00000002.pt"
        resumed, state = trained(in_workers(job, then), world, restore_from=saved)
        assert resumed.iteration == 4
        assert torch.equal(parameters_of(resumed), parameters_of(whole))
        assert_same_state(state, wanted)


@pytest.mark.parametrize("name", ["recall, clstm", "recall, window, strata of 2"])
def test_two_groups_train_as_one_to_rounding_and_alike_on_any_number_of_workers(
    name, world, tmp_path
):
    job = make_job(name, tmp_path, iterations=3)
    one, _ = trained(job, world)
    two, state = trained(in_workers(job, 3, groups=2), world)
    torch.testing.assert_close(parameters_of(two), parameters_of(one), rtol=0, atol=1e-12)
    for mine, others in zip(two.rollouts, one.rollouts, strict=True):
        for field, value in vars(mine).items():
            if field != "episodes":  # `episodes` has one column per group
                torch.testing.assert_close(value, getattr(others, field), rtol=0, atol=1e-10)
    again, state_again = trained(in_workers(job, 1, groups=2), world)
    assert torch.equal(parameters_of(again), parameters_of(two))
    assert_same_state(state_again, state)
