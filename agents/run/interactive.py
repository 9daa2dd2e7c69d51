"""Ask for what a training needs, and show the command that says the same.

Every answer goes the way of a flag: the same conversion, checks and messages. Nothing is written.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from agents.run.config import OWNERS, RunConfig
from agents.sizes import Sizes, shard_sizes
from rl_dist.errors import UserError
from rl_dist.flags import ParsedFlags
from rl_dist.launch.config import resolve
from rl_dist.machine import available_cores, print_gpu_info

Compose = Callable[[ParsedFlags], RunConfig]  # raises ValueError: these flags cannot go together


def _num_ranks(config: RunConfig) -> int:
    return resolve(config.launch).num_ranks


def _sizes(config: RunConfig) -> Sizes:
    return shard_sizes(config.train, 0, _num_ranks(config))


def _num_envs(config: RunConfig) -> int:
    sizes = _sizes(config)
    return sizes.global_num_envs if config.train.scaling == "strong" else sizes.num_envs


@dataclass(frozen=True)
class Question:
    """A question whose answer is the value of a flag; its text is the flag's help."""

    flag: str
    check: Callable[[RunConfig], object] = lambda config: None  # raises ValueError
    asked: Callable[[RunConfig], bool] = lambda config: True
    now: Callable[[RunConfig], object] | None = None  # what Enter means; None: the flag's value


QUESTIONS = (
    Question("env", lambda config: config.task.is_trading or config.prepare_task()),
    Question("data", RunConfig.prepare_task, asked=lambda config: config.task.is_trading),
    Question("num_gpus", _num_ranks, now=_num_ranks),
    Question("strategy", _num_ranks),
    Question("scaling", asked=lambda config: _num_ranks(config) > 1),
    Question(
        "lr_scaling",
        asked=lambda config: _num_ranks(config) > 1 and config.train.scaling == "weak",
    ),
    Question("hidden_size"),
    Question("num_steps"),
    Question(
        "batch_size",
        lambda config: _sizes(replace(config, train=replace(config.train, num_envs=0))),
    ),
    Question("num_envs", _sizes, now=_num_envs),
    Question("total_steps"),
    Question("num_episodes", asked=lambda config: not config.train.total_steps),
)


def ask_user(parsed: ParsedFlags, compose: Compose) -> ParsedFlags | int:
    """Return the flags with the user's answers, or an exit code: start nothing.

    Raises:
        ValueError: no terminal, ranks started elsewhere, a run to resume; or the flags given
            cannot go together.
    """
    if parsed.extra.resume:
        raise UserError("--interactive asks for a new run: leave it out beside --resume")
    if "RANK" in os.environ:
        raise UserError("--interactive starts the ranks itself: leave it out under torchrun")
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UserError("--interactive needs a terminal: give the flags instead, see --help")
    try:
        answers = ask_for_flags(parsed, compose)
    except (EOFError, KeyboardInterrupt):
        print("\nleft: nothing was started or written")
        return 128 + signal.SIGINT
    if answers is None:
        print("nothing was started or written")
        return 0
    return answers


def ask_for_flags(parsed: ParsedFlags, compose: Compose) -> ParsedFlags | None:
    """Return the flags with the answers; None: the user does not want to start."""
    compose(parsed)
    print_gpu_info()
    print(f"{available_cores()} CPU cores")
    print("Enter takes what stands in brackets; Ctrl-C leaves, and nothing is written.")
    for question in QUESTIONS:
        if question.asked(compose(parsed)):
            parsed = _ask(question, parsed, compose)
    print(f"\nThe same without questions:\n  {_command_of(parsed)}")
    while (reply := _read("Start it? yes or no [yes]: ").lower()) not in ("yes", "no", ""):
        print("  answer yes or no")
    return None if reply == "no" else parsed


def _ask(question: Question, parsed: ParsedFlags, compose: Compose) -> ParsedFlags:
    """Ask until the answer is good; say why one is not."""
    config = compose(parsed)
    declared = parsed.declaration(question.flag)
    allowed = ", ".join(declared.choices) or declared.range or declared.unit or "text"
    now = getattr(getattr(config, OWNERS[question.flag]), question.flag)
    with suppress(ValueError):  # sizes that do not divide: the answer will be checked
        now = question.now(config) if question.now else now
    while True:
        reply = _read(f"{question.flag}: {declared.help} ({allowed}) [{now}]: ")
        try:
            answered = parsed.answered(question.flag, reply) if reply else parsed
            question.check(compose(answered))
        except ValueError as error:
            print(f"  {' '.join(str(error).split())}")
        else:
            return answered


def _command_of(parsed: ParsedFlags) -> str:
    """Return the command line that gives these flags, quoted for a shell."""
    extra = {name: value for name, value in vars(parsed.extra).items() if value}
    extra.pop("interactive", None)
    words = [f"--{name}" if value is True else f"--{name}={value}" for name, value in extra.items()]
    return shlex.join(["python", "train_distributed.py", *words, *parsed.words()])


def _read(prompt: str) -> str:
    """Return a line that the user types; `input` would write its prompt to stderr."""
    print(prompt, end="", flush=True)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.strip()
