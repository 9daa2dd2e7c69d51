"""Entries of a checkpoint are checked: odd ones are one line, and the one before is used."""

import copy
import functools
import json
import math
from contextlib import suppress

import pytest
import torch
from train_runs import evaluate_here, only_error, records, train_here

from rl_dist.checkpoint.__main__ import main
from rl_dist.checkpoint.spec import CheckpointError, check_state
from rl_dist.checkpoint.store import load_checkpoint, pack, save_checkpoint, write_atomically
from rl_dist.process_group.world import World
from rl_dist.run_dir import RunDir
from rl_dist.strategies.config import StrategyConfig
from rl_dist.strategies.strategy import Strategy
from rl_dist.supervised.fit import FitState

ODD = [None, "x", -1, 10**30, math.nan, {}, [], {"a": {}}, [1, 2], torch.zeros(3, 3)]
ODD += [torch.tensor(math.nan)]


@pytest.fixture
def state(trained):
    """The second checkpoint of three."""
    return load_checkpoint(trained / "checkpoints" / "iteration_00000002.pt")


@pytest.fixture
def run(copy):
    """Writes the newest checkpoint of a run; it has those up to 2 of 3."""
    for name in ("iteration_00000003.pt", "best.pt"):
        (copy / "checkpoints" / name).unlink()

    def write(state):
        write_atomically(copy / "checkpoints" / "iteration_00000002.pt", pack(state))
        return copy

    return write


def places(value, path=()):
    """The way to every entry of nested dicts and lists, outer ones first."""
    entries = value if isinstance(value, dict) else {}
    if isinstance(value, list):
        entries = dict(enumerate(value))
    for key, entry in entries.items():
        yield (*path, key)
        yield from places(entry, (*path, key))


def altered(state, path, value):
    """A state with another entry; value Ellipsis: without it."""
    state = copy.copy(state)
    inner = state
    for key in path[:-1]:
        inner[key] = copy.copy(inner[key])
        inner = inner[key]
    if value is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return state


def odd_values(entry):
    if not isinstance(entry, torch.Tensor):
        return [..., *ODD]
    sparse = entry.to_sparse() if entry.ndim else entry.bool()
    wrong = [*ODD, entry[None], torch.zeros(1).expand(10**12), sparse]
    if entry.is_floating_point():
        wrong += [entry * math.nan, entry + math.inf, -1 - entry.abs()]
    return wrong


def test_every_odd_entry_is_refused_in_one_line_or_the_run_goes_on(state, run, monkeypatch, capsys):
    state["measured"] = {"valid/return": 1.0}
    passed = {}
    outer = [path for path in places(state) if len(path) < 3]
    inner = [path for path in places(state) if len(path) >= 3]
    for path in outer + inner[::20]:
        entry = functools.reduce(lambda inner, key: inner[key], path, state)
        for value in odd_values(entry):
            candidate = altered(state, path, value)
            try:
                check_state(candidate)
            except CheckpointError as error:
                assert "\n" not in str(error) and len(str(error)) < 300
            else:
                passed[path[0]] = candidate
    for path, candidate in passed.items():
        code = train_here(monkeypatch, "--resume", run(candidate))
        lines = capsys.readouterr().err.splitlines()
        errors = [line for line in lines if not line.startswith(("iteration ", "warning: "))]
        assert code == 0 or (code in (1, 2) and only_error("\n".join(errors))), (path, errors)


@pytest.mark.parametrize("entry", ["policy", "optimizer", "obs_normalizer"])
def test_what_is_not_finite_is_named_and_the_checkpoint_before_is_used(
    entry, run, state, monkeypatch, capsys
):
    inner = state[entry]["state"][0] if entry == "optimizer" else state[entry]
    name = list(inner)[-1]
    inner[name] = inner[name] * math.nan
    run_dir = run(state)
    assert main(["verify", str(run_dir)]) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "damaged:" in line]
    assert entry in line and name in line and "NaN" in line
    assert evaluate_here(monkeypatch, run_dir / "checkpoints" / "iteration_00000002.pt") == 2
    assert "NaN" in only_error(capsys.readouterr().err)
    assert train_here(monkeypatch, "--resume", run_dir) == 0
    out = capsys.readouterr().out
    assert "going on from" in out and "iteration_00000001.pt" in out
    assert [record["iteration"] for record in records(run_dir)] == [1, 2, 3]


def test_a_checkpoint_of_something_else_is_one_line(tmp_path, monkeypatch, capsys):
    weights = {"weights": torch.ones(2)}
    path = save_checkpoint(tmp_path / "checkpoints", weights, iteration=1, keep=1)
    assert train_here(monkeypatch, "--resume", tmp_path) == 2
    assert "train_distributed.py" in only_error(capsys.readouterr().err)
    assert evaluate_here(monkeypatch, path) == 2
    assert "train_distributed.py" in only_error(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("weights", "hidden_size", "cause"),
    [
        (None, 8192, "another shape"),
        ("carry", 8, "lstm_state"),
        ("num_actions", 8, "another shape"),
    ],
)
def test_tensors_of_other_sizes_than_the_configuration_has_are_one_line(
    weights, hidden_size, cause, run, state, monkeypatch, capsys
):
    config = json.loads(state["config"])
    config["policy"]["hidden_size"] = hidden_size
    state["config"] = json.dumps(config)
    if weights == "carry":
        state["carry"]["lstm_state"] = state["carry"]["lstm_state"][:, :, :-1].clone()
    elif weights:
        state["num_actions"] = 8
    assert train_here(monkeypatch, "--resume", run(state)) == 2
    assert cause in only_error(capsys.readouterr().err)


# ---- checkpoints of fit


def fitted():
    module = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    world = World(rank=0, local_rank=0, size=1, device=torch.device("cpu"), backend="gloo")
    strategy = Strategy(StrategyConfig(), world)
    strategy.wrap(module)(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return FitState(strategy, optimizer, scheduler, {"kind": "x"}, {"samples": 3})


def test_every_odd_entry_of_a_fit_is_one_line_or_is_taken(tmp_path):
    state = fitted()
    state.add({"epoch": 1.0, "valid/loss": 1.0})
    state.save(RunDir(tmp_path), keep=1, best=True)
    whole = load_checkpoint(tmp_path / "checkpoints" / "best.pt")
    for path in places(whole):
        for value in odd_values(functools.reduce(lambda inner, key: inner[key], path, whole)):
            candidate = altered(whole, path, value)
            with suppress(ValueError):  # a command prints it in one line
                check_state(candidate)
                fitted().load(candidate, tmp_path / "checkpoints" / "best.pt")
