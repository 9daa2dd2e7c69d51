"""Two real ranks over gloo, started once by our launcher; the tests read what they brought back."""

import subprocess
import sys

import pytest
import rl_dist_ranks
import torch

from rl_dist.machine import available_cores


@pytest.fixture(scope="module")
def ranks(ranks_folder):
    return [torch.load(ranks_folder / f"rank_{rank}.pt", weights_only=True) for rank in range(2)]


def test_each_rank_is_a_process_with_its_share_of_the_cores_that_talks_over_loopback(ranks):
    assert ranks[0]["pid"] != ranks[1]["pid"]
    for rank in ranks:
        assert (rank["size"], rank["threads"]) == (2, 1)
        assert rank["environment"]["OMP_NUM_THREADS"] == "1"  # as they were started
        assert rank["environment"]["GLOO_SOCKET_IFNAME"].startswith("lo")
        assert 0 < rank["sync_seconds"] < 60
        if sys.platform == "linux":  # in memory, which is never cut short as a full disk may be
            assert rank["store"].startswith("/memfd:")


def test_named_values_are_summed_over_ranks_in_any_order_and_keep_their_shapes(ranks):
    for rank in ranks:
        assert rank["sums"]["a"].item() == 11.0
        assert torch.equal(rank["sums"]["b"], torch.full((2, 2), 3.0, dtype=torch.float64))
        assert rank["same_names_in_any_order"] == {"a": 4.0, "b": 2.0}


def test_ranks_that_sum_different_names_get_an_error_on_every_rank(ranks):
    assert all("other names" in rank["desync_later"] for rank in ranks)
    for key, first, second in (("desync", "name 0", "name 1"), ("other_shapes", "x[1]", "x[1000]")):
        for rank in ranks:
            assert "different collective calls: rank 0 in " in rank[key]
            assert f"'sum of {first}' (" in rank[key]
            assert f"; rank 1 in 'sum of {second}' (" in rank[key]


def test_tensors_are_gathered_whole_in_rank_order_on_the_main_process_only(ranks):
    assert ranks[1]["gathered"] is None
    gathered = ranks[0]["gathered"]
    assert gathered["x"].tolist() == [0, 1, 10, 11, 12]
    assert gathered["flag"].tolist() == [True, False]
    assert gathered["y"].tolist() == [[0.5, 0.5], [1.5, 1.5]]
    assert gathered["y"].dtype == torch.float64
    assert gathered["none"].shape == (0, 3)
    long = torch.cat([torch.arange(3 * 16_384 + more) for more in (5, 6)])
    assert torch.equal(ranks[0]["long"]["x"], long) and ranks[0]["long"]["b"].all()
    assert all("rank 1 gathers" in rank["wrong_gather"] for rank in ranks)


@pytest.mark.skipif(available_cores() < 2, reason="one core: no thread pool to slow down")
def test_gathering_much_leaves_the_thread_pool_of_training_alone():
    """A second OpenMP team, opened in gloo's thread, slows every later parallel region down."""
    script = """
import os, torch
from rl_dist.process_group.collectives import gather_dicts, all_gather_json
from rl_dist.process_group.world import close_world, open_world
world = open_world("cpu")
# now gloo's threads and the pool have started
all_gather_json(0, world), torch.ones(10**6).exp_().sum()
before = len(os.listdir("/proc/self/task"))
gather_dicts({"x": torch.ones(10**6)}, world), all_gather_json([0.5] * 10**5, world)
print(len(os.listdir("/proc/self/task")) - before)
close_world(world)
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "0", done.stderr


def test_json_objects_reach_every_rank_and_the_largest_number_is_agreed_on(ranks):
    expected = [{"rank": 0, "text": "é"}, {"rank": 1, "text": "éééééé"}]
    assert [rank["json"] for rank in ranks] == [expected, expected]
    assert all(rank["long_json"] for rank in ranks)
    assert [rank["largest"] for rank in ranks] == [3, 3]


def test_parameters_that_differ_or_that_one_rank_lacks_are_reported_with_rank_and_name(ranks):
    for rank in ranks:
        drifted = "rank 1 in 0.weight, 0.bias, 2.weight and 1 more (against rank 0)"
        assert f"drifted apart: {drifted}" in rank["apart"]
        assert "drifted apart: rank 1 in y (against rank 0)" in rank["more"]


def test_wrapping_gives_every_rank_the_parameters_of_rank_0(ranks):
    reference = rl_dist_ranks.parameter_hash(rl_dist_ranks.make_module(seed=0))
    assert [rank["start"] for rank in ranks] == [reference, reference]
    assert [rank["together"] for rank in ranks] == ["", ""]
