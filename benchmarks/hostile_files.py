"""Cases of the hostile sweep: run directories, checkpoints and CSV files that were altered; see hostile.py."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from hostile import FRESH, REPO, RESUME, Case
from train_runs import daily_bars

from rl_dist.checkpoint.store import load_checkpoint, seal

Alter = Callable[[Path, Path], None]
NEWEST = "checkpoints/iteration_00000003.pt"  # a name for one that is newer than all
CANARY = "import os\nopen(os.environ['CANARY'], 'w').close()\nfrom misbehaving_envs import *\n"
# a file of 40 GB that is read whole shall fail here, not fill this machine
LIMIT = "ulimit -v 8000000"


# ---- checkpoints with a right checksum


class Runs:
    """A pickle that runs a command when it is loaded."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


def rewritten(change: Callable[[dict[str, Any], Path], Any]) -> Alter:
    """Changes the state of the newest checkpoint, with a right checksum, and removes the others."""

    def alter(run: Path, folder: Path) -> None:
        *others, newest = sorted((run / "checkpoints").glob("iteration_*.pt"))
        for path in (*others, *(run / "checkpoints").glob("best*.pt")):
            path.unlink()
        state = load_checkpoint(newest)
        changed = change(state, folder)
        part = folder / "changed.pt"
        torch.save(state if changed is None else changed, part)
        newest.write_bytes(seal(part.read_bytes()))
        part.unlink()

    return alter


def put(value: Any, *keys: Any) -> Alter:
    """Puts a value at a place of the state."""

    def change(state: dict[str, Any], folder: Path) -> None:
        for key in keys[:-1]:
            state = state[key]
        state[keys[-1]] = value

    return rewritten(change)


def without(name: str) -> Alter:
    """Removes an entry of the state."""
    return rewritten(
        lambda state, folder: {key: value for key, value in state.items() if key != name}
    )


def scaled(value: float, *keys: Any) -> Alter:
    """Makes the first number of a tensor another one."""

    def change(state: dict[str, Any], folder: Path) -> None:
        for key in keys:
            state = state[key]
        state.view(-1)[0] = value  # type: ignore[attr-defined]

    return rewritten(change)


def configured(section: str, name: str, value: Any, *, also_file: bool = False) -> Alter:
    """Changes the configuration in the checkpoint, and in config.json."""

    def change(state: dict[str, Any], folder: Path) -> None:
        config = json.loads(state["config"])
        text = (
            value.replace("{canary}", str(folder / "canary")) if isinstance(value, str) else value
        )
        config.setdefault(section, {})[name] = text
        state["config"] = json.dumps(config)
        if also_file:
            (folder / "run" / "config.json").write_text(json.dumps(config))

    return rewritten(change)


STATES: dict[str, Alter] = {
    "NaN weights": scaled(float("nan"), "policy", "actor_head.weight"),
    "an infinite weight": scaled(float("inf"), "policy", "critic_head.bias"),
    "NaN in Adam's state": scaled(float("nan"), "optimizer", "state", 0, "exp_avg"),
    "a negative variance": scaled(-1.0, "obs_normalizer", "moments.variance"),
    "a NaN mean": scaled(float("nan"), "obs_normalizer", "moments.mean"),
    "NaN in the carry": scaled(float("nan"), "carry", "obs"),
    "no policy": without("policy"),
    "no optimizer": without("optimizer"),
    "no carry": without("carry"),
    "no config": without("config"),
    "no iteration": without("iteration"),
    "the policy is a list": put([1, 2], "policy"),
    "the policy is empty": put({}, "policy"),
    "the optimizer is a number": put(3, "optimizer"),
    "a weight of another shape": put(torch.zeros(3, 3), "policy", "actor_head.weight"),
    "a weight of integers": put(
        torch.zeros(4, 8, dtype=torch.int64), "policy", "actor_head.weight"
    ),
    "a weight that is text": put("much", "policy", "actor_head.weight"),
    "a weight too many": put(torch.zeros(2), "policy", "extra"),
    "a negative iteration": put(-5, "iteration"),
    "an iteration of text": put("seven", "iteration"),
    "a huge iteration": put(2**70, "iteration"),
    "global_step of NaN": put(float("nan"), "global_step"),
    "num_obs of 10**12": put(10**12, "num_obs"),
    "num_actions of 0": put(0, "num_actions"),
    "the config is no JSON": put("{", "config"),
    "the config is a list": put("[]", "config"),
    "the config is nested 100,000 deep": put("[" * 100_000, "config"),
    "environments of another shape": put({"cue": torch.zeros(2)}, "environments"),
    "an episode_start that is text": put("yes", "carry", "episode_start"),
    "a state that is a list": rewritten(lambda state, folder: [1, 2, 3]),
    "a state that is a tensor": rewritten(lambda state, folder: torch.zeros(3)),
}
FIELDS: list[tuple[str, str, Any]] = [
    ("train", "num_envs", "many"), ("train", "num_envs", 10**9), ("train", "num_steps", 0), ("train", "seed", None),
    ("train", "total_steps", 1e400), ("train", "collective_timeout", "x"), ("ppo", "learning_rate", -1),
    ("ppo", "gamma", [1]), ("policy", "hidden_size", 10**7), ("policy", "policy", "os"), ("launch", "precision", "x"),
    ("launch", "num_gpus", 10**6), ("task", "env", 5), ("task", "env", "NoSuch-v0"), ("task", "env_kwargs", "{"),
    ("data", "data", 7), ("no_such_section", "x", 1), ("train", "no_such_field", 1), ("speed", "fused_adam", "yes"),
]  # fmt: skip


def config_fields() -> Iterator[Case]:
    """The configuration in the checkpoint, one field at a time."""
    for section, name, value in FIELDS:
        yield Case(group="8 odd contents", name=f"{section}.{name} = {value!r:.20}", run="one", command=RESUME,
                   alter=configured(section, name, value), codes=(2,), shell=LIMIT)  # fmt: skip


# ---- foreign code


def with_module(place: str, *, env: str = "canary_env:Misbehaving-v0", owner: int = -1) -> Alter:
    """A checkpoint and a config.json that name a module, and the module; `owner` gets both files."""

    def alter(run: Path, folder: Path) -> None:
        target = folder / place / "canary_env.py"
        target.parent.mkdir(exist_ok=True)
        target.write_text(CANARY)
        configured("task", "env", env, also_file=True)(run, folder)
        if owner >= 0:
            for path in (run / "config.json", *run.glob("checkpoints/*.pt")):
                os.chown(path, owner, owner)

    return alter


def hostile_pickle(run: Path, folder: Path) -> None:
    """A pickle that makes the canary, with a right checksum."""
    for path in (run / "checkpoints").glob("*.pt"):
        path.unlink()
    torch.save(Runs(f"touch {folder / 'canary'}"), folder / "changed.pt")
    (run / NEWEST).write_bytes(seal((folder / "changed.pt").read_bytes()))


ON_EVENT = configured("launch", "on_event", "touch {canary}", also_file=True)
HERE = {"PYTHONPATH": f"{REPO}{os.pathsep}{REPO / 'tests'}"}
EVALUATE, STATUS = "evaluate {run}", "status {run}"
FOREIGN: list[tuple[str, str, Alter, dict[str, Any]]] = [
    ("on_event of a checkpoint", RESUME, ON_EVENT, {}),
    ("on_event of a checkpoint, 2 ranks", f"{RESUME} --num_gpus 2", ON_EVENT, {}),
    ("on_event of a run that fails", "train --resume {run} --total_steps 256 --env_timeout -1", ON_EVENT, {}),
    ("a module in the run directory, resumed there", RESUME, with_module("run"), {"shell": "cd {run}"}),
    ("a module in the run directory, on the path", RESUME, with_module("run"), {"variables": {"PYTHONPATH": "{run}"}}),
    ("a module in checkpoints/, on the path", RESUME, with_module("run/checkpoints"),
     {"variables": {"PYTHONPATH": "{run}/checkpoints"}}),
    ("a module in the run directory, evaluated there", EVALUATE, with_module("run"),
     {"shell": "cd {run}", "variables": HERE}),
    ("a checkpoint evaluated beside its module", "evaluate {run}/checkpoints/iteration_00000002.pt",
     with_module("run/checkpoints"), {"shell": "cd {run}/checkpoints", "variables": HERE}),
    ("a module of another user's run", RESUME, with_module("lib", owner=65534),
     {"variables": {"PYTHONPATH": "{tmp}/lib"}}),
    ("a pickle that runs a program, resumed", RESUME, hostile_pickle, {}),
    ("a pickle that runs a program, evaluated", EVALUATE, hostile_pickle, {}),
    ("a pickle that runs a program, verified", "checkpoint verify {run}", hostile_pickle, {"errors": None}),
    ("a pre-trained file that runs a program", FRESH + " --pretrained {run}/" + NEWEST, hostile_pickle, {}),
]  # fmt: skip
# ---- files of the wrong kind


def named(name: str, make: Callable[[Path], Any]) -> Alter:
    """Makes a file in the run directory, in the place of what is there."""

    def alter(run: Path, folder: Path) -> None:
        path = run / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        path.parent.mkdir(exist_ok=True)
        make(path)

    return alter


def sparse(path: Path) -> None:
    """A file of 40 GB that takes no room."""
    with path.open("wb") as file:
        file.write(b"PK\x03\x04")
        file.truncate(40 * 10**9)


def full_folder(path: Path) -> None:
    """A folder that is not empty."""
    path.mkdir()
    (path / "x").touch()


def listener(path: Path) -> None:
    """A socket."""
    with socket.socket(socket.AF_UNIX) as one:
        parent = os.open(path.parent, os.O_RDONLY)
        one.bind(f"/proc/self/fd/{parent}/{path.name}")  # a socket's name may have 107 bytes
        os.close(parent)


def text(content: str | bytes) -> Callable[[Path], Any]:
    """A file with this content."""
    return lambda path: path.write_bytes(
        content if isinstance(content, bytes) else content.encode()
    )


KINDS: dict[str, Callable[[Path], Any]] = {
    "a FIFO": os.mkfifo,
    "a link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "a sparse file of 40 GB": sparse,
    "a folder": full_folder,
    "a socket": listener,
    "a link to itself": lambda path: path.symlink_to(path.name),
    "an empty file": lambda path: path.touch(),
    "no checkpoint": text("hello"),
}
RESUMED = {"command": RESUME, "codes": (0,)}
STARTED = {"command": f"{RESUME} --num_gpus 2", "codes": (0,)}
ODD_FILES: list[tuple[str, str, Callable[[Path], Any], dict[str, Any]]] = [
    *((NEWEST, kind, make, RESUMED) for kind, make in KINDS.items()),
    *((NEWEST, kind, KINDS[kind], STARTED) for kind in ("a FIFO",)),
    *((NEWEST, kind, KINDS[kind], {"command": EVALUATE, "codes": (0,)}) for kind in list(KINDS)[:3]),
    *((NEWEST, kind, KINDS[kind], {"command": STATUS, "codes": (0, 1), "errors": None}) for kind in list(KINDS)[:3]),
    *((NEWEST, kind, KINDS[kind], {"command": "checkpoint verify {run}", "errors": None}) for kind in list(KINDS)[:3]),
    *((f"checkpoints/{name}", "a folder", full_folder, RESUMED)
      for name in ("x.pt.part", "best.pt", "best.pt.part", "iteration_00000003.pt.part")),
    ("checkpoints/best.pt", "a FIFO", os.mkfifo, RESUMED),
    ("checkpoints", "a file", text("x"), {"command": RESUME, "codes": (2,)}),
    *(("metrics.jsonl", kind, make, {"command": RESUME, "codes": (0, 1, 2)})
      for kind, make in (("a folder", full_folder), ("a FIFO", os.mkfifo), ("endless", KINDS["a link to /dev/zero"]),
                         ("of rubbish", text(b"\xff\x00\n[]\n{}\n1\n")))),
    ("metrics.jsonl", "with a null global_step", text('{"iteration": 1, "global_step": null}\n'),
     {"command": RESUME, "codes": (0, 1, 2)}),
    *((name, kind, make, {"command": RESUME, "codes": (0, 1, 2)})
      for name in ("plots", "logs", "config.json", "logs/rank_0.log")
      for kind, make in (("a folder", full_folder), ("a FIFO", os.mkfifo)) if (name, kind) not in
      (("plots", "a folder"), ("logs", "a folder"))),
    *((name, kind, make, {"command": STATUS, "codes": (0, 1, 2), "errors": None})
      for name in ("config.json", "metrics.jsonl", "summary.json", "logs/rank_0.log")
      for kind, make in (("a FIFO", os.mkfifo), ("of rubbish", text(b"\xff[")))),
    *((name, "of rubbish", text("[1, {"), {"command": RESUME, "codes": (0, 1, 2)})
      for name in ("config.json", "summary.json")),
]  # fmt: skip


