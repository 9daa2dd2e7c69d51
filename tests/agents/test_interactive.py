
"""The dialogue, held through a pseudo-terminal with the real command, down to a real training."""

import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

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
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
        self.job = subprocess.Popen(
            [sys.executable, str(REPO / "train_distributed.py"), "--interactive", *map(str, argv)],
            cwd=folder,
            env=environment,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            preexec_fn=lambda: os.login_tty(theirs),  # its keys are signals to that process
        )
        os.close(theirs)

    def until(self, pattern, timeout_s=120.0):
        """Everything said up to the first match from here on."""
        end = time.monotonic() + timeout_s
        while (match := re.search(pattern, self.seen)) is None:
            assert time.monotonic() < end, self.seen
            self.seen += self._read()
        said, self.seen = self.seen[: match.end()], self.seen[match.end() :]
        return said

    def _read(self):
        try:
            data = os.read(self.mine, 65536)
        except OSError:  # Linux: everybody on the other side has left
            data = b""
        assert data, f"it has left: {self.seen}"
        return data.decode(errors="replace").replace("\r\n", "\n")

    def answer(self, question, text=""):
        said = self.until(re.escape(question) + r".*\]: ")
        os.write(self.mine, text.encode() + b"\n")
        return said

    def press(self, key):
        os.write(self.mine, key)

    def end(self):
        """The rest of what it says, and its exit code."""
        try:
            while data := os.read(self.mine, 65536):
                self.seen += data.decode(errors="replace").replace("\r\n", "\n")
        except OSError:
            pass
        code = self.job.wait(60)
        os.close(self.mine)
        return self.seen, code


@pytest.fixture
def terminal(tmp_path):
    opened = []

    def open_terminal(*argv):
        opened.append(Terminal(tmp_path, *argv))
        return opened[-1]

    yield open_terminal
    for one in opened:
        if one.job.poll() is None:
            one.job.kill()
            one.job.wait()


def parsed(*argv):
    return parse_flags(SECTIONS, argv, description="", extra=add_run_flags)


def answered(terminal):
    """The dialogue, answered with mistakes down to its last question, and the command that it proposes."""
    dialogue = terminal(*SMALL, "--device", "cpu", "--run_dir", "a run")
    assert "CPU cores" in dialogue.answer("Environment")
    dialogue.answer("Prices", "nowhere.csv")
    assert "nowhere.csv" in dialogue.answer("Prices")  # the reason, then the question again
    dialogue.answer("Ranks", "two")
    assert "num_gpus must be an int, got 'two'" in dialogue.answer("Ranks", "1")
    dialogue.answer("How ranks train together", "sideways")
    assert "strategy must be one of" in dialogue.answer("How ranks train together")
    assert "[8]" in dialogue.answer("Units of each LSTM", "6")  # given by flag
    dialogue.answer("Steps of a rollout", "33")
    assert "multiple of bptt_steps" in dialogue.answer("Steps of a rollout")
    dialogue.answer("Slots")
    dialogue.answer("Environments", "3")
    assert "try --num_envs 2 or --num_envs 4" in dialogue.answer("Environments")
    assert "[8 episodes]" in dialogue.answer("Length", "256 steps")
    command = dialogue.until(r"--interactive|\n  (python .*)\n").strip().splitlines()[-1]
    dialogue.answer("Start it?", "perhaps")
    words = shlex.split(command)
    assert words[:2] == ["python", "train_distributed.py"] and "'a run'" in command and "--interactive" not in words
    return dialogue, parsed(*words[2:])


def check_left(dialogue):
    said, code = dialogue.end()
    assert code == 128 + signal.SIGINT and "nothing was started or written" in said and "Traceback" not in said


