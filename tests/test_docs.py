"""Check that links, commands, flags and files in the docs exist."""

import ast
import importlib.util
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from agents.config import OWNERS, SECTIONS
from agents.run.choice import parse_training
from rl_dist.flags import fields_of

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(ROOT.glob("docs/*.md"))
TEXTS = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "examples/README.md")), *PAGES]
TRAINING = "train_distributed.py"
MARK = re.compile(r"<!-- generated: ([^>]+?) -->")
PACKAGES = ("rl_dist", "agents", "envs")
FOLDERS = "rl_dist|agents|envs|tests|docs|examples|benchmarks|deploy"


def page(name):
    return (ROOT / name).read_text()


@cache
def generated():
    spec = importlib.util.spec_from_file_location("generated", ROOT / "docs/generated.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def commands(path):
    """Yield the words of each python, make or torchrun command in code blocks."""
    for block in re.findall(r"^```.*?\n(.*?)^```", path.read_text(), re.M | re.S):
        for line in block.replace("\\\n", "").splitlines():
            if re.match(r"(python|make|torchrun) ", line.strip()):
                words = shlex.split(line.removesuffix("&"), comments=True)
                if words[0] != "torchrun" or TRAINING in words:
                    yield words


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_links_and_named_files_exist(path):
    text = path.read_text()
    targets = re.findall(r"\]\(([^)\s#]+)[^)\s]*\)", text)
    named = re.findall(rf"`((?:{FOLDERS})/[\w./]+)`", text)
    paths = [path.parent / target for target in targets if "://" not in target]
    assert [p for p in paths + [ROOT / name for name in named] if not p.exists()] == []


@pytest.mark.parametrize(
    "words", [pytest.param(w, id=" ".join(w)[:60]) for path in TEXTS for w in commands(path)]
)
def test_commands_have_flags_that_exist(words):
    if words[0] == "make":
        assert words[1] in re.findall(r"^([a-z-]+):", page("Makefile"), re.M)
        assert all(re.match(r"(ARGS|VENV|PYTHON)=", word) for word in words[2:])
        words = [TRAINING, *shlex.split(words[-1].partition("ARGS=")[2])] * (words[1] == "train")
    if TRAINING in words:
        parse_training(words[words.index(TRAINING) + 1 :])  # exits if a flag is invalid
    elif words and words[1] != "-c":
        command = words[: 3 if words[1] == "-m" else 2]
        flags = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert flags <= flags_of(" ".join(command))


@cache
def flags_of(command):
    """Return the flags of a program, including the training flags if it accepts them."""
    if command in generated().COMMANDS:
        text = generated().help_of(command)
    else:
        argv = [sys.executable, *command.split()[1:], "--help"]
        text = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, check=True).stdout
    own = set(re.findall(r"--\w+", text))
    passes_on = "training flags" in text or TRAINING in text
    return own | {f"--{name}" for name in OWNERS} if passes_on else own


def test_the_migration_page_names_flags_that_exist():
    named = set(re.findall(r"`--(\w+)`", page("docs/migrating.md")))
    assert len(named) > 30 and named - OWNERS.keys() == {"preset", "run_dir", "resume"}


def test_the_tree_in_the_readme_matches_the_source():
    folders, listed = {0: ROOT}, set()  # depth -> the folder whose content is listed there
    tree = page("README.md").partition("## Where things are\n```\n")[2].partition("```")[0]
    for line in tree.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        names = re.findall(r"(?:^|\s)([\w.]+/|\w+\.py)(?=\s|$)", line.partition("   ")[0] or line)
        listed.update(folders[depth] / name for name in names)
        folders[depth + 1] = folders[depth] / names[0] if names else folders[depth]
    units = {path for name in PACKAGES for path in ROOT.glob(f"{name}/[!_]*")}
    assert sorted({path for path in listed if not path.exists()} | units - listed) == []


def test_generated_parts_of_the_pages_are_up_to_date():
    for text in (path.read_text() for path in PAGES):
        assert generated().filled(text) == text, "run python docs/generated.py"
        assert all(generated().generate(mark).strip() for mark in MARK.findall(text))
        # a line break would end the row of a table
        assert re.findall(r"^\| .*[^|\n]$", text, re.M) == []
    flags = [flag for section in SECTIONS.values() for flag in fields_of(section)]
    assert [flag for flag in flags if f"`--{flag}`" not in page("docs/reference.md")] == []


def test_every_guarantee_names_its_tests():
    promises, _ = page("docs/guarantees.md").split("## Limits")
    rows = re.findall(r"^\| \w.* \|$", promises, re.M)
    assert len(rows) > 40 and [row for row in rows[1:] if "`tests/" not in row] == []


def test_messages_that_troubleshooting_quotes_exist():
    texts = ""  # all strings of the source, with "..." in place of inserted values
    for path in sorted(path for name in PACKAGES for path in ROOT.glob(f"{name}/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            parts = getattr(node, "values", [node])
            if isinstance(node, ast.Constant | ast.JoinedStr):
                texts += "".join(str(getattr(part, "value", "...")) for part in parts) + "\n"
    cells = re.findall(r"^\| (`.*?) \| ", page("docs/troubleshooting.md"), re.M)
    quoted = [message for cell in cells for message in re.findall("`(.+?)`", cell)]
    parts = {part.strip() for message in quoted for part in message.split("...")}
    assert len(parts) > 30 and [part for part in parts if part not in texts] == []
