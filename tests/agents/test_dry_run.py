"""Flags that are made of a configuration mean the same configuration."""

import sys
from contextlib import ExitStack

import pytest

from agents.run.choice import choose_run, parse_training
from rl_dist.run_dir import RunDir


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
def test_flags_of_a_configuration_make_the_same_one(flags, tmp_path, monkeypatch):
    config = config_from(flags, monkeypatch)
    run = RunDir(tmp_path)
    run.write_config(config.to_dict())
    again = " ".join(f"--{name}={value}" for name, value in run.flags().items())
    assert config_from(again, monkeypatch) == config
