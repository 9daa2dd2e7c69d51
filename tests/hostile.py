"""Table of hostile, damaged and unusual run directories with expected messages.

A case changes a copy of a small finished run and runs one command in this process. In every case
the command prints no traceback and at most one error line, executes no code of the run directory,
and leaves no process behind.
"""

import functools
import json
import operator
import os
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch
from train_runs import RECALL, run_here

import check_gpu_setup
import train_distributed
from agents import export, pretrain
from agents.evaluate import command as evaluate
from agents.run import start
from rl_dist import status
from rl_dist.checkpoint import __main__ as checkpoint
from rl_dist.checkpoint.store import load_checkpoint, pack, write_atomically
from rl_dist.launch.ranks import RankReport

SPARSE_BYTES = 40 * 2**30
PROGRAMS = {
    "train": train_distributed.main,
    "evaluate": evaluate.main,
    "export": export.main,
    "pretrain": pretrain.main,
    "check": check_gpu_setup.main,
    "status": status.main,
    "checkpoint": checkpoint.main,
}
TINY = " ".join(map(str, [*RECALL, "--eval_episodes 2 --total_steps 128"]))


# ---- special files, links and folders in place of a normal file


def sparse(path):
    path.touch()
    os.truncate(path, SPARSE_BYTES)


def bound_socket(path):
    here = Path.cwd()
    os.chdir(path.parent)  # the path of a socket is limited to 107 bytes
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(here)


def folder_with_content(path):
    path.mkdir()
    (path / "of a user").write_text("x")


ODD_FILES = {
    "pipe": os.mkfifo,
    "directory": folder_with_content,
    "socket": bound_socket,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "sparse giant": sparse,
    "link to nowhere": lambda path: path.symlink_to("nowhere"),
    "link to itself": lambda path: path.symlink_to(path.name),
}


def damage(path):
    """Flip one bit of a file and return its path."""
    data = bytearray(path.read_bytes())
    data[500] ^= 1
    path.write_bytes(data)
    return path


