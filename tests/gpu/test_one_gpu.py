"""What one GPU must do; the figures go into the report of `make test-gpu`."""

import json
import math
import time
import warnings
from dataclasses import replace

import pytest
import torch
from agents_ranks import Recording
from gpu_jobs import (
    CARTPOLE,
    ITERATIONS,
    TRADING,
    job_on,
    make_env_on,
    parameters_on_cpu,
    trained,
    world_on,
)
from gymnasium.spaces import Box
from policies import run_stepwise
from torch import nn
from train_runs import REPO, only_error, records, start, train_here

from agents.network.noise import action_noise
from agents.network.sequences import run_sequence
from agents.policy import Policy, PolicyConfig
from agents.rollout import collect
from agents.trainer import Training
from rl_dist.checkpoint.store import load_checkpoint
from rl_dist.process_group.collectives import (
    all_gather_json,
    all_reduce_max,
    all_reduce_sum,
    gather_dicts,
)
from rl_dist.strategies.precision import set_tf32
from rl_dist.telemetry.monitor import Monitor, sources_of

HALF = "checkpoints/iteration_00000001.pt"
SINGLE = {"dtype": torch.float32}
# The GPU rounds otherwise, in float64 by 1e-16; Adam and 12 steps make more of it.
CLOSE = {"rtol": 1e-6, "atol": 1e-8}


def largest_difference(one, other):
    return (one - other).abs().max().item()


@pytest.mark.parametrize("name", [TRADING, CARTPOLE])
def test_a_training_gives_the_numbers_of_the_cpu(name, tmp_path, record_property):
    found = []
    for device in ("cuda", "cpu"):
        with world_on(device) as world:
            training = trained(world, name=name, iterations=ITERATIONS, run_dir=tmp_path / device)
            found.append(parameters_on_cpu(training))
    record_property("largest difference", largest_difference(*found))
    torch.testing.assert_close(*found, **CLOSE)


def test_a_resumed_run_goes_on_as_if_never_interrupted(world, tmp_path, record_property):
    options = {"iterations": 2, "checkpoint_every": 1}
    whole = parameters_on_cpu(trained(world, run_dir=tmp_path / "whole", **options))
    resumed = trained(world, tmp_path / "whole" / HALF, run_dir=tmp_path / "resumed", **options)
    difference = largest_difference(parameters_on_cpu(resumed), whole)
    record_property("largest difference", difference or "none, bit for bit")
    assert difference <= 1e-6  # cuDNN may add gradients in another order


def test_a_checkpoint_of_the_gpu_goes_on_on_the_cpu(world, tmp_path):
    training = trained(world, run_dir=tmp_path, iterations=1)
    state = load_checkpoint(tmp_path / HALF)
    assert {value.device.type for value in state["policy"].values()} == {"cpu"}
    on_cpu = Training(job_on("cpu", run_dir=tmp_path), replace(world, device=torch.device("cpu")))
    on_cpu.restore(state)
    assert torch.equal(parameters_on_cpu(on_cpu), parameters_on_cpu(training))


@pytest.mark.parametrize("precision", ["tf32", "bf16", "fp16"])
def test_a_precision_trains_nearly_as_fp32(precision, world, tmp_path, record_property):
    if precision != "fp16" and torch.cuda.get_device_capability()[0] < 8:
        pytest.skip("this GPU has neither TF32 nor bf16")
    losses = {}
    for name in ("fp32", precision):
        options = {"iterations": 1, "strategy": {"precision": name}, **SINGLE}
        training = trained(world, kind=Recording, run_dir=tmp_path / name, **options)
        losses[name] = training.losses[0]["loss/value"]
    record_property("value loss of the first iteration", losses)
    assert math.isfinite(losses[precision])
    # steps that overflow are left out of fp16's mean
    bound = 0.5 if precision == "fp16" else 0.1
    assert abs(losses[precision] - losses["fp32"]) < bound * losses["fp32"]


