"""Untrusted run directories run no code; bad content causes a one-line error."""

import copy as copies
import dataclasses
import json
import math
import os
import shutil
import sys
from contextlib import suppress

import pytest
import torch
from hostile import CASES, FOREIGN, check, setting, write_module
from supervised_ranks import Fitted
from train_runs import evaluate_here, run_here, train_here

from agents import export
from agents.config import SECTIONS
from agents.learner.checkpoint_schema import RunSchema
from agents.run import choice, start
from rl_dist import status
from rl_dist.checkpoint.__main__ import main
from rl_dist.checkpoint.content import CheckpointError, check_state
from rl_dist.checkpoint.store import (
    LoadedCheckpoint,
    latest_checkpoint,
    load_checkpoint,
    pack,
    write_atomically,
)
from rl_dist.launch.ranks import RankReport

HUGE = [10**4000, -(10**4000), 2**63, -(2**63), 1e308, float("nan"), float("inf")]
NESTED = json.loads("[" * 500 + "]" * 500)
WRONG = [None, True, -1, 0, 0.5, "", "\0", "\x1b[2J", "\ud800", "x" * 10**5, [], {}]
WRONG += [{"a": NESTED}, NESTED, *HUGE]


@pytest.fixture
def canary(tmp_path, monkeypatch):
    """Return the path of a file that exists only if an untrusted run executed code.

    This fixture puts modules on the import path; if they are imported, they create the file.
    Commands create the file with `touch`.
    """
    monkeypatch.syspath_prepend(tmp_path / "modules")
    write_module(tmp_path / "modules", tmp_path / "canary")
    yield tmp_path / "canary"
    for name in [name for name in sys.modules if name.startswith(("foreign", "lab"))]:
        del sys.modules[name]


@pytest.mark.timeout(60)  # a command that opens a pipe would block forever
@pytest.mark.parametrize("name", CASES)
def test_a_hostile_run_or_command_is_refused_in_one_line_or_harmless(
    name, copy, canary, untraced, monkeypatch, capsys
):
    check(CASES[name], copy, canary, monkeypatch, capsys)


# ---- imports of user modules


@pytest.mark.parametrize("module", ["foreign_envs", "lab.inner.foreign_envs"])
def test_modules_of_the_users_own_run_are_imported(module, copy, canary, tmp_path):
    # The folders of the module do not need an __init__.py.
    write_module(tmp_path / "modules" / "lab" / "inner", canary)
    env = f"{module}:Foreign-v0"
    setting(copy, "task", "env", env)
    assert train_here("--resume", copy) == evaluate_here(copy) == 0
    assert canary.exists()
    (copy / "config.json").chmod(0o666)
    assert evaluate_here(copy) == 2
    assert evaluate_here(copy, "--env", env) == 0


@pytest.mark.parametrize(
    "module, named",
    [
        ("foreign_envs", True),
        ("run.foreign_package.inner", True),
        ("linked", False),
        ("envs.foreign_envs", True),
    ],
)
def test_no_module_is_imported_from_the_run_directory(
    module, named, copy, canary, tmp_path, monkeypatch
):
    shutil.rmtree(tmp_path / "modules")
    write_module(copy, canary)
    write_module(copy / "foreign_package", canary, "inner")
    write_module(copy / "envs", canary)
    write_module(tmp_path / "elsewhere", canary, "target")
    (copy / "linked.py").symlink_to(tmp_path / "elsewhere" / "target.py")
    env = f"{module}:Foreign-v0"
    setting(copy, "task", "env", env)
    monkeypatch.chdir(copy)
    monkeypatch.setattr(sys, "path", ["", str(copy), str(tmp_path), *sys.path])
    words = ["--env", env] if named else []
    assert train_here("--resume", copy, *words) == 2
    assert evaluate_here(copy, *words) == 2 and not canary.exists()
    assert str(copy) not in sys.path and "" not in sys.path


# ---- event commands, and text that is printed for people


def test_the_event_command_is_in_no_file_and_not_printed(copy, secret, capsys):
    files = [path for path in copy.rglob("*") if path.is_file()]
    assert files and not any(secret.encode() in path.read_bytes() for path in files)
    assert main(["inspect", str(copy), "--json"]) == 0
    assert secret not in capsys.readouterr().out


def test_a_resume_accepts_an_event_command(copy, canary):
    assert train_here("--resume", copy, "--on_event", f"touch {canary}") == 0
    assert canary.exists()


def test_text_from_a_run_is_escaped_when_printed(copy, untraced, capsys):
    for path in (copy / "checkpoints").glob("*.pt"):
        state = load_checkpoint(path) | {"measured": {"valid\x1b[2J\nINJECTED": 1.0}}
        write_atomically(path, pack(state))
    setting(copy, "task", "env", "Recall-v0\nINJECTED")
    for read, words in ((main, ["list"]), (main, ["inspect"]), (status.main, [])):
        assert read([*words, str(copy)]) == 0
    assert run_here(export.main, copy) == 0
    assert evaluate_here(copy) == train_here("--resume", copy) == 2
    for shown in capsys.readouterr():
        assert shown.count("INJECTED") >= 2
        assert "\x1b" not in shown and "\nINJECTED" not in shown


# ---- invalid values in every configuration field and every checkpoint entry

FIELDS = [(name, item.name) for name, one in SECTIONS.items() for item in dataclasses.fields(one)]


@pytest.mark.parametrize("section, name", FIELDS)
def test_a_run_with_any_field_value_continues_or_is_refused_in_one_line(
    section, name, copy, canary, monkeypatch, capsys, tmp_path
):
    os.mkfifo(tmp_path / "pipe")
    places = [str(tmp_path / "pipe"), "/dev/zero", "/", str(tmp_path / "written")]
    values = [*WRONG, *places, f"$(touch {canary})", FOREIGN, "foreign_envs"]
    saved = load_checkpoint(latest_checkpoint(copy))
    monkeypatch.setattr(start, "run_ranks", lambda *_, **__: RankReport(0))
    # To save time, each field gets an eighth of the values; 8 consecutive fields cover them all.
    for value in values[FIELDS.index((section, name)) % 8 :: 8]:
        config = json.loads(saved["config"])
        if section in ("data", "market", "trading"):
            config["task"]["env"] = "StockTrading-v0"
        config[section][name] = value
        found = LoadedCheckpoint(copy / "x.pt", saved | {"config": json.dumps(config)})
        monkeypatch.setattr(choice, "load_newest", lambda path, found=found: found)
        code = train_here("--resume", copy)
        errors = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
        assert (code, len(errors)) in ((0, 0), (2, 1)), (value, errors)
    assert not canary.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["modules", "pipe", "run"]


ODD = [None, "x", -1, 10**30, math.nan, {}, [], {"a": {}}, [1, 2], torch.zeros(3, 3)]
ODD += [torch.tensor(math.nan)]


def odd_states(state, path=()):
    """Yield copies of a state in which one entry is invalid or missing.

    Each item is (path of keys to the entry, changed copy).
    """
    entries = dict(enumerate(state)) if isinstance(state, list) else state
    for key, entry in entries.items() if isinstance(entries, dict) else ():
        values = [*ODD]
        if isinstance(entry, torch.Tensor):
            sparse = entry.to_sparse() if entry.ndim else entry.bool()
            values += [entry[None], torch.zeros(1).expand(10**12), sparse]
            if entry.is_floating_point():
                values += [entry * math.nan, entry + math.inf, -1 - entry.abs()]
        for value in values:
            changed = copies.copy(state)
            changed[key] = value
            yield (*path, key), changed
        shorter = copies.copy(state)
        del shorter[key]
        yield (*path, key), shorter
        for way, inner in odd_states(entry, (*path, key)):
            changed = copies.copy(state)
            changed[key] = inner
            yield way, changed


def test_a_run_with_an_odd_checkpoint_entry_continues_or_is_refused_in_one_line(copy, capsys):
    folder = copy / "checkpoints"
    for name in ("iteration_00000003.pt", "best.pt"):
        (folder / name).unlink()
    passed = {}
    for number, (way, state) in enumerate(
        odd_states(load_checkpoint(folder / "iteration_00000002.pt"))
    ):
        if len(way) > 2 and number % 20:
            continue
        try:
            check_state(state, RunSchema)
            passed[way[0]] = state
        except CheckpointError as error:
            assert "\n" not in str(error) and len(str(error)) < 300
    for name, state in passed.items():
        write_atomically(folder / "iteration_00000002.pt", pack(state))
        code = train_here("--resume", copy)
        errors = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
        assert (code == 0 and not errors) or (code in (1, 2) and len(errors) == 1), (name, errors)


DAMAGED = {
    "strategy 5": lambda state: state.update(strategy=5),
    "no parameter group": lambda state: state["optimizer"].update(param_groups=[]),
    "configuration not JSON": lambda state: state.update(config="x"),
    "configuration too deep": lambda state: state.update(config="[" * 10**5),
    "environments short": lambda state: state["environments"].update(cue=torch.zeros(1).long()),
    "environments NaN": lambda state: state["environments"]["noise"].fill_(math.nan),
    "a weight is text": lambda state: state["policy"].update({"actor_head.bias": "x"}),
    "carry narrow": lambda state: state["carry"].update(lstm_state=torch.zeros(2, 4, 7)),
    "an environment entry missing": lambda state: state["environments"].pop("cue"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_wrong_entry_is_called_damage_and_the_older_checkpoint_is_used(name, copy):
    newest = latest_checkpoint(copy)
    state = load_checkpoint(newest)
    DAMAGED[name](state)
    write_atomically(newest, pack(state))
    assert main(["verify", str(copy)]) == main(["inspect", str(newest)]) == 1
    assert latest_checkpoint(copy).name == "iteration_00000002.pt"


def test_a_fit_with_an_odd_checkpoint_entry_continues_or_is_refused_in_one_line(world, tmp_path):
    def fit_again():
        Fitted(world, tmp_path, epochs=1, net=torch.nn.Linear(6, 3).double(), resume=True)

    fit_again()
    path = tmp_path / "checkpoints" / "iteration_00000001.pt"
    for number, (way, candidate) in enumerate(odd_states(load_checkpoint(path))):
        if len(way) > 2 and number % 4:
            continue
        path.write_bytes(pack(candidate))
        with suppress(ValueError):  # commands print a ValueError as one line
            fit_again()
        for events in tmp_path.glob("events.out*"):
            events.unlink()  # a start checks every file of a run directory
