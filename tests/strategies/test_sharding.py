"""Strategy hybrid on real ranks over gloo, which are started once."""

import pytest
import sharding_ranks
import torch
from agents_ranks import world_of_one
from rl_dist_ranks import make_module
from sharding_ranks import HALF, job, run

from rl_dist.launch.ranks import launch
from rl_dist.process_group.collectives import parameter_hash
from rl_dist.process_group.world import GROUP_TIMEOUT
from rl_dist.strategies.config import resolve_shard_size

pytestmark = pytest.mark.timeout(600)  # the first test launches all ranks
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


def test_training_equals_that_of_one_process_also_with_accumulation(ranks, tmp_path):
    with world_of_one() as world:
        single = run(job(tmp_path, "none"), world)
    for rank in ranks:
        hybrid, parts = rank["hybrid"], rank["hybrid in parts"]
        for trained in (hybrid, parts):
            torch.testing.assert_close(trained["parameters"], single["parameters"], **CLOSE)
        for one, other in zip(hybrid["records"], single["records"], strict=True):
            assert one == pytest.approx(other, rel=1e-6, abs=1e-9, nan_ok=True)
        # Each step has one reduction, even if its batch is split into parts.
        assert hybrid["reductions"] == parts["reductions"] == rank["ddp"]["reductions"]
    assert len({rank["hybrid"]["hash"] for rank in ranks}) == 1


def test_every_rank_holds_only_its_shard(ranks):
    groups, total = len(ranks) // 2, len(ranks[0]["hybrid"]["parameters"])
    held = [rank["hybrid"]["shard_numbers"] for rank in ranks]
    assert sum(held) == groups * total and max(held) < 0.7 * total
    assert ranks[0]["hybrid"]["mesh"] == [groups, 2]
    assert ranks[0]["hybrid"]["timeouts_s"] == [GROUP_TIMEOUT.total_seconds()] * 2


def test_a_resumed_training_equals_an_uninterrupted_one_bit_for_bit(ranks):
    for rank in ranks:
        assert torch.equal(rank["hybrid, resumed"]["parameters"], rank["hybrid"]["parameters"])
        assert rank["hybrid, resumed"]["records"] == rank["hybrid"]["records"][1:]


def test_checkpoints_of_hybrid_and_ddp_are_interchangeable(ranks, folder, tmp_path):
    for rank in ranks:
        for name in ("hybrid, resumed as ddp", "ddp, resumed as hybrid"):
            torch.testing.assert_close(rank[name]["parameters"], rank["ddp"]["parameters"], **CLOSE)
    with world_of_one() as world:
        single = run(job(tmp_path, "none"), world, folder / "hybrid" / "checkpoints" / HALF)
    torch.testing.assert_close(single["parameters"], ranks[0]["ddp"]["parameters"], **CLOSE)


def test_ranks_start_equal_skip_a_nan_together_and_refuse_different_calls(ranks):
    start = parameter_hash(make_module(seed=0))  # hash of the weights of rank 0
    for rank in (rank["refusals"] for rank in ranks):
        assert rank["hashes"] == [start, start] and not rank["stepped"]
        assert "rank 0 in 'gradient reduction'" in rank["other calls"]
        assert "rank 1 in 'gather of bytes'" in rank["other calls"]


def test_by_default_the_ranks_of_a_machine_form_a_group(monkeypatch):
    assert resolve_shard_size(0, 4) == 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert resolve_shard_size(0, 4) == 2
