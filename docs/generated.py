"""Fill the pages of the site with what the source declares.

A page says `<!-- generated: NAME -->` where the table or text of that name belongs. MkDocs calls
`on_page_markdown`, see `hooks` in mkdocs.yml. Nothing that the source declares is written twice,
so no page can be stale.
"""

import contextlib
import dataclasses
import io
import re
import sys
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # mkdocs does not put the checkout there

# Everything that is taken from the source is imported here, and nowhere else in this file.
import check_gpu_setup
import rl_dist
from agents.evaluate import command as evaluate
from agents.pretrain import command as pretrain
from agents.run.choice import PAPER, QUICK, TRADING, add_run_flags
from agents.run.config import SECTIONS, load_agent
from agents.run.metric_table import METRICS
from rl_dist.checkpoint import command as checkpoint
from rl_dist.config import is_flag
from rl_dist.process_group.process_ends import STOP_SIGNALS
from rl_dist.resume_check import command as resume_check
from rl_dist.speedup import command as speedup
from rl_dist.status import command as status

COMMANDS: dict[str, Callable[[], Any]] = {
    "python check_gpu_setup.py": check_gpu_setup.main,
    "python -m rl_dist.speedup": speedup.main,
    "python -m rl_dist.status": status.main,
    "python -m rl_dist.checkpoint": checkpoint.main,
    "python -m rl_dist.resume_check": resume_check.main,
    "python -m agents.evaluate": evaluate.main,
    "python -m agents.pretrain": pretrain.main,
}
SHORT_HELP = list(COMMANDS)[1:6]  # the others list all training flags, which have a table
OWN_SECTIONS = {
    "python -m agents.pretrain": {n: c for n, c in pretrain.SECTIONS.items() if n not in SECTIONS}
}
API = {"load_agent": load_agent} | {name: getattr(rl_dist, name) for name in rl_dist.__all__}
TITLES = {
    "launch": "Ranks, devices and strategies",
    "speed": "Speed",
    "train": "Length, sizes, checkpoints",
    "ppo": "PPO",
    "policy": "Policy",
    "task": "Environment",
    "data": "Market data",
    "market": "Simulated market",
    "trading": "Trading",
    "fit": "Fitting",
    "pretrain": "Pre-training",
}

