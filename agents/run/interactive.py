"""Asks for what a training needs, and shows the command that says the same.

Every answer goes the way of a flag: the same conversion, the same checks, the same messages. Nothing is written.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

from agents.run.config import RunConfig
from agents.sizes import Sizes, share_out
from rl_dist.config import ParsedFlags
from rl_dist.errors import UserError
from rl_dist.hardware.host_memory import available_cores
from rl_dist.hardware.report import print_gpu_info
from rl_dist.launch.launcher import resolve

SCRIPT = "train_distributed.py"
INTRODUCTION = "Enter takes what stands in brackets; Ctrl-C leaves, and nothing is written."
Compose = Callable[[ParsedFlags], RunConfig]  # raises ValueError: these flags cannot go together
LENGTH = re.compile(r"(\S+?)\s*(episodes?|steps?)?")


def refuse_without_user(parsed: ParsedFlags) -> None:
    """Make sure that there is somebody to ask, and something.

    Raises:
        UserError: no terminal, ranks started elsewhere, or a run to resume.
    """
    if parsed.extra.resume:
        raise UserError(f"--interactive asks for a new run: leave it out beside --resume {parsed.extra.resume}")
    if "RANK" in os.environ:
        raise UserError("--interactive starts the ranks itself: leave it out under torchrun")
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UserError("--interactive needs a terminal to ask in: give the flags instead, see --help")


def command_of(parsed: ParsedFlags) -> str:
    """The command line that gives these flags, quoted for a shell."""
    words = ["python", SCRIPT]
    for name, value in vars(parsed.extra).items():
        if name != "interactive" and value:
            words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return shlex.join([*words, *parsed.words()])


@dataclass(frozen=True, kw_only=True)
class Question:
    """One question, whose answer is the value of a flag."""

    flag: str
    text: str
    now: Callable[[RunConfig], object]  # what Enter means
    check: Callable[[RunConfig], object] = lambda config: None  # raises ValueError
    asked: Callable[[RunConfig], bool] = lambda config: True
    instead: Callable[[RunConfig], str] = lambda config: ""  # for Enter, where what the flags say cannot be

    def answer(self, parsed: ParsedFlags, text: str) -> ParsedFlags:
        """The flags with this answer."""
        return parsed.answered(self.flag, text)


class LengthQuestion(Question):
    """Two flags, of which one counts."""

    def answer(self, parsed: ParsedFlags, text: str) -> ParsedFlags:
        """The flags with this answer, such as "5000" or "200000 steps"."""
        match = LENGTH.fullmatch(text)
        if match is None:
            raise ValueError(f"give a number of episodes, or of steps as in '200000 steps', got {text!r}")
        if match[1].isdecimal() and not int(match[1]):  # as a flag, 0 of one means that the other counts
            raise ValueError("the length must be at least 1")
        flag, other = ("num_episodes", "total_steps")
        if (match[2] or "").startswith("step"):
            flag, other = other, flag
        return parsed.forgotten(other).answered(flag, match[1])


def _ranks(config: RunConfig) -> int:
    return resolve(config.launch).num_ranks


def _sizes(config: RunConfig) -> Sizes:
    return share_out(config.train, 0, _ranks(config))


def _check_batch(config: RunConfig) -> Sizes:
    return share_out(replace(config.train, num_envs=0), 0, _ranks(config))


def _batch_that_divides(config: RunConfig) -> str:
    """Nothing, or the next larger batch that the ranks can share."""
    try:
        _check_batch(config)
    except ValueError:
        ranks = _ranks(config)
        return str(-(-config.train.batch_size // ranks) * ranks)
    return ""


def _default_envs(config: RunConfig) -> str:
    """Nothing, or 0, where the number given does not go with the batch."""
    try:
        _sizes(config)
    except ValueError:
        return "0"
    return ""


def _num_envs(config: RunConfig) -> int:
    if config.train.num_envs:
        return config.train.num_envs
    sizes = _sizes(config)
    return sizes.global_num_envs if config.train.scaling == "strong" else sizes.num_envs


def _length(config: RunConfig) -> str:
    train = config.train
    return f"{train.total_steps} steps" if train.total_steps else f"{train.num_episodes} episodes"


def _of_all(config: RunConfig) -> bool:
    return _ranks(config) > 1


QUESTIONS = (
    Question(
        flag="env",
        text="Environment: StockTrading-v0, a Gymnasium id, or module:id",
        now=lambda config: config.task.env,
        check=lambda config: None if config.task.is_trading else config.prepare_task(),
    ),
    Question(
        flag="data",
        text="Prices: simulated, or a CSV file of daily bars",
        now=lambda config: config.data.data,
        check=lambda config: config.prepare_task(),
        asked=lambda config: config.task.is_trading,
    ),
    Question(
        flag="num_gpus",
        text="Ranks, one per GPU where there are GPUs (0 = one CPU process)",
        now=_ranks,
        check=lambda config: resolve(config.launch),
    ),
    Question(
        flag="strategy",
        text="How ranks train together",
        now=lambda config: config.launch.strategy,
        check=lambda config: resolve(config.launch),
    ),
    Question(
        flag="scaling",
        text="Sizes are totals, shared out over the ranks (strong), or per rank (weak)",
        now=lambda config: config.train.scaling,
        asked=_of_all,
    ),
    Question(
        flag="lr_scaling",
        text="Learning rate times the growth of the batch (linear), its root (sqrt), or as it is (none)",
        now=lambda config: config.train.lr_scaling,
        asked=lambda config: _of_all(config) and config.train.scaling == "weak",
    ),
    Question(flag="hidden_size", text="Units of each LSTM", now=lambda config: config.policy.hidden_size),
    Question(flag="num_steps", text="Steps of a rollout", now=lambda config: config.train.num_steps),
    Question(
        flag="batch_size",
        text="Slots of bptt_steps steps per minibatch",
        now=lambda config: config.train.batch_size,
        check=_check_batch,
        instead=_batch_that_divides,
    ),
    Question(flag="num_envs", text="Environments", now=_num_envs, check=_sizes, instead=_default_envs),
    LengthQuestion(
        flag="num_episodes",
        text="Length: a number of episodes, or of steps as in '200000 steps'",
        now=_length,
    ),
)


def ask_user(parsed: ParsedFlags, compose: Compose) -> ParsedFlags | int:
    """The flags with the user's answers, or an exit code: start nothing."""
    refuse_without_user(parsed)
    try:
        asked = ask_for_flags(parsed, compose)
    except (EOFError, KeyboardInterrupt):
        print("\nleft: nothing was started or written")
        return 128 + signal.SIGINT
    if asked is None:
        print("nothing was started or written")
        return 0
    return asked


