"""The dialogue in this process, with typed lines in place of a terminal."""

import io
import json
import re
import shlex
import signal
import sys

import pytest
from train_runs import SIZES, only_error, train_here

from agents.config import RunConfig, with_threads
from agents.run.choice import fresh_config, parse_training
from agents.run.interactive import ask_user


class Keyboard(io.StringIO):
    """Lines that a user types; after them Ctrl-C, if asked for, else the end of input."""

    def __init__(self, *lines, interrupt=False):
        super().__init__("".join(f"{line}\n" for line in lines))
        self.interrupt = interrupt

    def isatty(self):
        return True

    def readline(self):
        line = super().readline()
        if not line and self.interrupt:
            raise KeyboardInterrupt
        return line


def type_lines(monkeypatch, *lines, **keys):
    monkeypatch.setattr(sys, "stdin", Keyboard(*lines, **keys))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)


def converse(monkeypatch, run_dir, *lines, **keys):
    """The exit code of the command in a dialogue."""
    type_lines(monkeypatch, *lines, **keys)
    flags = ["--env", "CartPole-v1", "--eval_episodes", "2", *SIZES[2:], "--device", "cpu"]
    flags += ["--run_dir", run_dir]
    return train_here(monkeypatch, "--interactive", *flags)


def test_answers_with_mistakes_become_a_command_line_and_a_training(monkeypatch, capsys, tmp_path):
    run_dir = tmp_path / "a run"
    answers = ["Nope-v9", "", "two", "1", "sideways", "", "6", "33", "", "", "3", "", "256"]
    assert converse(monkeypatch, run_dir, *answers, "perhaps", "yes") == 0
    out, err = capsys.readouterr()
    for part in ("Nope-v9", "CPU cores", "multiple of bptt_steps", "(1..8192) [8]", "--num_envs 4"):
        assert part in out, part
    assert "num_gpus" in err and "'two'" in err and "strategy" in err and "'sideways'" in err
    (command,) = re.findall(r"  python train_distributed.py (.*)", out)
    saved = RunConfig.from_dict(json.loads((run_dir / "config.json").read_text()))
    assert with_threads(fresh_config(parse_training(shlex.split(command)))) == saved
    held = (saved.policy.hidden_size, saved.train.total_steps, saved.launch.num_gpus)
    assert held == (6, 256, 1)


@pytest.mark.parametrize(
    ("lines", "keys", "code"),
    [
        ([""], {}, 128 + signal.SIGINT),
        ([""], {"interrupt": True}, 128 + signal.SIGINT),
        ([*[""] * 8, "no"], {}, 0),
    ],
)
def test_a_dialogue_that_is_left_writes_nothing(monkeypatch, tmp_path, lines, keys, code):
    assert converse(monkeypatch, tmp_path / "run", *lines, **keys) == code
    assert list(tmp_path.iterdir()) == []


def test_enter_alone_changes_nothing_and_sizes_follow_from_answers(monkeypatch):
    words = ["--env", "CartPole-v1", "--device", "cpu", "--no-anneal_lr", "--seed", "3"]
    parsed = parse_training(words)
    type_lines(monkeypatch, *[""] * 9)
    assert ask_user(parsed, words) == words
    type_lines(monkeypatch, "", "3", "none", "ddp", "", "", "8", "9", "", "", "")
    config = fresh_config(parse_training(ask_user(parsed, words)))
    assert (config.launch.num_gpus, config.launch.strategy) == (3, "ddp")
    assert config.train.batch_size == 9


@pytest.mark.parametrize(
    ("flags", "variables"),
    [([], {}), (["--resume", "auto"], {}), ([], {"RANK": "0", "WORLD_SIZE": "1"})],
)
def test_where_nobody_can_answer_it_is_refused_in_one_line(
    flags, variables, monkeypatch, capsys, tmp_path
):
    monkeypatch.chdir(tmp_path)
    if flags or variables:
        type_lines(monkeypatch)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert train_here(monkeypatch, "--interactive", *flags) == 2
    assert "--interactive needs" in only_error(capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == []
