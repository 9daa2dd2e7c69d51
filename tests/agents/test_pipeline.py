"""Test that pipeline training on pairs of ranks equals ddp, also after a resume."""

import math

import pytest
import torch
from agents_ranks import world_of_one
from pipeline_ranks import BRIEFLY, FORMS, REST, exercise
from torch import nn
from train_runs import SMALL, records, start_training

from agents.config import RunConfig
from agents.run.choice import parse_training, resumed_config
from rl_dist.errors import UserError
from rl_dist.launch.config import LaunchConfig, resolve
from rl_dist.launch.ranks import launch
from rl_dist.process_group.world import GROUP_TIMEOUT
from rl_dist.strategies.strategy import Strategy


def results_of(out_dir, num_ranks):
    paths = [out_dir / f"{num_ranks}_rank_{rank}.pt" for rank in range(num_ranks)]
    return [torch.load(path, weights_only=True) for path in paths]


@pytest.fixture(scope="module")
def pair(ranks_folder):
    return results_of(ranks_folder, 2)


def check_curve(ranks, label):
    tolerance = {"rtol": 0, "atol": 1e-6 if label == "fp32" else 1e-12}
    for rank in ranks:
        pipeline, ddp = rank[label, "pipeline"], rank[label, "ddp"]
        assert len(pipeline["losses"]) == 2
        for name in ("losses", "parameters"):
            torch.testing.assert_close(pipeline[name], ddp[name], **tolerance)
        assert pipeline["hash"] == ranks[0][label, "pipeline"]["hash"]


@pytest.mark.parametrize("label", BRIEFLY)
def test_two_stages_train_as_two_replicas_do(pair, label):
    check_curve(pair, label)


@pytest.mark.slow  # starts more processes
@pytest.mark.parametrize(("num_ranks", "labels"), [(2, REST), (4, BRIEFLY)])
def test_pairs_of_stages_train_as_replicas_do_in_every_form(num_ranks, labels, tmp_path):
    assert launch(exercise, (str(tmp_path), labels), num_ranks) == 0
    for label in labels:
        check_curve(results_of(tmp_path, num_ranks), label)


def test_a_run_resumes_bit_for_bit_and_checkpoints_pass_between_ddp_and_pipeline(pair):
    for rank in pair:
        whole = rank[BRIEFLY[0], "pipeline"]["parameters"]
        assert torch.equal(rank["resumed", "pipeline", "pipeline"], whole)
        for change in (("pipeline", "ddp"), ("ddp", "pipeline")):
            torch.testing.assert_close(rank["resumed", *change], whole, rtol=0, atol=1e-12)


def test_a_loss_that_is_not_finite_on_one_rank_holds_back_both_stages(pair):
    for rank in pair:
        skipped = [losses["optim/skipped_steps"] for losses in rank["poisoned"]["losses"]]
        assert skipped == [1, 0] and rank["poisoned"]["parameters"].isfinite().all()
        assert rank["poisoned"]["hash"] == pair[0]["poisoned"]["hash"]


def test_the_groups_of_stages_wait_as_long_as_the_world_does(pair):
    assert pair[0]["poisoned"]["timeouts_s"] == [GROUP_TIMEOUT.total_seconds()] * 2


@pytest.mark.parametrize(
    ("saved", "given", "form"),
    [
        ({"shard_size": 2}, ["--hybrid_form", "pipeline"], ("hybrid", "pipeline", 0)),
        ({"shard_size": 0}, ["--shard_size", "2"], ("hybrid", "shard", 2)),
        ({"hybrid_form": "pipeline"}, ["--hybrid_form", "shard"], ("hybrid", "shard", 0)),
        ({"shard_size": 2}, ["--strategy", "ddp"], ("ddp", "shard", 0)),
    ],
)
def test_the_form_of_a_resumed_hybrid_run_changes_without_naming_hybrid_again(saved, given, form):
    launch_config = LaunchConfig(num_gpus=4, device="cpu", strategy="hybrid", **saved)
    given = parse_training(given).given
    resumed = resumed_config(RunConfig(launch=launch_config), given).launch
    assert (resumed.strategy, resumed.hybrid_form, resumed.shard_size) == form
    assert resolve(resumed).num_ranks == 4


def test_a_policy_without_a_cascade_and_one_rank_are_refused():
    settings = {"launch": {"strategy": "hybrid", "hybrid_form": "pipeline"}}
    with pytest.raises(UserError, match="--policy clstm"):
        RunConfig.from_dict(RunConfig().to_dict() | settings | {"policy": {"policy": "mlp"}})
    with world_of_one() as world, pytest.raises(UserError, match="pairs of ranks"):
        Strategy(FORMS["pipeline"], world).wrap(nn.Linear(2, 2))


@pytest.mark.slow  # starts 2 ranks 3 times
@pytest.mark.timeout(900)
def test_the_command_trains_in_two_stages_and_continues_as_ddp_and_in_stages_again(tmp_path):
    run_dir = tmp_path / "run"
    stages = ["--strategy", "hybrid", "--hybrid_form", "pipeline"]
    for flags in (
        [*SMALL, "--num_gpus", "2", "--device", "cpu", *stages, "--run_dir", run_dir],
        ["--resume", run_dir, "--num_episodes", "16", "--strategy", "ddp"],
        ["--resume", run_dir, "--num_episodes", "24", *stages],
    ):
        training = start_training(*flags)
        _, stderr = training.communicate(timeout=300)
        assert training.returncode == 0, stderr
    rows = records(run_dir)
    assert rows[-1]["episode/total"] >= 24
    assert all(math.isfinite(row["loss/policy"]) for row in rows)
