"""Test the interactive dialogue in this process, with prepared lines as input."""

import io
import json
import re
import shlex
import signal
import sys

import pytest
from train_runs import SIZES, train_here

from agents.config import RunConfig, with_threads
from agents.run.choice import fresh_config, parse_training

CARTPOLE = ["--env", "CartPole-v1", "--eval_episodes", "2", *SIZES[2:], "--device", "cpu"]


class Keyboard(io.StringIO):
    """Standard input with prepared lines, then end of file or Ctrl-C."""

    interrupts = False

    def isatty(self):
        return True

    def readline(self, *size):
        line = super().readline(*size)
        if not line and self.interrupts:
            raise KeyboardInterrupt
        return line


def converse(monkeypatch, lines, *flags, interrupts=False):
    """Run the command with these input lines; return its exit code."""
    keyboard = Keyboard("".join(f"{line}\n" for line in lines))
    keyboard.interrupts = interrupts
    monkeypatch.setattr(sys, "stdin", keyboard)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    return train_here(monkeypatch, "--interactive", *flags)


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
    saved = RunConfig.from_dict(json.loads((run_dir / "config.json").read_text()))
    assert with_threads(fresh_config(parse_training(shlex.split(command)))) == saved
    assert (saved.policy.hidden_size, saved.train.total_steps) == (6, 256)


@pytest.mark.parametrize(("lines", "interrupts"), [([""], False), ([""], True), ([""] * 8, True)])
def test_a_dialogue_that_is_left_writes_nothing(monkeypatch, tmp_path, lines, interrupts):
    flags = [*CARTPOLE, "--run_dir", tmp_path / "run"]
    code = converse(monkeypatch, lines, *flags, interrupts=interrupts)
    assert code == 128 + signal.SIGINT
    assert list(tmp_path.iterdir()) == []
