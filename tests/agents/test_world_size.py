"""Test that training gives the same results on any number of ranks, over gloo."""

import functools
from dataclasses import replace

import agents_ranks
import pytest
import torch
from agents_ranks import (
    CASES,
    CLIPPED,
    ITERATIONS,
    JOBS,
    MORE_JOBS,
    NUM_ENVS,
    SLOW_JOBS,
    TWELVE,
    WITH_FILES,
    Recording,
    finish,
    make_job,
)

from rl_dist.checkpoint.store import load_checkpoint
from rl_dist.launch.ranks import launch

# The first test that needs a plan waits until all ranks of the plan have trained.
pytestmark = pytest.mark.timeout(600)
ALWAYS = [*JOBS, *MORE_JOBS]
STOPS = "recall, mlp, KL stop"
ON_FOUR = ["trading, clstm", STOPS]
PLANS = {  # one launch trains all cases of a plan: {number of ranks: names of cases}
    "default": {4: ON_FOUR, 3: [TWELVE], 2: [*ALWAYS, "weak"]},
    "slow": {4: [*(set(ALWAYS) - set(ON_FOUR)), *SLOW_JOBS], 2: [*SLOW_JOBS]},
}
TRAINED = [
    pytest.param(
        plan, name, num_ranks, id=f"{name}-{num_ranks}", marks=[pytest.mark.slow] * (plan == "slow")
    )
    for plan, sizes in PLANS.items()
    for num_ranks, names in sizes.items()
    for name in sorted(names)
    if name != "weak"
]


@pytest.fixture(scope="module")
def one_rank(world):
    """Return a function that trains a case on one rank and returns its record."""
    return functools.cache(lambda name: agents_ranks.record_of(name, world))


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Return a function that launches a plan and returns the folder with its records."""

    @functools.cache
    def launched(plan):
        path = tmp_path_factory.mktemp("ranks")
        assert launch(agents_ranks.train_all, (str(path), PLANS[plan]), max(PLANS[plan])) == 0
        return path

    return launched


@pytest.fixture(scope="module")
def ranks_of(directory):
    """Return a function that returns the records of all ranks of a world."""

    @functools.cache
    def load(plan, num_ranks):
        files = [directory(plan) / f"{num_ranks}_rank_{rank}.pt" for rank in range(num_ranks)]
        return [torch.load(path, weights_only=True) for path in files]

    return load


@pytest.fixture(scope="module")
def two(ranks_of):
    return ranks_of("default", 2)


def together(ranks, name, what):
    """Join the data of all ranks into a tensor [iterations, T, B of all ranks, ...]."""
    return torch.cat([rank[name][what] for rank in ranks], dim=2)


@pytest.mark.parametrize("plan, name, num_ranks", TRAINED)
def test_training_equals_that_of_one_rank(plan, name, num_ranks, one_rank, ranks_of):
    """Compare data, losses, learning rates, statistics and parameters.

    Parameters must have the same hash on all ranks after every gradient step.
    """
    ranks, alone, case = ranks_of(plan, num_ranks), one_rank(name), CASES[name]
    single = case.dtype == torch.float32
    assert torch.equal(together(ranks, name, "ends"), alone["ends"])
    if case.iterations == ITERATIONS:
        assert alone["ends"].any(0).any(0).all()  # each environment ended an episode
    assert len(alone["obs"][0].movedim(1, 0).flatten(1).unique(dim=0)) == alone["obs"].shape[2]
    actions = together(ranks, name, "actions")
    tolerance = {"rtol": 0, "atol": 1e-5 if single else 1e-10}
    torch.testing.assert_close(actions, alone["actions"], **tolerance)

    assert (alone["parameters"][1:] != alone["parameters"][:-1]).any(1).all()
    if "total_steps" not in case.options:  # cases with total_steps 0 end after num_episodes
        assert len(alone["parameters"]) == case.iterations
    hashes = ranks[0][name]["hashes"]
    assert len(set(hashes)) == len(hashes) >= 4
    for rank in ranks:
        assert rank[name]["hashes"] == hashes
        errors = (rank[name]["parameters"] - alone["parameters"]).abs().amax(1)
        assert single or errors[0] < 1e-12
        assert errors.max() < tolerance["atol"], errors
    if single:
        return

    # In every iteration the probability ratio is 1 before the first gradient step, because inputs,
    # states and normalisers are still the same as in the rollout. The normalisers only add the
    # samples of the rollout at the end of the update.
    samples = alone["obs"][0, :, :, 0].numel()
    for iteration, (kl, clip_fraction, count) in alone["firsts"].items():
        assert abs(kl) < 1e-14 and clip_fraction == 0.0
        warm_up = case.options.get("normalize_obs", True)
        assert count == (iteration - 1 + warm_up) * samples

    for what in ("obs", "rewards"):
        many = together(ranks, name, what)
        torch.testing.assert_close(many, alone[what], rtol=1e-8, atol=1e-8)
    for rank in ranks:
        for many, one in zip(rank[name]["losses"], alone["losses"], strict=True):
            assert many == pytest.approx(one, rel=1e-7, abs=1e-9)
        for what, value in rank[name]["moments"].items():
            torch.testing.assert_close(value, alone["moments"][what], rtol=1e-9, atol=1e-12)
            assert torch.equal(value, ranks[0][name]["moments"][what])


def test_the_kl_stop_ends_some_iterations_early_but_not_all_in_their_first_epoch(one_rank):
    steps = [losses["optim/steps"] for losses in one_rank(STOPS)["losses"]]
    assert min(steps) < 8 and max(steps) > 2, steps


def rates_of(record):
    return [losses["optim/learning_rate"] for losses in record["losses"]]


@pytest.mark.parametrize("name, iteration", WITH_FILES.items())
def test_a_run_of_two_ranks_continues_on_one_with_its_totals_and_learning_rate(
    name, iteration, directory, two, world, tmp_path
):
    """The checkpoint must hold the environments in global order."""
    folder = directory("default") / name / "checkpoints"
    path = folder / f"iteration_{iteration:08}.pt"
    num_envs = len(load_checkpoint(path)["carry"]["obs"])
    training = Recording(make_job(name, tmp_path), world, num_envs)
    record, stayed = finish(training, path).record(), two[0][name]
    assert record["obs"].shape[2] == NUM_ENVS
    assert rates_of(record) == rates_of(stayed)[iteration:]
    parameters = stayed["parameters"][iteration:]
    torch.testing.assert_close(record["parameters"], parameters, rtol=0, atol=1e-10)
    assert torch.equal(record["ends"], together(two, name, "ends")[iteration + 1 :])


def test_weak_scaling_on_two_ranks_is_one_rank_with_twice_the_sizes_and_the_scaled_rate(two, world):
    rates = rates_of(two[0]["weak"])
    # Linear scaling doubles the learning rate of 3e-3; annealing then lowers it.
    assert rates == pytest.approx([6e-3, 4.5e-3, 3e-3, 1.5e-3])
    sizes = {"scaling": "strong", "lr_scaling": "none", "num_envs": NUM_ENVS, "batch_size": 16}
    twice = replace(CLIPPED, learning_rate=6e-3)
    alone = agents_ranks.record_of("weak", world, ppo=twice, **sizes)
    assert rates_of(alone) == pytest.approx(rates)
    parameters = two[0]["weak"]["parameters"]
    torch.testing.assert_close(parameters, alone["parameters"], rtol=0, atol=1e-10)
    assert torch.equal(together(two, "weak", "actions"), alone["actions"])
