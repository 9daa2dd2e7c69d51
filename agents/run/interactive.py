"""Ask for the main flags in the terminal; print the equivalent command line.

Each answer is appended to the command line as a flag. The command line is then parsed again, so
answers get the same checks and error messages as flags. No files are written.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys

from agents.config import OWNERS
from agents.run.choice import fresh_config, parse_training
from rl_dist.errors import UserError
from rl_dist.flags import ParsedFlags, allowed, fields_of, shown
from rl_dist.machine import available_cores, print_gpu_info

QUESTIONS = [
    *("env", "data", "num_gpus", "strategy", "hidden_size", "num_steps"),
    *("batch_size", "num_envs", "total_steps", "num_episodes"),
]


def ask_user(parsed: ParsedFlags, words: list[str]) -> ParsedFlags:
    """Ask the questions; return the flags with the user's answers.

    Args:
        words: the command line that gave `parsed`.

    Raises:
        SystemExit: the user cancels or does not want to start.
        ValueError: there is no terminal, or the flags do not fit.
    """
    has_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if parsed.configs["run"].resume or "RANK" in os.environ or not has_terminal:
        raise UserError(
            "--interactive needs a terminal and a new run, without --resume and torchrun: give "
            "other flags, see --help"
        )
    words = [word for word in words if word != "--interactive"]
    print_gpu_info()
    print(f"{available_cores()} CPU cores")
    print("Enter takes the value in brackets. Ctrl-C leaves without a trace.")
    try:
        for flag in QUESTIONS:
            words = _ask(flag, words)
        print(f"\nThe same without questions:\n  python train_distributed.py {shlex.join(words)}")
        reply = input("Start it? yes or no [yes]: ")
    except (EOFError, KeyboardInterrupt):
        print("\nCancelled; nothing was started.")
        raise SystemExit(128 + signal.SIGINT) from None
    if reply not in ("", "yes"):
        raise SystemExit(0)
    return parse_training(words)


def _ask(flag: str, words: list[str]) -> list[str]:
    """Ask for a flag until the answer is valid; return `words` and this flag."""
    config = fresh_config(parse_training(words))
    if flag in config.idle_flags():
        return words
    section = getattr(config, OWNERS[flag])
    field = fields_of(section)[flag]
    question = f"{flag}: {field.description} ({allowed(field)}) [{shown(getattr(section, flag))}]: "
    while reply := input(question).strip():
        answered = [*words, f"--{flag}={reply}"]
        try:
            fresh_config(parse_training(answered))
        except SystemExit:  # the parser has already printed the error
            continue
        except ValueError as error:
            print(f"  {' '.join(str(error).split())}")
        else:
            return answered
    return words
