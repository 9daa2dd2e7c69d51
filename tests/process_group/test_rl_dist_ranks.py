"""Two real ranks over gloo, started once by our launcher; the tests judge what they brought back."""

import json
import subprocess
import sys

import pytest
import rl_dist_ranks
import torch

from rl_dist.hardware.host_memory import available_cores
from rl_dist.launch.launcher import launch
from rl_dist.process_group.world import threads_per_rank


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("two_ranks")
    assert launch(rl_dist_ranks.exercise, (str(directory),), num_ranks=2) == 0
    return directory


@pytest.fixture(scope="module")
def ranks(run_dir):
    return [torch.load(run_dir / f"rank_{rank}.pt", weights_only=True) for rank in range(2)]


def test_each_rank_is_a_process_of_its_own_with_its_share_of_the_cores(ranks):
    assert ranks[0]["pid"] != ranks[1]["pid"]
    assert all(rank["size"] == 2 for rank in ranks)
    assert all(rank["threads"] == threads_per_rank(2) for rank in ranks)
    assert all(rank["environment"]["OMP_NUM_THREADS"] == str(threads_per_rank(2)) for rank in ranks)


def test_ranks_of_one_machine_talk_over_loopback_only(ranks):
    assert all(rank["environment"]["GLOO_SOCKET_IFNAME"].startswith("lo") for rank in ranks)


def test_named_values_are_summed_over_ranks_and_keep_their_shapes(ranks):
    for rank in ranks:
        assert rank["sums"]["a"].item() == 11.0
        torch.testing.assert_close(rank["sums"]["b"], torch.full((2, 2), 3.0, dtype=torch.float64))


def test_the_order_of_names_does_not_matter_to_a_sum(ranks):
    for rank in ranks:
        assert {k: v.item() for k, v in rank["same_names_in_any_order"].items()} == {"a": 4.0, "b": 2.0}


def test_ranks_that_sum_different_names_get_an_error_on_every_rank(ranks):
    assert all("other names" in rank["desync_later"] for rank in ranks)
    for key, first, second in (("desync", "name 0", "name 1"), ("other_shapes", "x[1]", "x[1000]")):
        expected = f"different collective calls: rank 0 in 'sum of {first}' (collective "
        assert all(expected in rank[key] and f"; rank 1 in 'sum of {second}' (" in rank[key] for rank in ranks)


def test_tensors_are_gathered_in_rank_order_on_the_main_process_only(ranks):
    assert ranks[1]["gathered"] is None
    gathered = ranks[0]["gathered"]
    assert gathered["x"].tolist() == [0, 1, 10, 11, 12]
    assert gathered["flag"].tolist() == [True, False]
    assert gathered["y"].tolist() == [[0.5, 0.5], [1.5, 1.5]] and gathered["y"].dtype == torch.float64
    assert gathered["none"].shape == (0, 3)


def test_long_tensors_and_texts_are_gathered_whole(ranks):
    first, second = torch.arange(3 * 16_384 + 5), torch.arange(3 * 16_384 + 6)
    assert torch.equal(ranks[0]["long"]["x"], torch.cat([first, second])) and ranks[0]["long"]["b"].all()
    assert all(rank["long_json"] for rank in ranks)


@pytest.mark.skipif(available_cores() < 2, reason="one core: no thread pool to slow down")
def test_gathering_much_leaves_the_thread_pool_of_training_alone():
    """A second OpenMP team, opened in gloo's thread, makes every later parallel region twice as slow."""
    script = """
import os, torch
from rl_dist.process_group.collectives import gather_dicts, gather_json
from rl_dist.process_group.world import close_world, open_world
world = open_world("cpu")
gather_json(0, world), torch.ones(10**6).exp_().sum()  # gloo's threads and the pool have started
before = len(os.listdir("/proc/self/task"))
gather_dicts({"x": torch.ones(10**6)}, world), gather_json([0.5] * 10**5, world)
print(len(os.listdir("/proc/self/task")) - before)
close_world(world)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "0", done.stderr


def test_gathering_tensors_of_unlike_shapes_is_an_error_that_names_the_rank(ranks):
    assert all("rank 1 gathers ['x'" in rank["wrong_gather"] for rank in ranks)


def test_json_objects_of_all_ranks_reach_every_rank(ranks):
    expected = [{"rank": 0, "text": "é"}, {"rank": 1, "text": "éééééé"}]
    assert [rank["json"] for rank in ranks] == [expected, expected]


def test_ranks_agree_on_the_largest_value(ranks):
    assert [rank["largest"] for rank in ranks] == [3, 3]


def test_parameters_that_differ_are_reported_with_rank_and_name(ranks):
    expected = "drifted apart: rank 1 in 0.weight, 0.bias, 2.weight and 1 more (against rank 0)"
    assert all(expected in rank["apart"] for rank in ranks)


def test_what_one_rank_alone_holds_is_a_difference(ranks):
    assert all("drifted apart: rank 1 in y (against rank 0)" in rank["more"] for rank in ranks)


def test_wrapping_gives_every_rank_the_parameters_of_rank_0(ranks):
    reference = rl_dist_ranks.parameter_hash(rl_dist_ranks.make_module(seed=0))
    assert [rank["start"] for rank in ranks] == [reference, reference]
    assert [rank["together"] for rank in ranks] == ["", ""]


def test_the_ddp_gradient_is_the_mean_of_the_ranks_gradients(ranks):
    module = rl_dist_ranks.make_module(seed=0)
    losses = [rl_dist_ranks.loss_of(module, rank) for rank in range(2)]
    expected = torch.autograd.grad((losses[0] + losses[1]) / 2, list(module.parameters()))
    for rank in ranks:
        for got, wanted in zip(rank["gradient"], expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-14)


def test_parameters_stay_equal_on_all_ranks_through_optimizer_steps(ranks):
    assert ranks[0]["hashes"] == ranks[1]["hashes"]
    assert len(set(ranks[0]["hashes"])) == 3


def test_strategy_none_is_refused_with_several_ranks(ranks):
    assert all("one rank only" in rank["none_refused"] for rank in ranks)


def test_time_in_collectives_is_counted(ranks):
    assert all(0 < rank["sync_seconds"] < 60 for rank in ranks)


def test_metrics_of_both_ranks_are_written_once(run_dir, ranks):
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [record["iteration"] for record in records] == [1, 2]
    assert [entry["rank"] for entry in records[0]["ranks"]] == [0, 1]
    assert len(list(run_dir.glob("events.out.tfevents.*"))) == 1


def test_every_rank_has_its_log_file(run_dir, ranks):
    assert sorted(path.name for path in (run_dir / "logs").iterdir()) == ["rank_0.log", "rank_1.log"]
