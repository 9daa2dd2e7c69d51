"""The dialogue in this process, with typed lines in place of a terminal."""

import io
import json
import re
import shlex
import signal
import sys

import pytest
from train_runs import SIZES, only_error, train_here

from agents.run import interactive
from agents.run.choice import add_run_flags, fresh_config
from agents.run.config import SECTIONS, RunConfig, with_threads
from rl_dist.flags import parse_flags


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


def converse(monkeypatch, run_dir, *lines, **keys):
    """The exit code of the command in a dialogue."""
    monkeypatch.setattr(sys, "stdin", Keyboard(*lines, **keys))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    flags = ["--env", "CartPole-v1", "--eval_episodes", "2", *SIZES[2:], "--device", "cpu"]
    flags += ["--run_dir", run_dir]
    return train_here(monkeypatch, "--interactive", *flags)


def parsed(*argv):
    return parse_flags(SECTIONS, argv, description="", extra=add_run_flags)


def test_answers_with_mistakes_become_a_command_line_and_a_training(monkeypatch, capsys, tmp_path):
    run_dir = tmp_path / "a run"
    answers = ["Nope-v9", "", "two", "1", "sideways", "", "6", "33", "", "", "3", "", "256"]
    assert converse(monkeypatch, run_dir, *answers, "perhaps", "yes") == 0
    said = capsys.readouterr().out
    reasons = ["unknown environment 'Nope-v9'", "must be a whole number, got 'two'", "CPU cores"]
    reasons += ["strategy must be one of", "multiple of bptt_steps", "answer yes or no"]
    for reason in [*reasons, "(1..8192) [8]", "try --num_envs 2 or --num_envs 4"]:
        assert reason in said, reason
    (command,) = re.findall(r"  python train_distributed.py (.*)", said)
    saved = RunConfig.from_dict(json.loads((run_dir / "config.json").read_text()))
    assert with_threads(fresh_config(parsed(*shlex.split(command)))) == saved
    found = (saved.policy.hidden_size, saved.train.total_steps, saved.launch.num_gpus)
    assert found == (6, 256, 1)


@pytest.mark.parametrize("interrupt", [False, True])
def test_the_end_of_input_and_ctrl_c_leave_and_write_nothing(
    interrupt, monkeypatch, capsys, tmp_path
):
    code = converse(monkeypatch, tmp_path / "run", "", interrupt=interrupt)
    assert code == 128 + signal.SIGINT
    assert "nothing was started or written" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def ask(monkeypatch, flags, *answers):
    monkeypatch.setattr(sys, "stdin", Keyboard(*answers))
    return interactive.ask_for_flags(parsed(*flags), fresh_config)


def test_enter_alone_changes_nothing(monkeypatch, capsys):
    flags = ["--env", "CartPole-v1", "--device", "cpu", "--no-anneal_lr", "--quick", "--seed", "3"]
    asked = ask(monkeypatch, flags, *[""] * 12)
    assert asked is not None and fresh_config(asked) == fresh_config(parsed(*flags))
    (command,) = re.findall(r"  python train_distributed.py (.*)", capsys.readouterr().out)
    assert parsed(*shlex.split(command)) == asked


def test_several_ranks_are_asked_how_they_share_and_get_a_batch_that_divides(monkeypatch, capsys):
    flags = ["--env", "CartPole-v1", "--device", "cpu"]
    asked = ask(monkeypatch, flags, "", "3", "none", "ddp", "weak", "sqrt", *[""] * 7)
    config = fresh_config(asked)
    assert (config.launch.num_gpus, config.launch.strategy) == (3, "ddp")
    assert (config.train.scaling, config.train.lr_scaling) == ("weak", "sqrt")
    assert config.train.batch_size == 8
    assert "strategy none works in one process" in capsys.readouterr().out
    shared = ask(monkeypatch, flags, "", "3", "ddp", "strong", "", "", "", "129", *[""] * 4)
    assert fresh_config(shared).train.batch_size == 129
    assert "--batch_size 9" in capsys.readouterr().out


def test_no_is_an_answer(monkeypatch, capsys):
    flags = ["--env", "CartPole-v1", "--device", "cpu"]
    assert ask(monkeypatch, flags, *[""] * 8, "no") is None


@pytest.mark.parametrize(
    ("flags", "variables", "reason"),
    [
        ([], {}, "needs a terminal"),
        (["--resume", "auto"], {}, "leave it out beside --resume"),
        ([], {"RANK": "0", "WORLD_SIZE": "1"}, "under torchrun"),
    ],
)
def test_where_nobody_can_answer_it_is_refused_in_one_line(
    flags, variables, reason, monkeypatch, capsys, tmp_path
):
    monkeypatch.chdir(tmp_path)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert train_here(monkeypatch, "--interactive", *flags) == 2
    assert reason in only_error(capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == []
