"""A run directory of somebody else: it runs no code, and what does not fit is one line."""

import dataclasses
import json
import os
import shutil
import sys

import pytest
from odd_files import ODD_FILES
from train_runs import evaluate_here, only_error, run_here, train_here

from agents import load_policy
from agents.api.training import TrainedRun
from agents.export import command as export
from agents.pretrain import command as pretrain
from agents.run import choice, start
from agents.run.config import SECTIONS, RunConfig
from envs.task import GymTask
from rl_dist import status
from rl_dist.checkpoint.__main__ import main
from rl_dist.checkpoint.store import (
    Found,
    latest_checkpoint,
    load_checkpoint,
    pack,
    write_atomically,
)
from rl_dist.checkpoint.trust import check_named
from rl_dist.errors import UserError
from rl_dist.resume_check import parameter_sha256 as hash_of
from rl_dist.speedup import __main__ as speedup
from rl_dist.speedup.job_of_run import flags_of, read_config

HUGE = [10**4000, -(10**4000), 2**63, -(2**63), 1e308, float("nan"), float("inf")]
NESTED = json.loads("[" * 500 + "]" * 500)
WRONG = [None, True, -1, 0, 0.5, "", "\0", "\x1b[2J", "\ud800", "x" * 10**5, [], {}]
WRONG += [{"a": NESTED}, NESTED, *HUGE]


@pytest.fixture
def canary(tmp_path, monkeypatch):
    """A file that foreign code makes: a module on the path does, and so does `touch`."""
    monkeypatch.syspath_prepend(tmp_path / "modules")
    write_module(tmp_path / "modules", tmp_path / "canary")
    yield tmp_path / "canary"
    for name in [name for name in sys.modules if name.startswith(("foreign", "lab"))]:
        del sys.modules[name]


def write_module(folder, canary, name="foreign_envs"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.py").write_text(
        f"open({str(canary)!r}, 'w').close()\nimport gymnasium\n"
        "gymnasium.register('Foreign-v0', entry_point='envs.memory_tasks:RecallEnv')\n"
    )


def alter(run_dir, section, name, value, *, config_too=True):
    """Change a field in all checkpoints, and in config.json."""

    def altered(text):
        config = json.loads(text)
        config[section][name] = value
        return json.dumps(config)

    for path in (run_dir / "checkpoints").glob("*.pt"):
        state = load_checkpoint(path)
        write_atomically(path, pack(state | {"config": altered(state["config"])}))
    if config_too:
        config = run_dir / "config.json"
        config.write_text(altered(config.read_text()))


# ---- commands


def test_the_command_for_events_is_in_no_file_and_has_to_be_given_again(
    copy, secret, monkeypatch, capsys, canary
):
    files = [path for path in copy.rglob("*") if path.is_file()]
    assert files and not any(secret.encode() in path.read_bytes() for path in files)
    assert "on_event" not in json.loads((copy / "config.json").read_text())["launch"]
    assert main(["inspect", str(copy), "--json"]) == 0
    assert secret not in capsys.readouterr().out
    assert train_here(monkeypatch, "--resume", copy, "--on_event", f"touch {canary}") == 0
    assert canary.exists()


def test_a_command_in_a_checkpoint_is_never_called(copy, canary, monkeypatch, capsys):
    alter(copy, "launch", "on_event", f"touch {canary}")
    assert not any("on_event" in flag for flag in flags_of(read_config(copy)))
    assert train_here(monkeypatch, "--resume", copy) == 0
    assert evaluate_here(monkeypatch, copy) == 0
    assert not canary.exists()


def test_a_pre_training_does_not_call_the_command_of_its_config(tmp_path, canary):
    config = pretrain.PretrainRunConfig().to_dict()
    config["launch"]["on_event"] = f"touch {canary}"
    (tmp_path / "config.json").write_text(json.dumps(config))
    parsed = pretrain.parse_flags(
        pretrain.SECTIONS, [], description="", extra=pretrain._add_run_flags
    )
    assert pretrain._resumed(tmp_path, parsed).launch.on_event == ""


# ---- modules


def commands(run_dir, monkeypatch, *flags):
    """The exit codes of all commands that load a run."""

    def measure(*_, **__):
        raise UserError("measures")

    monkeypatch.setattr("rl_dist.speedup.measure.Measurements.measure", measure)
    return [
        train_here(monkeypatch, "--resume", run_dir, *flags),
        evaluate_here(monkeypatch, run_dir, *flags),
        speedup.main([str(run_dir), *flags]),
    ]


@pytest.mark.parametrize(
    "case", ["no config.json", "another env", "of all the world", "somebody else's"]
)
def test_a_module_that_the_users_own_run_does_not_name_is_not_imported(
    case, copy, canary, monkeypatch, capsys
):
    alter(copy, "task", "env", "foreign_envs:Foreign-v0", config_too=case != "another env")
    if case == "no config.json":
        (copy / "config.json").unlink()
    elif case == "of all the world":
        (copy / "config.json").chmod(0o666)
    elif case == "somebody else's":
        mine = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: mine + 1)
    codes = commands(copy, monkeypatch)
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert codes == [2, 2, 2] and len(errors) == 3
    assert all("--env foreign_envs:Foreign-v0" in line for line in errors[:2])
    assert not canary.exists()
    if case != "no config.json":
        assert commands(copy, monkeypatch, "--env", "foreign_envs:Foreign-v0")[:2] == [0, 0]
        assert canary.exists()


def test_a_core_or_callback_that_the_users_own_run_does_not_name_is_not_imported(
    copy, canary, monkeypatch, capsys
):
    alter(copy, "train", "callback", "foreign_envs:call", config_too=False)
    assert train_here(monkeypatch, "--resume", copy) == 2
    assert "add --callback foreign_envs:call" in only_error(capsys.readouterr().err)
    assert train_here(monkeypatch, "--resume", copy, "--callback", "") == 0
    core = "foreign_envs:Foreign"
    alter(copy, "policy", "policy", "own")
    alter(copy, "policy", "core", core, config_too=False)
    codes = [train_here(monkeypatch, "--resume", copy), evaluate_here(monkeypatch, copy)]
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert codes == [2, 2] and not canary.exists()
    assert len(errors) == 2 and all(f"--core {core}" in line for line in errors)
    with pytest.raises(UserError, match=f"--core {core}, in Python core='{core}'"):
        load_policy(copy)
    with pytest.raises(UserError, match="no function or class Foreign"):  # it is imported now
        load_policy(copy, core=core)
    assert canary.exists()


@pytest.mark.parametrize("module", ["foreign_envs", "lab.inner.foreign_envs"])
def test_the_users_own_run_goes_on_without_naming_its_module_again(
    module, copy, canary, tmp_path, monkeypatch, capsys
):
    write_module(tmp_path / "modules" / "lab" / "inner", canary)  # folders without __init__
    alter(copy, "task", "env", f"{module}:Foreign-v0")
    assert commands(copy, monkeypatch) == [0, 0, 2]
    assert "error: measures" in capsys.readouterr().err
    assert canary.exists()


@pytest.mark.parametrize(
    ("module", "named"),
    [
        ("foreign_envs", True),
        ("run.foreign_envs", False),
        ("run.foreign_package.inner", True),
        ("linked", False),
    ],
)
def test_no_module_is_imported_from_the_run_directory(
    module, named, copy, canary, tmp_path, monkeypatch, capsys
):
    shutil.rmtree(tmp_path / "modules")
    write_module(copy, canary)
    write_module(copy / "foreign_package", canary, "inner")
    write_module(copy / "foreign_package", canary, "__init__")
    write_module(tmp_path / "elsewhere", canary, "target")
    (copy / "linked.py").symlink_to(tmp_path / "elsewhere" / "target.py")
    env = f"{module}:Foreign-v0"
    alter(copy, "task", "env", env)
    monkeypatch.chdir(copy)
    monkeypatch.setattr(sys, "path", ["", str(copy), str(tmp_path), *sys.path])
    assert commands(copy, monkeypatch, *(["--env", env] if named else []))[:2] == [2, 2]
    assert "error: " in capsys.readouterr().err and not canary.exists()
    assert str(copy) not in sys.path and "" not in sys.path


