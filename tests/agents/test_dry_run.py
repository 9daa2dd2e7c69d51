"""Dry runs: a copy is configured alike, and what is said to fit counts what was measured."""

import dataclasses
import sys
from contextlib import ExitStack

import pytest
from gymnasium.spaces import Discrete

from agents.dry_run import measure
from agents.dry_run.measure import PlannedTraining
from agents.run.choice import add_run_flags, choose_run
from agents.run.config import SECTIONS, RunConfig
from agents.run.memory import Shapes
from agents.sizes import TrainConfig, shard_sizes
from envs.vector.layout import Layout
from rl_dist.flags import parse_flags
from rl_dist.hardware.report import read_facts
from rl_dist.launch.config import LaunchConfig
from rl_dist.speedup.job_of_run import flags_of

SHAPES = Shapes(Layout.vector(10), Discrete(2))


def config_from(argv, monkeypatch):
    """The configuration that training makes of flags."""
    monkeypatch.setattr(sys, "argv", ["command", *argv.split()])
    with ExitStack() as held:
        return choose_run(parse_flags(SECTIONS, description="", extra=add_run_flags), held).config


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--preset paper --quick",
        # defaults, but not of this task
        "--learning_rate 3e-4 --gamma 0.99 --gae_lambda 0.95",
        "--env CartPole-v1 --total_steps 4096 --no-anneal_lr --strategy ddp",
    ],
)
def test_flags_of_a_configuration_make_the_same_one(flags, monkeypatch):
    config = config_from(flags, monkeypatch)
    again = " ".join(flags_of(config.to_dict()))
    assert config_from(again, monkeypatch) == config


def test_what_fits_is_scaled_to_what_a_dry_run_took(tmp_path, monkeypatch):
    train = TrainConfig(num_envs=8, batch_size=8)
    config = RunConfig(train=train, launch=LaunchConfig(device="cpu"))
    planned = PlannedTraining(config, 1, "cpu", shard_sizes(train, 0, 1), 4096)
    facts = read_facts(tmp_path)
    host = dataclasses.replace(facts.host, process_bytes=0, memory_available_bytes=2**30)
    facts = dataclasses.replace(facts, host=host)
    monkeypatch.setattr(measure, "observe_shapes", lambda make_env: SHAPES)

    def largest(factor):
        peak = int(factor * planned.compute(SHAPES, train).peak)
        monkeypatch.setattr(measure, "_measured_peak", lambda *_: peak)
        figures = measure.measure_memory(planned, None, facts)[1]
        assert figures.measured_peak == peak
        return figures.largest_num_envs, figures.largest_batch_size, figures.limit

    assert largest(0.5) == largest(1.0)
    num_envs, batch_size, limit = largest(3.0)
    for sizes in ({"num_envs": num_envs}, {"num_envs": 0, "batch_size": batch_size}):
        needed = 3 * planned.compute(SHAPES, dataclasses.replace(train, **sizes)).peak
        assert 0.8 * limit < needed <= 1.01 * limit
