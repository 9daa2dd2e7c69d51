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
    make_job,
)

from agents.trainer import train
from rl_dist.checkpoint.store import load_checkpoint
from rl_dist.launch.ranks import launch
from rl_dist.process_group.world import StopFlag
from rl_dist.telemetry.metrics import NullWriter

pytestmark = pytest.mark.timeout(600)  # the first test of a plan waits until all ranks have trained
ALWAYS = [*JOBS, *MORE_JOBS]
ON_FOUR = ["trading, clstm", "recall, mlp, KL stop"]
PLANS = {  # each plan is one launch: {number of ranks: names of cases}
    "default": {4: ON_FOUR, 3: [*TWELVE], 2: [*ALWAYS, "weak"]},
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


@pytest.fixture(scope="module")
def run_dir(directory):
    """Return the run directory with metrics and checkpoints that two ranks wrote."""
    return directory("default") / WITH_FILES


def together(ranks, name, what):
    """Join the shares of all ranks to a tensor [iterations, T, B of all ranks, ...]."""
    return torch.cat([rank[name][what] for rank in ranks], dim=2)


@pytest.mark.parametrize(("plan", "name", "num_ranks"), TRAINED)
def test_a_training_is_that_of_one_rank(plan, name, num_ranks, one_rank, ranks_of):
    """Compare data, losses, learning rates, statistics and parameters.

    Parameters must have the same hash on all ranks after every gradient step.
    """
    ranks, alone, case = ranks_of(plan, num_ranks), one_rank(name), CASES[name]
    single = case.dtype == torch.float32
    assert torch.equal(together(ranks, name, "ends"), alone["ends"])
    if case.iterations == ITERATIONS:
        assert alone["ends"].any(0).any(0).all()  # each environment ended an episode
    actions = together(ranks, name, "actions")
    tolerance = {"rtol": 0, "atol": 1e-5 if single else 1e-10}
    torch.testing.assert_close(actions, alone["actions"], **tolerance)

    assert (alone["parameters"][1:] != alone["parameters"][:-1]).any(1).all()
    if "total_steps" not in case.options:  # other cases stop by num_episodes
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

    for what in ("obs", "rewards"):
        many = together(ranks, name, what)
        torch.testing.assert_close(many, alone[what], rtol=1e-8, atol=1e-8)
    for rank in ranks:
        assert rank[name]["rates"] == alone["rates"]
        for many, one in zip(rank[name]["losses"], alone["losses"], strict=True):
            assert many == pytest.approx(one, rel=1e-7, abs=1e-9)
        for what, value in rank[name]["moments"].items():
            torch.testing.assert_close(value, alone["moments"][what], rtol=1e-9, atol=1e-12)
            assert torch.equal(value, ranks[0][name]["moments"][what])


def test_all_ranks_stop_their_epochs_together_at_the_kl_of_all_ranks(one_rank, ranks_of):
    name = "recall, mlp, KL stop"
    steps = [losses["optim/steps"] for losses in one_rank(name)["losses"]]
    assert min(steps) < 8 and max(steps) > 2, steps  # stopped early, but not always in epoch 1
    for num_ranks in (2, 4):
        for rank in ranks_of("default", num_ranks):
            assert [losses["optim/steps"] for losses in rank[name]["losses"]] == steps


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_rollouts_differ_from_rank_to_rank_and_environment_to_environment(num_ranks, ranks_of):
    """Environments have different observations, not only different action noise."""
    for name in ON_FOUR if num_ranks == 4 else ALWAYS:
        # rollout 0, before any gradient step
        obs = together(ranks_of("default", num_ranks), name, "obs")[0]
        columns = obs.movedim(1, 0).flatten(1)
        assert len(columns.unique(dim=0)) == NUM_ENVS, name
        assert len(obs[0].unique(dim=0)) > 1, name  # already before any action


def test_the_main_process_alone_writes_metrics_and_checkpoints(run_dir, two):
    assert [rank[WITH_FILES]["writer"] for rank in two] == ["MetricsWriter", "NullWriter"]
    files = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    assert files == ["iteration_00000003.pt", "iteration_00000006.pt"]


def gone_on(name, path, world, tmp_path):
    """Resume from a checkpoint on one rank; return the record."""
    state = load_checkpoint(path)
    training = Recording(make_job(name, tmp_path), world, len(state["carry"]["obs"]))
    training.restore(state)
    train(training, NullWriter(), StopFlag())
    return training.record()


def test_a_checkpoint_of_two_ranks_goes_on_with_one_as_if_nothing_had_happened(
    run_dir, one_rank, two, world, tmp_path
):
    """The checkpoint must equal one written by one rank, in global environment order."""
    alone = one_rank(WITH_FILES)
    record = gone_on(WITH_FILES, run_dir / "checkpoints" / "iteration_00000003.pt", world, tmp_path)
    assert len(record["parameters"]) == ITERATIONS - 3
    torch.testing.assert_close(record["parameters"], alone["parameters"][3:], rtol=0, atol=1e-10)
    assert torch.equal(record["ends"], alone["ends"][4:])
    written = two[0][WITH_FILES]["parameters"]
    torch.testing.assert_close(record["parameters"][-1], written[-1], rtol=0, atol=1e-10)


def test_weak_scaling_on_two_ranks_is_one_rank_with_twice_the_sizes_and_the_scaled_rate(
    one_rank, two, world
):
    rates = two[0]["weak"]["rates"]
    # linear scaling doubles 3e-3, annealing lowers it
    assert rates == pytest.approx([6e-3, 4.5e-3, 3e-3, 1.5e-3])
    sizes = {"scaling": "strong", "lr_scaling": "none", "num_envs": NUM_ENVS, "batch_size": 16}
    twice = replace(CLIPPED, learning_rate=6e-3)
    alone = agents_ranks.record_of("weak", world, ppo=twice, **sizes)
    assert alone["rates"] == pytest.approx(rates)
    torch.testing.assert_close(
        two[0]["weak"]["parameters"], alone["parameters"], rtol=0, atol=1e-10
    )
    assert torch.equal(together(two, "weak", "actions"), alone["actions"])


def test_a_weak_run_of_two_ranks_goes_on_with_one_with_its_totals_and_learning_rate(
    directory, one_rank, two, world, tmp_path
):
    path = directory("default") / "weak" / "checkpoints" / "iteration_00000002.pt"
    record = gone_on("weak", path, world, tmp_path)
    stayed = two[0]["weak"]
    assert record["obs"].shape[2] == NUM_ENVS == 2 * CASES["weak"].options["num_envs"]
    assert record["rates"] == stayed["rates"][2:]
    torch.testing.assert_close(record["parameters"], stayed["parameters"][2:], rtol=0, atol=1e-10)
    assert torch.equal(record["actions"], together(two, "weak", "actions")[3:])
    assert torch.equal(record["ends"], together(two, "weak", "ends")[3:])
