"""Test that pipelines of two ranks train like ddp, also after a resume."""

import pytest
import torch
from agents_ranks import world_of_one
from pipeline_ranks import BRIEFLY, FORMS, REST, exercise
from torch import nn

from agents.config import RunConfig
from agents.learner.pipeline import StageStrategy
from agents.run.choice import parse_training, resumed_config
from rl_dist.errors import UserError
from rl_dist.launch.config import LaunchConfig, resolve
from rl_dist.launch.ranks import launch
from rl_dist.process_group.world import World
from rl_dist.strategies.strategy import Strategy


def check_curve(ranks, label):
    for rank in ranks:
        pipeline, ddp = rank[label, "pipeline"], rank[label, "ddp"]
        assert len(pipeline["losses"]) == 2
        for name in ("losses", "parameters"):
            torch.testing.assert_close(pipeline[name], ddp[name], rtol=0, atol=1e-12)
        assert pipeline["hash"] == ranks[0][label, "pipeline"]["hash"]


@pytest.mark.parametrize("label", BRIEFLY)
def test_two_stages_train_like_two_replicas(ranks, label):
    check_curve(ranks, label)


@pytest.mark.slow  # slow because it launches new ranks
@pytest.mark.parametrize("num_ranks, labels", [(2, REST), (4, BRIEFLY)])
def test_pairs_of_stages_train_like_replicas_in_all_other_cases(num_ranks, labels, tmp_path):
    assert launch(exercise, (str(tmp_path), labels), num_ranks) == 0
    files = [tmp_path / f"rank_{rank}.pt" for rank in range(num_ranks)]
    for label in labels:
        check_curve([torch.load(path, weights_only=True) for path in files], label)


def test_a_run_resumes_bit_for_bit_and_checkpoints_pass_between_ddp_and_pipeline(ranks):
    for rank in ranks:
        whole = rank[BRIEFLY[0], "pipeline"]["parameters"]
        assert torch.equal(rank["resumed", "pipeline", "pipeline"], whole)
        for change in (("pipeline", "ddp"), ("ddp", "pipeline")):
            torch.testing.assert_close(rank["resumed", *change], whole, rtol=0, atol=1e-12)


def test_an_infinite_loss_on_one_rank_makes_both_stages_skip_the_step(ranks):
    for rank in ranks:
        skipped = [losses["optim/skipped_steps"] for losses in rank["poisoned"]["losses"]]
        assert skipped == [1, 0] and rank["poisoned"]["parameters"].isfinite().all()
        assert rank["poisoned"]["hash"] == ranks[0]["poisoned"]["hash"]


@pytest.mark.parametrize(
    "given, form",
    [
        (["--hybrid_form", "pipeline"], ("hybrid", "pipeline", 0)),
        (["--strategy", "ddp"], ("ddp", "shard", 0)),
    ],
)
def test_a_resume_can_change_the_form_of_a_hybrid_run_by_one_flag(given, form):
    saved = LaunchConfig(num_gpus=4, device="cpu", strategy="hybrid", shard_size=2)
    resumed = resumed_config(RunConfig(launch=saved), parse_training(given).given).launch
    assert (resumed.strategy, resumed.hybrid_form, resumed.shard_size) == form
    assert resolve(resumed).num_ranks == 4


def test_a_policy_without_a_cascade_gloo_on_gpus_and_a_single_rank_are_refused():
    settings = {"launch": {"strategy": "hybrid", "hybrid_form": "pipeline"}}
    with pytest.raises(UserError, match="--policy clstm"):
        RunConfig.from_dict(RunConfig().to_dict() | settings | {"policy": {"policy": "mlp"}})
    with pytest.raises(UserError, match="gloo.*--backend nccl"):
        StageStrategy(FORMS["pipeline"], World(0, 0, 2, torch.device("cuda"), "gloo", 2))
    with world_of_one() as world, pytest.raises(UserError, match="pairs of ranks"):
        Strategy(FORMS["pipeline"], world).wrap(nn.Linear(2, 2))
