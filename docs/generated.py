"""Fill the pages with what the source declares.

A page says `<!-- generated: NAME -->` where the table or text of that name belongs. If an
`<!-- end -->` follows, the text between them is committed: `python docs/generated.py` writes it,
and a test keeps it current. MkDocs fills in the others, see `hooks` in mkdocs.yml.
"""

import contextlib
import io
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # mkdocs does not put the checkout there

# Everything that is taken from the source is imported here, and nowhere else in this file.
import check_gpu_setup
import rl_dist
from agents import export, pretrain
from agents.config import DEFAULTS, PRESETS, QUICK, SECTIONS
from agents.evaluate import command as evaluate
from agents.run.choice import ALL_SECTIONS, CHANGEABLE
from agents.run.metric_table import METRIC_TABLE
from agents.run.saved import load_agent
from benchmarks import task_table
from rl_dist import resume_check, status
from rl_dist.checkpoint import __main__ as checkpoint
from rl_dist.flags import allowed, fields_of, shown
from rl_dist.process_group.process_ends import STOP_SIGNALS
from rl_dist.speedup import __main__ as speedup

COMMANDS: dict[str, Callable[[], Any]] = {
    "python check_gpu_setup.py": check_gpu_setup.main,
    "python -m rl_dist.speedup": speedup.main,
    "python -m rl_dist.status": status.main,
    "python -m rl_dist.checkpoint": checkpoint.main,
    "python -m rl_dist.resume_check": resume_check.main,
    "python -m agents.evaluate": evaluate.main,
    "python -m agents.export": export.main,
    "python -m agents.pretrain": pretrain.main,
}
SHORT_HELP = list(COMMANDS)[1:7]  # the others list all training flags, which have a table
OWN_SECTIONS = {
    "python -m agents.pretrain": {
        name: section for name, section in pretrain.SECTIONS.items() if name not in SECTIONS
    }
}
API = {"load_agent": load_agent} | {name: getattr(rl_dist, name) for name in rl_dist.__all__}
TITLES = {
    "run": "The run",
    "launch": "Ranks, devices and strategies",
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
PAGES = sorted(Path(__file__).parent.glob("*.md"))
_MARK = re.compile(r"<!-- generated: ([^>]+?) -->")
_COMMITTED = re.compile(_MARK.pattern + r"\n\n.*?\n\n(<!-- end -->)", re.S)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace the marks of a page; MkDocs calls it."""
    text = _COMMITTED.sub(r"<!-- generated: \1 -->", markdown)
    text = _MARK.sub(lambda mark: generate(mark[1]), text)
    return _stacked("rows", text) if page.file.src_uri in LONG_ROWS else text


def filled(text: str) -> str:
    """Return the text of a page with the parts that are committed as the source has them now."""
    return _COMMITTED.sub(
        lambda mark: f"<!-- generated: {mark[1]} -->\n\n{generate(mark[1])}\n\n{mark[2]}", text
    )


def generate(name: str) -> str:
    """Return the Markdown that stands for a mark; an unknown name is a KeyError."""
    kind, _, rest = name.partition(" ")
    return {
        "flags": lambda: _stacked("flags", flag_tables(ALL_SECTIONS)),
        "own_flags": lambda: _stacked("flags", flag_tables(OWN_SECTIONS[rest])),
        "presets": preset_table,
        "changeable": lambda: ", ".join(f"`--{name}`" for name in sorted(CHANGEABLE)),
        "metrics": lambda: _stacked("metrics", metric_table()),
        "signals": signal_rows,
        "results": results,
        "help": help_texts,
        "api": lambda: "\n\n".join(_documented(API[name]) for name in rest.split()),
        "home": lambda: f"from {API[rest].__module__} import {rest}",
    }[kind]()


def _documented(value: Any) -> str:
    return f"::: {value.__module__}.{value.__qualname__}"


def flag_tables(sections: Mapping[str, Any]) -> str:
    """Return a heading and a table for each section of flags."""
    parts = []
    for name, section in sections.items():
        rows = [
            (_flag(name, field), shown(getattr(section, name)), allowed(field), field.description)
            for name, field in fields_of(section).items()
        ]
        table = _table(("flag", "default", "allowed", "meaning"), rows)
        parts.append(f"### {TITLES.get(name, name)}\n\n{table}")
    return "\n\n".join(parts)


def _flag(name: str, field: Any) -> str:
    return f"`--{name}`" + (f", `--no-{name}`" if field.annotation is bool else "")


def preset_table() -> str:
    """Return the table of the defaults that a task or a preset replaces."""
    columns = {f"--preset {name}": values for name, values in PRESETS.items()} | {"--quick": QUICK}
    changed = {name for values in columns.values() for name in values}
    rows = [
        (f"`--{name}`", shown(value))
        + tuple(shown(values[name]) if name in values else "" for values in columns.values())
        for name, value in DEFAULTS.items()
        if name in changed
    ]
    return _table(("flag", "default", *columns), rows)


def metric_table() -> str:
    """Return the table of the keys of metrics.jsonl."""
    places = {"record": "record", "ranks": "`ranks`", "both": "record, `ranks`"}
    rows = [
        (
            f"`{name}`",
            metric.unit,
            places[metric.place],
            metric.meaning + (f" ({metric.when})" if metric.when else ""),
        )
        for name, metric in METRIC_TABLE.items()
    ]
    return _table(("key", "unit", "in", "meaning"), rows)


def results() -> str:
    """Return the tables of what the presets reach, from the stored results."""
    rows, sources = task_table.read_rows()
    return task_table.page(rows, task_table.read_results(rows, task_table.RESULTS), sources)


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
        "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in line) + " |"
        for line in lines
    )


def _stacked(kind: str, text: str) -> str:
    """Return tables that a narrow screen shows as a list, see css/site.css."""
    return f'<div class="stack {kind}" markdown>\n\n{text}\n\n</div>'


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(filled(path.read_text()))
