"""Test that environment workers, in 1 or 2 groups, do not change the results."""

from dataclasses import replace

import pytest
import torch
from agents_ranks import make_job, parameters_of
from test_trainer import run

from envs.workers.env import WorkerEnv
from rl_dist.resume_check import differences


def trained(job, world, workers, groups=1, **options):
    """Train with `workers` environment workers; return the Training and its state.

    With 0 workers the environments run in this process.
    """

    def make_env(num_envs, env_offset):
        env = {"env_id": "Recall-v0", "env_offset": env_offset}
        return WorkerEnv(num_envs, workers, groups, options={"env_kwargs": {"delay": 3}}, **env)

    training, _ = run(replace(job, make_env=make_env) if workers else job, world, **options)
    state = training.state()
    training.env.close()
    return training, state


def test_training_is_the_same_with_any_number_of_workers_also_after_a_resume(world, tmp_path):
    job = make_job("recall, clstm", tmp_path / "in place", iterations=4, dtype=torch.float32)
    _, wanted = trained(job, world, 0)
    for number, (first, then) in enumerate([(1, 3), (3, 0), (0, 2)]):
        job = replace(job, run_dir=tmp_path / str(number))
        trained(job, world, first, stop_at=2)
        saved = job.run_dir / "checkpoints" / "iteration_00000002.pt"
        assert differences(trained(job, world, then, restore_from=saved)[1], wanted) == []


@pytest.mark.parametrize("name", ["recall, clstm", "recall, window, strata of 2"])
def test_two_groups_train_like_one_up_to_rounding_with_any_number_of_workers(name, world, tmp_path):
    job = make_job(name, tmp_path, iterations=3)
    one, _ = trained(job, world, 0)
    two, state = trained(job, world, 3, groups=2)
    torch.testing.assert_close(parameters_of(two), parameters_of(one), rtol=0, atol=1e-12)
    assert differences(trained(job, world, 1, groups=2)[1], state) == []