def test_names_that_are_no_modules_are_one_line(tmp_path):
    for env in (".x:Id", ":Id", "a..b:Id", "no such:Id", "os\0:Id"):
        with pytest.raises(ValueError, match=r"env"):
            check_named(tmp_path, "task", {"env": env, "env_kwargs": ""}, None)
            GymTask(dataclasses.replace(RunConfig().task, env=env))


# ---- what people read

ODD = "\x1b[2J\nINJECTED"
SUMMARIES = ["", "x", "[]", "{}", "[" * 10**5, '{"iteration": 9' + "9" * 5000 + "}", '"']
SUMMARIES += ['{"iteration": "1", "test": 3}', *list(ODD_FILES)[:5]]


def test_text_of_a_run_is_escaped_for_people(copy, untraced, monkeypatch, capsys):
    for path in (copy / "checkpoints").glob("*.pt"):
        state = load_checkpoint(path) | {"measured": {f"valid{ODD}": 1.0}}
        write_atomically(path, pack(state))
    (copy / "summary.json").write_text(json.dumps({"iteration": 1, "test": {f"return{ODD}": 1.0}}))
    alter(copy, "task", "env", "Recall-v0\nINJECTED")
    for read, words in ((main, ["list"]), (main, ["inspect"]), (status.main, [])):
        assert read([*words, str(copy)]) == 0
    assert run_here(export.main, [copy], monkeypatch) == 0
    assert evaluate_here(monkeypatch, copy) == train_here(monkeypatch, "--resume", copy) == 2
    printed = capsys.readouterr()
    for text in (*printed, (copy / "export" / "onnx" / "README.md").read_text()):
        assert text.count("INJECTED") >= 2
        assert "\x1b" not in text and "\nINJECTED" not in text


@pytest.mark.parametrize("content", SUMMARIES)
def test_an_odd_summary_is_named_in_one_line(content, copy, untraced, monkeypatch, capsys):
    path = copy / "summary.json"
    path.unlink()
    ODD_FILES.get(content, lambda path: path.write_text(content))(path)
    assert run_here(export.main, [copy], monkeypatch) == 2
    assert str(path) in only_error(capsys.readouterr().err)
    for read in (lambda: TrainedRun(run_dir=copy, exit_code=0).test, lambda: hash_of(copy)):
        with pytest.raises(UserError, match=f"^{path}.*$"):
            read()


# ---- every field


FIELDS = [(name, item.name) for name, one in SECTIONS.items() for item in dataclasses.fields(one)]


@pytest.mark.parametrize(("section", "name"), FIELDS)
def test_whatever_a_field_holds_the_run_goes_on_or_one_line_says_why_not(
    section, name, copy, canary, monkeypatch, capsys, tmp_path
):
    os.mkfifo(tmp_path / "pipe")
    places = [str(tmp_path / "pipe"), "/dev/zero", "/", str(tmp_path / "written")]
    values = [*WRONG, *places, f"$(touch {canary})", "foreign_envs:Foreign-v0", "foreign_envs"]
    # all values over eight neighbouring fields
    values = values[FIELDS.index((section, name)) % 8 :: 8]
    found = load_checkpoint(latest_checkpoint(copy))
    started = []
    monkeypatch.setattr(
        start, "launch", lambda fn, args, *_, **__: started.append(args[0].config) or 0
    )
    for value in values:
        config = json.loads(found["config"])
        if section in ("data", "market", "trading"):
            config["task"]["env"] = "StockTrading-v0"
        config[section][name] = value
        state = found | {"config": json.dumps(config)}
        monkeypatch.setattr(
            choice, "load_saved", lambda path, state=state: Found(path / "x.pt", state)
        )
        code = train_here(monkeypatch, "--resume", copy)
        err = capsys.readouterr().err
        assert (code == 0 and not err) or (code == 2 and only_error(err)), (value, err)
    for config in started:
        for each in SECTIONS:
            type(SECTIONS[each])(**vars(getattr(config, each)))
        assert config.launch.on_event == ""
    assert not canary.exists() and not (tmp_path / "written").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["modules", "pipe", "run"]
