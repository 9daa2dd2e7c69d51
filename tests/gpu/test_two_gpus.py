"""What two GPUs must do together, over NCCL."""

import pytest
import torch
from gpu_jobs import ITERATIONS, parameters_on_cpu, train_rank, trained
from train_runs import REPO, start

from rl_dist.launch.bench import time_reductions
from rl_dist.launch.ranks import launch

DP = {"mode": "dp", "device_ids": (0, 1)}
STRATEGIES = {
    "ddp": {"mode": "ddp"},
    "ddp, bf16 gradients": {"mode": "ddp", "gradient_compression": "bf16"},
    "hybrid": {"mode": "hybrid"},
    "hybrid, two stages": {"mode": "hybrid", "hybrid_form": "pipeline"},
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", STRATEGIES)
def test_two_gpus_train_as_one(name, world, tmp_path, record_property):
    alone = parameters_on_cpu(trained(world, run_dir=tmp_path / "alone", iterations=ITERATIONS))
    assert launch(train_rank, (str(tmp_path), STRATEGIES[name]), num_ranks=2) == 0
    ranks = [torch.load(tmp_path / f"rank_{r}.pt", weights_only=True) for r in range(2)]
    assert ranks[0]["hash"] == ranks[1]["hash"]
    difference = (ranks[0]["parameters"] - alone).abs().max().item()
    record_property("largest difference", difference)
    assert difference < (0.1 if "bf16" in name else 1e-6)


def test_one_process_trains_on_two_gpus_as_on_one(world, tmp_path, record_property):
    alone = parameters_on_cpu(trained(world, run_dir=tmp_path / "alone", iterations=ITERATIONS))
    both = parameters_on_cpu(
        trained(world, run_dir=tmp_path / "dp", iterations=ITERATIONS, strategy=DP)
    )
    record_property("largest difference", (both - alone).abs().max().item())
    torch.testing.assert_close(both, alone, rtol=1e-6, atol=1e-8)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("what", "words"), [("fail", ("rank 1", "the roof is on fire")), ("hang", ("rank 1", "update"))]
)
def test_a_rank_that_fails_or_hangs_ends_the_job_and_is_named(what, words):
    job = start(REPO / "tests" / "gpu_jobs.py", what)
    _, err = job.communicate(timeout=240)
    assert job.returncode == 1
    assert all(word in err for word in words), err


def test_reductions_are_right_and_have_a_rate(record_property):
    sizes = (2**10, 2**20, 2**26)
    measured = time_reductions(2, sizes, "cuda")
    record_property("seconds by bytes", measured.gradients_s)
    record_property("small collectives of an iteration, seconds", measured.small_s)
    assert measured.backend == "nccl" and min(measured.gradients_s.values()) > 0.0