def test_fp32_means_fp32_and_tf32_means_tf32(record_property):
    torch.manual_seed(0)
    matrix = torch.randn(512, 512, device="cuda")
    exact = (matrix.double() @ matrix.double()).float()
    lstm = nn.LSTM(512, 64).cuda()
    wide = nn.LSTM(512, 64).cuda().double()
    wide.load_state_dict({name: value.double() for name, value in lstm.state_dict().items()})
    outputs = wide(matrix[:, None].double())[0].float()
    errors = {}
    for precision in ("tf32", "fp32"):
        set_tf32(precision)
        errors[precision] = [
            largest_difference(matrix @ matrix, exact),
            largest_difference(lstm(matrix[:, None])[0], outputs),
        ]
    record_property("largest errors of a product and of an LSTM", errors)
    assert errors["fp32"][0] < 1e-3 and errors["fp32"][1] < 1e-4
    if torch.cuda.get_device_capability()[0] >= 8:
        assert errors["tf32"][0] > 2 * errors["fp32"][0]


def test_vector_steps_do_not_wait_for_the_device(world, tmp_path):
    job = job_on("cuda", TRADING, tmp_path)
    training = Training(job, world)
    steps = job.train.num_steps
    noise = action_noise(training.action_space, 1, 0, job.train.num_envs, 0, steps)
    done = []

    def on_step():  # from the end of the first step to the end of the last one
        done.append(None)
        torch.cuda.set_sync_debug_mode("error" if len(done) < steps else "default")

    parts = training.policy, training.normalizers.obs, training.env, training.carry
    try:
        collect(*parts, noise.to(world.device), job.train.bptt_steps, job.ppo.gamma, on_step)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(done) == steps


def test_an_update_waits_for_the_device_only_to_read_the_losses(world, tmp_path, record_property):
    training = Training(job_on("cuda", TRADING, tmp_path), world)
    rollout = training.collect(lifetime_step=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        training.update(rollout)
        torch.cuda.set_sync_debug_mode("default")
    waits = sum("synchronizing" in str(warning.message) for warning in caught)
    record_property("waits in an update", waits)
    assert waits < 4  # the losses are read once


def test_out_of_memory_is_one_line(monkeypatch, capsys, tmp_path):
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**26) / total)
    words = "--env CartPole-v1 --device cuda --num_gpus 1 --num_envs 64 --hidden_size 1024"
    try:
        assert train_here(monkeypatch, *words.split(), "--run_dir", tmp_path / "run") == 1
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert "ran out of memory" in only_error(capsys.readouterr().err)


def test_the_clock_splits_a_gradient_step(world, tmp_path, record_property):
    training = Training(job_on("cuda", TRADING, tmp_path), world)
    rollout = training.collect(lifetime_step=0)
    torch.cuda.synchronize()
    began_s = time.perf_counter()
    training.update(rollout)
    torch.cuda.synchronize()
    took_s = time.perf_counter() - began_s
    phases = training.ppo.clock.read()
    parts = [phases[f"time/{name}_s"] for name in ("forward", "backward", "optimizer")]
    record_property("forward, backward, optimizer, update in s", [*parts, took_s])
    assert min(parts) > 0.0 and sum(parts) < 1.05 * took_s


