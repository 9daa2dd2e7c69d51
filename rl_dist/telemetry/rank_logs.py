"""What the log files of ranks tell: how a run began and ended, what went wrong."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rl_dist.hardware.plain_files import plain_file

TAIL_BYTES = 2**20
_LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+) ([A-Z]+) rank (\d+) ([\w.]+): (.*)")  # metrics.py's format
_BEGAN = re.compile(r"rank \d+ of (\d+) on (\w+)")  # train_distributed.py's first line
_TRAINED = "trained to iteration "  # and its last one
_CAUSE = re.compile(r"[A-Za-z_][\w.]*: .*")  # the end of a traceback


@dataclass(frozen=True)
class Message:
    """A warning or error that a rank logged."""

    time: str
    level: str
    rank: int
    text: str


@dataclass(frozen=True)
class RankLog:
    """The end of one rank's log file; a life is from one start to the next."""

    modified: float
    messages: list[Message]  # warnings and errors of all lives
    began: tuple[int, str] | None  # ranks and device of the last life
    trained: bool  # the last life came to the end of its training
    error: Message | None  # the first of the last life


def read_logs(run_dir: Path) -> list[RankLog]:
    """The logs of all ranks there are, in their order."""
    paths = [path for path in run_dir.glob("logs/rank_*.log") if path.stem[5:].isdecimal() and path.is_file()]
    return [read_log(path) for path in sorted(paths, key=lambda path: int(path.stem[5:]))]


def read_log(path: Path) -> RankLog:
    """One log file."""
    messages: list[Message] = []
    began, trained, first = None, False, 0  # first: number of messages before the last life
    level = ""
    for line in tail(path).splitlines():
        match = _LINE.fullmatch(line)
        if match:
            when, level, rank, _, text = match.groups()
            if start := _BEGAN.search(text):
                began, trained, first = (int(start[1]), start[2]), False, len(messages)
            trained = trained or text.startswith(_TRAINED)
            if level in ("WARNING", "ERROR", "CRITICAL"):
                messages.append(Message(when, level, int(rank), text))
        elif level in ("ERROR", "CRITICAL") and _CAUSE.fullmatch(line):
            messages[-1] = Message(messages[-1].time, level, messages[-1].rank, line)
    errors = [message for message in messages[first:] if message.level != "WARNING"]
    return RankLog(path.stat().st_mtime, messages, began, trained, errors[0] if errors else None)


def last_messages(logs: Sequence[RankLog], number: int) -> list[Message]:
    """The last warnings and errors of all ranks, oldest first."""
    together = sorted((message for log in logs for message in log.messages), key=lambda message: message.time)
    return together[-number:] if number else []


def tail(path: Path) -> str:
    """The last whole lines of a file, "" without one; its very last line may be torn."""
    try:
        with open(path, "rb", opener=plain_file) as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            data = file.read(TAIL_BYTES)
    except OSError:
        return ""
    return (data if size <= TAIL_BYTES else data.partition(b"\n")[2]).decode(errors="replace")
