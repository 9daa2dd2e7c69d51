"""Mode hybrid on real ranks over gloo, started once; the tests judge what they brought back."""

import json

import pytest
import sharding_ranks
import torch
from agents_ranks import world_of_one
from sharding_ranks import HALF, MAX_GRAD_NORM, job, make_policy, run, trained
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path
from train_runs import SIZES, records, start_training

from rl_dist.checkpoint.file import load_checkpoint
from rl_dist.checkpoint.folder import load_latest
from rl_dist.errors import UserError
from rl_dist.launch.launcher import launch
from rl_dist.parallel.config import StrategyConfig, resolve_shard_size
from rl_dist.parallel.strategy import Strategy
from rl_dist.process_group.hashes import parameter_hash, tensor_hash

pytestmark = pytest.mark.timeout(600)  # the first test waits for all ranks' work, on any machine
CLOSE = {"rtol": 1e-5, "atol": 1e-9}


@pytest.fixture(
    scope="module",
    params=[pytest.param((2, 0), id="one group of 2"), pytest.param((4, 2), id="2 x 2", marks=pytest.mark.slow)],
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
    for rank in ranks:
        for mode in ("ddp", "hybrid"):
            torch.testing.assert_close(rank[mode]["gradient"], alone["gradient"], **CLOSE)


def test_the_norm_is_of_the_whole_gradient_and_clips_it_as_in_one_process(ranks, alone):
    assert (alone["norms"] > MAX_GRAD_NORM).all()
    for rank in ranks:
        torch.testing.assert_close(rank["hybrid"]["norms"], alone["norms"], **CLOSE)
        torch.testing.assert_close(rank["hybrid"]["parameters"], alone["parameters"], **CLOSE)
        torch.testing.assert_close(rank["ddp"]["parameters"], alone["parameters"], **CLOSE)


def test_all_ranks_start_from_rank_0_and_hold_the_same_after_every_step(ranks):
    assert {rank["hybrid"]["start"] for rank in ranks} == {parameter_hash(make_policy(seed=0))}
    assert len({rank["hybrid"]["hash"] for rank in ranks}) == 1


def test_every_rank_holds_its_share_only(ranks):
    stats = [rank["hybrid"]["stats"] for rank in ranks]
    total = sum(parameter.numel() * 8 for parameter in make_policy().parameters())
    groups = stats[0]["mesh"]["replicate"]
    assert stats[0]["mesh"] == {"replicate": len(ranks) // 2, "shard": 2}
    assert sum(one["shard_bytes"] for one in stats) == groups * total
    assert all(one["shard_bytes"] < 0.7 * total for one in stats)


def test_the_bare_policy_acts_with_whole_parameters_through_its_lstms(ranks):
    for rank in ranks:
        policy = make_policy(seed=5)
        policy.load_state_dict(rank["hybrid"]["module"])
        expected = sharding_ranks.act(policy)
        assert all(rank["flat weights"])
        assert type(rank["fresh state"]) is torch.Tensor
        assert all(torch.equal(*pair) for pair in zip(rank["acted"], expected["acted"], strict=True))
        assert all(torch.equal(*pair) for pair in zip(rank["sequence"], expected["sequence"], strict=True))


def test_a_loss_that_is_no_number_on_one_rank_makes_all_ranks_skip_the_step(ranks):
    assert all(rank["skipped"] for rank in ranks)


def test_saved_states_are_those_of_ddp(ranks):
    for rank in ranks:
        ddp, hybrid = rank["ddp"], rank["hybrid"]
        assert list(hybrid["module"]) == list(ddp["module"])
        torch.testing.assert_close(hybrid["module"], dict(ddp["module"]), **CLOSE)
        assert hybrid["optimizer"]["param_groups"] == ddp["optimizer"]["param_groups"]
        torch.testing.assert_close(hybrid["optimizer"]["state"], ddp["optimizer"]["state"], **CLOSE)
        assert all(type(tensor) is torch.Tensor for tensor in hybrid["module"].values())


def test_going_on_from_saved_states_is_going_on(ranks):
    for rank in ranks:
        assert all(torch.equal(*pair) for pair in zip(rank["again"], rank["uninterrupted"], strict=True))
        torch.testing.assert_close(rank["as ddp"], rank["uninterrupted"], **CLOSE)


def test_accumulated_parts_are_reduced_once_a_step(ranks):
    for rank in ranks:
        assert rank["reductions"] == 3
        torch.testing.assert_close(rank["in parts"]["gradient"], rank["hybrid"]["gradient"], **CLOSE)
        torch.testing.assert_close(rank["in parts"]["parameters"], rank["hybrid"]["parameters"], **CLOSE)


def test_a_rank_that_changed_its_copy_is_found(ranks):
    assert all("drifted apart: rank 1 in critic_head.bias (against rank 0)" in rank["in sync"] for rank in ranks)


@pytest.mark.parametrize(
    ("shard_size", "num_ranks", "told"),
    [
        (0, 1, "strategy hybrid shares out over several ranks, got 1; start more, or use --strategy none"),
        (1, 4, "strategy hybrid with shard_size 1 is ddp: use --strategy ddp, or --shard_size 2, 4"),
        (3, 4, "shard_size 3 does not divide 4 ranks; use --shard_size 2, 4"),
        (8, 4, "shard_size 8 does not divide 4 ranks; use --shard_size 2, 4"),
    ],
)
def test_what_cannot_be_shared_out_is_refused_with_what_can(shard_size, num_ranks, told):
    with pytest.raises(UserError) as error:
        resolve_shard_size(shard_size, num_ranks)
    assert str(error.value) == told


def test_groups_are_the_ranks_of_a_machine_unless_told_otherwise(monkeypatch):
    assert resolve_shard_size(0, 4) == 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert resolve_shard_size(0, 4) == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with pytest.raises(UserError, match="one rank on this machine is ddp: use --strategy ddp, or --shard_size 2, 4"):
        resolve_shard_size(0, 4)


def test_one_rank_and_negative_sizes_are_refused():
    with world_of_one() as world, pytest.raises(UserError, match="several ranks"):
        Strategy(StrategyConfig(mode="hybrid"), world)
    with pytest.raises(UserError, match="shard_size must be at least 0, got -1"):
        StrategyConfig(shard_size=-1)


def test_ranks_refuse_a_size_that_does_not_divide_them(ranks):
    assert all("does not divide" in rank["refused"] for rank in ranks)


def test_an_optimizer_whose_steps_would_change_nothing_is_refused_with_the_cure(ranks):
    assert all(rank["refused optimizer"].endswith("make it of strategy.parameters, after wrap") for rank in ranks)


def test_a_rank_that_makes_another_call_while_gradients_are_reduced_is_named(ranks):
    for rank in ranks:
        assert "the ranks made different collective calls: rank 0 in 'gradient reduction' (coll" in rank["other calls"]
        assert "; rank 1 in 'agreement on a number' (coll" in rank["other calls"]


@pytest.mark.slow
def test_a_rank_that_does_not_come_to_a_forward_pass_is_named(tmp_path, capfd):
    assert launch(sharding_ranks.hang_before_forward, (str(tmp_path),), num_ranks=2) == 1
    told = capfd.readouterr().err
    assert "in 'gather of parameters'" in told
    assert "for rank 1, which made no progress in update, outside any collective" in told


@pytest.mark.slow
def test_a_rank_that_does_not_come_to_a_reduction_is_named(tmp_path, capfd):
    assert launch(sharding_ranks.hang, (str(tmp_path),), num_ranks=2) == 1
    told = capfd.readouterr().err
    assert "in 'gradient reduction' (collective " in told
    assert "for rank 1, which made no progress in update, outside any collective (--collective_timeout 6)" in told


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


def test_checkpoint_files_are_those_of_ddp(trained_ranks, folder):
    states = [load_checkpoint(folder / mode / "checkpoints" / HALF) for mode in ("ddp", "hybrid")]
    ddp, hybrid = (
        {name: (value.shape, value.dtype) if isinstance(value, Tensor) else value for name, value in leaves(state)}
        for state in states
    )
    assert list(ddp) == list(hybrid)
    assert all(ddp[name] == hybrid[name] for name in ddp if not isinstance(ddp[name], float))


def leaves(state):
    return [(keystr(path), value) for path, value in tree_flatten_with_path(state)[0]]


@pytest.mark.slow
def test_the_command_trains_in_hybrid_and_goes_on_with_one_rank(tmp_path):
    run_dir = tmp_path / "run"

    def command(*flags):
        process = start_training(*flags, "--device", "cpu")
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        return out

    command("--env", "Recall-v0", *SIZES, "--num_gpus", "2", "--strategy", "hybrid", "--run_dir", run_dir)
    summary = json.loads((run_dir / "summary.json").read_text())
    newest = load_latest(run_dir)
    assert newest is not None and json.loads(newest.state["config"])["launch"]["strategy"] == "hybrid"
    assert summary["parameter_sha256"] == tensor_hash(*newest.state["policy"].values())
    told = command("--resume", run_dir, "--num_episodes", "16", "--strategy", "default", "--num_gpus", "1")
    assert "going on from" in told
    assert [record["iteration"] for record in records(run_dir)] == list(range(1, len(records(run_dir)) + 1))
