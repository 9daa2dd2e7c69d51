"""auto measures and fallback steps down; what they chose is kept, and changes nothing else."""

import dataclasses
import json

import pytest
import torch
from agents_ranks import world_of_one
from train_runs import SIZES, only_error, records, train_here

from agents.config import RunConfig, TrainConfig
from agents.run import auto
from agents.run.auto import choose
from agents.run.choice import parse_training, resumed_config
from agents.run.start import Run
from envs.task import TaskConfig
from rl_dist.errors import UserError
from rl_dist.launch import fallback
from rl_dist.launch.child import ChildError
from rl_dist.launch.config import LaunchConfig, resolve
from rl_dist.launch.fallback import resolve_launch
from rl_dist.run_dir import RunDir
from rl_dist.strategies.config import Hardware, StrategyConfig, check_strategy

RECALL = ["--env", "Recall-v0", *SIZES, "--device", "cpu"]
TWO = Hardware(2)
CHOSEN = LaunchConfig(
    device="cpu", num_gpus=2, strategy="auto", chosen_strategy="ddp", chosen_on="2 ranks on cpu"
)


@pytest.fixture
def world():
    with world_of_one() as opened:
        yield opened


@pytest.mark.parametrize(
    ("mode", "hardware", "meant"),
    [("default", Hardware(1), "none"), ("default", TWO, "ddp"), ("hybrid", TWO, "hybrid")],
)
def test_a_mode_is_what_the_hardware_makes_of_it(mode, hardware, meant):
    assert check_strategy(StrategyConfig(mode=mode), hardware) == meant


@pytest.mark.parametrize(
    ("options", "hardware", "field"),
    [
        ({"mode": "none"}, TWO, "strategy none"),
        ({"mode": "dp"}, Hardware(1, "cpu", 2), "strategy dp"),
        ({"mode": "dp"}, Hardware(1, "cuda", 1), "strategy dp"),
        ({"mode": "hybrid"}, Hardware(1), "strategy hybrid"),
        ({"mode": "hybrid", "hybrid_form": "pipeline"}, Hardware(3), "hybrid_form pipeline"),
        ({"mode": "hybrid", "precision": "fp16"}, TWO, "precision fp16"),
        ({"mode": "auto", "shard_size": 3}, TWO, "shard_size 3"),
        ({"gradient_compression": "bf16"}, Hardware(1), "gradient_compression bf16"),
        ({"precision": "tf32"}, Hardware(1), "precision tf32"),
    ],
)
def test_what_cannot_work_is_refused(options, hardware, field):
    with pytest.raises(UserError, match=field):
        check_strategy(StrategyConfig(**options), hardware)


# ---- auto


def test_what_was_chosen_stands_on_the_same_ranks_only():
    config, resolved, _ = resolve_launch(CHOSEN)
    assert config.strategy_config.mode == "ddp" and resolved.num_ranks == 2
    moved, _, _ = resolve_launch(dataclasses.replace(CHOSEN, num_gpus=1))
    assert moved.strategy_config.mode == "auto" and moved.chosen_on == ""
    alone = dataclasses.replace(CHOSEN, chosen_strategy="none", chosen_on="1 rank on cpu")
    assert resolve_launch(alone)[1].num_ranks == 1  # fallback had gone down to one


def test_a_resumed_run_with_other_flags_of_strategies_chooses_again():
    def resumed(*given):
        parsed = parse_training(given).given
        return resolve_launch(resumed_config(RunConfig(launch=CHOSEN), parsed).launch)[0]

    assert resumed("--strategy", "auto").strategy_config.mode == "ddp"
    for flags in (("--shard_size", "2"), ("--gradient_compression", "bf16")):
        assert resumed(*flags).strategy_config.mode == "auto"


def test_ranks_that_start_again_find_their_choices_in_the_configuration(
    world, tmp_path, monkeypatch
):
    monkeypatch.setattr(auto, "fastest", lambda *_, **__: pytest.fail("measured again"))
    config = RunConfig(
        launch=LaunchConfig(device="cpu", strategy="auto", precision="auto"),
        task=TaskConfig(env="Recall-v0", env_workers=-1),
        train=TrainConfig(batch_size=0),
    )
    launch = dataclasses.replace(
        config.launch, chosen_strategy="ddp", chosen_on="1 rank on cpu", precision="bf16"
    )
    chosen = dataclasses.replace(
        config,
        launch=launch,
        task=dataclasses.replace(config.task, env_workers=3),
        train=TrainConfig(batch_size=16),
    )
    directory = RunDir(tmp_path)
    directory.write_config(chosen.to_dict())
    run = Run(
        directory=directory,
        config=config,
        resolved=resolve(config.launch),
        resume_from="",
    )
    assert choose(run, world).config == chosen


# ---- stepping down


@pytest.fixture
def broken(monkeypatch):
    def fail(num_ranks, *_, **__):
        raise ChildError(f"{num_ranks} ranks failed: NCCL error")

    monkeypatch.setattr(fallback, "time_reductions", fail)


@pytest.mark.parametrize("strategy", ["default", "ddp", "auto", "hybrid"])
def test_ranks_that_cannot_work_together_step_down_to_one(strategy, broken):
    asked = LaunchConfig(device="cpu", num_gpus=2, strategy=strategy, fallback=True)
    config, resolved, note = resolve_launch(asked)
    assert (resolved.num_ranks, config.chosen_strategy) == (1, "none")
    assert note.count("NCCL error") == (2 if strategy == "hybrid" else 1)
    assert note.endswith("strategy none, 1 rank on cpu")
    assert config.num_gpus == 2  # the requested number is kept
    assert resolve_launch(config)[0] == config


@pytest.mark.slow
def test_ranks_that_work_stay_as_asked():
    asked = LaunchConfig(device="cpu", num_gpus=2, strategy="ddp", fallback=True)
    config, resolved, note = resolve_launch(asked)  # for real
    assert (config, note, resolved.num_ranks) == (asked, "", 2)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"device": "cuda", "num_gpus": 1000}, "sees 0 GPU|can be used"),
        ({"num_gpus": 2, "strategy": "none"}, "none works in one process"),
        ({"strategy": "dp", "precision": "tf32"}, "precision tf32"),
    ],
)
def test_a_mistake_in_other_flags_is_no_reason_to_step_down(flags, words, broken):
    with pytest.raises(ValueError, match=words):
        resolve_launch(LaunchConfig(**{"device": "cpu"} | flags, fallback=True))


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
