"""The dialogue, held through a pseudo-terminal with the real command, down to a real training."""

import io
import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest
from train_runs import REPO, SMALL, only_error, train_here

from agents.run import interactive
from agents.run.choice import add_run_flags, fresh_config
from agents.run.config import SECTIONS, RunConfig
from rl_dist.config import parse_flags


class Terminal:
    """The command in a terminal of its own: waits for what it says, types answers."""

    def __init__(self, folder, *argv):
        self.mine, theirs = pty.openpty()
        self.seen = ""
        self.job = subprocess.Popen(
            [sys.executable, str(REPO / "train_distributed.py"), "--interactive", *map(str, argv)],
            cwd=folder,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            preexec_fn=lambda: os.login_tty(theirs),  # its keys are signals to that process
        )
        os.close(theirs)

    def read(self):
        """What it says next; "" once everybody on the other side has left."""
        try:
            return os.read(self.mine, 65536).decode(errors="replace").replace("\r\n", "\n")
        except OSError:
            return ""

    def until(self, pattern, timeout_s=120.0):
        """Everything said up to the first match from here on."""
        end = time.monotonic() + timeout_s
        while (match := re.search(pattern, self.seen)) is None:
            assert time.monotonic() < end and (data := self.read()), self.seen
            self.seen += data
        said, self.seen = self.seen[: match.end()], self.seen[match.end() :]
        return said

    def answer(self, question, text=""):
        said = self.until(re.escape(question) + r".*\]: ")
        self.press(text.encode() + b"\n")
        return said

    def press(self, key):
        os.write(self.mine, key)

    def end(self):
        """The rest of what it says, and its exit code."""
        while data := self.read():
            self.seen += data
        return self.seen, self.job.wait(60)


@pytest.fixture
def terminal(tmp_path):
    opened = []
    yield lambda *argv: opened.append(Terminal(tmp_path, *argv)) or opened[-1]
    for one in opened:
        one.job.kill()
        one.job.wait()
        os.close(one.mine)


def parsed(*argv):
    return parse_flags(SECTIONS, argv, description="", extra=add_run_flags)


def answered(terminal):
    """The dialogue, answered with mistakes down to its last question, and what it proposes."""
    dialogue = terminal(*SMALL[2:], "--device", "cpu", "--run_dir", "a run")
    assert "CPU cores" in dialogue.answer("env:")
    dialogue.answer("data:", "nowhere.csv")
    assert "nowhere.csv" in dialogue.answer("data:")  # the reason, then the question again
    dialogue.answer("num_gpus:", "two")
    assert "must be a whole number, got 'two'" in dialogue.answer("num_gpus:", "1")
    dialogue.answer("strategy:", "sideways")
    assert "strategy must be one of" in dialogue.answer("strategy:")
    assert "(1..8192) [8]" in dialogue.answer("hidden_size:", "6")  # given by flag
    dialogue.answer("num_steps:", "33")
    assert "multiple of bptt_steps" in dialogue.answer("num_steps:")
    dialogue.answer("batch_size:")
    dialogue.answer("num_envs:", "3")
    assert "try --num_envs 2 or --num_envs 4" in dialogue.answer("num_envs:")
    dialogue.answer("total_steps:", "256")
    command = dialogue.until(r"\n  (python .*)\n").strip().splitlines()[-1]
    dialogue.answer("Start it?", "perhaps")
    words = shlex.split(command)
    assert words[:2] == ["python", "train_distributed.py"] and "--interactive" not in words
    return dialogue, parsed(*words[2:])


def test_answers_become_a_command_line_and_leaving_writes_nothing(terminal, tmp_path):
    dialogue, again = answered(terminal)
    dialogue.until(r"answer yes or no(.|\n)*\]: ")
    dialogue.press(b"\x03")  # Ctrl-C
    said, code = dialogue.end()
    assert code == 128 + signal.SIGINT and "Traceback" not in said
    assert "nothing was started or written" in said
    config = fresh_config(again)
    assert again.extra.run_dir == "a run"
    found = (config.policy.hidden_size, config.train.total_steps, config.launch.num_gpus)
    assert found == (6, 256, 1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow  # trains
def test_answers_become_a_training(terminal, tmp_path):
    dialogue, again = answered(terminal)
    assert not (tmp_path / "a run").exists()
    assert "answer yes or no" in dialogue.answer("Start it?")
    said, code = dialogue.end()
    assert code == 0, said
    saved = json.loads((tmp_path / "a run" / "config.json").read_text())
    assert fresh_config(again) == RunConfig.from_dict(saved)


def ask(monkeypatch, flags, *answers):
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in answers)))
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
    assert config.train.batch_size == 128
    assert "strategy none works in one process" in capsys.readouterr().out
    shared = ask(monkeypatch, flags, "", "3", "ddp", "strong", "", "", "", "129", *[""] * 4)
    assert fresh_config(shared).train.batch_size == 129
    assert "--batch_size 129" in capsys.readouterr().out


def test_no_and_the_end_of_input_start_nothing(monkeypatch, capsys):
    flags = ["--env", "CartPole-v1", "--device", "cpu"]
    assert ask(monkeypatch, flags, *[""] * 9, "no") is None
    with pytest.raises(EOFError):
        ask(monkeypatch, flags, "CartPole-v1")


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
