"""Training on one GPU has the same results as training on the CPU.

The report of `make test-gpu` includes the figures that these tests record.
"""

import json
import math
import warnings
from dataclasses import replace

import pytest
import torch
from agents_ranks import Recording
from gpu_jobs import (
    CARTPOLE,
    DEVICE,
    ITERATIONS,
    TRADING,
    job_on,
    largest_difference,
    parameters_on_cpu,
    train_rank,
    trained,
    world_on,
)
from torch import nn
from train_runs import REPO, printed_error, records, start, train_here

from rl_dist.checkpoint.store import load_checkpoint
from rl_dist.launch.ranks import launch
from rl_dist.strategies.precision import set_tf32

PRECISIONS = {  # largest allowed relative difference of the value loss from its value in fp32
    "tf32": 0.1,
    "bf16": 0.1,
    "fp16": 0.5,  # the mean loss excludes steps that overflow
}


@pytest.fixture
def training(world, tmp_path):
    """Return the Training of a trading task, before its first iteration."""
    return Recording(job_on(DEVICE, TRADING, tmp_path), world)


@pytest.mark.parametrize("name", [TRADING, CARTPOLE])
def test_training_on_a_gpu_equals_training_on_the_cpu(name, tmp_path, record_property):
    parameters = []
    for device in (DEVICE, "cpu"):
        with world_on(device) as world:
            options = {"iterations": ITERATIONS, "run_dir": tmp_path / device}
            parameters.append(parameters_on_cpu(trained(world, name=name, **options)))
    record_property("largest difference", largest_difference(*parameters))
    # Rounding on a GPU differs by about 1e-16; 12 Adam steps amplify this difference.
    torch.testing.assert_close(*parameters, rtol=1e-6, atol=1e-8)


def test_a_run_can_be_resumed_on_the_gpu_and_on_the_cpu(world, tmp_path, record_property):
    options = {"iterations": 2, "checkpoint_every": 1}
    whole = parameters_on_cpu(trained(world, run_dir=tmp_path / "whole", **options))
    half, last = sorted(tmp_path.glob("whole/checkpoints/iteration_*.pt"))
    resumed = parameters_on_cpu(trained(world, half, run_dir=tmp_path / "resumed", **options))
    difference = largest_difference(resumed, whole)
    record_property("largest difference", difference or "none (equal bit for bit)")
    assert difference <= 1e-6  # cuDNN may sum gradients in another order

    state = load_checkpoint(last)
    assert {value.device.type for value in state["policy"].values()} == {"cpu"}
    on_cpu = Recording(job_on("cpu", run_dir=tmp_path), replace(world, device=torch.device("cpu")))
    on_cpu.restore(state)
    assert torch.equal(parameters_on_cpu(on_cpu), whole)


@pytest.mark.timeout(600)
def test_two_ranks_that_share_a_gpu_train_like_one(world, tmp_path, record_property):
    alone = parameters_on_cpu(trained(world, run_dir=tmp_path, iterations=ITERATIONS))
    arguments = str(tmp_path), {"mode": "ddp"}, (0, 0), "gloo"
    assert launch(train_rank, arguments, num_ranks=2) == 0
    ranks = [torch.load(tmp_path / f"rank_{rank}.pt", weights_only=True) for rank in range(2)]
    assert ranks[0]["hash"] == ranks[1]["hash"]
    difference = largest_difference(ranks[0]["parameters"], alone)
    record_property("largest difference", difference)
    assert difference < 1e-6


@pytest.mark.parametrize("precision", PRECISIONS)
def test_training_in_lower_precision_stays_close_to_fp32(
    precision, world, tmp_path, record_property
):
    if precision != "fp16" and torch.cuda.get_device_capability()[0] < 8:
        pytest.skip("this GPU has neither TF32 nor bf16")
    losses = {}
    for name in ("fp32", precision):
        options = {"iterations": 1, "strategy": {"precision": name}, "dtype": torch.float32}
        recording = trained(world, run_dir=tmp_path / name, **options)
        losses[name] = recording.losses[0]["loss/value"]
    record_property("value loss of the first iteration", losses)
    assert math.isfinite(losses[precision])
    difference = abs(losses[precision] - losses["fp32"])
    assert difference < PRECISIONS[precision] * losses["fp32"]


def test_fp32_means_fp32_and_tf32_means_tf32(record_property):
    torch.manual_seed(0)
    matrix = torch.randn(512, 512, device=DEVICE)
    exact = (matrix.double() @ matrix.double()).float()
    lstm, wide = nn.LSTM(512, 64).to(DEVICE), nn.LSTM(512, 64).to(DEVICE).double()
    wide.load_state_dict({name: value.double() for name, value in lstm.state_dict().items()})
    outputs = wide(matrix[:, None].double())[0].float()
    errors = {}
    for precision in ("tf32", "fp32"):
        set_tf32(precision)
        errors[precision] = [
            largest_difference(matrix @ matrix, exact),
            largest_difference(lstm(matrix[:, None])[0], outputs),
        ]
    record_property("largest errors of a matrix product and of an LSTM", errors)
    assert errors["fp32"][0] < 1e-3 and errors["fp32"][1] < 1e-4
    if torch.cuda.get_device_capability()[0] >= 8:
        assert errors["tf32"][0] > 2 * errors["fp32"][0]


def count_waits(work):
    """Call `work()`; return its result and how often it waited for the device."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        result = work()
        torch.cuda.set_sync_debug_mode("default")
    return result, sum("synchronizing" in str(warning.message) for warning in caught)


def test_no_vector_step_and_no_gradient_step_waits_for_the_device(training, record_property):
    rollout, while_collecting = count_waits(lambda: training.collect())
    _, while_updating = count_waits(lambda: training.update(rollout))
    record_property("waits per rollout and per update", (while_collecting, while_updating))
    assert while_collecting < training.run.config.train.num_steps and while_updating < 4


def test_out_of_memory_is_one_line(capsys, tmp_path):
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**26) / total)
    words = "--env CartPole-v1 --device cuda --num_gpus 1 --num_envs 64 --hidden_size 1024"
    try:
        assert train_here(*words.split(), "--run_dir", tmp_path) == 1
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert "ran out of memory" in printed_error(capsys)


@pytest.mark.timeout(600)
def test_the_setup_checker_accepts_a_run_that_then_trains_and_evaluates(
    capsys, tmp_path, record_property
):
    checker = start(REPO / "check_gpu_setup.py", "--num_gpus", "1", "--json")
    out, err = checker.communicate()
    report = json.loads(out)
    record_property("measured", report["measured"])
    assert checker.returncode == 0, (err, report["checks"])

    run_dir = tmp_path / "run"
    assert train_here("--quick", "--num_gpus", "1", "--run_dir", run_dir) == 0
    assert "1 rank(s) on" in capsys.readouterr().out
    metrics = records(run_dir)
    record_property("steps/s", f"{metrics[-1]['time/sps']:.0f}")
    assert (run_dir / "summary.json").exists() and all(r["loss/value"] >= 0 for r in metrics)
    assert any(record["ranks"][0]["gpu/memory_allocated_gib"] for record in metrics)
