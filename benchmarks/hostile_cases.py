"""Cases of the hostile sweep: environments, deaths, signals, limits, flags and variables; see hostile.py."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from hostile import FRESH, GO_ON, LONG, RESUME, SMALL, STEPS, Case, iterations

ENV = f"train --run_dir {{run}} {SMALL} --total_steps {3 * STEPS}"
NAMED = r"environment misbehaving_envs:\w+-v0 number {number} at its step {step}: "
# root obeys permissions, too
DROP = "setpriv --bounding-set -dac_override,-dac_read_search,-fowner"
NO_FILES_OF_JOB = "rl_dist_*"


def misbehaving(
    misdeed: str, number: int = 1, at: int = 20, stream: str = "environment", saved: bool = False
) -> str:
    """Flags of an environment whose copy `number` does something at step `at` of its life."""
    kwargs = json.dumps({"misdeeds": {number: misdeed}, "at": at, "stream": stream})
    return f"--env misbehaving_envs:Misbehaving{'Saved' * saved}-v0 --env_kwargs '{kwargs}'"


def left_in_temporary(run: Path, folder: Path) -> str:
    """Folders of jobs that are over."""
    left = [path.name for path in (folder / "temporary").glob(NO_FILES_OF_JOB)]
    return f"left in the temporary directory: {left}" if left else ""


def whole(run: Path, folder: Path) -> str:
    """What a run directory lacks that says to be one."""
    lacking = [name for name in ("config.json", "metrics.jsonl") if not (run / name).is_file()]
    return f"{run.name} lacks {lacking}" if run.exists() and lacking else ""


def has_iterations(number: int) -> Callable[[Path, Path], str]:
    """A check that a run has so many."""

    def check(run: Path, folder: Path) -> str:
        found = iterations(run)
        return "" if len(found) == number else f"{len(found)} iterations instead of {number}"

    return check


def deaths() -> Iterator[Case]:
    """Every way for a process to die, of every rank, on 1, 2 and 3 ranks, with and without restarts."""
    three = SMALL.replace("--num_envs 4", "--num_envs 6").replace(
        "--batch_size 4", "--batch_size 6"
    )
    ranks = {1: (SMALL, (0,)), 2: (SMALL, (0, 3)), 3: (three, (3,))}
    for misdeed in ("exit 0", "exit 1", "exit 77", "SIGSEGV", "SIGKILL"):
        dearer = misdeed in ("exit 0", "SIGKILL")  # the others are no different there
        for size, (sizes, numbers) in ranks.items():
            for number in numbers if size < 3 or dearer else ():
                command = (
                    f"{ENV.replace(SMALL, sizes)} --num_gpus {size} {misbehaving(misdeed, number)}"
                )
                words = (
                    rf"ended with code {misdeed[5:]}\b" if misdeed.startswith("exit") else misdeed
                )
                where = "the main rank" if number == 0 else "another rank"
                yield Case(
                    group="1 deaths",
                    name=f"{misdeed} on {where} of {size}",
                    command=command,
                    says=words,
                )
        for size in (1, 2) if dearer else (1,):
            again = (
                f"{ENV} --num_gpus {size} --max_restarts 1 {misbehaving(misdeed, 0, saved=True)}"
            )
            yield Case(
                group="1 deaths",
                name=f"{misdeed} on rank 0 of {size}, restarted",
                command=again,
                codes=(0,),
                says="restart 1 of 1",
                check=has_iterations(3),
            )


HANG = f"{LONG} --env_timeout 0 {misbehaving('hang')}".replace("--env Recall-v0 ", "")
STOPS = [
    *(
        Case(group="1 signals", name=f"{name}, {ranks} ranks", command=f"{LONG} --num_gpus {ranks}", strike=name,
             codes=(code,), then=GO_ON)
        for name, code in (("INT", 130), ("TERM", 143), ("USR1", 138), ("HUP", 129))
        for ranks in (1, 2)
    ),
    *(
        Case(group="1 signals", name=f"{name} twice, hangs on {ranks} ranks", command=f"{HANG} --num_gpus {ranks}",
             strike=f"1; {name}; 2; {name}", codes=(code,), within_s=60)
        for name, code in (("INT", 130), ("TERM", 143))
        for ranks in (1, 2)
    ),
    *(
        Case(group="held: kills", name=f"KILL {whom}, {ranks} ranks", command=f"{LONG} --num_gpus {ranks}",
             strike=f"{delay}; KILL {whom}", codes=(-9,), then=GO_ON)
        for whom in ("launcher", "group")
        for ranks, delay in ((1, 0), (1, 0.7), (2, 0), (2, 1.1))
    ),
]  # fmt: skip
TWINS = [
    Case(group="2 locks", name=f"two {what} at once, {ranks} ranks", command=f"{command} --num_gpus {ranks}", run=run,
         twin=True, codes=(0, 2), within_s=120, check=has_iterations(8 if run else 2))
    for what, command, run in (
        ("resumes", f"train --resume {{run}} --total_steps {8 * STEPS} --keep_checkpoints 50", "one"),
        ("fresh starts", FRESH, ""),
    )
    for ranks in (1, 2)
]  # fmt: skip
EXACT = [
    Case(group="4 exact resume", name=f"{ranks} ranks", within_s=200, codes=(0,),
         command=f"resume_check --env Recall-v0 --device cpu --num_gpus {ranks} --num_envs 12 --batch_size 12")
    for ranks in (3, 4)
]  # fmt: skip
FAILING = [
    Case(group="5 failing rank", name=f"an environment raises on rank {ranks - 1} of {ranks}", says="no such price",
         command=f"{ENV} --num_gpus {ranks} {misbehaving('raise', 3)}")
    for ranks in (2, 4)
]  # fmt: skip
VANISHED = [
    Case(group="7 vanished runs", name=f"{strike}, {ranks} ranks", strike=strike, codes=(0, 1), check=whole,
         command=FRESH.replace(f"--total_steps {2 * STEPS}", f"--total_steps {400 * STEPS}") + f" --num_gpus {ranks}")
    for strike, ranks in (("remove", 1), ("remove", 2), ("move", 1))
]  # fmt: skip


def environments() -> Iterator[Case]:
    """Faults named with number and step, in training and while judged; and what costs nothing."""
    faults = {
        "raise": "raised KeyError", "interrupt": "raised KeyboardInterrupt", "SystemExit": "raised SystemExit",
        "nan": "observation is nan", "shape": r"observation has shape \(3,\)", "huge observation": "observation is inf",
        "text as observation": "observation has shape", "reward": "reward is inf", "huge reward": "reward is 1e[+]300",
        "reward None": "reward is nan", "terminated text": "terminated is 'False'", "terminated None": "terminated is",
        "truncated 2": "truncated is 2", "info None": "info is None", "info list": "info is a list",
        "four values": "raised ValueError", "leak descriptors": "raised OSError", "hang": "did not come back within 2",
        "hang in C": "did not come back within 2 s .*cannot be interrupted",
        "close descriptors": "closed files|SIGABRT|SIGSEGV",
    }  # fmt: skip
    for misdeed, problem in faults.items():
        words = NAMED.format(number=1, step=20) + problem
        says = problem if "descriptors" in misdeed else words
        command = f"{ENV} --env_timeout 2 {misbehaving(misdeed)}"
        yield Case(group="10 environments", name=misdeed, command=command, says=says)
    for misdeed in (
        "raise",
        "interrupt",
        "huge reward",
        "terminated text",
        "info None",
        "close descriptors",
    ):
        command = f"{ENV} --num_gpus 2 {misbehaving(misdeed, 3, 5, 'evaluation')} --eval_episodes 4"
        says = "evaluation " + NAMED.format(number=3, step=5)
        yield Case(
            group="10 environments",
            name=f"{misdeed}, evaluated on rank 1 of 2",
            command=command,
            says=says,
        )
    for misdeed in ("close stdout", "close descriptor 1", "set the clock", "end a thread"):
        for ranks in (1, 2):
            command = f"{ENV} --num_gpus {ranks} {misbehaving(misdeed)}"
            yield Case(
                group="10 environments",
                name=f"{misdeed}, {ranks} ranks",
                command=command,
                codes=(0,),
            )
    for misdeed in ("raise", "nan", "huge reward", "terminated text", "hang"):
        command = f"{ENV} --env_restarts 1 --env_timeout 2 {misbehaving(misdeed)}"
        yield Case(
            group="10 environments",
            name=f"{misdeed}, made anew",
            command=command,
            codes=(0,),
            says="made again",
        )


def module(text: str, name: str = "odd_env") -> Callable[[Path, Path], None]:
    """Puts a module beside the command."""

    def alter(run: Path, folder: Path) -> None:
        (folder / f"{name}.py").write_text(text)

    return alter


NO_TEMPORARY = module(
    "import tempfile\ntempfile._candidate_tempdir_list = lambda: ['/proc/none']", "sitecustomize"
)


MODULES = [
    Case(group="10 environments", name=f"a module that {name}", alter=module(text), codes=(2,), says="odd_env",
         command=f"{ENV} --env odd_env:Odd-v0", variables={"PYTHONPATH": "{tmp}"})
    for name, text in (
        ("is not Python", "this is no Python"), ("raises", "1 / 0"), ("registers nothing", ""),
        ("exits", "raise SystemExit(0)"),
    )
]  # fmt: skip
# nothing tells it from Ctrl-C
MODULES.append(replace(
    MODULES[0], name="a module that interrupts", alter=module("raise KeyboardInterrupt"), codes=(1, 2), says="SIGINT|odd_env",
))  # fmt: skip
SIZES = [
    Case(group="11 sizes", name="10 million environments", shell="ulimit -v 8000000", codes=(2,),
         says="GiB.*--num_envs", command="train --env CartPole-v1 --num_envs 10000000 --run_dir {run}"),
    *(
        Case(group="11 sizes", name=f"OMP_NUM_THREADS={value}", codes=(0,), variables={"OMP_NUM_THREADS": value},
             says="OMP_NUM_THREADS is .*ignored")
        for value in ("0", "abc", "-4")
    ),
]  # fmt: skip
CIRCUMSTANCES: dict[str, dict[str, Any]] = {
    "no HOME": {"shell": "unset HOME", "codes": (0,)},
    "a HOME that is not there": {"variables": {"HOME": "/proc/none"}, "codes": (0,)},
    "a TMPDIR that is not there": {"variables": {"TMPDIR": "/proc/none"}, "codes": (0,)},
    "no folder for temporary files": {"alter": NO_TEMPORARY, "variables": {"PYTHONPATH": "{tmp}"}, "codes": (2,),
                                      "says": "TMPDIR"},
    "a folder closed to this user": {"shell": f"mkdir closed; chmod 555 closed; exec {DROP} \"$@\"", "codes": (2,),
                                     "command": FRESH.replace("{run}", "closed/run"), "says": "Permission denied"},
    "a run closed to this user": {"run": "one", "shell": f"chmod 555 {{run}}; exec {DROP} \"$@\"", "codes": (1, 2),
                                  "command": RESUME, "says": "Permission denied"},
    "checkpoints closed to this user": {"run": "one", "shell": f"chmod 555 {{run}}/checkpoints; exec {DROP} \"$@\"",
                                        "command": RESUME, "says": "Permission denied"},
    "a config.json closed to this user": {"run": "one", "shell": f"chmod 000 {{run}}/config.json; exec {DROP} \"$@\"",
                                          "command": RESUME, "codes": (1, 2), "says": "Permission denied"},
    "files of a year to come": {"run": "one", "shell": "touch -d 2037-01-01 {run}/* {run}/*/*", "codes": (0,),
                                "command": RESUME},
    "the status of a run of a year to come": {"run": "one", "shell": "touch -d 2037-01-01 {run}/*", "command": "status {run}", "codes": (0, 1),
                                              "says": "state +finished", "errors": None},
    "memory for less than the start": {"shell": "ulimit -v 3000000", "codes": (0, 1, 2), "errors": None},
}  # fmt: skip
DISKS: dict[str, dict[str, Any]] = {
    "a file of 4 KiB at most": {"shell": "ulimit -f 4", "says": "too large"},
    "a file of 1000 KiB at most": {
        "shell": "ulimit -f 1000",
        "says": "cannot write checkpoint.*too large",
        "command": FRESH.replace("--hidden_size 8", "--hidden_size 128"),
    },
    "stdout is full": {"shell": 'exec "$@" > /dev/full', "codes": (0,)},
    "nobody reads stdout": {"shell": 'exec "$@" > >(true)', "codes": (0,)},
    "stdout is closed": {"shell": 'exec "$@" >&-', "codes": (0,)},
    "stdin, stdout and stderr are closed": {"shell": 'exec "$@" <&- >&- 2>&-', "codes": (0,)},
    "SIGCHLD, SIGINT and SIGTERM ignored": {"shell": "trap '' CHLD INT TERM", "codes": (0,)},
}
ODD_STARTS: dict[str, dict[str, Any]] = {
    "a run directory of 300 characters": {"command": FRESH.replace("{run}", "x" * 300), "codes": (2,)},
    "a run directory that is no UTF-8": {"shell": "set -- \"$@\" --run_dir $'bad\\xff\\xfe'", "codes": (0, 2)},
    "a working directory that is gone": {"shell": "mkdir gone; cd gone; rmdir ../gone", "codes": (0, 2)},
    "14 open files": {"shell": "ulimit -n 14", "codes": (0, 1, 2)},
    "30 open files": {"shell": "ulimit -n 30", "codes": (0, 1, 2)},
    "30 open files, 2 ranks": {"shell": "ulimit -n 30", "codes": (0, 1, 2), "command": f"{FRESH} --num_gpus 2"},
    **{
        f"{name}={value}": {"variables": {name: value, **others}, "codes": (0, 2)}
        for name, value, others in (
            ("TORCHELASTIC_RESTART_COUNT", "abc", {}), ("TORCHELASTIC_MAX_RESTARTS", "abc", {}),
            ("RANK", "abc", {"WORLD_SIZE": "2"}), ("RANK", "2", {"WORLD_SIZE": "2"}), ("WORLD_SIZE", "2", {}),
            ("RANK", "0", {"WORLD_SIZE": "x"}), ("RANK", "-1", {"WORLD_SIZE": "1"}),
            ("CUDA_VISIBLE_DEVICES", "x,y", {}),
        )
    },
    "MASTER_PORT=abc, 2 ranks": {"variables": {"MASTER_PORT": "abc"}, "codes": (2,),
                                 "command": f"{FRESH} --num_gpus 2"},
    "MASTER_ADDR unknown, 2 ranks": {"variables": {"MASTER_ADDR": "no.such.host.invalid"}, "codes": (2,),
                                     "command": f"{FRESH} --num_gpus 2"},
}  # fmt: skip
for _name in ("RANK=abc", "RANK=2", "WORLD_SIZE=2", "RANK=0", "RANK=-1"):
    ODD_STARTS[_name]["codes"] = (2,)
FLAGS = [
    "--num_envs -1", "--num_envs 1.5", "--num_steps 0", "--bptt_steps 7", "--learning_rate nan", "--clip_coef inf",
    "--total_steps 99999999999999999999999", "--seed -1", "--num_gpus -2", "--device cuda", "--strategy hybrid",
    "--gpu_ids 0", "--env NoSuch-v0", "--env no_such_module:X-v0", "--env_kwargs [1]", "--env_kwargs {\"x\":1}",
    "--env_timeout -1", "--resume no_such_run", "--preset paper", "--precision fp8", "--num_episodes 5", "--fee_bps 3",
    "--data x.csv", "--no_such_flag 1", "--pretrained x.pt", "--eval_episodes 0", "--env ''",
]  # fmt: skip
CASES = [
    *deaths(),
    *STOPS,
    *TWINS,
    *EXACT,
    *FAILING,
    *VANISHED,
    *environments(),
    *MODULES,
    *SIZES,
    *(Case(group="13 untried", name=name, **facts) for name, facts in CIRCUMSTANCES.items()),
    *(Case(group="9 odd starts", name=name, **facts) for name, facts in ODD_STARTS.items()),
    *(Case(group="held: disks and streams", name=name, **facts) for name, facts in DISKS.items()),
    *(Case(group="held: flags", name=words, command=f"{FRESH} {words}", codes=(2,)) for words in FLAGS),
    Case(group="12 leftovers", name="the next start removes a killed launcher's folder", strike="KILL group",
         codes=(-9,), command=f"{LONG} --num_gpus 2", then=f"{GO_ON} --num_gpus 2", check=left_in_temporary),
]  # fmt: skip
