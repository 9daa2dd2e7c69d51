"""Whole iterations on `cuda` tensors without a GPU: no device mixed, waits and operators counted.

`make rehearse` runs this and prints the tables. A wait is a point where the host stops for the
device; an operator is one that does work there, which is about one kernel.
"""

import os
from collections import Counter, defaultdict

import pytest
import torch
import torch.distributed as dist
from agents_ranks import parameters_of, world_of_one
from gpu_jobs import CARTPOLE, job_on
from gymnasium.spaces import Box

if os.environ.get("REHEARSE") != "1" or torch.version.cuda is None:
    pytest.skip("needs torch with CUDA: `make rehearse` runs it", allow_module_level=True)

from fake_gpu import fake_gpu

from agents.dry_run.batch_size import random_minibatch
from agents.policy import Policy, PolicyConfig
from agents.ppo import PPO, PPOConfig
from agents.trainer import Training, train
from rl_dist.parallel.config import StrategyConfig
from rl_dist.parallel.strategy import Strategy
from rl_dist.process_group.world import StopFlag, World, close_world, open_world
from rl_dist.telemetry.metrics import NullWriter

ROLLOUT, TRAINER = "agents/rollout.py", "agents/trainer.py"
PHASES = {  # of the iteration; the innermost function counts
    (ROLLOUT, "_complete"): "end of rollout",
    (ROLLOUT, "collect"): "vector step",
    (TRAINER, "collect"): "end of rollout",
    ("agents/network/minibatches.py", "minibatches"): "gradient step",
    ("agents/ppo.py", "step"): "gradient step",
    ("agents/ppo.py", "add"): "gradient step",
    ("agents/ppo.py", "update"): "rest of update",
    (TRAINER, "update"): "rest of update",
    (TRAINER, "save"): "checkpoint",
    (TRAINER, "train"): "metrics and agreements",
}
SINGLE = {"dtype": torch.float32}
REFRESHED = PPOConfig(update_epochs=3, refresh_states=True)
CASES = {  # a job, its GPUs, how far it may be from the same job on the CPU; None: other numbers
    "trading": ({}, 1, 1e-10),
    "an environment of the host": ({"name": CARTPOLE}, 1, 1e-10),
    "trading in fp32": (SINGLE, 1, 1e-4),
    "refreshed states": ({"name": CARTPOLE, "ppo": REFRESHED}, 1, 1e-10),
    "masks": ({"name": "levers, window, masks of info"}, 1, 1e-10),
    "dp on two GPUs": ({"strategy": {"mode": "dp", "device_ids": (0, 1)}}, 2, 1e-10),
    "bf16": ({"strategy": {"precision": "bf16"}} | SINGLE, 1, None),
    "fp16": ({"strategy": {"precision": "fp16"}} | SINGLE, 1, None),
}
# Waits per vector step, per gradient step and in the rest of an iteration, operators per vector
# step and per gradient step. More waits slow training down; whoever takes some away lowers the
# number. Operators are rounded up, for they differ between releases of torch.
MOST = {
    "trading": (0, 0, 2, 81, 242),
    "trading in fp32": (0, 0, 2, 79, 249),
    "an environment of the host": (1, 0, 2, 25, 230),
    "refreshed states": (1, 0, 2, 25, 223),
    "masks": (1, 0, 2, 34, 435),
    "dp on two GPUs": (0, 2, 2, 81, 725),
    "bf16": (0, 0, 2, 94, 295),
    "fp16": (0, 0, 2, 94, 315),
}
REST = ("end of rollout", "rest of update", "metrics and agreements")


def iterate(world, job, gpu=None):
    """One iteration of a training whose normalisers are filled."""
    training = Training(job, world)
    training.warm_up_normalizers()
    training.iteration = 1
    if gpu:
        gpu.operators.clear()
        gpu.waits.clear()
    train(training, NullWriter(), StopFlag())
    return training


def rehearse(job, num_gpus):
    """Counts, gradient steps and parameters of an iteration on GPUs that are not there."""
    with fake_gpu(num_gpus, PHASES) as gpu:
        world = open_world("cuda")
        try:
            training = iterate(world, job, gpu)
            steps = training.ppo.optimizer.state_dict()["state"][0]["step"].item()
            return gpu, int(steps), parameters_of(training).cpu()
        finally:
            close_world(world)