def write_module(folder, canary, name="foreign_envs"):
    """Write a module that creates the file `canary` when it is imported."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.py").write_text(
        f"open({str(canary)!r}, 'w').close()\nimport gymnasium\n"
        "gymnasium.register('Foreign-v0', entry_point='envs.memory_tasks:RecallEnv')\n"
    )


# ---- changes to a run directory


def setting(run, section, name, value, *, config=True):
    """Set a configuration field in all checkpoints.

    If `config` is true, also set the field in config.json.
    """

    def altered(text):
        sections = json.loads(text)
        sections[section][name] = value
        return json.dumps(sections)

    for path in (run / "checkpoints").glob("*.pt"):
        state = load_checkpoint(path)
        write_atomically(path, pack(state | {"config": altered(state["config"])}))
    if config:
        path = run / "config.json"
        path.write_text(altered(path.read_text()))


def newest(*keys, change):
    """Return a function that removes best.pt and changes the newest checkpoint."""

    def alter(run):
        (run / "checkpoints" / "best.pt").unlink()
        path = run / "checkpoints" / "iteration_00000003.pt"
        state = load_checkpoint(path)
        entries = functools.reduce(operator.getitem, keys[:-1], state)
        entries[keys[-1]] = change(entries[keys[-1]])
        write_atomically(path, pack(state))

    return alter


def put_in_place(run, name, kind):
    """Replace a path by a file of another kind; move the original to `target`."""
    path, target = run / name, run.parent / "target"
    path.parent.mkdir(parents=True, exist_ok=True)
    # Move the original instead of deleting it.
    if path.exists():
        path.rename(target)
    elif kind == "link to a folder":
        target.mkdir()
    else:
        target.write_text("kept")
    make = {"pipe": os.mkfifo, "directory": os.mkdir, "file": Path.touch}
    make.get(kind, lambda path: path.symlink_to(target))(path)


def name_core(run):
    setting(run, "policy", "policy", "own")
    setting(run, "policy", "core", "foreign_envs:Core", config=False)


def name_encoder(run):
    setting(run, "policy", "encoder", "foreign_envs:Encoder", config=False)


# ---- the table of cases


@dataclass
class Case:
    command: str  # {run} stands for the run directory
    alter: Callable[[Path], None] = lambda run: None
    code: int = 2
    says: str = "{run}"  # regular expression that must match some part of the output
    starts: bool = False  # False: replace the launch of ranks by a function that does nothing
    patches: dict = field(default_factory=dict)  # full attribute name -> new value


RESUME, EVALUATE, EXPORT = "train --resume {run}", "evaluate {run}", "export {run}"
FOREIGN = "foreign_envs:Foreign-v0"
NOT_MINE = {
    "no config.json": lambda run: (run / "config.json").unlink(),
    "a config.json that everybody can write": lambda run: (run / "config.json").chmod(0o666),
}
FILES = ["config.json", "metrics.jsonl", "events.out.tfevents.1", "logs/rank_0.log"]
FILES += ["plots/learning_curve.png", "wandb_run_id"]
EXPORTED = [f"export/onnx/{name}" for name in ("policy.onnx", "contract.json")]
FOLDERS = ("plots", "logs", "profile", "checkpoints", "wandb", "export", "export/onnx")
PLACES = [(name, "directory") for name in FILES]
PLACES += [(name, kind) for name in FILES + EXPORTED for kind in ("pipe", "link")]
PLACES += [(name, kind) for name in FOLDERS for kind in ("file", "link to a folder")]
WITH_NAMES = [f"train {TINY} --run_dir", f"check {TINY} --run_dir", "train --resume"]
WITH_NAMES += ["pretrain --run_dir", "pretrain --resume", "evaluate", "export"]
WITH_NAMES += ["status", "checkpoint verify"]
LAST = "{run}/checkpoints/iteration_00000003.pt"

CASES = {
    # Untrusted code: modules, callbacks, cores and commands that are named in a run directory.
    **{
        f"module, {why}: {command}": Case(
            command,
            lambda run, alter=alter: (setting(run, "task", "env", FOREIGN), alter(run)),
            says=f"--env {FOREIGN}|config.json: No such file",
        )
        for why, alter in NOT_MINE.items()
        for command in (RESUME, EVALUATE)
    },
    "module, not named in config.json": Case(
        RESUME,
        lambda run: setting(run, "task", "env", FOREIGN, config=False),
        says=f"--env {FOREIGN}",
    ),
    "module, a config.json of another user": Case(
        RESUME,
        lambda run: setting(run, "task", "env", FOREIGN),
        says=f"--env {FOREIGN}",
        patches={"os.getuid": lambda: 12345},
    ),
    "callback": Case(
        RESUME,
        lambda run: setting(run, "train", "callback", "foreign_envs:call", config=False),
        says="--callback foreign_envs:call",
    ),
    **{
        f"{alter.__name__}: {command}": Case(command, alter, says=f"--{named}")
        for alter, named in (
            (name_core, "core foreign_envs:Core"),
            (name_encoder, "encoder foreign_envs:Encoder"),
        )
        for command in (RESUME, EVALUATE, EXPORT)
    },
    **{
        f"command for events: {command}": Case(
            command,
            lambda run: setting(run, "launch", "on_event", f"touch {run.parent}/canary"),
            0,
            "",
            starts=True,
        )
        for command in (RESUME, EVALUATE)
    },
    # Damaged or unexpected contents of checkpoints.
    **{
        f"NaN in {keys[0]}: {command}": Case(
            command, newest(*keys, change=lambda old: old * torch.nan), code, says, starts=True
        )
        for keys in (
            ("policy", "actor_head.bias"),
            ("optimizer", "state", 0, "exp_avg"),
            ("normalizers", "obs.moments.mean"),
        )
        for command, code, says in (
            ("checkpoint verify {run}", 1, f"damaged: .*{keys[0]}.*{keys[-1]}.*NaN"),
            (f"evaluate {LAST}", 2, "NaN"),
            (RESUME, 0, "iteration_00000002.pt"),
        )
    },
    "a checkpoint without a policy": Case(
        f"evaluate {LAST}",
        lambda run: write_atomically(Path(LAST.format(run=run)), pack({"iteration": 1})),
        says="not a checkpoint of train_distributed.py",
    ),
    "a configuration wider than its weights": Case(
        RESUME,
        lambda run: setting(run, "policy", "hidden_size", 8192),
        says="damaged",
    ),
    # Special files, links and folders in the run directory.
    **{
        f"{name} is a {kind}": Case(
            EXPORT if name.startswith("export") else RESUME,
            lambda run, name=name, kind=kind: put_in_place(run, name, kind),
            says=f"{{run}}/{name}",
        )
        for name, kind in PLACES
    },
    # Invalid values of flags.
    **{
        f"no module: {env}": Case(f"train {TINY} --env {env} --run_dir new", says="env")
        for env in (".x:Id", "a..b:Id", "os$:Id")
    },
    **{
        f"{command}: a name {name:.3}": Case(f"{command} {name}", says=name[:3])
        for command in WITH_NAMES
        for name in ("x" * 300, "bad\udcff")
    },
}  # fmt: skip


def everything_in(path):
    return {each: each.is_file() and each.read_bytes() for each in [path, *path.rglob("*")]}


def check(case, run, canary, monkeypatch, capsys):
    """Apply a case to the run `run`, which is alone in its folder; check the result."""
    case.alter(run)
    target = run.parent / "target"
    kept = everything_in(target)
    monkeypatch.chdir(run.parent)
    if not case.starts:
        monkeypatch.setattr(start, "run_ranks", lambda *_, **__: RankReport(0))
    for name, value in case.patches.items():
        monkeypatch.setattr(name, value)
    inside = set(run.parent.iterdir())
    children = set(psutil.Process().children())
    program, *words = case.command.split()
    words = [word.replace("{run}", str(run)) for word in words]
    code = run_here(PROGRAMS[program], *words)
    out, err = capsys.readouterr()
    assert code == case.code, out + err
    assert "Traceback" not in out + err
    errors = [line for line in err.splitlines() if not line.startswith(("iteration ", "skipped: "))]
    assert len(errors) == (code == 2) and all(line.startswith("error: ") for line in errors)
    printed = errors[0] if errors else out + err
    assert re.search(case.says.replace("{run}", re.escape(str(run))), printed), printed
    assert not canary.exists() and set(run.parent.iterdir()) == inside
    assert everything_in(target) == kept
    assert set(psutil.Process().children()) <= children
