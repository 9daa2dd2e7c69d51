"""auto measures and fallback steps down; what they come to is kept, and changes nothing else."""

import dataclasses
import json
from unittest import mock

import pytest
import torch
from agents_ranks import world_of_one
from train_runs import SIZES, only_error, records, train_here

from agents.dry_run.strategy import gradient_steps, resolve_training_strategy
from agents.policy import PolicyConfig
from agents.ppo import PPO
from agents.run.config import SECTIONS, RunConfig, save_config
from agents.run.resumed import resumed_config
from agents.sizes import TrainConfig
from envs.task import TaskConfig
from rl_dist.errors import UserError
from rl_dist.flags import parse_flags
from rl_dist.launch.bench import BenchError
from rl_dist.launch.config import LaunchConfig, resolve
from rl_dist.launch.fallback import resolve_launch, try_ranks
from rl_dist.resume_check.comparison import differences, result_of
from rl_dist.strategies import choice
from rl_dist.strategies.choice import Hardware, Measurement, choose_strategy, measure_mode
from rl_dist.strategies.config import StrategyConfig

RECALL = ["--env", "Recall-v0", *SIZES, "--device", "cpu"]
TWO = Hardware(2)
CHOSEN = LaunchConfig(
    device="cpu", num_gpus=2, strategy="auto", chosen_strategy="ddp", chosen_on="2 ranks on cpu"
)


@pytest.fixture
def world():
    with world_of_one() as opened:
        yield opened


# ---- the decision


def auto(**seconds):
    """What auto decides on two ranks where modes take so long in their better turn."""
    turns = {mode: iter([9.0, best]) for mode, best in seconds.items()}

    def attempt(mode):
        step_s = next(turns[mode])
        return Measurement(mode, "out of memory" if step_s < 0 else "", step_s)

    return choose_strategy(StrategyConfig(mode="auto"), TWO, attempt)


@pytest.mark.parametrize(
    ("mode", "hardware", "decided"),
    [
        ("default", Hardware(1), "none"),
        ("default", TWO, "ddp"),
        ("hybrid", TWO, "hybrid"),
    ],
)
def test_a_strategy_that_is_named_is_not_measured(mode, hardware, decided):
    found = choose_strategy(StrategyConfig(mode=mode), hardware, pytest.fail)
    assert found.mode == decided


def test_where_no_mode_works_all_problems_are_named():
    with pytest.raises(UserError, match="none that works") as error:
        auto(ddp=-1.0, hybrid=-1.0)
    assert error.value.exit_code == 1


def test_auto_takes_the_fastest_and_a_later_one_only_if_it_is_clearly_faster():
    found = auto(ddp=0.05, hybrid=0.001)
    assert found.mode == "hybrid"
    assert "hybrid, 1 ms a gradient step (ddp, 50 ms a gradient step)" in found.reason
    assert auto(ddp=0.1, hybrid=0.0999).mode == auto(ddp=0.001, hybrid=0.05).mode == "ddp"
    found = auto(ddp=1.0, hybrid=-1.0)  # it failed in one turn
    assert found.mode == "ddp" and "hybrid does not work here (out of memory)" in found.reason


@pytest.mark.parametrize(
    ("options", "hardware", "words"),
    [
        ({"mode": "none"}, TWO, "strategy none works in one process, got 2 ranks"),
        ({"mode": "dp"}, Hardware(1), "needs CUDA GPUs"),
        ({"mode": "dp"}, Hardware(1, "cuda", 1), "at least 2 GPUs, got 1"),
        ({"mode": "hybrid"}, Hardware(1), "several ranks"),
        ({"mode": "hybrid", "hybrid_form": "pipeline"}, Hardware(3), "pairs of ranks, got 3"),
        ({"mode": "hybrid", "precision": "fp16"}, TWO, "precision fp16"),
        ({"mode": "auto", "shard_size": 2}, Hardware(1), "shard_size does nothing on one rank"),
        ({"mode": "auto", "shard_size": 3}, TWO, "shard_size 3 does not divide 2 ranks"),
        ({"gradient_compression": "bf16"}, Hardware(1), "got none .*--gradient_compression none"),
        ({"mode": "none", "backend": "gloo"}, Hardware(1), "backend gloo needs strategy ddp"),
        ({"mode": "ddp", "backend": "nccl"}, TWO, "backend nccl (works on|is not part of)"),
        ({"mode": "ddp", "backend": "mpi"}, TWO, "backend mpi is not part of this torch"),
        ({"cudnn_autotune": True}, Hardware(1), "cudnn_autotune does nothing without a GPU"),
        ({"precision": "tf32"}, Hardware(1), "precision tf32"),
    ],
)
def test_what_cannot_be_or_has_no_effect_is_refused(options, hardware, words):
    with pytest.raises(UserError, match=words):
        choose_strategy(StrategyConfig(**options), hardware, pytest.fail)