def ask_for_flags(parsed: ParsedFlags, compose: Compose) -> ParsedFlags | None:
    """Ask all questions; the flags given are what Enter takes.

    Args:
        compose: makes the configuration that flags lead to, or says why they cannot.

    Returns:
        The flags with the answers; None: the user does not want to start.

    Raises:
        EOFError, KeyboardInterrupt: the user has left.
        ValueError: the flags given cannot go together.
    """
    compose(parsed)
    print_gpu_info()
    print(f"{available_cores()} CPU cores\n{INTRODUCTION}")
    for question in QUESTIONS:
        if question.asked(compose(parsed)):
            parsed = _ask(question, parsed, compose)
    print(f"\nThe same without questions:\n  {command_of(parsed)}")
    while (reply := _read("Start it? yes or no [yes]: ").lower()) not in ("", "y", "yes", "n", "no"):
        print("  answer yes or no")
    return None if reply.startswith("n") else parsed


def _ask(question: Question, parsed: ParsedFlags, compose: Compose) -> ParsedFlags:
    """Ask until the answer is good; a bad one is told why."""
    config = compose(parsed)
    instead = question.instead(config)
    if instead:
        parsed = question.answer(parsed, instead)
        config = compose(parsed)
    choices = parsed.choices(question.flag)
    offered = f" ({', '.join(map(str, choices))})" if choices else ""
    while True:
        reply = _read(f"{question.text}{offered} [{question.now(config)}]: ")
        try:
            answered = question.answer(parsed, reply) if reply else parsed
            question.check(compose(answered))
        except ValueError as error:
            print(f"  {' '.join(str(error).split())}")
        else:
            return answered


def _read(prompt: str) -> str:
    """A line that the user types; `input` would write its prompt to stderr."""
    print(prompt, end="", flush=True)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.strip()
