"""The hostile sweep: environments, files, flags, signals and limits that mean harm.

    python benchmarks/hostile.py [--only REGEX] [--jobs 2] [--patience 1] [--keep FOLDER]

The cases are the tables of hostile_cases.py and hostile_files.py. Each is one command in a folder,
a session and a temporary directory of its own, two at a time. Whatever the case, the command must
end in time, leave no process and print no traceback; the canary file, which hostile code would
make, must not be there; what fails says so in exactly one line that begins with `error: `; bad
usage (exit code 2) leaves config.json and metrics.jsonl of a run as they were; and a training that
succeeds has every iteration exactly once in metrics.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

REPO = Path(__file__).resolve().parents[1]
PROGRAMS = {
    "train": [str(REPO / "train_distributed.py")],
    "check": [str(REPO / "check_gpu_setup.py")],
    "evaluate": ["-m", "agents.evaluate"],
    **{name: ["-m", f"rl_dist.{name}"] for name in ("status", "checkpoint", "resume_check")},
}
SMALL = (
    "--device cpu --num_envs 4 --num_steps 16 --bptt_steps 8 --batch_size 4 --hidden_size 8 "
    "--eval_episodes 2 "
    "--validate_every 0 --checkpoint_every 1 --collective_timeout 20"
)
STEPS = 4 * 16  # of an iteration
FRESH = f"train --env Recall-v0 --run_dir {{run}} {SMALL} --total_steps {2 * STEPS}"
LONG = FRESH.replace(f"--total_steps {2 * STEPS}", "--total_steps 100000000")
RESUME = f"train --resume {{run}} --total_steps {4 * STEPS}"
GO_ON = "train --resume {run} --total_steps {more}"  # two iterations more than there are
# until the first iteration; until the last process of a case has left
STARTED_S, GONE_S = 60.0, 30.0
KINDS = ("hang", "traceback", "foreign code", "exit code", "words", "left behind", "state")
PREPARED = {"one": FRESH, "two": f"{FRESH} --num_gpus 2"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One hostile command and what must come of it.

    {run}, {tmp}, {canary} and {more} are filled in.
    """

    group: str
    name: str
    command: str = FRESH
    codes: tuple[int, ...] = (1,)  # allowed exit codes
    says: str = ""  # expression that stdout and stderr together must hold
    run: str = ""  # the prepared run that {run} is a copy of
    # changes {run} and {tmp} before; gets the canary's path, too
    alter: Callable[[Path, Path], None] | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    shell: str = ""  # what a shell does before it becomes the command
    # once it trains: signals, seconds, remove and move; such as "TERM; 1.5; KILL group"
    strike: str = ""
    twin: bool = False  # the command runs twice, in the same moment; one at least must succeed
    then: str = ""  # a second command, which must succeed
    check: Callable[[Path, Path], str] | None = None  # of {run} and {tmp} at the end: what is wrong
    # lines that begin with `error: ` where the exit code is 1 or 2; None: any number
    errors: int | None = 1
    within_s: float = 75.0


