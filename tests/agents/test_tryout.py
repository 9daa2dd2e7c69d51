"""Trying a training out: a copy is configured alike, and what is said to fit counts what was measured."""

import dataclasses
import sys
from contextlib import ExitStack

import pytest

from agents.dry_run.measure import Question, add_largest, compute, look_at_memory
from agents.dry_run.memory import Shapes
from agents.run.choice import add_run_flags, choose_run
from agents.run.config import SECTIONS, RunConfig
from agents.sizes import TrainConfig, share_out
from rl_dist.config import parse_flags
from rl_dist.hardware.report import read_facts
from rl_dist.launch.launcher import LaunchConfig
from rl_dist.speedup.job_of_run import flags_of

SHAPES = Shapes(num_obs=10, num_actions=2, discrete=True)


def config_from(argv, monkeypatch):
    """What training makes of flags."""
    monkeypatch.setattr(sys, "argv", ["command", *argv])
    with ExitStack() as held:
        return choose_run(parse_flags(SECTIONS, description="", epilog="", extra=add_run_flags), held)[0]


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--preset", "paper", "--quick"],
        ["--learning_rate", "3e-4", "--gamma", "0.99", "--gae_lambda", "0.95"],  # defaults, but not of this task
        ["--total_steps", "4096", "--target_kl", "0.02"],
        ["--env", "CartPole-v1", "--hidden_size", "32", "--no-anneal_lr", "--strategy", "ddp"],
    ],
)
def test_flags_of_a_configuration_make_the_same_one(flags, monkeypatch):
    config = config_from(flags, monkeypatch)
    assert config_from(flags_of(config.to_dict()), monkeypatch) == config


def test_what_fits_is_scaled_to_what_a_dry_run_took(tmp_path):
    train = TrainConfig(num_envs=8, batch_size=8)
    config = RunConfig(train=train, launch=LaunchConfig(device="cpu"))
    question = Question(config, 1, "cpu", share_out(train, 0, 1), 4096, full=False)
    figures = look_at_memory(question, SHAPES, read_facts(tmp_path))
    figures = dataclasses.replace(figures, process=0, limit=2**30)
    computed = sum(figures.computed.values())

    def largest(measured_peak):
        return add_largest(question, SHAPES, dataclasses.replace(figures, measured_peak=measured_peak))

    guess, less, thrice = largest(None), largest(computed // 2), largest(3 * computed)
    assert (less.largest_num_envs, less.largest_batch_size) == (guess.largest_num_envs, guess.largest_batch_size)
    for name, value in (("num_envs", thrice.largest_num_envs), ("batch_size", thrice.largest_batch_size)):
        sizes = {"num_envs": 0} | {name: value}
        needed = 3 * compute(question, SHAPES, dataclasses.replace(train, **sizes)).peak
        assert 0.8 * 2**30 < needed <= 2**30