# ---- daily bars


def bars(change: Callable[[Any], Any]) -> Alter:
    """bars.csv with a change: of the frame, or what `change` returns as the file's text."""

    def alter(run: Path, folder: Path) -> None:
        frame = daily_bars().astype(object)
        changed = change(frame)
        content = (
            changed
            if isinstance(changed, str)
            else (frame if changed is None else changed).to_csv(index=False)
        )
        (folder / "bars.csv").write_text(content)

    return alter


def cell(column: str, value: Any, row: int = 700) -> Alter:
    """One value is another."""

    def change(frame: Any) -> None:
        frame.loc[row, column] = value

    return bars(change)


def times(factor: float) -> Callable[[Any], Any]:
    """All prices times a factor."""
    prices = ["open", "high", "low", "close", "adj_close"]
    return lambda frame: frame.assign(
        **{name: frame[name].astype(float) * factor for name in prices}
    )


BARS: dict[str, Alter] = {
    **{f"{column} of {value}": cell(column, value) for column, value in (
        ("date", "0000-01-01"), ("date", "9999-99-99"), ("date", ""), ("date", "01/02/2018"), ("tic", ""),
        ("close", "1e300"), ("close", "0"), ("close", "-5"), ("close", "inf"), ("close", "abc"), ("close", ""),
        ("adj_close", "1e300"), ("adj_close", "1e-300"), ("volume", "-1"), ("volume", "1e300"), ("high", "0.001"),
    )},
    "prices of 1e300": bars(times(1e300)),
    "prices of 1e-300": bars(times(1e-300)),
    "no rows": bars(lambda frame: frame.iloc[:0]),
    "ten days": bars(lambda frame: frame.iloc[:50]),
    "a row twice": bars(lambda frame: frame.iloc[[*range(len(frame)), 5]]),
    "a day missing for one ticker": bars(lambda frame: frame.drop(index=700)),
    "no close": bars(lambda frame: frame.drop(columns="close")),
    "a torn last line": bars(lambda frame: frame.to_csv(index=False)[:-30]),
    "bytes of zero": bars(lambda frame: "\0" * 5000),
    "nothing": bars(lambda frame: ""),
    "a quote that does not end": bars(lambda frame: frame.to_csv(index=False).replace("T1", '"T1', 1)),
}  # fmt: skip
BARS_COMMAND = "train --data {tmp}/bars.csv --run_dir {run} --device cpu --num_envs 4 --num_steps 32 --bptt_steps 8 " \
    "--batch_size 8 --hidden_size 8 --num_episodes 4 --episode_days 40"  # fmt: skip
FILE_CASES = [
    *(Case(group="8 odd contents", name=name, run="one", command=RESUME, alter=alter, codes=(2,), shell=LIMIT)
      for name, alter in STATES.items()),
    *(Case(group="8 odd contents", name=f"{name}, evaluated", run="one", command=EVALUATE, codes=(2,), shell=LIMIT,
           alter=STATES[name])
      for name in ("NaN weights", "no policy", "a weight that is text", "the config is a list")),
    *config_fields(),
    *(Case(group="3 foreign code", name=name, run="one", command=command, alter=alter, **{"codes": (0, 1, 2)} | facts)
      for name, command, alter, facts in FOREIGN),
    *(Case(group="6 odd files" if "pt" in name or name == "checkpoints" else "9 odd files", run="one", shell=LIMIT,
           name=f"{name} is {kind}: {facts['command'].split()[0]}", alter=named(name, make), **facts)
      for name, kind, make, facts in ODD_FILES),
    *(Case(group="held: CSV", name=name, command=BARS_COMMAND, alter=alter, codes=(2,), says="bars.csv|days")
      for name, alter in BARS.items()),
    Case(group="held: CSV", name="nothing wrong", command=BARS_COMMAND, alter=bars(lambda frame: None), codes=(0,)),
]  # fmt: skip
