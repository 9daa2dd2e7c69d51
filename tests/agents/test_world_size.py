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
        (plan, name, num_ranks),
        id=f"{name}-{num_ranks}",
        marks=[pytest.mark.slow] * (plan == "slow"),
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


def together(ranks, what):
    """Join the data of all ranks into a tensor [iterations, T, B of all ranks, ...]."""
    return torch.cat([rank[what] for rank in ranks], dim=2)


@pytest.fixture(scope="module", params=TRAINED)
def trained(request, one_rank, ranks_of):
    """Return a case, the records of all its ranks, and the record of a single rank."""
    plan, name, num_ranks = request.param
    return CASES[name], [rank[name] for rank in ranks_of(plan, num_ranks)], one_rank(name)


def tolerance_of(case):
    return 1e-5 if case.dtype == torch.float32 else 1e-10


def test_episodes_end_at_the_same_steps(trained):
    case, ranks, alone = trained
    assert torch.equal(together(ranks, "ends"), alone["ends"])
    if case.iterations == ITERATIONS:
        assert alone["ends"].any(0).any(0).all()  # each environment ended an episode


def test_every_environment_sees_other_observations(trained):
    _, _, alone = trained
    assert len(alone["obs"][0].movedim(1, 0).flatten(1).unique(dim=0)) == alone["obs"].shape[2]


def test_actions_equal_those_of_one_rank(trained):
    case, ranks, alone = trained
    close = {"rtol": 0, "atol": tolerance_of(case)}
    torch.testing.assert_close(together(ranks, "actions"), alone["actions"], **close)


def test_every_iteration_changes_the_parameters(trained):
    case, _, alone = trained
    assert (alone["parameters"][1:] != alone["parameters"][:-1]).any(1).all()
    if "total_steps" not in case.options:  # cases with total_steps 0 end after num_episodes
        assert len(alone["parameters"]) == case.iterations


def test_all_ranks_have_the_same_parameters_after_every_gradient_step(trained):
    _, ranks, _ = trained
    hashes = ranks[0]["hashes"]
    assert len(set(hashes)) == len(hashes) >= 4
    assert [rank["hashes"] for rank in ranks] == [hashes] * len(ranks)


def test_parameters_equal_those_of_one_rank(trained):
    case, ranks, alone = trained
    for rank in ranks:
        errors = (rank["parameters"] - alone["parameters"]).abs().amax(1)
        assert case.dtype == torch.float32 or errors[0] < 1e-12
        assert errors.max() < tolerance_of(case), errors


# In fp32, rounding changes these numbers too much.
IN_FP64 = pytest.mark.parametrize(
    "trained",
    [param for param in TRAINED if "fp32" not in param.id],
    indirect=True,
)


@IN_FP64
def test_the_probability_ratio_is_1_before_the_first_gradient_step(trained):
    """Inputs, states and normalisers must still be the same as in the rollout."""
    _, _, alone = trained
    for kl, clip_fraction, _ in alone["firsts"].values():
        assert abs(kl) < 1e-14 and clip_fraction == 0.0


@IN_FP64
def test_normalisers_add_a_rollout_only_after_its_update(trained):
    case, _, alone = trained
    samples = alone["obs"][0, :, :, 0].numel()
    warm_up = case.options.get("normalize_obs", True)
    for iteration, (_, _, count) in alone["firsts"].items():
        assert count == (iteration - 1 + warm_up) * samples


@IN_FP64
@pytest.mark.parametrize("what", ["obs", "rewards"])
def test_inputs_and_rewards_equal_those_of_one_rank(what, trained):
    _, ranks, alone = trained
    torch.testing.assert_close(together(ranks, what), alone[what], rtol=1e-8, atol=1e-8)


@IN_FP64
def test_losses_and_learning_rates_equal_those_of_one_rank(trained):
    _, ranks, alone = trained
    for rank in ranks:
        for many, one in zip(rank["losses"], alone["losses"], strict=True):
            assert many == pytest.approx(one, rel=1e-7, abs=1e-9)


@IN_FP64
def test_statistics_equal_those_of_one_rank_and_agree_on_all_ranks(trained):
    _, ranks, alone = trained
    for rank in ranks:
        for what, value in rank["moments"].items():
            torch.testing.assert_close(value, alone["moments"][what], rtol=1e-9, atol=1e-12)
            assert torch.equal(value, ranks[0]["moments"][what])


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
    record, ranks = finish(training, path).record(), [rank[name] for rank in two]
    stayed = ranks[0]
    assert record["obs"].shape[2] == NUM_ENVS
    assert rates_of(record) == rates_of(stayed)[iteration:]
    parameters = stayed["parameters"][iteration:]
    torch.testing.assert_close(record["parameters"], parameters, rtol=0, atol=1e-10)
    assert torch.equal(record["ends"], together(ranks, "ends")[iteration + 1 :])


def test_weak_scaling_on_two_ranks_is_one_rank_with_twice_the_sizes_and_the_scaled_rate(two, world):
    ranks = [rank["weak"] for rank in two]
    rates = rates_of(ranks[0])
    # Linear scaling doubles the learning rate of 3e-3; annealing then lowers it.
    assert rates == pytest.approx([6e-3, 4.5e-3, 3e-3, 1.5e-3])
    sizes = {"scaling": "strong", "lr_scaling": "none", "num_envs": NUM_ENVS, "batch_size": 16}
    twice = replace(CLIPPED, learning_rate=6e-3)
    alone = agents_ranks.record_of("weak", world, ppo=twice, **sizes)
    assert rates_of(alone) == pytest.approx(rates)
    torch.testing.assert_close(ranks[0]["parameters"], alone["parameters"], rtol=0, atol=1e-10)
    assert torch.equal(together(ranks, "actions"), alone["actions"])
