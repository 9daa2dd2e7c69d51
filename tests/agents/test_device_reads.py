"""Count how often the host reads device values: each read waits for all GPU work."""

from unittest import mock

import pytest
from agents_ranks import make_job
from operators import counted_reads

from agents.learner.rollout import STEPS_PER_READ
from agents.learner.trainer import Training
from rl_dist.strategies import strategy


@pytest.mark.parametrize(
    "name, checks",  # a batch of tensors is checked once per rollout
    [
        ("trading, clstm", {}),
        ("trading, mlp", {}),
        ("walk, clstm, batch of tensors", {"tolist": 1}),
    ],
)
def test_the_host_reads_once_in_8_steps_once_after_a_rollout_and_once_after_an_update(
    name, checks, world
):
    """No other vector step and no gradient step reads a device value."""
    job = make_job(name)
    training = Training(job, job.make_env, world)
    training.warm_up_normalizers()
    # Choose the code paths for GPUs: the code paths for the CPU may read values in every step.
    with mock.patch.object(strategy, "step_if", lambda finite, optimizer: optimizer.step()):
        gpu_reads = mock.patch.dict(STEPS_PER_READ, cpu=STEPS_PER_READ["cuda"])
        with gpu_reads, counted_reads() as collecting:
            collected = training.collect()
        with counted_reads() as updating:
            training.update(collected)
    num_reads = job.config.train.num_steps // STEPS_PER_READ["cuda"] + 1
    assert +collecting == {"cpu": num_reads, **checks} and +updating == {"tolist": 1}