def test_the_trading_environment_gives_the_bits_of_the_cpu():
    gpu, cpu = make_env_on("cuda", "trading", 8), make_env_on("cpu", "trading", 8)
    seeds = list(range(8))
    gpu.reset(seed=seeds)
    cpu.reset(seed=seeds)
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        actions = torch.rand(8, 2, generator=generator) * 2.0 - 1.0
        on_gpu, on_cpu = gpu.step(actions.to("cuda")), cpu.step(actions)
        torch.testing.assert_close(on_gpu[0].cpu(), on_cpu[0], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(on_gpu[1].cpu(), on_cpu[1], rtol=1e-12, atol=1e-12)
        assert torch.equal(on_gpu[3].cpu(), on_cpu[3])
        on_gpu, on_cpu = gpu.get_state(), cpu.get_state()
        assert all(torch.equal(on_gpu[name].cpu(), on_cpu[name]) for name in ("shares", "cash"))


def test_sequences_equal_single_steps_and_so_do_their_gradients(world):
    torch.manual_seed(0)
    policy = Policy(PolicyConfig(hidden_size=16), 5, Box(-1.0, 1.0, (2,))).double().to("cuda")
    obs = torch.randn(12, 7, 5, dtype=torch.float64).to("cuda")
    state = torch.randn(7, 6, 16, dtype=torch.float64).to("cuda")
    starts = (torch.rand(12, 7) < 0.2).to("cuda")
    gradients, outputs = [], []
    for run in (run_sequence, run_stepwise):
        policy.zero_grad()
        found = run(policy.network, obs, state, starts)
        sum(part.square().sum() for part in found).backward()
        outputs.append([part.detach().cpu() for part in found])
        gradients.append([p.grad.cpu() for p in policy.parameters() if p.grad is not None])
    torch.testing.assert_close(*outputs, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-9)


def test_the_cell_that_acts_equals_the_lstm_that_learns():
    torch.manual_seed(0)
    policy = Policy(PolicyConfig(hidden_size=16), 5, Box(-1.0, 1.0, (2,))).double().to("cuda")
    obs = torch.randn(7, 5, dtype=torch.float64).to("cuda")
    state = torch.randn(7, 6, 16, dtype=torch.float64).to("cuda")
    actions, _, values, after = policy.act(obs, state, torch.zeros(7, dtype=torch.bool).to("cuda"))
    (actor, learned), learned_after = policy.network(obs[None], state)
    for one, other in ((actions, actor[0]), (values, learned[0]), (after, learned_after)):
        torch.testing.assert_close(one.cpu(), other.detach().cpu(), rtol=1e-10, atol=1e-12)


def test_collectives_over_nccl_bring_tensors_back_where_they_were(world):
    given = {"here": torch.ones(3), "there": torch.full((2, 2), 2.0).to("cuda"), "number": 0.5}
    sums = all_reduce_sum(given, world)
    assert [sums[name].device.type for name in given] == ["cpu", "cuda", "cpu"]
    assert sums["there"].sum().item() == 8.0 and float(sums["number"]) == 0.5
    rows = gather_dicts({"x": torch.arange(4).to("cuda"), "y": torch.ones(2, 3)}, world)
    assert (
        rows is not None and rows["x"].tolist() == [0, 1, 2, 3] and rows["x"].device.type == "cpu"
    )
    assert all_gather_json({"rank": 0}, world) == [{"rank": 0}] and all_reduce_max(7, world) == 7


def test_the_monitor_reads_the_gpu(world, record_property):
    kept = torch.ones(2**20, device="cuda")
    monitor = Monitor(sources_of(world.device), 0.05)
    time.sleep(1.0)
    found = monitor.take()
    monitor.close()
    record_property("values", found)
    assert found["gpu/memory_allocated_gib"] >= kept.nbytes / 2**30


def test_a_whole_run_trains_evaluates_and_says_how_fast(
    monkeypatch, capsys, tmp_path, record_property
):
    run_dir = tmp_path / "run"
    assert train_here(monkeypatch, "--quick", "--num_gpus", "1", "--run_dir", run_dir) == 0
    assert "over NCCL" in capsys.readouterr().out
    found = records(run_dir)
    record_property("steps/s", f"{found[-1]['time/sps']:.0f}")
    assert (run_dir / "summary.json").exists() and all(r["loss/value"] >= 0 for r in found)


@pytest.mark.timeout(600)
def test_the_setup_checker_finds_that_it_can_train(record_property):
    checker = start(REPO / "check_gpu_setup.py", "--num_gpus", "1", "--json")
    out, err = checker.communicate()
    found = json.loads(out)
    record_property("measured", found["measured"])
    assert checker.returncode == 0, (err, found["checks"])
