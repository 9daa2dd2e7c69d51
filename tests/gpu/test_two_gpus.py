"""Training on two GPUs over NCCL has the same results as training on one."""

import pytest
import torch
from gpu_jobs import ITERATIONS, largest_difference, parameters_on_cpu, train_rank, trained
from train_runs import REPO, start

from rl_dist.launch.bench import time_reductions
from rl_dist.launch.ranks import launch

STRATEGIES = {  # name: (fields of StrategyConfig, largest allowed difference from a run on one GPU)
    "ddp": ({"mode": "ddp"}, 1e-6),
    "ddp, bf16 gradients": ({"mode": "ddp", "gradient_compression": "bf16"}, 0.1),
    "hybrid": ({"mode": "hybrid"}, 1e-6),
    "hybrid, two stages": ({"mode": "hybrid", "hybrid_form": "pipeline"}, 1e-6),
    # Strategy dp uses a single process for both GPUs.
    "dp": ({"mode": "dp", "device_ids": (0, 1)}, 1e-6),
}
FAULTS = {  # name of a function in gpu_jobs.py: strings that the error must contain
    "fail": ("rank 1", "the roof is on fire"),
    "hang": ("rank 1", "update"),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", STRATEGIES)
def test_two_gpus_train_like_one(name, world, tmp_path, record_property):
    strategy, bound = STRATEGIES[name]
    sizes = {"iterations": ITERATIONS}
    alone = parameters_on_cpu(trained(world, run_dir=tmp_path / "alone", **sizes))
    if name == "dp":
        both = parameters_on_cpu(trained(world, run_dir=tmp_path, strategy=strategy, **sizes))
    else:
        assert launch(train_rank, (str(tmp_path), strategy), num_ranks=2) == 0
        ranks = [torch.load(tmp_path / f"rank_{r}.pt", weights_only=True) for r in range(2)]
        assert ranks[0]["hash"] == ranks[1]["hash"]
        both = ranks[0]["parameters"]
    difference = largest_difference(both, alone)
    record_property("largest difference", difference)
    assert difference < bound


@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_rank_that_fails_or_hangs_ends_the_job_and_is_named(fault):
    job = start(REPO / "tests" / "gpu_jobs.py", fault)
    _, err = job.communicate(timeout=240)
    assert job.returncode == 1
    assert all(word in err for word in FAULTS[fault]), err


def test_reductions_are_right_and_have_a_rate(record_property):
    measured = time_reductions(2, (2**10, 2**20, 2**26), "cuda")
    record_property("seconds by bytes", measured)
    assert min(measured.values()) > 0.0
