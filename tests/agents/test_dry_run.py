"""Flags that are made of a configuration mean the same configuration."""

import sys
from contextlib import ExitStack

import pytest

from agents.run.choice import choose_run, parse_training
from rl_dist.speedup.job_of_run import flags_of


def config_from(argv, monkeypatch):
    """The configuration that training makes of flags."""
    monkeypatch.setattr(sys, "argv", ["command", *argv.split()])
    with ExitStack() as held:
        return choose_run(parse_training(), held).config


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
