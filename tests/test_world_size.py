"""The same training on any number of ranks: 1 x 8, 2 x 4 and 4 x 2 ranks x environments, over gloo."""

import json

import agents_ranks
import pytest
import torch
from agents_ranks import (
    ITERATIONS,
    JOBS,
    NUM_ENVS,
    NUM_STEPS,
    WITH_FILES,
    Recording,
    make_job,
    world_of_one,
)

from agents.trainer import train
from rl_dist.checkpoint import load_checkpoint
from rl_dist.launch import launch
from rl_dist.metrics import NullWriter
from rl_dist.world import StopFlag, current_world


@pytest.fixture(scope="module")
def one_rank():
    with world_of_one() as world:
        yield {name: agents_ranks.record_of(name, world) for name in JOBS}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """Where the ranks leave their records; two of them also their metrics and checkpoints, in run/."""
    directory = tmp_path_factory.mktemp("ranks")
    assert launch(agents_ranks.train_all, (str(directory),), 4) == 0
    return directory / "run"


@pytest.fixture(scope="module")
def launched(run_dir):
    """Records of all ranks, by number of ranks."""
    return {
        num_ranks: [
            torch.load(run_dir.parent / f"{num_ranks}_rank_{rank}.pt", weights_only=True) for rank in range(num_ranks)
        ]
        for num_ranks in (2, 4)
    }


def together(ranks, name, what):
    """[iterations, T, B of all ranks, ...] from the ranks' shares."""
    return torch.cat([rank[name][what] for rank in ranks], dim=2)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", JOBS)
def test_actions_rewards_and_episode_ends_are_those_of_one_rank(name, num_ranks, one_rank, launched):
    ranks, alone = launched[num_ranks], one_rank[name]
    for what in ("obs", "actions", "rewards"):
        many = together(ranks, name, what)
        assert many.shape == alone[what].shape
        torch.testing.assert_close(many, alone[what], rtol=1e-8, atol=1e-8)
    assert torch.equal(together(ranks, name, "ends"), alone["ends"])
    assert alone["ends"].any(0).any(0).all()  # episodes ended in every environment


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", JOBS)
def test_parameters_are_those_of_one_rank_after_every_iteration(name, num_ranks, one_rank, launched):
    alone = one_rank[name]["parameters"]
    assert len(alone) == JOBS[name][-1] and (alone[1:] != alone[:-1]).any(1).all()
    for rank in launched[num_ranks]:
        errors = (rank[name]["parameters"] - alone).abs().amax(1)
        assert errors[0] < 1e-12 and errors.max() < 1e-10, errors


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", JOBS)
def test_parameters_are_equal_by_hash_on_all_ranks_after_every_gradient_step(name, num_ranks, launched):
    first, *others = (rank[name]["hashes"] for rank in launched[num_ranks])
    assert len(set(first)) == len(first) >= 2 * JOBS[name][-1]
    assert all(other == first for other in others)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", JOBS)
def test_losses_and_statistics_are_of_all_ranks(name, num_ranks, one_rank, launched):
    for rank in launched[num_ranks]:
        for many, alone in zip(rank[name]["losses"], one_rank[name]["losses"], strict=True):
            assert many == pytest.approx(alone, rel=1e-7, abs=1e-9)
        for what, value in rank[name]["moments"].items():
            torch.testing.assert_close(value, one_rank[name]["moments"][what], rtol=1e-9, atol=1e-12)
            assert torch.equal(value, launched[num_ranks][0][name]["moments"][what])


def test_all_ranks_stop_their_epochs_together_at_the_kl_of_all_ranks(one_rank, launched):
    name = "recall, mlp, KL stop"
    steps = [losses["optim/steps"] for losses in one_rank[name]["losses"]]
    assert min(steps) < 8 and max(steps) > 2, steps  # it stopped early, and not always at once
    for num_ranks in (2, 4):
        for rank in launched[num_ranks]:
            assert [losses["optim/steps"] for losses in rank[name]["losses"]] == steps


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_rollouts_differ_from_rank_to_rank_and_environment_to_environment(num_ranks, launched):
    """The seed changes the data path, not only the noise."""
    for name in JOBS:
        obs = together(launched[num_ranks], name, "obs")[0]  # of the first, untrained rollout
        columns = obs.movedim(1, 0).flatten(1)
        assert len(columns.unique(dim=0)) == NUM_ENVS, name
        assert len(obs[0].unique(dim=0)) > 1, name  # at the very first step, before any action


def test_the_gradient_is_the_mean_over_the_ranks_gradients(launched):
    first, second = (rank["gradient"] for rank in launched[2])
    for one, other, reduced, also in zip(first["own"], second["own"], first["reduced"], second["reduced"], strict=True):
        torch.testing.assert_close(reduced, (one + other) / 2, rtol=1e-10, atol=1e-14)
        assert torch.equal(reduced, also)
    assert any((one - other).abs().max() > 1e-3 for one, other in zip(first["own"], second["own"], strict=True))


def test_the_main_process_alone_writes_metrics_of_all_ranks_once(run_dir, launched):
    assert [rank[WITH_FILES]["writer"] for rank in launched[2]] == ["MetricsWriter", "NullWriter"]
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [record["iteration"] for record in records] == list(range(1, ITERATIONS + 1))
    assert [record["global_step"] for record in records] == [128 * i for i in range(1, ITERATIONS + 1)]
    for record in records:
        assert [entry["rank"] for entry in record["ranks"]] == [0, 1]
        counts = [entry["episode/count"] for entry in record["ranks"]]
        assert sum(counts) == record["episode/count"] > 0
        total = sum(e["episode/return"] * e["episode/count"] for e in record["ranks"] if e["episode/count"])
        assert record["episode/return"] == pytest.approx(total / record["episode/count"])
    assert len(list(run_dir.glob("events.out.tfevents.*"))) == 1


def test_episodes_that_the_metrics_count_are_those_of_all_rollouts(run_dir, launched):
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    ends = together(launched[2], WITH_FILES, "ends")[1:]  # without the warm-up
    assert [record["episode/count"] for record in records] == ends.sum((1, 2)).tolist()
    assert records[-1]["episode/total"] == int(ends.sum())
    assert ends.shape[1:] == (NUM_STEPS, NUM_ENVS)


def test_the_main_process_alone_writes_checkpoints(run_dir, launched):
    assert [rank[WITH_FILES]["saved"] for rank in launched[2]] == [[5, 10], []]
    files = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    assert files == ["iteration_00000005.pt", "iteration_00000010.pt"]


def test_a_checkpoint_of_two_ranks_goes_on_with_one_as_if_nothing_had_happened(run_dir, one_rank, launched):
    """And, written by two ranks in global order, holds what one rank would have written."""
    path = run_dir / "checkpoints" / "iteration_00000005.pt"
    training = Recording(make_job(WITH_FILES), current_world())
    training.restore(load_checkpoint(path))
    train(training, NullWriter(), StopFlag())
    record, alone = training.record(), one_rank[WITH_FILES]
    assert len(record["parameters"]) == ITERATIONS - 5
    torch.testing.assert_close(record["parameters"], alone["parameters"][5:], rtol=0, atol=1e-10)
    assert torch.equal(record["ends"], alone["ends"][6:])
    written = launched[2][0][WITH_FILES]["parameters"]
    torch.testing.assert_close(record["parameters"][-1], written[-1], rtol=0, atol=1e-10)
