"""Mode hybrid on real ranks over gloo, started once; and what they brought back."""

import pytest
import sharding_ranks
import torch
from agents_ranks import world_of_one
from sharding_ranks import HALF, MAX_GRAD_NORM, job, make_policy, run, trained

from rl_dist.errors import UserError
from rl_dist.launch.ranks import launch
from rl_dist.process_group.collectives import parameter_hash
from rl_dist.process_group.world import GROUP_TIMEOUT
from rl_dist.strategies.config import resolve_shard_size

pytestmark = pytest.mark.timeout(600)  # the first test waits for all ranks' work, on any machine
CLOSE = {"rtol": 1e-5, "atol": 1e-9}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((2, 0), id="one group of 2"),
        pytest.param((4, 2), id="2 x 2", marks=pytest.mark.slow),
    ],
)
def folder(request, ranks_folder, tmp_path_factory):
    num_ranks, shard_size = request.param
    if num_ranks == 2:
        return ranks_folder
    directory = tmp_path_factory.mktemp("sharding")
    assert launch(sharding_ranks.probe, (str(directory), shard_size), num_ranks=num_ranks) == 0
    return directory


@pytest.fixture(scope="module")
def ranks(folder):
    return [torch.load(path, weights_only=True) for path in sorted(folder.glob("rank_*.pt"))]


@pytest.fixture(scope="module")
def alone():
    """The same steps of one process on the whole batch."""
    with world_of_one() as world:
        return trained("none", world)[0]


def test_shards_add_up_to_the_gradient_of_one_process_on_the_whole_batch(ranks, alone):
    assert (alone["norms"] > MAX_GRAD_NORM).all()  # of the whole gradient, which it clips
    for rank in ranks:
        for name in ("ddp", "hybrid", "in parts"):
            for key in ("gradient", "norms", "parameters"):
                torch.testing.assert_close(rank[name][key], alone[key], **CLOSE)
        assert rank["reductions"] == 3  # once a step, however many parts it has
        assert rank["hybrid"]["start"] == parameter_hash(make_policy(seed=0))  # of rank 0
    assert len({rank["hybrid"]["hash"] for rank in ranks}) == 1


def test_every_rank_holds_its_share_only(ranks):
    held = [rank["hybrid"]["shard_bytes"] for rank in ranks]
    total = sum(parameter.numel() * 8 for parameter in make_policy().parameters())
    groups = len(ranks) // 2
    assert ranks[0]["hybrid"]["mesh"] == [groups, 2]
    assert ranks[0]["hybrid"]["timeouts_s"] == [GROUP_TIMEOUT.total_seconds()] * 2
    assert sum(held) == groups * total and max(held) < 0.7 * total


def test_a_loss_that_is_no_number_on_one_rank_makes_all_ranks_skip_the_step(ranks):
    assert all(rank["skipped"] for rank in ranks)


def test_saved_states_are_those_of_ddp(ranks):
    for rank in ranks:
        ddp, hybrid = rank["ddp"], rank["hybrid"]
        torch.testing.assert_close(hybrid["module"], dict(ddp["module"]), **CLOSE)
        assert hybrid["optimizer"]["param_groups"] == ddp["optimizer"]["param_groups"]
        torch.testing.assert_close(hybrid["optimizer"]["state"], ddp["optimizer"]["state"], **CLOSE)
        assert all(type(tensor) is torch.Tensor for tensor in hybrid["module"].values())


@pytest.mark.parametrize(
    ("shard_size", "num_ranks", "words"),
    [
        (0, 1, "several ranks, got 1"),
        (1, 4, "shard_size 1 .* --shard_size 2, 4"),
        (3, 4, "shard_size 3 .* --shard_size 2, 4"),
    ],
)
def test_what_cannot_be_shared_out_is_refused_with_what_can(shard_size, num_ranks, words):
    with pytest.raises(UserError, match=words):
        resolve_shard_size(shard_size, num_ranks)


def test_groups_are_the_ranks_of_a_machine_unless_told_otherwise(monkeypatch):
    assert resolve_shard_size(0, 4) == 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert resolve_shard_size(0, 4) == 2


def test_an_optimizer_whose_steps_would_change_nothing_and_another_call_are_refused(ranks):
    for rank in ranks:
        assert "make it of strategy.parameters" in rank["refused optimizer"]
        assert "rank 0 in 'gradient reduction'" in rank["other calls"]
        assert "rank 1 in 'agreement on a number'" in rank["other calls"]


@pytest.fixture(scope="module")
def trained_ranks(ranks):
    return [rank["trainings"] for rank in ranks]


def test_a_training_is_that_of_one_process(trained_ranks, tmp_path):
    with world_of_one() as world:
        single = run(job(tmp_path, "none"), world)
    for rank in trained_ranks:
        torch.testing.assert_close(rank["hybrid"]["parameters"], single["parameters"], **CLOSE)
        for one, other in zip(rank["hybrid"]["records"], single["records"], strict=True):
            assert one == pytest.approx(other, rel=1e-6, abs=1e-9, nan_ok=True)
        assert rank["hybrid"]["evaluated"] == single["evaluated"]
    assert len({rank["hybrid"]["hash"] for rank in trained_ranks}) == 1


def test_a_resumed_training_ends_bit_for_bit_as_one_never_interrupted(trained_ranks):
    for rank in trained_ranks:
        assert torch.equal(rank["hybrid, resumed"]["parameters"], rank["hybrid"]["parameters"])
        assert rank["hybrid, resumed"]["records"] == rank["hybrid"]["records"][1:]


def test_checkpoints_of_hybrid_and_ddp_stand_for_each_other(trained_ranks, folder, tmp_path):
    for rank in trained_ranks:
        for name in ("hybrid, resumed as ddp", "ddp, resumed as hybrid"):
            torch.testing.assert_close(rank[name]["parameters"], rank["ddp"]["parameters"], **CLOSE)
    with world_of_one() as world:
        single = run(job(tmp_path, "none"), world, folder / "hybrid" / "checkpoints" / HALF)
    torch.testing.assert_close(single["parameters"], trained_ranks[0]["ddp"]["parameters"], **CLOSE)