def test_answers_become_a_command_line_and_leaving_writes_nothing(terminal, tmp_path):
    dialogue, again = answered(terminal)
    dialogue.until(r"answer yes or no(.|\n)*\]: ")
    dialogue.press(b"\x03")  # Ctrl-C
    check_left(dialogue)
    config = fresh_config(again)
    assert again.extra.run_dir == "a run"
    assert (config.policy.hidden_size, config.train.total_steps, config.launch.num_gpus) == (6, 256, 1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow  # trains
def test_answers_become_a_training(terminal, tmp_path):
    dialogue, again = answered(terminal)
    assert not (tmp_path / "a run").exists()
    assert "answer yes or no" in dialogue.answer("Start it?")
    said, code = dialogue.end()
    assert code == 0, said
    saved = RunConfig.from_dict(json.loads((tmp_path / "a run" / "config.json").read_text()))
    assert fresh_config(again) == saved
    assert (saved.policy.hidden_size, saved.train.total_steps, saved.launch.num_gpus) == (6, 256, 1)
    assert json.loads((tmp_path / "a run" / "summary.json").read_text())["global_step"] == 256


@pytest.mark.slow  # two processes
def test_leaving_at_any_question_writes_nothing(terminal, tmp_path):
    dialogues = {key: terminal() for key in (b"\x03", b"\x04")}  # Ctrl-C and the end of input
    for key, dialogue in dialogues.items():
        dialogue.answer("Environment", "CartPole-v1")
        dialogue.until(r"Ranks.*\]: ")  # prices are asked for where they are traded
        dialogue.press(key)
        check_left(dialogue)
    assert list(tmp_path.iterdir()) == []


class Lines:
    def __init__(self, *lines):
        self.left = [f"{line}\n" for line in lines]

    def readline(self):
        return self.left.pop(0) if self.left else ""


def ask(monkeypatch, flags, *lines):
    monkeypatch.setattr(sys, "stdin", Lines(*lines))
    return interactive.ask_for_flags(parsed(*flags), fresh_config)


def test_enter_alone_changes_nothing(monkeypatch, capsys):
    flags = ["--env", "CartPole-v1", "--device", "cpu", "--no-anneal_lr", "--quick", "--seed", "3"]
    asked = ask(monkeypatch, flags, *[""] * 10)
    assert asked is not None and fresh_config(asked) == fresh_config(parsed(*flags))
    assert "python train_distributed.py --quick --device cpu --seed 3 --no-anneal_lr --env CartPole-v1" in (
        capsys.readouterr().out
    )


def test_several_ranks_are_asked_how_they_share_and_get_a_batch_that_divides(monkeypatch, capsys):
    flags = ["--env", "CartPole-v1", "--device", "cpu"]
    asked = ask(monkeypatch, flags, "", "3", "none", "ddp", "weak", "sqrt", *[""] * 6)
    assert asked is not None
    config = fresh_config(asked)
    assert (config.launch.num_gpus, config.launch.strategy) == (3, "ddp")
    assert (config.train.scaling, config.train.lr_scaling, config.train.batch_size) == ("weak", "sqrt", 128)
    assert "strategy none works with one rank only" in capsys.readouterr().out
    shared = ask(monkeypatch, flags, "", "3", "ddp", "strong", *[""] * 6)
    assert shared is not None and fresh_config(shared).train.batch_size == 129
    assert "[129]" in capsys.readouterr().out


def test_on_gpus_enter_takes_all_of_them(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda index: "Card")
    monkeypatch.setattr(interactive, "print_gpu_info", lambda: None)
    asked = ask(monkeypatch, ["--env", "CartPole-v1"], "", "5", *[""] * 9)
    assert asked is not None and fresh_config(asked).launch.num_gpus == -1
    said = capsys.readouterr().out
    assert "this machine has 4" in said and "[4]" in said


def test_no_is_an_answer(monkeypatch, capsys):
    assert ask(monkeypatch, ["--env", "CartPole-v1", "--device", "cpu"], *[""] * 8, "no") is None


@pytest.mark.parametrize(
    ("argv", "variables", "reason"),
    [
        (["--interactive"], {}, "needs a terminal"),
        (["--interactive", "--resume", "auto"], {}, "leave it out beside --resume"),
        (["--interactive"], {"RANK": "0", "WORLD_SIZE": "1"}, "under torchrun"),
    ],
)
def test_where_nobody_can_answer_it_is_refused_in_one_line(argv, variables, reason, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert train_here(monkeypatch, *argv) == 2
    assert reason in only_error(capsys.readouterr().err)
    assert list(Path(tmp_path).iterdir()) == []


@pytest.mark.parametrize("text", ["0", "0 steps", "00 episodes"])
def test_a_length_of_nothing_is_no_answer(text):
    length = interactive.QUESTIONS[-1]
    with pytest.raises(ValueError, match="at least 1"):
        length.answer(parse_flags(SECTIONS, description="", argv=[]), text)