# ---- measuring


def test_an_error_in_the_program_is_not_taken_for_a_mode_that_does_not_work(world):
    def start(mode):
        raise TypeError("a bug")
        yield

    with pytest.raises(TypeError, match="a bug"):
        measure_mode("ddp", start, world)


def test_random_numbers_go_on_as_if_nothing_had_been_tried(world):
    before = torch.get_rng_state()
    assert not measure_mode("ddp", lambda mode: (torch.rand(9) for _ in range(99)), world).problem
    assert torch.equal(torch.get_rng_state(), before)


def test_two_ranks_choose_alike_when_a_mode_fails_on_one_of_them(ranks_folder):
    one, other = (json.loads((ranks_folder / f"{rank}.json").read_text()) for rank in range(2))
    assert one == other
    assert "rank 1: CUDA out of memory" in one["full"]["problem"]
    assert one["broken"]["problem"].startswith("rank 0: shard_size 3")
    assert one["ddp"]["problem"] == "" and one["ddp"]["step_s"] > 0
    assert one["slow on rank 0"]["step_s"] >= 0.08
    assert one["chosen"]["mode"] == "ddp" and one["chosen"]["reason"]
    assert one["groups left behind"] == 0


# ---- the job's own gradient steps


def steps_of(world, env="Recall-v0", **sizes):
    given = {"num_envs": 8, "batch_size": 8, "num_steps": 16, "bptt_steps": 8} | sizes
    train, policy, task = TrainConfig(**given), PolicyConfig(hidden_size=8), TaskConfig(env=env)
    config = RunConfig(train=train, policy=policy, task=task, launch=LaunchConfig(device="cpu"))
    return gradient_steps(config, (), config.prepare_task(), world)


@pytest.mark.parametrize("env", ["Recall-v0", "StockTrading-v0"])
def test_the_jobs_gradient_steps_are_tried_with_its_shapes(world, env):
    steps, seen = steps_of(world, env, grad_accumulation=2), []
    with mock.patch.object(PPO, "update", lambda ppo, minibatch, *_, **__: seen.append(minibatch)):
        assert not measure_mode("none", steps, world).problem
    assert seen[0].obs.shape[:2] == (8, 16) and seen[0].lstm_state.shape[0] == 16
    assert not measure_mode("ddp", steps, world).problem


def test_rollouts_that_do_not_fit_beside_the_steps_are_a_problem_of_the_mode(world):
    steps = steps_of(world, num_envs=800_000, num_steps=1_000_000)  # hundreds of TB
    assert "allocate" in measure_mode("none", steps, world).problem


def test_a_run_with_auto_is_bit_for_bit_the_one_with_the_strategy_it_chose(
    tmp_path, monkeypatch, capfd
):
    # both can be on one rank
    monkeypatch.setattr(choice, "_candidates", lambda *_: ("none", "ddp"))
    common = [*RECALL, "--checkpoint_every", "1"]
    auto_run = [*common, "--strategy", "auto", "--run_dir", tmp_path / "auto"]
    assert train_here(monkeypatch, *auto_run) == 0
    out = capfd.readouterr().out
    kept = json.loads((tmp_path / "auto/config.json").read_text())["launch"]
    assert kept["strategy"] == "auto" and kept["chosen_on"] == "1 rank on cpu"
    assert out.count(f"strategy auto takes {kept['chosen_strategy']}, ") == 1
    monkeypatch.undo()
    named = ["--strategy", kept["chosen_strategy"], "--run_dir", tmp_path / "named"]
    assert train_here(monkeypatch, *common, *named) == 0
    assert differences(result_of(tmp_path / "named"), result_of(tmp_path / "auto")) == []
    capfd.readouterr()
    more = ["--resume", tmp_path / "auto", "--num_episodes", "12"]
    assert train_here(monkeypatch, *more) == 0
    assert "strategy auto takes" not in capfd.readouterr().out  # it stands
    assert json.loads((tmp_path / "auto/config.json").read_text())["launch"] == kept


# ---- what is kept


