"""Ask for what a training needs, and show the command that says the same.

Every answer goes the way of a flag: the same conversion, checks and messages. Nothing is written.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

from agents.run.config import OWNERS, RunConfig
from agents.sizes import shard_sizes
from rl_dist.config import ParsedFlags
from rl_dist.errors import UserError
from rl_dist.hardware.memory import available_cores
from rl_dist.hardware.report import print_gpu_info
from rl_dist.launch.launcher import resolve

Compose = Callable[[ParsedFlags], RunConfig]  # raises ValueError: these flags cannot go together


def _check_sizes(config: RunConfig) -> object:
    return shard_sizes(config.train, 0, resolve(config.launch).num_ranks)


def _check_batch(config: RunConfig) -> object:
    return _check_sizes(replace(config, train=replace(config.train, num_envs=0)))


def _next_batch(config: RunConfig) -> str:
    """Return the next larger batch that the ranks can share."""
    ranks = resolve(config.launch).num_ranks
    return str(-(-config.train.batch_size // ranks) * ranks)


def _num_envs(config: RunConfig) -> int:
    sizes = shard_sizes(config.train, 0, resolve(config.launch).num_ranks)
    return sizes.global_num_envs if config.train.scaling == "strong" else sizes.num_envs


def _on_several_ranks(config: RunConfig) -> bool:
    return resolve(config.launch).num_ranks > 1


def _check_launch(config: RunConfig) -> object:
    return resolve(config.launch)


@dataclass(frozen=True)
class Question:
    """A question whose answer is the value of a flag; its text is the flag's help."""

    flag: str
    check: Callable[[RunConfig], object] = lambda config: None  # raises ValueError
    asked: Callable[[RunConfig], bool] = lambda config: True
    now: Callable[[RunConfig], object] | None = None  # what Enter means; None: the flag's value
    instead: Callable[[RunConfig], str] | None = None  # for Enter, where that fails the check


QUESTIONS = (
    Question("env", lambda config: config.task.is_trading or config.prepare_task()),
    Question("data", RunConfig.prepare_task, asked=lambda config: config.task.is_trading),
    Question("num_gpus", _check_launch, now=lambda config: resolve(config.launch).num_ranks),
    Question("strategy", _check_launch),
    Question("scaling", asked=_on_several_ranks),
    Question(
        "lr_scaling",
        asked=lambda config: _on_several_ranks(config) and config.train.scaling == "weak",
    ),
    Question("hidden_size"),
    Question("num_steps"),
    Question("batch_size", _check_batch, instead=_next_batch),
    Question("num_envs", _check_sizes, now=_num_envs, instead=lambda config: "0"),
    Question("total_steps"),
    Question("num_episodes", asked=lambda config: not config.train.total_steps),
)


def ask_user(parsed: ParsedFlags, compose: Compose) -> ParsedFlags | int:
    """Return the flags with the user's answers, or an exit code: start nothing.

    Raises:
        UserError: no terminal, ranks started elsewhere, or a run to resume.
        ValueError: the flags given cannot go together.
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
    """Ask all questions; Enter takes the flags given.

    Args:
        compose: makes the configuration that flags lead to, or says why they cannot.

    Returns:
        The flags with the answers; None: the user does not want to start.
    """
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
    if question.instead:
        try:
            question.check(config)
        except ValueError:
            parsed = parsed.answered(question.flag, question.instead(config))
            config = compose(parsed)
    declared = parsed.declaration(question.flag)
    allowed = ", ".join(declared.choices) or declared.range or declared.unit or "text"
    value = getattr(getattr(config, OWNERS[question.flag]), question.flag)
    now = question.now(config) if question.now else value
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
    extra = vars(parsed.extra).items()
    words = [
        f"--{name}" if value is True else f"--{name}={value}"
        for name, value in extra
        if value and name != "interactive"
    ]
    return shlex.join(["python", "train_distributed.py", *words, *parsed.words()])


def _read(prompt: str) -> str:
    """Return a line that the user types; `input` would write its prompt to stderr."""
    print(prompt, end="", flush=True)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.strip()
