"""Two real ranks over gloo, started once by our launcher; the tests read what they brought back."""

import sys

import pytest
import torch

from rl_dist.machine import available_cores


def test_each_rank_is_a_process_with_its_share_of_the_cores_that_talks_over_loopback(ranks):
    assert ranks[0]["pid"] != ranks[1]["pid"]
    for rank in ranks:
        assert (rank["size"], rank["threads"]) == (2, 1)
        assert rank["environment"]["OMP_NUM_THREADS"] == "1"  # as they were started
        assert rank["environment"]["GLOO_SOCKET_IFNAME"].startswith("lo")
        assert 0 < rank["sync_seconds"] < 60
        if sys.platform == "linux":  # in memory, which is never cut short as a full disk may be
            assert rank["store"].startswith("/memfd:")


def test_values_are_summed_gathered_and_agreed_on(ranks):
    expected = [{"rank": 0, "text": "é"}, {"rank": 1, "text": "éééééé"}]
    for rank in ranks:
        assert rank["sums"]["a"].item() == 11.0
        assert torch.equal(rank["sums"]["b"], torch.full((2, 2), 3.0, dtype=torch.float64))
        assert rank["same_names_in_any_order"] == {"a": 4.0, "b": 2.0}
        assert rank["json"] == expected and rank["long_json"] and rank["largest"] == 3
    gathered, long = ranks[0]["gathered"], ranks[0]["long"]
    assert gathered["x"].tolist() == [0, 1, 10, 11, 12]
    assert gathered["flag"].tolist() == [True, False]
    assert gathered["y"].tolist() == [[0.5, 0.5], [1.5, 1.5]]
    assert gathered["y"].dtype == torch.float64 and gathered["none"].shape == (0, 3)
    assert torch.equal(long["x"], torch.cat([torch.arange(3 * 16_384 + more) for more in (5, 6)]))
    assert long["b"].all() and ranks[1]["gathered"] is None


@pytest.mark.parametrize(
    ("error", "says"),
    [
        ("desync", ["rank 0 in 'sum of name 0' (", "; rank 1 in 'sum of name 1' ("]),
        ("other_shapes", ["rank 0 in 'sum of x[1]' (", "; rank 1 in 'sum of x[1000]' ("]),
        ("desync_later", ["other names"]),  # as over NCCL, without announcements
        ("wrong_gather", ["rank 1 gathers"]),
        ("apart", ["rank 1 in 0.weight, 0.bias, 2.weight (4 of 4) (against rank 0)"]),
        ("more", ["rank 1 in y ("]),
    ],
)
def test_ranks_that_differ_get_an_error_that_names_the_difference_on_every_rank(ranks, error, says):
    for rank in ranks:
        assert all(part in rank[error] for part in says), rank[error]


def test_wrapping_gives_every_rank_the_parameters_of_rank_0(ranks):
    assert {rank["start"] for rank in ranks} == {ranks[0]["reference"]}
    assert [rank["together"] for rank in ranks] == ["", ""]


@pytest.mark.skipif(available_cores() < 2, reason="one core: no thread pool to slow down")
def test_gathering_much_leaves_the_thread_pool_of_training_alone(ranks):
    """A second OpenMP team, opened in gloo's thread, slows every later parallel region down."""
    assert max(rank["new_threads"] for rank in ranks) <= 0
