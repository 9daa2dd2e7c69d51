"""The checkout as files, syntax trees and graphs of imports, for rules and counts."""

from __future__ import annotations

import ast
import io
import os
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PACKAGES = ("rl_dist", "envs", "agents")
SKIPPED_FOLDERS = {".git", ".venv", "runs", "shared", "build", "dist", "site", "__pycache__"}
TEXT_SUFFIXES = {
    *("", ".py", ".md", ".toml", ".txt", ".cfg", ".yml", ".yaml", ".html", ".sh", ".json"),
}
NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    tokenize.ENDMARKER,
}
# What a reader meets between the main function of a rank and loss.backward().
READING_PATH = (
    *("agents/rank", "agents/api/rank", "agents/trainer", "agents/recorder", "agents/rollout"),
    *("agents/advantages", "agents/ppo", "agents/policy", "agents/network/sequences"),
    *("agents/network/minibatches", "agents/network/cores", "agents/network/heads"),
    *("agents/network/inputs", "agents/network/normalize", "agents/network/encoders"),
    *("agents/network/noise", "rl_dist/strategies/strategy"),
)


@dataclass(frozen=True)
class Source:
    """One text file of the checkout; `tree` is its syntax tree where it is Python."""

    path: str  # from the root of the checkout, with slashes
    text: str
    tree: ast.Module

    @property
    def package(self) -> str:
        """The first folder of the path; "" at the root."""
        return self.path.split("/")[0] if "/" in self.path else ""

    @property
    def module(self) -> str:
        """The dotted name under which Python imports it."""
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def shipped(self) -> bool:
        """True for Python that users run: the packages and the scripts beside them."""
        return self.package in PACKAGES or (not self.package and self.path.endswith(".py"))

    @property
    def num_lines(self) -> int:
        """Lines of text."""
        return len(self.text.splitlines())

    def nodes(self, *kinds: type) -> Iterator[Any]:
        """All nodes of these kinds in the syntax tree."""
        return (node for node in ast.walk(self.tree) if isinstance(node, kinds))

    def functions(self) -> list[Any]:
        """All functions and methods."""
        return list(self.nodes(ast.FunctionDef, ast.AsyncFunctionDef))


def is_skipped(folder: Path) -> bool:
    """Return True for a folder that is no part of the repository."""
    made = folder.name in SKIPPED_FOLDERS or folder.name.endswith(("_cache", ".egg-info"))
    return made or (folder / "pyvenv.cfg").exists()


def read_sources(root: Path) -> list[Source]:
    """Every text file of a checkout, without what runs, tools and environments leave in it."""
    sources = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(f for f in folders if not is_skipped(Path(folder, f)))
        for path in (Path(folder, name) for name in sorted(names)):
            # a worktree has a file called .git
            if path.suffix not in TEXT_SUFFIXES or path.name == ".git" or not path.is_file():
                continue
            if path.stat().st_size < 1_000_000:
                text = path.read_text(encoding="utf-8", errors="replace")
                tree = ast.parse(text if path.suffix == ".py" else "")
                sources.append(Source(path.relative_to(root).as_posix(), text, tree))
    return sources


def length(node: Any) -> int:
    """Lines of a function from `def` to the last one, docstring included."""
    return node.end_lineno - node.lineno + 1


def import_targets(source: Source) -> list[tuple[int, str]]:
    """(line, dotted name) of everything imported at run time; for `from a import b` it is a.b."""
    typing_only = {
        id(node)
        for branch in source.nodes(ast.If)
        if ast.unparse(branch.test) == "TYPE_CHECKING"
        for node in ast.walk(branch)
    }
    targets = []
    for node in source.nodes(ast.Import, ast.ImportFrom):
        if id(node) in typing_only:
            continue
        prefix = ""
        if isinstance(node, ast.ImportFrom):
            parts = source.module.split(".")
            is_package = source.path.endswith("__init__.py")
            parents = parts[: len(parts) - node.level + is_package] if node.level else []
            prefix = ".".join([*parents, *filter(None, [node.module])]) + "."
        targets += [(node.lineno, f"{prefix}{alias.name}") for alias in node.names]
    return targets


def unit_names(sources: list[Source], package: str) -> set[str]:
    """Return the modules and packages right below a package."""
    return {s.module.split(".")[1] for s in sources if s.package == package and "." in s.module}


def code_tokens(source: Source) -> int:
    """Tokens of a Python file without comments, docstrings, line ends and indentation."""
    docstrings = {
        (child.lineno, child.col_offset)
        for node in source.nodes(ast.AST)
        for child in (node.body if isinstance(getattr(node, "body", None), list) else ())
        if isinstance(child, ast.Expr)
        and isinstance(child.value, ast.Constant)
        and isinstance(child.value.value, str)
    }
    tokens = tokenize.generate_tokens(io.StringIO(source.text).readline)
    return sum(token.type not in NO_CODE and token.start not in docstrings for token in tokens)


def size_counts(sources: list[Source]) -> dict[str, int]:
    """Code tokens of source, tests and benchmarks; lines of the README."""
    lines = {source.path: source.num_lines for source in sources}
    python = [source for source in sources if source.path.endswith(".py")]
    tokens = {
        "source": [s for s in python if s.shipped or s.package == "examples"],
        "tests": [s for s in python if s.package == "tests"],
        "benchmarks": [s for s in python if s.package == "benchmarks"],
        "the path to loss.backward()": [
            s for s in python if s.path.removesuffix(".py") in READING_PATH
        ],
    }
    return {f"tokens of {name}": sum(map(code_tokens, owned)) for name, owned in tokens.items()} | {
        "lines of README.md": lines.get("README.md", 0),
    }