LONG_ROWS = ("guarantees.md", "troubleshooting.md")  # pages whose tables are lists on a phone
_MARK = re.compile(r"<!-- generated: ([^>]+?) -->")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace the marks of a page; MkDocs calls it."""
    text = _MARK.sub(lambda mark: generate(mark[1]), markdown)
    return _stacked("rows", text) if page.file.src_uri in LONG_ROWS else text


def generate(name: str) -> str:
    """Return the Markdown that stands for a mark; an unknown name is a KeyError."""
    kind, _, rest = name.partition(" ")
    return {
        "flags": lambda: _stacked("flags", flag_tables(SECTIONS)),
        "run_flags": run_flags,
        "own_flags": lambda: _stacked("flags", flag_tables(OWN_SECTIONS[rest])),
        "presets": preset_table,
        "metrics": lambda: _stacked("metrics", metric_table()),
        "signals": signal_rows,
        "help": help_texts,
        "api": lambda: f"::: {API[rest].__module__}.{API[rest].__qualname__}",
        "home": lambda: f"from {API[rest].__module__} import {rest}",
    }[kind]()


def flag_tables(sections: Mapping[str, type[Any]]) -> str:
    """Return a heading and a table for each section of flags."""
    parts = []
    for name, section in sections.items():
        hints = typing.get_type_hints(section)
        rows = [
            _flag_row(entry, hints[entry.name])
            for entry in filter(is_flag, dataclasses.fields(section))
        ]
        parts.append(
            f"### {TITLES.get(name, name)}\n\n"
            + _table(("flag", "default", "allowed", "meaning"), rows)
        )
    return "\n\n".join(parts)


def _flag_row(entry: dataclasses.Field[Any], hint: Any) -> tuple[str, ...]:
    metadata = entry.metadata
    is_switch = hint is bool
    flag = f"`--{entry.name}`" + (f", `--no-{entry.name}`" if is_switch else "")
    default = {"True": "on", "False": "off", "": "unset", "None": "none"}.get(
        str(entry.default), f"{entry.default}"
    )
    unit = "" if isinstance(entry.default, str) else metadata.get("unit", "")
    return flag, f"{default} {unit}".strip(), _allowed(metadata, hint), metadata.get("help", "")


def _allowed(metadata: Mapping[str, Any], hint: Any) -> str:
    """Return the values that a flag takes: choices, a range or a type."""
    words = "".join(f", `{word}`" for word in metadata.get("words") or {})
    if metadata.get("choices"):
        return ", ".join(f"`{choice}`" for choice in metadata["choices"]) + words
    if metadata.get("range"):
        low, high = metadata["range"]
        return f"{low:g} to {high:g}{words}"
    kinds = {
        bool: "on or off",
        int: "whole number",
        float: "number",
        str: metadata.get("unit") or "text",
    }
    return kinds.get(hint, "text") + words


def run_flags() -> str:
    """Return the table of the flags that belong to no section."""
    found = _Recorder()
    add_run_flags(found)  # type: ignore[arg-type]
    return _table(
        ("flag", "meaning"), [(f"`{name}`", options["help"]) for name, options in found.added]
    )


class _Recorder:
    """Stands for a parser and remembers the flags that are added to it."""

    def __init__(self) -> None:
        self.added: list[tuple[str, dict[str, Any]]] = []

    def add_argument_group(self, name: str) -> "_Recorder":
        return self

    def add_argument(self, name: str, **options: Any) -> None:
        self.added.append((name, options))


def preset_table() -> str:
    """Return the table of the defaults that a task or a preset replaces."""
    declared = {
        entry.name: entry.default
        for section in SECTIONS.values()
        for entry in dataclasses.fields(section)
    }
    sets = {"`StockTrading-v0`": TRADING, "`--quick`": QUICK, "`--preset paper`": PAPER}
    names = sorted(set().union(*sets.values()), key=list(declared).index)
    rows = [
        (
            f"`--{name}`",
            _shown(declared[name]),
            *(_shown(each.get(name, "")) for each in sets.values()),
        )
        for name in names
    ]
    return _table(("flag", "declared", *sets), rows)


def _shown(value: Any) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def metric_table() -> str:
    """Return the table of the keys of metrics.jsonl."""
    rows = []
    for name, metric in METRICS.items():
        where = {(True, True): "record, `ranks`", (True, False): "record", (False, True): "`ranks`"}
        place = where[metric.overall, metric.per_rank]
        rows.append(
            (
                f"`{name}`",
                metric.unit,
                place,
                metric.meaning + (f" ({metric.when})" if metric.when else ""),
            )
        )
    return _table(("key", "unit", "in", "meaning"), rows)


def signal_rows() -> str:
    """Return the exit codes of runs that a signal stopped."""
    return _table(
        ("signal", "exit code"),
        [(number.name, str(128 + number)) for number in sorted(STOP_SIGNALS)],
    )


def help_texts() -> str:
    """Return what the commands print for --help."""
    return "\n\n".join(
        f"### `{name}`\n\n```text\n{help_of(name).strip()}\n```" for name in SHORT_HELP
    )


def help_of(command: str) -> str:
    """Return the --help of one of COMMANDS."""
    printed, before = io.StringIO(), sys.argv
    sys.argv = [command.split()[-1], "--help"]
    try:
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            COMMANDS[command]()
    finally:
        sys.argv = before
    return printed.getvalue()


def _table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [heads, tuple("---" for _ in heads), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
    )


def _stacked(kind: str, text: str) -> str:
    """Return tables that a narrow screen shows as a list, see css/site.css."""
    return f'<div class="stack {kind}" markdown>\n\n{text}\n\n</div>'