class Trial:
    """A case under way, in a folder of its own."""

    patience = 1.0  # factor of the time that a case has, for a busy machine

    def __init__(self, case: Case, folder: Path, prepared: Path) -> None:
        self.case = case
        self.folder = folder
        self.run = folder / "run"
        self.canary = folder / "canary"
        self.problems: list[tuple[str, str]] = []
        (folder / "temporary").mkdir(parents=True)
        if case.run:
            shutil.copytree(prepared / case.run / "run", self.run)
        if case.alter:
            case.alter(self.run, folder)
        self.kept = self._kept()

    def _kept(self) -> list[bytes]:
        """What bad usage must not change."""
        paths = [self.run / "config.json", self.run / "metrics.jsonl"]
        return [path.read_bytes() for path in paths if _is_plain(path)]

    def judge(self) -> list[tuple[str, str]]:
        """Do it; what went wrong, by kind."""
        case = self.case
        codes, output = self._execute(case.command, 2 if case.twin else 1, case.strike)
        self._look_at(output, codes)
        if not set(codes) <= set(case.codes) or (case.twin and 0 not in codes):
            self._bad("exit code", f"{codes} instead of {case.codes}")
        if case.says and not re.search(case.says, output):
            self._bad("words", f"no {case.says!r}")
        if codes == [2] and self._kept() != self.kept:
            self._bad("state", "bad usage changed config.json or metrics.jsonl")
        if case.then:
            codes, output = self._execute(case.then)
            self._look_at(output, codes)
            if codes != [0]:
                self._bad("exit code", f"{codes} of the second command: {_last(output)}")
        if 0 in codes and case.command.startswith("train") and not case.alter:
            found = iterations(self.run)
            if found != list(range(1, len(found) + 1)):
                self._bad("state", f"iterations {found[:30]} in metrics.jsonl")
        if case.check and (problem := case.check(self.run, self.folder)):
            self._bad("state", problem)
        return self.problems

    def _bad(self, kind: str, text: str) -> None:
        self.problems.append((kind, text))

    def _fill(self, text: str) -> str:
        names = {"{run}": self.run, "{tmp}": self.folder, "{canary}": self.canary}
        if "{more}" in text:
            names["{more}"] = STEPS * (max(iterations(self.run), default=0) + 2)
        for name, value in names.items():
            text = text.replace(name, str(value))
        return text

    def _execute(self, command: str, copies: int = 1, strike: str = "") -> tuple[list[int], str]:
        """Run a command to its end; the exit codes, sorted, and all that was printed."""
        program, *words = shlex.split(command)
        argv = [sys.executable, *PROGRAMS[program], *map(self._fill, words)]
        if self.case.shell:
            argv = ["bash", "-c", f'{self._fill(self.case.shell)}\nexec "$@"', "bash", *argv]
        variables = {
            "PYTHONPATH": os.pathsep.join(map(str, (REPO, REPO / "tests"))),
            "OMP_NUM_THREADS": "1",
        }
        variables |= {"TMPDIR": str(self.folder / "temporary"), "CANARY": str(self.canary)}
        variables |= {name: self._fill(value) for name, value in self.case.variables.items()}
        with (self.folder / "output").open("w+b") as output:
            streams = {
                "stdin": subprocess.DEVNULL,
                "stdout": output,
                "stderr": output,
                "cwd": self.folder,
            }
            environment = os.environ | variables
            jobs = [
                subprocess.Popen(argv, env=environment, start_new_session=True, **streams)
                for _ in range(copies)
            ]
            deadline_s = time.monotonic() + self.case.within_s * self.patience
            try:
                if strike:
                    self._strike(jobs[0], strike)
                for job in jobs:
                    job.wait(max(0.1, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._bad("hang", f"has not ended after {self.case.within_s * self.patience:.0f} s")
            for job in jobs:
                self._clear(job)
            output.seek(0)
            return sorted(job.returncode for job in jobs), output.read().decode(errors="replace")

    def _strike(self, job: subprocess.Popen[bytes], steps: str) -> None:
        """Wait for the first checkpoint, then do what the steps say."""
        deadline_s = time.monotonic() + STARTED_S * self.patience
        saved = "checkpoints/iteration_*.pt"
        while (
            not list(self.run.glob(saved)) and job.poll() is None and time.monotonic() < deadline_s
        ):
            time.sleep(0.05)
        for step in (one.strip() for one in steps.split(";")):
            what, _, whom = step.partition(" ")
            if what == "remove":
                shutil.rmtree(self.run, ignore_errors=True)
            elif what == "move":
                self.run.rename(self.folder / "moved")
            elif what[0].isdigit():
                time.sleep(float(what))
            else:
                with suppress(ProcessLookupError):
                    (os.killpg if whom == "group" else os.kill)(
                        job.pid, signal.Signals[f"SIG{what}"]
                    )

    def _clear(self, job: subprocess.Popen[bytes]) -> None:
        """End what is left of a session: after a hang at once, else when it has had its time."""
        deadline_s = time.monotonic() + (GONE_S if job.poll() is not None else 0.0)
        while (left := session_of(job.pid)) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        if left and job.returncode is not None:
            self._bad("left behind", f"{len(left)} processes")
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        job.wait()

    def _look_at(self, output: str, codes: list[int]) -> None:
        """What no output may hold, and the line that a failure must have."""
        if "Traceback (most recent call last)" in output:
            self._bad("traceback", _last(output))
        if self.canary.exists():
            self._bad("foreign code", "the canary file is there")
        told = len(re.findall(r"^(?:\S+: )?error: ", output, re.MULTILINE))
        wanted = self.case.errors
        if len(codes) == 1 and codes[0] in (1, 2) and wanted is not None and told != wanted:
            self._bad("words", f"{told} error lines: {_last(output)}")


def _is_plain(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def _last(output: str) -> str:
    lines = [line for line in output.splitlines() if line.strip()]
    return lines[-1][:160] if lines else "nothing printed"


def iterations(run: Path) -> list[int]:
    """The iterations in metrics.jsonl, in the order of the file."""
    path, found = run / "metrics.jsonl", []
    for line in path.read_bytes().splitlines() if _is_plain(path) else []:
        with suppress(ValueError, TypeError, KeyError):
            found.append(json.loads(line)["iteration"])
    return found


def session_of(pid: int) -> list[psutil.Process]:
    """The living processes of a session."""
    found = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, PermissionError, psutil.NoSuchProcess):
            if os.getsid(process.pid) == pid and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def prepare(folder: Path) -> None:
    """Make the runs that cases start from."""
    for name, command in PREPARED.items():
        problems = Trial(
            Case(group="", name=name, command=command, codes=(0,)), folder / name, folder
        ).judge()
        if problems:
            raise SystemExit(f"the run {name!r}, from which cases start, failed: {problems}")


def attempt(
    case: Case, number: int, folder: Path, keep: bool
) -> tuple[float, list[tuple[str, str]]]:
    """Seconds and problems of one case."""
    started_s = time.monotonic()
    own = folder / f"case_{number:03d}"
    try:
        problems = Trial(case, own, folder).judge()
    except Exception as error:  # of the sweep itself: the other cases go on
        problems = [("state", f"the case could not be tried: {error!r}")]
    if not keep:
        subprocess.run(["chmod", "-R", "u+rwX", str(own)], check=False, stderr=subprocess.DEVNULL)
        shutil.rmtree(own, ignore_errors=True)
    return time.monotonic() - started_s, problems


def table(results: Iterable[tuple[Case, list[tuple[str, str]]]]) -> str:
    """Cases by group, and what went wrong in them."""
    counts: dict[str, Counter[str]] = {}
    for case, problems in results:
        for group in (case.group, "all"):
            counts.setdefault(group, Counter()).update(
                {"cases", "held" if not problems else "", *dict(problems)}
            )
    columns = ("cases", "held", *KINDS)
    rows = ["".join([f"{'':<26}", *(f"{name:>13}" for name in columns)])]
    rows += [
        "".join([f"{group:<26}", *(f"{counts[group][name]:>13}" for name in columns)])
        for group in sorted(counts, key=lambda name: (name == "all", name))
    ]
    return "\n".join(rows)


def main() -> int:
    """Try all cases; 0 if every one held."""
    sys.path[:0] = [str(REPO), str(REPO / "tests")]
    from hostile_cases import CASES
    from hostile_files import FILE_CASES

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default="", metavar="REGEX", help="cases whose 'group: name' matches"
    )
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time")
    parser.add_argument(
        "--patience", type=float, default=1.0, help="factor of the time that a case has"
    )
    parser.add_argument(
        "--keep", default="", metavar="FOLDER", help="keep the folders of all cases here"
    )
    args = parser.parse_args()
    # a shell or nohup that puts this into the background ignores these, and every case would
    # inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, lambda signum, frame: sys.exit(128 + signum))
    Trial.patience = args.patience
    cases = [
        case for case in (*CASES, *FILE_CASES) if re.search(args.only, f"{case.group}: {case.name}")
    ]
    started_s, results = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="hostile_", ignore_cleanup_errors=True) as temporary:
        folder = Path(args.keep or temporary).absolute()
        prepare(folder)
        with ThreadPoolExecutor(args.jobs) as pool:
            waiting = {
                pool.submit(attempt, case, n, folder, bool(args.keep)): case
                for n, case in enumerate(cases)
            }
            for future in as_completed(waiting):
                case, (seconds, problems) = waiting[future], future.result()
                results.append((case, problems))
                found = "; ".join(f"{kind}: {text}" for kind, text in problems)
                line = f"{seconds:5.1f} s  {case.group}: {case.name}  {found}"
                print(f"{'BAD' if found else 'ok':<4}{line}", flush=True)
    held = sum(not problems for _, problems in results)
    seconds = time.monotonic() - started_s
    print(f"\n{table(results)}\n\n{held} of {len(results)} cases held ({seconds:.0f} s)")
    return 0 if held == len(results) else 1


if __name__ == "__main__":
    sys.modules["hostile"] = sys.modules[__name__]  # the tables import it
    sys.exit(main())
