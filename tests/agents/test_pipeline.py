"""The pipeline: two stages on pairs of ranks train as replicas do, and checkpoints pass over."""

import math

import pytest
import torch
from agents_ranks import world_of_one
from pipeline_ranks import BRIEFLY, FORMS, REST, UNCLIPPED, exercise, first_minibatch, training_of
from torch import nn
from train_runs import SMALL, records, start_training

from agents.config import RunConfig
from agents.pipeline import StageStrategy, stage_of
from agents.run.choice import parse_training, resumed_config
from rl_dist.errors import UserError
from rl_dist.launch.config import LaunchConfig, resolve
from rl_dist.launch.ranks import launch
from rl_dist.process_group.world import GROUP_TIMEOUT
from rl_dist.strategies.strategy import Strategy

PIPELINE = FORMS["pipeline"]
TWO_RANKS = [
    *("--num_gpus", "2", "--device", "cpu"),
    *("--strategy", "hybrid", "--hybrid_form", "pipeline"),
]


def launched(out_dir, num_ranks, labels):
    assert launch(exercise, (str(out_dir), labels, False), num_ranks) == 0
    return results_of(out_dir, num_ranks)


def results_of(out_dir, num_ranks):
    paths = [out_dir / f"{num_ranks}_rank_{rank}.pt" for rank in range(num_ranks)]
    return [torch.load(path, weights_only=True) for path in paths]


@pytest.fixture(scope="module")
def pair(ranks_folder):
    return results_of(ranks_folder, 2)


@pytest.fixture(scope="module")
def rest(tmp_path_factory):
    return launched(tmp_path_factory.mktemp("rest"), 2, REST)


@pytest.mark.parametrize("label", BRIEFLY)
def test_two_stages_train_as_two_replicas_do(pair, label):
    check_curve(pair, label)


@pytest.mark.slow  # two more processes
@pytest.mark.parametrize("label", REST)
def test_two_stages_train_as_two_replicas_do_in_every_form(rest, label):
    check_curve(rest, label)


def check_curve(ranks, label):
    tolerance = {"rtol": 0, "atol": 1e-6 if label == "fp32" else 1e-12}
    for rank in ranks:
        pipeline, ddp = rank[label, "pipeline"], rank[label, "ddp"]
        assert len(pipeline["losses"]) == 2
        for name in ("losses", "parameters"):
            torch.testing.assert_close(pipeline[name], ddp[name], **tolerance)
    assert len({rank[label, "pipeline"]["hash"] for rank in ranks}) == 1


def check_gradient(ranks):
    """The stages' gradients and their norm are those of one process on all sequences."""
    with world_of_one() as world:
        training = training_of("trading, clstm", "pipeline", world, ppo=UNCLIPPED)
        _, norm, _ = training.ppo.step(first_minibatch(training))
        alone = {name: parameter.grad for name, parameter in training.policy.named_parameters()}
    assert float(norm) > 1e-3
    for rank, found in enumerate(one["gradient"] for one in ranks):
        mine = {name for name in alone if stage_of(name) == rank % 2}
        assert set(found["gradients"]) == mine and 0 < len(mine) < len(alone)
        for name in mine:
            torch.testing.assert_close(found["gradients"][name], alone[name], rtol=0, atol=1e-12)
        assert found["norm"] == pytest.approx(float(norm), abs=1e-12)
        assert found["moments"] == len(mine)  # the optimizer keeps nothing of the other stage


def test_a_stages_gradient_is_its_part_of_one_processs(pair):
    check_gradient(pair)


def test_a_run_resumes_bit_for_bit(pair):
    for rank in pair:
        assert torch.equal(rank["resumed"]["pipeline", "pipeline"], rank["resumed"]["whole"])


@pytest.mark.parametrize(("before", "after"), [("ddp", "pipeline"), ("pipeline", "ddp")])
def test_checkpoints_pass_between_ddp_and_pipeline(pair, before, after):
    for rank in pair:
        curves = rank["resumed"]
        torch.testing.assert_close(curves[before, after], curves["whole"], rtol=0, atol=1e-12)


def test_a_loss_that_is_not_finite_on_one_rank_holds_back_both_stages(pair):
    for rank in pair:
        before, held_back, after = rank["poisoned"]["hashes"]
        assert rank["poisoned"]["stepped"] == [False, True]
        assert before == held_back != after
    assert pair[0]["poisoned"]["hashes"] == pair[1]["poisoned"]["hashes"]


def test_the_groups_of_stages_wait_as_long_as_the_world_does(pair):
    assert pair[0]["poisoned"]["timeouts_s"] == [GROUP_TIMEOUT.total_seconds()] * 2


@pytest.mark.slow  # four processes
def test_two_pairs_average_the_gradients_of_each_stage(tmp_path):
    ranks = launched(tmp_path, 4, BRIEFLY[:1])
    check_gradient(ranks)
    check_curve(ranks, BRIEFLY[0])


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


def test_a_policy_without_a_cascade_is_refused():
    launch_config = {"strategy": "hybrid", "hybrid_form": "pipeline"}
    saved = RunConfig().to_dict()
    assert RunConfig.from_dict(saved | {"launch": launch_config}).policy.policy == "clstm"
    with pytest.raises(UserError, match="--policy clstm: use --strategy ddp"):
        RunConfig.from_dict(saved | {"launch": launch_config, "policy": {"policy": "mlp"}})


def test_the_general_strategy_and_one_rank_are_refused(monkeypatch):
    with world_of_one() as world:
        with pytest.raises(UserError, match="pairs of ranks"):
            StageStrategy(PIPELINE, world)
        # one rank is enough to see this
        monkeypatch.setattr("rl_dist.strategies.strategy.check_strategy", lambda *_: "hybrid")
        with pytest.raises(UserError, match="trains the cascaded policy only"):
            Strategy(PIPELINE, world).wrap(nn.Linear(2, 2))


@pytest.mark.slow  # four runs with two ranks each
@pytest.mark.timeout(900)
def test_the_command_trains_in_two_stages_and_goes_on_as_ddp_shards_and_stages_again(tmp_path):
    run_dir = tmp_path / "run"
    training = start_training(*SMALL, *TWO_RANKS, "--run_dir", run_dir)
    _, stderr = training.communicate(timeout=300)
    assert training.returncode == 0, stderr
    steps = (("--strategy", "ddp"), ("--strategy", "hybrid"), ("--hybrid_form", "pipeline"))
    for number, changed in enumerate(steps, 2):
        resumed = start_training("--resume", run_dir, "--num_episodes", 8 * number, *changed)
        _, stderr = resumed.communicate(timeout=300)
        assert resumed.returncode == 0, stderr
    rows = records(run_dir)
    assert rows[-1]["episode/total"] >= 32
    assert all(math.isfinite(row["loss/policy"]) for row in rows)
