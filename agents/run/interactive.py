"""Ask for the main flags in the terminal, then show the command without them.

Every answer goes the way of a flag: it is one more word of the command line, which is parsed again
with the same checks and messages. Nothing is written.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Callable, Mapping

from agents.config import OWNERS, RunConfig
from agents.run.choice import fresh_config, parse_training
from agents.run.sizes import shard_sizes
from rl_dist.errors import UserError
from rl_dist.flags import ParsedFlags, allowed, fields_of, shown
from rl_dist.launch.config import resolve
from rl_dist.machine import available_cores, print_gpu_info


def _sizes(config: RunConfig) -> object:
    return shard_sizes(config.train, 0, resolve(config.launch).num_ranks)


def _ranks(config: RunConfig) -> object:
    return resolve(config.launch)


# flags, each with a check that raises ValueError
QUESTIONS: Mapping[str, Callable[[RunConfig], object]] = {
    **dict.fromkeys(("env", "data"), RunConfig.prepare_task),
    **dict.fromkeys(("num_gpus", "strategy", "hidden_size", "num_steps"), _ranks),
    **dict.fromkeys(("batch_size", "num_envs", "total_steps", "num_episodes"), _sizes),
}


def ask_user(parsed: ParsedFlags, words: list[str]) -> list[str] | int:
    """Return the words of a command line with the user's answers, or an exit code.

    Raises:
        ValueError: no terminal, ranks started elsewhere, or flags that cannot go together.
    """
    has_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if parsed.extra.resume or "RANK" in os.environ or not has_terminal:
        raise UserError(
            "--interactive needs a terminal and a new run, without --resume and torchrun: give the "
            "flags instead, see --help"
        )
    words = [word for word in words if word != "--interactive"]
    print_gpu_info()
    print(f"{available_cores()} CPU cores")
    print("Enter takes the value in brackets; Ctrl-C leaves, and nothing is written.")
    try:
        for flag, check in QUESTIONS.items():
            config = fresh_config(parse_training(words))
            if flag not in config.idle_flags():
                words = _ask(flag, check, config, words)
        print(f"\nThe same without questions:\n  python train_distributed.py {shlex.join(words)}")
        while (reply := _read("Start it? yes or no [yes]: ").lower()) not in ("yes", "no", ""):
            print("  answer yes or no")
    except (EOFError, KeyboardInterrupt):
        print("\nCancelled; nothing was started.")
        return 128 + signal.SIGINT
    return 0 if reply == "no" else words


def _ask(
    flag: str, check: Callable[[RunConfig], object], config: RunConfig, words: list[str]
) -> list[str]:
    """Ask until the answer fits; return the words with it."""
    section = getattr(config, OWNERS[flag])
    field = fields_of(section)[flag]
    value = shown(getattr(section, flag))
    while True:
        reply = _read(f"{flag}: {field.description} ({allowed(field)}) [{value}]: ")
        answered = [*words, f"--{flag}={reply}"] if reply else words
        try:
            check(fresh_config(parse_training(answered)))
        except SystemExit:  # the parser has printed the reason
            continue
        except ValueError as error:
            print(f"  {' '.join(str(error).split())}")
        else:
            return answered


def _read(prompt: str) -> str:
    """Return a line that the user types; `input` would write its prompt to stderr."""
    print(prompt, end="", flush=True)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.strip()
