"""Test which strategies are refused, and which automatic choices a resume keeps."""

import json
from dataclasses import replace
from unittest import mock

import pytest
from agents_ranks import world_of_one

from agents.config import RunConfig
from agents.learner.settings import TrainConfig
from agents.run import auto
from agents.run.auto import choose
from agents.run.choice import parse_training, resumed_config
from agents.run.start import Run
from envs.task import TaskConfig
from rl_dist.errors import UserError
from rl_dist.launch.child import ChildError
from rl_dist.launch.config import LaunchConfig, resolve, resolve_launch
from rl_dist.process_group.join import RESTART_COUNT
from rl_dist.run_dir import RunDir
from rl_dist.strategies.config import StrategyConfig, check_strategy

TWO = LaunchConfig(device="cpu", num_gpus=2, strategy="auto")
CHOSEN = replace(TWO, chosen_strategy="ddp", chosen_on="2 ranks on cpu")
PIPELINE = {"mode": "hybrid", "hybrid_form": "pipeline"}


@pytest.mark.parametrize(
    "options, hardware, field",
    [
        ({"mode": "none"}, (2,), "strategy none"),
        ({"mode": "dp"}, (1, "cpu", 2), "strategy dp"),
        ({"mode": "hybrid"}, (1,), "strategy hybrid"),
        (PIPELINE, (3,), "hybrid_form pipeline"),
        ({"mode": "hybrid", "precision": "fp16"}, (2,), "precision fp16"),
        ({"mode": "auto", "shard_size": 3}, (4,), "shard_size 3 .* --shard_size 2, 4"),
    ],
)
def test_strategies_that_cannot_work_are_refused(options, hardware, field):
    with pytest.raises(UserError, match=field):
        check_strategy(StrategyConfig(**options), *hardware)


# ---- --strategy auto


@pytest.mark.parametrize(
    "chosen, flags, mode",
    [
        (CHOSEN, (), "ddp"),
        # A new number of ranks or a new shard size requires a new measurement.
        (CHOSEN, ("--num_gpus", "1"), "auto"),
        (CHOSEN, ("--shard_size", "2"), "auto"),
        # The saved choice of --fallback was one rank.
        (replace(TWO, chosen_strategy="none", chosen_on="1 rank on cpu"), (), "none"),
    ],
)
def test_a_choice_is_kept_while_ranks_and_strategy_flags_stay_the_same(chosen, flags, mode):
    launch = resumed_config(RunConfig(launch=chosen), parse_training(flags).given).launch
    config, resolved, _ = resolve_launch(launch)
    assert config.strategy_config.mode == mode
    assert resolved.num_ranks == (1 if mode == "none" or "1" in flags else 2)


def test_restarted_ranks_read_their_choices_from_the_configuration(tmp_path, monkeypatch):
    monkeypatch.setattr(auto, "fastest", lambda *_, **__: pytest.fail("measured again"))
    monkeypatch.setenv(RESTART_COUNT, "1")
    launch = LaunchConfig(device="cpu", strategy="auto", precision="auto")
    task = TaskConfig(env="Recall-v0", env_workers=-1)
    asked = RunConfig(launch=launch, task=task, train=TrainConfig(batch_size=0))
    options = {"batch_size": 16, "env_workers": 3, "precision": "bf16"}
    chosen = asked.changed(options | {"chosen_strategy": "ddp", "chosen_on": "1 rank on cpu"})
    directory = RunDir(tmp_path)
    directory.config_path.write_text(json.dumps(chosen.to_dict()))
    run = Run(directory=directory, config=asked, resolved=resolve(launch), resume_from="")
    with world_of_one() as world:
        assert choose(run, world).config == chosen


# ---- --fallback to one rank


@pytest.mark.parametrize("strategy, failed", [("auto", 1), ("hybrid", 2), ("dp", 1)])
def test_ranks_that_cannot_communicate_fall_back_to_one_rank(strategy, failed, monkeypatch):
    ranks = mock.Mock(side_effect=ChildError("NCCL error"))
    monkeypatch.setattr("rl_dist.launch.config.time_reductions", ranks)
    asked = replace(TWO, strategy=strategy, fallback=True)
    config, resolved, note = resolve_launch(asked)
    assert (resolved.num_ranks, config.chosen_strategy) == (1, "none")
    assert note.count("does not work here") == failed
    assert config.num_gpus == 2  # the requested number of ranks is kept
    assert resolve_launch(config)[0] == config
    ranks.side_effect = None  # now several ranks work again
    assert strategy == "dp" or resolve_launch(asked)[0] == asked
