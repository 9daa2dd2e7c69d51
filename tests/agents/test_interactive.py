"""Test the interactive dialogue in this process, with prepared lines as input."""

import io
import re
import shlex
import signal
import sys

import pytest
from train_runs import SIZES, train_here

from agents.config import RunConfig, with_threads
from agents.run.choice import fresh_config, parse_training
from rl_dist.files import read_object

CARTPOLE = ["--env", "CartPole-v1", "--eval_episodes", "2", *SIZES[2:], "--device", "cpu"]


class Keyboard(io.StringIO):
    """Standard input with prepared lines."""

    def isatty(self):
        return True


def converse(monkeypatch, lines, *flags):
    """Run the command with these input lines; return its exit code."""
    monkeypatch.setattr(sys, "stdin", Keyboard("".join(f"{line}\n" for line in lines)))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    return train_here("--interactive", *flags)


def test_answers_with_mistakes_become_a_command_line_and_a_training(monkeypatch, capsys, tmp_path):
    run_dir = tmp_path / "a run"
    answers = ["", "two", "1", "sideways", "", "6", "33", "", "", "", "256", ""]
    flags = [*CARTPOLE, "--run_dir", run_dir]
    assert converse(monkeypatch, answers, *flags) == 0
    out, err = capsys.readouterr()
    for part in ("multiple of bptt_steps", "(1..8192) [8]"):
        assert part in out, part
    assert "num_gpus" in err and "'two'" in err and "strategy" in err and "'sideways'" in err
    (command,) = re.findall(r"  python train_distributed.py (.*)", out)
    saved = RunConfig.from_dict(read_object(run_dir / "config.json"))
    assert with_threads(fresh_config(parse_training(shlex.split(command)), {})) == saved
    assert (saved.policy.hidden_size, saved.train.total_steps) == (6, 256)


@pytest.mark.parametrize("num_lines", [1, 8])
def test_a_cancelled_dialogue_writes_nothing(monkeypatch, tmp_path, num_lines):
    flags = [*CARTPOLE, "--run_dir", tmp_path / "run"]
    assert converse(monkeypatch, [""] * num_lines, *flags) == 128 + signal.SIGINT
    assert list(tmp_path.iterdir()) == []
