"""A whole iteration on `cuda` tensors without a GPU: no devices mixed, waits and operators counted."""

import os

import pytest
import torch
from agents_ranks import parameters_of, world_of_one
from gpu_jobs import CARTPOLE, TRADING, job_on

if os.environ.get("REHEARSE") != "1":
    pytest.skip("make rehearse runs this, with a CUDA build of torch", allow_module_level=True)

from fake_gpu import fake_gpu

from agents.trainer import Training, train
from rl_dist.process_group.world import StopFlag, close_world, open_world
from rl_dist.telemetry.metrics import NullWriter

ROLLOUT, TRAINER, PPO = "agents/rollout.py", "agents/trainer.py", "agents/ppo.py"
PHASES = {  # the innermost function counts
    (ROLLOUT, "_next_values"): "end of rollout",
    (ROLLOUT, "collect"): "vector step",
    (TRAINER, "collect"): "end of rollout",
    (PPO, "update"): "gradient step",
    ("agents/gae.py", "gae"): "advantages",
    (TRAINER, "merge_statistics"): "normalisers",
    (TRAINER, "update"): "rest of the update",
    (TRAINER, "save"): "checkpoint",
    (TRAINER, "train"): "metrics, agreements",
}


def iterate(world, job):
    """One iteration of a training whose normalisers are filled; the training."""
    training = Training(job, world)
    training.warm_up_normalizers()
    training.iteration = 1
    if world.device.type == "cuda":
        GPU[0].operators.clear()
        GPU[0].waits.clear()
    train(training, NullWriter(), StopFlag())
    return training


GPU = []


def rehearse(job, num_gpus=1):
    GPU[:] = []
    with fake_gpu(num_gpus, PHASES) as gpu:
        GPU.append(gpu)
        world = open_world("cuda")
        try:
            training = iterate(world, job)
            steps = {"vector step": job.train.num_steps, "gradient step": 4}
            parameters = parameters_of(training).cpu()
        finally:
            close_world(world)
    return gpu, parameters, steps


def test_a(tmp_path):
    job = job_on("cuda", TRADING, tmp_path, iterations=1)
    gpu, parameters, steps = rehearse(job)
    for place, n in sorted(gpu.waits.items()):
        print(n, place)
    from collections import Counter
    c = Counter()
    for (phase, line), n in gpu.operators.items():
        c[phase] += n
    print(c)
    with world_of_one() as world:
        torch.testing.assert_close(parameters, parameters_of(iterate(world, job_on("cpu", TRADING, tmp_path/"cpu", iterations=1))), rtol=1e-10, atol=1e-12)
