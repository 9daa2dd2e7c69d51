"""Memory: what is computed is what the real loop then takes, and what is said to fit fits."""

import dataclasses
import functools
from pathlib import Path

import pytest
import torch

from agents.dry_run.memory import (
    Shapes,
    TrackedTensors,
    compute_memory,
    count_parameters,
    dry_run,
    largest_sizes,
    probe,
)
from agents.policy import Policy, PolicyConfig
from agents.run.config import RunConfig
from agents.sizes import TrainConfig, share_out
from agents.trainer import Job
from envs.task import TaskConfig
from envs.trading.simulated_market import SimulatedMarketConfig
from rl_dist.launch.launcher import LaunchConfig
from rl_dist.process_group.world import close_world, open_world

SIZES = {"num_envs": 16, "num_steps": 32, "bptt_steps": 16, "batch_size": 16}
CARTPOLE, TRADING = TaskConfig(env="CartPole-v1"), TaskConfig()
CONFIGS = {
    "cartpole, clstm": (CARTPOLE, PolicyConfig(hidden_size=64), {}),
    "cartpole, small clstm, long rollout": (CARTPOLE, PolicyConfig(hidden_size=16), {"num_steps": 256}),
    "cartpole, mlp": (CARTPOLE, PolicyConfig(policy="mlp", hidden_size=256), {}),
    "trading, large clstm": (TRADING, PolicyConfig(hidden_size=256), {}),
    "trading, window": (TRADING, PolicyConfig(hidden_size=32, feature_window=8), {}),
    "recall, no memory": (TaskConfig(env="Recall-v0"), PolicyConfig(hidden_size=64, memory=False), {}),
    "pendulum, clstm": (TaskConfig(env="Pendulum-v1"), PolicyConfig(hidden_size=32), {}),
    "recall, clstm in float64": (TaskConfig(env="Recall-v0"), PolicyConfig(hidden_size=64), {}),
}


def job_of(name):
    task, policy, changed = CONFIGS[name]
    precision = "fp64" if "float64" in name else "auto"
    config = RunConfig(
        train=TrainConfig(**SIZES | changed),
        policy=policy,
        task=task,
        market=SimulatedMarketConfig(num_worlds=2),
        launch=LaunchConfig(precision=precision),
    )
    make_env = functools.partial(config.prepare_task().training_env, device="cpu")
    dtype = config.launch.dtype
    return Job(train=config.train, policy=policy, ppo=config.ppo, make_env=make_env, run_dir=Path("."), dtype=dtype)


@pytest.fixture
def world():
    threads = torch.get_num_threads()
    world = open_world("cpu")
    torch.set_num_threads(1)
    yield world
    close_world(world)
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_computed_peak_is_within_a_tenth_of_the_measured_one(name, world):
    job = job_of(name)
    need = compute_memory(
        job.policy, job.train, share_out(job.train, 0, 1), probe(job.make_env), itemsize=job.dtype.itemsize
    )
    measured = dry_run(job, world)
    assert need.peak == pytest.approx(measured.peak, rel=0.1)
    assert (need.parameters, need.gradients) == (measured.parameters, measured.gradients)
    assert need.optimizer == pytest.approx(measured.optimizer, rel=0.01)  # Adam counts its steps, too
    assert need.moment != "start"


@pytest.mark.parametrize("discrete", [True, False])
@pytest.mark.parametrize("policy", [PolicyConfig(hidden_size=24), PolicyConfig(hidden_size=24, policy="mlp")])
def test_parameters_are_counted_as_the_policy_has_them(policy, discrete):
    from gymnasium import spaces

    space = spaces.Discrete(3) if discrete else spaces.Box(-1, 1, (3,))
    expected = sum(p.numel() for p in Policy(policy, 7, space).parameters())
    assert count_parameters(policy, 7, 3, discrete) == expected


def test_tensors_are_tracked_until_they_are_gone():
    with TrackedTensors() as tracked:
        kept = torch.zeros(1000)
        view = kept[10:]
        for _ in range(3):
            torch.zeros(500)
        assert tracked.live == 4000
        del kept
        assert tracked.live == 4000  # the view holds it
        del view
        assert tracked.live == 0
    assert tracked.peak == 6000


def need_of(train, ranks=1):
    shapes = Shapes(num_obs=10, num_actions=2, discrete=True)
    return compute_memory(PolicyConfig(hidden_size=32), train, share_out(train, 0, ranks), shapes).peak


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("scaling", ["strong", "weak"])
def test_the_largest_sizes_fit_and_a_tenth_more_does_not(ranks, scaling):
    train = TrainConfig(num_envs=24, batch_size=24, scaling=scaling)
    limit = 300 * 2**20
    num_envs, batch_size = largest_sizes(train, ranks, lambda train: need_of(train, ranks), limit)
    for fits in ({"num_envs": num_envs}, {"num_envs": 0, "batch_size": batch_size}):
        assert need_of(dataclasses.replace(train, **fits), ranks) <= limit
    more_envs, more_slots = num_envs // 240 * 264 + 264, batch_size // 120 * 132 + 132
    for more in ({"num_envs": more_envs}, {"num_envs": 0, "batch_size": more_slots}):
        assert need_of(dataclasses.replace(train, **more), ranks) > limit


def test_nothing_fits_into_no_memory():
    assert largest_sizes(TrainConfig(num_envs=8, batch_size=8), 1, need_of, 1000) == (0, 0)


def test_what_fits_on_a_rank_grows_with_the_number_of_ranks():
    train = TrainConfig(num_envs=24, batch_size=24)
    found = [largest_sizes(train, ranks, lambda t, ranks=ranks: need_of(t, ranks), 300 * 2**20) for ranks in (1, 4)]
    assert found[1][0] > 3 * found[0][0] and found[1][1] > 3 * found[0][1]
