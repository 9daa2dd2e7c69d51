import math

import pytest
import torch
from agents_ranks import world_of_one
from pipeline_ranks import BRIEFLY, FORMS, REST, UNCLIPPED, exercise, first_minibatch, training_of
from torch import nn
from train_runs import SMALL, only_error, records, start_training

from agents.pipeline import make_strategy, stage_of
from agents.run.config import SECTIONS, RunConfig
from agents.run.resumed import resumed_config
from rl_dist.config import parse_flags
from rl_dist.errors import UserError
from rl_dist.launch.fallback import settle_launch
from rl_dist.launch.launcher import LaunchConfig, launch, resolve
from rl_dist.parallel.config import StrategyConfig
from rl_dist.parallel.strategy import Strategy

PIPELINE = FORMS["pipeline"]
TWO_RANKS = ["--num_gpus", "2", "--device", "cpu", "--strategy", "hybrid", "--hybrid_form", "pipeline"]


def launched(out_dir, num_ranks, labels):
    assert launch(exercise, (str(out_dir), labels, False), num_ranks) == 0
    return results_of(out_dir, num_ranks)


def results_of(out_dir, num_ranks):
    return [torch.load(out_dir / f"{num_ranks}_rank_{rank}.pt", weights_only=True) for rank in range(num_ranks)]


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


def check_curve(pair, label):
    tolerance = 1e-6 if label == "fp32" else 1e-12
    for rank in pair:
        pipeline, ddp = rank[label, "pipeline"], rank[label, "ddp"]
        assert len(pipeline["losses"]) == 2
        for found, expected in zip(pipeline["losses"], ddp["losses"], strict=True):
            assert found == pytest.approx(expected, abs=tolerance)
        torch.testing.assert_close(pipeline["parameters"], ddp["parameters"], rtol=0, atol=tolerance)
    assert len({rank[label, "pipeline"]["hash"] for rank in pair}) == 1


def check_gradient(ranks):
    """The stages' gradients together are that of one process on the slots of all ranks, and so is their norm."""
    with world_of_one() as world:
        training = training_of("trading, clstm", "pipeline", world, ppo=UNCLIPPED)
        _, norm, _ = training.ppo.step(first_minibatch(training))
        alone = {name: parameter.grad for name, parameter in training.policy.named_parameters()}
    assert float(norm) > 1e-3
    for rank, found in enumerate(one["gradient", "pipeline"] for one in ranks):
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


@pytest.mark.slow  # four processes
def test_two_pairs_average_the_gradients_of_each_stage(tmp_path):
    ranks = launched(tmp_path, 4, BRIEFLY[:1])
    check_gradient(ranks)
    label = BRIEFLY[0]
    for rank in ranks:
        torch.testing.assert_close(
            rank[label, "pipeline"]["parameters"], rank[label, "ddp"]["parameters"], rtol=0, atol=1e-12
        )
    assert len({rank[label, "pipeline"]["hash"] for rank in ranks}) == 1


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_an_odd_number_of_ranks_is_refused(num_ranks):
    with pytest.raises(UserError, match=f"pairs of ranks, got {num_ranks}"):
        PIPELINE.resolve(num_ranks)
    PIPELINE.resolve(4)


def test_one_rank_refuses_before_it_builds_anything():
    with world_of_one() as world, pytest.raises(UserError, match="pairs of ranks"):
        make_strategy(PIPELINE, world)


def test_unknown_forms_and_forms_without_effect_are_refused():
    with pytest.raises(UserError, match="hybrid_form must be one of shard, pipeline, got 'diagonal'"):
        StrategyConfig(mode="hybrid", hybrid_form="diagonal")
    with pytest.raises(ValueError, match="hybrid_form must be one of"):
        LaunchConfig(strategy="hybrid", hybrid_form="diagonal")
    with pytest.raises(ValueError, match="needs strategy hybrid, got ddp"):
        resolve(LaunchConfig(strategy="ddp", hybrid_form="pipeline"))
    with pytest.raises(ValueError, match="needs strategy hybrid, got ddp"):  # no reason to step down
        settle_launch(LaunchConfig(num_gpus=2, device="cpu", strategy="ddp", hybrid_form="pipeline", fallback=True))
    with pytest.raises(ValueError, match="shard_size 2 does nothing with hybrid_form pipeline"):
        LaunchConfig(strategy="hybrid", hybrid_form="pipeline", shard_size=2)
    assert LaunchConfig(strategy="hybrid", hybrid_form="pipeline").strategy_config.pipelined


@pytest.mark.parametrize(
    ("saved", "given", "form"),
    [
        ({"strategy": "hybrid"}, ["--hybrid_form", "pipeline"], ("hybrid", "pipeline", 0)),
        ({"strategy": "hybrid", "shard_size": 2}, ["--hybrid_form", "pipeline"], ("hybrid", "pipeline", 0)),
        ({"strategy": "hybrid"}, ["--shard_size", "2"], ("hybrid", "shard", 2)),
        ({"strategy": "hybrid", "hybrid_form": "pipeline"}, ["--hybrid_form", "shard"], ("hybrid", "shard", 0)),
        ({"strategy": "hybrid", "shard_size": 2}, ["--strategy", "ddp"], ("ddp", "shard", 0)),
    ],
)
def test_the_form_of_a_resumed_hybrid_run_changes_without_naming_hybrid_again(saved, given, form):
    before = RunConfig(launch=LaunchConfig(num_gpus=4, device="cpu", **saved))
    launch_config = resumed_config(before, parse_flags(SECTIONS, given, description="")).launch
    assert (launch_config.strategy, launch_config.hybrid_form, launch_config.shard_size) == form
    assert resolve(launch_config).num_ranks == 4


@pytest.mark.parametrize("given", [["--hybrid_form", "pipeline"], ["--shard_size", "2"]])
def test_the_form_of_hybrid_is_refused_where_the_resumed_run_is_none(given):
    before = RunConfig(launch=LaunchConfig(num_gpus=4, device="cpu"))
    resumed = resumed_config(before, parse_flags(SECTIONS, given, description=""))
    with pytest.raises(ValueError, match="strategy hybrid"):
        resolve(resumed.launch)


def test_a_policy_without_a_cascade_is_refused():
    launch_config = {"strategy": "hybrid", "hybrid_form": "pipeline"}
    saved = RunConfig().to_dict()
    assert RunConfig.from_dict(saved | {"launch": launch_config}).policy.policy == "clstm"
    with pytest.raises(UserError, match="use --policy clstm, or --strategy ddp"):
        RunConfig.from_dict(saved | {"launch": launch_config, "policy": {"policy": "mlp"}})


def test_modules_other_than_the_policy_are_refused_by_the_general_strategy(monkeypatch):
    with world_of_one() as world:
        monkeypatch.setattr(StrategyConfig, "resolve", lambda *_: None)  # one rank is enough to see this
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


@pytest.mark.slow  # starts the command
def test_the_command_refuses_an_odd_number_of_ranks_in_one_line(tmp_path):
    training = start_training(*SMALL, *TWO_RANKS, "--num_gpus", "3", "--run_dir", tmp_path / "run")
    _, stderr = training.communicate(timeout=120)
    assert training.returncode == 2
    assert "hybrid_form pipeline works on pairs of ranks, got 3" in only_error(stderr)