def table(title, gpu, units):
    """Operators and waits of each phase, and each line of ours that waits."""
    operators, waits = Counter(), defaultdict(Counter)
    for (phase, _), count in gpu.operators.items():
        operators[phase] += count
    for (phase, line, reason), count in gpu.waits.items():
        waits[phase][f"{line}: {reason}"] += count
    lines = [f"\n{title}", f"{'operators':>10}{'waits':>8}"]
    for phase in dict.fromkeys(gpu.phases.values()):
        unit = units.get(phase, 1)
        total = waits[phase].total() / unit
        lines.append(f"{operators[phase] / unit:>10.1f}{total:>8.2f}  {phase}")
        lines += [f"{'':>10}{n / unit:>8.2f}    {line}" for line, n in sorted(waits[phase].items())]
    return "\n".join(lines), operators, waits


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CASES)
def test_an_iteration_mixes_no_devices_and_waits_as_often_as_is_known(name, tmp_path, capsys):
    options, num_gpus, bound = CASES[name]
    job = job_on("cuda", run_dir=tmp_path / "gpu", iterations=1, **options)
    gpu, gradient_steps, parameters = rehearse(job, num_gpus)
    units = {"vector step": job.train.num_steps, "gradient step": gradient_steps}
    text, operators, waits = table(name, gpu, units)
    with capsys.disabled():
        print(text)
    found = [waits[phase].total() / units[phase] for phase in units]
    found.append(sum(waits[phase].total() for phase in REST))
    found += [operators[phase] / units[phase] for phase in units]
    assert all(count <= most for count, most in zip(found, MOST[name], strict=True)), found
    assert torch.isfinite(parameters).all()
    if bound is None:
        return
    options = {key: value for key, value in options.items() if key != "strategy"}
    job = job_on("cpu", run_dir=tmp_path / "cpu", iterations=1, **options)
    with world_of_one() as world:
        expected = parameters_of(iterate(world, job))
    torch.testing.assert_close(parameters, expected, rtol=bound, atol=bound)


@pytest.mark.timeout(900)
def test_shards_of_fsdp_stay_on_the_gpu_for_a_gradient_step(capsys):
    phases = {
        ("agents/ppo.py", "step"): "gradient step",
        ("rl_dist/parallel/strategy.py", "module_state"): "gather of weights",
    }
    with fake_gpu(2, phases) as gpu:
        # torch's fake group sends nothing: sizes and devices are right, numbers are not
        dist.init_process_group("fake", rank=0, world_size=2, store=dist.HashStore())
        try:
            world = World(0, 0, 2, torch.device("cuda", 0), "nccl")
            policy = Policy(PolicyConfig(hidden_size=8), 3, Box(-1.0, 1.0, (2,))).to(world.device)
            strategy = Strategy(StrategyConfig(mode="hybrid"), world)
            ppo = PPO(policy, PPOConfig(), strategy)
            ppo.step(random_minibatch(policy, 4, 6))
            shards = [parameter.to_local() for parameter in strategy.parameters]
            gradients = [parameter.grad.to_local() for parameter in strategy.parameters]
            state = strategy.module_state()
        finally:
            dist.destroy_process_group()
    text, operators, waits = table("hybrid, FSDP", gpu, {})
    with capsys.disabled():
        print(text)
    found = [waits[phase].total() for phase in phases.values()]
    found += [operators[phase] for phase in phases.values()]
    assert all(n <= most for n, most in zip(found, (1, 19, 270, 62), strict=True)), found
    assert {tensor.device.type for tensor in (*shards, *gradients)} == {"cuda"}
    assert sum(map(torch.numel, shards)) < 0.6 * sum(map(torch.numel, state.values()))
    assert {value.device.type for value in state.values()} == {"cpu"}


def test_what_mixes_devices_or_waits_is_found():
    with fake_gpu(2) as gpu:
        ones = torch.ones(3, device="cuda:0")
        with pytest.raises(RuntimeError, match="same device"):
            ones + torch.ones(3)
        with pytest.raises(RuntimeError, match="same device"):
            ones + torch.ones(3, device="cuda:1")
        assert not gpu.waits
        assert ones.sum().item() == 3.0 and ones.tolist() == [1.0] * 3
        assert ones[ones > 0].shape == (3,)
        assert torch.tensor([1.0], device="cuda").cpu().numpy() == [1.0]
        torch.cuda.current_stream().synchronize()
        reasons = Counter(reason for _, _, reason in gpu.waits.elements())
        known = {"local_scalar_dense": 1, "index by a mask": 1, "synchronize": 1}
        assert reasons == known | {"copy to cpu": 2, "copy to cuda": 1}