def test_what_was_chosen_stands_on_the_same_ranks_only():
    decision = resolve_launch(CHOSEN)
    assert decision.config.strategy_config.mode == "ddp" and decision.resolved.num_ranks == 2
    moved = resolve_launch(dataclasses.replace(CHOSEN, num_gpus=1))
    assert moved.config.strategy_config.mode == "auto" and moved.config.chosen_on == ""
    alone = dataclasses.replace(CHOSEN, chosen_strategy="none", chosen_on="1 rank on cpu")
    assert resolve_launch(alone).resolved.num_ranks == 1  # fallback had gone down to one


def test_a_resumed_run_with_other_flags_of_strategies_chooses_again():
    def resumed(*given):
        parsed = parse_flags(SECTIONS, given, description="")
        return resolve_launch(resumed_config(RunConfig(launch=CHOSEN), parsed).launch)

    assert resumed("--strategy", "auto").config.strategy_config.mode == "ddp"
    for flags in (("--shard_size", "2"), ("--gradient_compression", "bf16")):
        assert resumed(*flags).config.strategy_config.mode == "auto"
    with pytest.raises(ValueError, match="hybrid_form pipeline .* strategy auto"):
        resumed("--hybrid_form", "pipeline")


def test_ranks_that_start_again_find_their_choice_in_the_configuration(
    world, tmp_path, monkeypatch
):
    measured = "agents.dry_run.strategy.choose_strategy"
    monkeypatch.setattr(measured, lambda *_, **__: pytest.fail("measured again"))
    config = RunConfig(launch=LaunchConfig(device="cpu", strategy="auto"))
    chosen = dataclasses.replace(config.launch, chosen_strategy="ddp", chosen_on="1 rank on cpu")
    save_config(dataclasses.replace(config, launch=chosen), tmp_path)
    found = resolve_training_strategy(config, resolve(config.launch), None, world, tmp_path)
    assert found.launch == chosen


# ---- stepping down


def cannot(resolved):
    raise BenchError(f"{resolved.num_ranks} ranks failed: NCCL error")


@pytest.mark.parametrize("strategy", ["default", "ddp", "auto", "hybrid"])
def test_ranks_that_cannot_work_together_step_down_to_one(strategy):
    config = LaunchConfig(device="cpu", num_gpus=2, strategy=strategy, fallback=True)
    decision = resolve_launch(config, probe=cannot)
    assert (decision.resolved.num_ranks, decision.config.chosen_strategy) == (1, "none")
    tried = 2 if strategy == "hybrid" else 1
    assert decision.note.count("2 ranks failed: NCCL error") == tried
    assert decision.note.endswith(": fallback to strategy none, 1 rank on cpu")
    assert decision.config.num_gpus == 2  # what was asked for is kept beside it
    assert resolve_launch(decision.config, probe=cannot).config == decision.config


@pytest.mark.slow
def test_ranks_that_work_stay_as_asked():
    config = LaunchConfig(device="cpu", num_gpus=2, strategy="ddp", fallback=True)
    decision = resolve_launch(config, probe=try_ranks)  # for real
    assert (decision.config, decision.note, decision.resolved.num_ranks) == (config, "", 2)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"device": "cuda", "num_gpus": 1000}, "torch sees no CUDA GPU|has "),
        ({"num_gpus": 2, "strategy": "none"}, "none works in one process"),
        ({"strategy": "dp", "precision": "tf32"}, "precision tf32"),
        ({"strategy": "ddp", "hybrid_form": "pipeline"}, "hybrid_form pipeline .* strategy ddp"),
    ],
)
def test_a_mistake_in_other_flags_is_no_reason_to_step_down(flags, words):
    with pytest.raises(ValueError, match=words):
        resolve_launch(LaunchConfig(**{"device": "cpu"} | flags, fallback=True), probe=cannot)


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="dp works here")
def test_a_strategy_that_cannot_be_ends_the_run_unless_fallback_is_asked_for(
    tmp_path, monkeypatch, capfd
):
    asked = [*RECALL, "--strategy", "dp", "--run_dir", tmp_path / "run"]
    assert train_here(monkeypatch, *asked) == 2
    assert "strategy dp" in only_error(capfd.readouterr().err)
    assert train_here(monkeypatch, *asked, "--fallback") == 0
    assert capfd.readouterr().out.count("fallback to strategy none, 1 rank on cpu") == 1
    kept = json.loads((tmp_path / "run/config.json").read_text())["launch"]
    assert (kept["strategy"], kept["chosen_strategy"]) == ("dp", "none")
    assert records(tmp_path / "run")
