"""Random kill points over short runs on one to four CPU ranks: is each resumed to the same end?

    python benchmarks/kill_points.py [--points 132] [--seed 1] [--ranks 1 2 3 4] [--ways SIGKILL
    ...]

A run of Recall-v0 loses a rank, its launcher or the whole process group at a random moment, by a
signal or, from inside, by `os._exit`. With `--max_restarts` its launcher must start the ranks
again; else it must end by itself, say so, and leave no process, and the same command goes on with
the run (`--resume auto`; before the first checkpoint it begins anew). That start is hit in its
turn, until the run has met its share; the last start trains to the end, which must equal the
undisturbed run's: parameter hash, last checkpoint, metrics. Every case - number of ranks, with or
without restarts, victim, way - comes up equally often; the moments are random. Starting costs
seconds and training milliseconds, so one run takes several hits; where it ends differently, all of
them count as failed. A random moment would meet the long phases only, so a part of the hits are
aimed: at the start-up, or, after the random delay, at the next rollout or checkpoint.

Each rank notes in a file of its own what it is doing, for the tables: this script starts the real
training with notes around collecting, updating and saving.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, whatever the directory
if __name__ == "__main__" and "KILL_POINTS_NOTES" in os.environ:  # as train_distributed.py does
    from rl_dist.launch.supervisor import supervise

    supervise()

import psutil

import agents.trainer
import train_distributed
from agents.trainer import Training
from rl_dist.launch.ranks import restart_count
from rl_dist.process_group.process_ends import report
from rl_dist.resume_check import differences, parameter_sha256, result_of

ITERATIONS = 20
FLAGS = [  # of sizes that one to four ranks share
    *(
        "--env",
        "Recall-v0",
        "--device",
        "cpu",
        "--num_envs",
        "12",
        "--num_steps",
        "16",
        "--bptt_steps",
        "8",
    ),
    *("--batch_size", "12", "--hidden_size", "8", "--validate_every", "0", "--eval_episodes", "2"),
    *("--checkpoint_every", "3", "--total_steps", str(12 * 16 * ITERATIONS)),
]
# environment variable: folder of the ranks' notes; set where training is meant
NOTES = "KILL_POINTS_NOTES"
PHASES = ("start-up", "rollout", "update", "checkpoint", "in between")
TRAINING = PHASES[1:]
SIGNALS = {name: signal.Signals[name] for name in ("SIGKILL", "SIGSEGV", "SIGABRT")}
# by what a rank leaves at once
EXITS = {signal.SIGRTMIN + 1 + place: code for place, code in enumerate((0, 1, 77))}
WAYS = SIGNALS | {f"_exit({code})": signum for signum, code in EXITS.items()}
VICTIMS = {"main rank": WAYS, "other rank": WAYS, "launcher": SIGNALS, "group": SIGNALS}
AIMS = {"start-up": 0.2, "any moment": 0.4, "rollout": 0.2, "checkpoint": 0.2}  # share of the hits
START_UP_S = 8.0
GONE_WITHIN_S = 30.0
AGAIN_WITHIN_S = 90.0
ENDED_WITHIN_S = 300.0
run_rank = train_distributed.run_rank


# ---- inside the ranks


def noting_rank(*args: Any) -> int:
    """What every rank runs: the training, with notes of what it is doing."""
    for signum, code in EXITS.items():
        signal.signal(signum, lambda *_, code=code: os._exit(code))
    note("start-up")
    for owner, name, phase in (
        (Training, "collect", "rollout"),
        (Training, "update", "update"),
        (agents.trainer, "save", "checkpoint"),
    ):
        setattr(owner, name, noted(getattr(owner, name), phase))
    return run_rank(*args)


def noted(function: Any, phase: str) -> Any:
    """The same function, noting its beginning and its end."""

    def call(*args: Any, **options: Any) -> Any:
        note(phase)
        try:
            return function(*args, **options)
        finally:
            note("in between")

    return call


def note(phase: str) -> None:
    """Write down phase, process id and how often the ranks were started again.

    The note is replaced whole.
    """
    path = Path(os.environ[NOTES], f"rank_{os.environ.get('RANK', 0)}.json")
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"phase": phase, "pid": os.getpid(), "restarts": restart_count()}))
    part.replace(path)


# ---- the runs


@dataclass(frozen=True)
class Case:
    """Who is to die, and how."""

    ranks: int
    restarting: bool  # by its launcher
    victim: str
    way: str

    @property
    def of_rank(self) -> bool:
        """Whether a single rank dies."""
        return self.victim.endswith("rank")


@dataclass(frozen=True)
class Hit:
    """What a case met, or why it went wrong."""

    case: Case
    phase: str
    problem: str = ""


class Run:
    """One start of the training in its own process group."""

    def __init__(self, run_dir: Path, ranks: int, restarting: bool, temporary: Path) -> None:
        self.notes, self.restarts = temporary / "notes", 0
        shutil.rmtree(self.notes, ignore_errors=True)
        self.notes.mkdir()
        self.errors = temporary / "stderr"
        flags = [*FLAGS, "--num_gpus", str(ranks), "--max_restarts", "100" if restarting else "0"]
        variables = {NOTES: str(self.notes), "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"}
        with self.errors.open("wb") as errors:
            self.job = subprocess.Popen(
                [sys.executable, __file__, *flags, "--run_dir", str(run_dir), "--resume", "auto"],
                env=os.environ | variables,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )

    def noted(self) -> dict[int, dict[str, Any]]:
        """By rank, the notes since the last restart."""
        notes = {
            int(path.stem[5:]): json.loads(path.read_text())
            for path in self.notes.glob("rank_*.json")
        }
        return {rank: one for rank, one in notes.items() if one["restarts"] == self.restarts}

    def wait_for(
        self, phases: tuple[str, ...], rank: int = 0, patience_s: float = ENDED_WITHIN_S
    ) -> None:
        """Wait until a rank is in one of these phases, or the run is over, or patience."""
        deadline_s = time.monotonic() + patience_s
        while self.job.poll() is None and time.monotonic() < deadline_s:
            if self.noted().get(rank, {}).get("phase") in phases:
                return
            time.sleep(0.0005)

    def wait_for_aim(self, aim: str, span_s: float, rng: random.Random) -> None:
        """Wait for a random moment of the kind that was drawn."""
        if aim == "start-up":
            time.sleep(rng.uniform(0.0, START_UP_S))
            return
        self.wait_for(TRAINING)
        time.sleep(rng.uniform(0.0, span_s))
        if aim in PHASES:
            self.wait_for((aim,))

    def hit(self, case: Case, rng: random.Random) -> Hit | None:
        """Let the victim die; returns what it met, None if the run was over."""
        rank = rng.randrange(1, case.ranks) if case.victim == "other rank" else 0
        if case.of_rank:
            self.wait_for(PHASES, rank)
        seen = self.noted().get(rank, {"phase": "start-up"})
        if self.job.poll() is not None:
            return None
        try:
            if case.victim == "group":
                os.killpg(self.job.pid, WAYS[case.way])
            else:
                os.kill(seen["pid"] if case.of_rank else self.job.pid, WAYS[case.way])
        except ProcessLookupError:  # it has just ended by itself
            return None
        return Hit(case, seen["phase"])

    def problem_after(self, case: Case) -> str:
        """What is wrong once the victim is dead, if anything."""
        if case.of_rank and case.restarting:
            self.restarts += 1
            self.wait_for(PHASES, patience_s=AGAIN_WITHIN_S)
            if self.job.poll() is None and self.noted():
                return ""
        left = self.left_after(GONE_WITHIN_S)
        line = next(
            (line for line in self.errors.read_text().splitlines() if line.startswith("error:")),
            "no error",
        )
        told = self.job.returncode and line != "no error" and not case.restarting
        if left or (case.of_rank and not told):
            still = f"{len(left)} process(es) after {GONE_WITHIN_S:.0f} s"
            return f"code {self.job.returncode}, {line}, {still}"
        return ""

    def left_after(self, patience_s: float) -> list[psutil.Process]:
        """Processes of the run that are still there when the patience is over; they are ended."""
        deadline_s = time.monotonic() + patience_s
        while (left := self._alive()) and time.monotonic() < deadline_s:
            self.job.poll()
            time.sleep(0.05)
        for process in left:
            process.kill()
        self.job.wait()
        return left

    def _alive(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if (
                    os.getsid(process.pid) == self.job.pid
                    and process.status() != psutil.STATUS_ZOMBIE
                ):
                    found.append(process)
            except (ProcessLookupError, psutil.NoSuchProcess):
                continue
        return found


def one_run(folder: Path, cases: list[Case], span_s: float, rng: random.Random) -> list[Hit]:
    """Hit a run several times, let it end, and return the hits that met it."""
    place = (folder / "run", cases[0].ranks, cases[0].restarting, folder)
    hits = list[Hit]()
    run = None
    for case in cases:
        run = run or Run(*place)
        run.wait_for_aim(rng.choices(list(AIMS), list(AIMS.values()))[0], span_s, rng)
        met = run.hit(case, rng)
        if met is None:
            break  # it was over before
        hits.append(replace(met, problem=run.problem_after(case)))
        run = run if run.job.poll() is None else None
    run = run or Run(*place)
    try:
        code: int | str = run.job.wait(ENDED_WITHIN_S)
    except subprocess.TimeoutExpired:
        code = "none, it hangs"
    left = run.left_after(0.0 if isinstance(code, str) else GONE_WITHIN_S)
    if code == 0:
        return with_problem(hits, "the last start left a process behind") if left else hits
    sys.stderr.write(run.errors.read_text())
    return with_problem(hits, f"the last start ended with code {code}")


def with_problem(hits: list[Hit], problem: str) -> list[Hit]:
    """All hits of a run that went wrong at its end; a problem of their own stays."""
    return [replace(one, problem=one.problem or problem) for one in hits]


def undisturbed(folder: Path, ranks: int) -> tuple[Path, float]:
    """Train straight; returns the run directory and the seconds that training took."""
    folder.mkdir()
    run = Run(folder / "run", ranks, False, folder)
    run.wait_for(TRAINING)
    started_s = time.monotonic()
    last = folder / "run" / "checkpoints" / f"iteration_{ITERATIONS:08d}.pt"
    ended_s = 0.0
    while run.job.poll() is None:
        ended_s = ended_s or (time.monotonic() if last.exists() else 0.0)
        time.sleep(0.01)
    if run.job.returncode:
        raise SystemExit(f"the undisturbed run failed:\n{run.errors.read_text()}")
    took = f"{ITERATIONS} iterations in {ended_s - started_s:.1f} s"
    parameters = parameter_sha256(folder / "run")
    print(f"undisturbed on {ranks}: {took}, parameters {parameters}", flush=True)
    return folder / "run", ended_s - started_s


def judge(hits: list[Hit], run_dir: Path, wanted: Path) -> list[Hit]:
    """The hits, with what differs at the end of their run as their problem."""
    if any("last start" in one.problem for one in hits):
        return hits
    found = differences(result_of(wanted), result_of(run_dir))
    if parameter_sha256(run_dir) != parameter_sha256(wanted):
        found.insert(0, "parameter hash")
    return with_problem(hits, f"differs: {found[0]}") if found else hits


def table(hits: list[Hit], row: str, column: str) -> str:
    """Hits that were resumed to the same end, of all, by two of their properties."""
    keys = [
        (str(getattr(one.case, row)), str(getattr(one.case, column, one.phase)), not one.problem)
        for one in hits
    ]
    total = Counter(key[:2] for key in keys)
    good = Counter(key[:2] for key in keys if key[2])
    columns = [*sorted({key[1] for key in keys}), "all"]
    rows = [f"| {row} | {' | '.join(columns)} |", "|" + "---|" * (len(columns) + 1)]
    for name in [*sorted({key[0] for key in keys}), "all"]:
        cells = [
            [key for key in total if name in (key[0], "all") and one in (key[1], "all")]
            for one in columns
        ]
        counts = [
            f"{sum(good[key] for key in cell)} of {sum(total[key] for key in cell)}"
            for cell in cells
        ]
        rows.append(f"| {name} | {' | '.join(counts)} |")
    return "\n".join(rows)


def cases_of(args: argparse.Namespace, rng: random.Random) -> list[Case]:
    """Make as many as asked for, each about equally often, equal ranks and restarts together."""
    cases = [
        Case(ranks, restarting, victim, way)
        for ranks in args.ranks
        for restarting in (False, True)
        for victim, ways in VICTIMS.items()
        for way in ways
        if (ranks > 1 or victim != "other rank") and way in args.ways
    ]
    drawn = [
        case for _ in range(-(-args.points // len(cases))) for case in rng.sample(cases, len(cases))
    ]
    return sorted(drawn[: args.points], key=lambda case: (case.ranks, case.restarting))


def main() -> int:
    """Hit, resume, compare; 0 if every run came to the same end."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--points", type=int, default=132, help="hits in all; 132: every case once")
    parser.add_argument("--hits_per_run", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--seed", type=int, default=1, help="of the cases' order and the moments")
    args = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    rng = random.Random(args.seed)
    hits = list[Hit]()
    started_s = time.monotonic()
    straight = {}
    waiting = cases_of(args, rng)
    with tempfile.TemporaryDirectory(prefix="kill_points_") as temporary:
        folder = Path(temporary)
        while waiting:
            first = waiting[0]
            asked = [
                one
                for one in waiting
                if (one.ranks, one.restarting) == (first.ranks, first.restarting)
            ]
            if first.ranks not in straight:
                straight[first.ranks] = undisturbed(folder / f"straight_{first.ranks}", first.ranks)
            wanted, training_s = straight[first.ranks]
            shutil.rmtree(folder / "killed", ignore_errors=True)
            (folder / "killed").mkdir()
            met = one_run(
                folder / "killed",
                asked[: args.hits_per_run],
                1.5 * training_s / args.hits_per_run,
                rng,
            )
            met = judge(met, folder / "killed" / "run", wanted)
            hits += met
            for one in met:
                waiting.remove(one.case)
                print(f"{one.case} in {one.phase}: {one.problem or 'the same end'}")
            print(
                f"{len(hits):>4} of {args.points}  {time.monotonic() - started_s:5.0f} s",
                flush=True,
            )
    good = sum(not one.problem for one in hits)
    tables = [
        table(hits, *what)
        for what in (("victim", "way"), ("victim", "phase"), ("ranks", "restarting"))
    ]
    print("\n" + "\n\n".join(tables))
    print(f"\n{good} of {len(hits)} resumed to the same end, no process left behind"
          f" ({time.monotonic() - started_s:.0f} s, seed {args.seed})")  # fmt: skip
    return 0 if good == len(hits) else 1


if NOTES in os.environ:
    train_distributed.run_rank = noting_rank  # also where a rank's process imports this file anew
    if __name__ == "__main__":
        code = train_distributed.main()
        report(exit_code=code)
        sys.exit(code)
elif __name__ == "__main__":
    sys.exit(main())
