"""Random kill points over a short run on two CPU ranks: is each resumed to the same end?

    python benchmarks/kill_points.py [--points 100] [--seed 1] [--ranks 2]

A run of Recall-v0 is ended by SIGKILL at a random moment - one random rank, the launcher, or the whole process
group -, and the same command goes on with it (`--resume auto`; before the first checkpoint it begins anew). That
start is killed in its turn, until the run has met its share of kills; the last start trains to the end. The end
must equal the undisturbed run's: parameter hash, last checkpoint, metrics. After every kill no process may be left.
Starting costs seconds and training milliseconds, so one run takes several kills; where it ends differently, all
of them count as failed. A random moment would meet the long phases only, so a part of the kills are aimed: at the
start-up, or, after the random delay, at the next rollout or checkpoint.

Each rank notes in a file of its own what it is doing, for the table: this script starts the real training with
notes around collecting, updating and saving.
"""

from __future__ import annotations

import argparse
import json
import os
import random
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

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, whatever the directory

import agents.trainer
import train_distributed
from agents.trainer import Training
from rl_dist.run_comparison import differences, parameter_sha256, result_of

ITERATIONS = 40
FLAGS = [
    *("--env", "Recall-v0", "--device", "cpu", "--num_envs", "4", "--num_steps", "16", "--bptt_steps", "8"),
    *("--batch_size", "4", "--hidden_size", "8", "--validate_every", "0", "--eval_episodes", "2"),
    *("--checkpoint_every", "3", "--total_steps", str(4 * 16 * ITERATIONS)),
]
NOTES = "KILL_POINTS_NOTES"  # environment variable: folder of the ranks' notes
PHASES = ("start-up", "rollout", "update", "checkpoint", "in between")
TRAINING = PHASES[1:]
KINDS = ("rank", "launcher", "group")
AIMS = {"start-up": 0.2, "any moment": 0.4, "rollout": 0.2, "checkpoint": 0.2}  # share of the kills
START_UP_S = 8.0
GONE_WITHIN_S = 30.0
run_rank = train_distributed.run_rank


# ---- inside the ranks


def noting_rank(*args: Any) -> int:
    """What every rank runs: the training, with notes of what it is doing."""
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
    """Write down phase and process id; the note is replaced whole."""
    path = Path(os.environ[NOTES], f"rank_{os.environ.get('RANK', 0)}.json")
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"phase": phase, "pid": os.getpid()}))
    part.replace(path)


# ---- the runs


@dataclass(frozen=True)
class Kill:
    """What one kill met, or why it went wrong."""

    kind: str
    phase: str
    problem: str = ""


class Run:
    """One start of the training in its own process group."""

    def __init__(self, run_dir: Path, num_ranks: int, temporary: Path) -> None:
        self.notes = temporary / "notes"
        shutil.rmtree(self.notes, ignore_errors=True)
        self.notes.mkdir()
        self.errors = temporary / "stderr"
        command = [sys.executable, __file__, "--train", *FLAGS, "--num_gpus", str(num_ranks)]
        variables = {NOTES: str(self.notes), "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"}
        with open(self.errors, "wb") as errors:
            self.job = subprocess.Popen(
                [*command, "--run_dir", str(run_dir), "--resume", "auto"],
                env=os.environ | variables,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )

    def noted(self) -> list[dict[str, Any]]:
        """The notes of the ranks that have written one, in rank order."""
        return [json.loads(path.read_text()) for path in sorted(self.notes.glob("rank_*.json"))]

    def wait_for(self, phases: tuple[str, ...]) -> None:
        """Wait until rank 0 is in one of these phases, or the run is over."""
        while self.job.poll() is None and not any(one["phase"] in phases for one in self.noted()[:1]):
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

    def kill(self, kind: str, rng: random.Random) -> Kill | None:
        """Send SIGKILL; returns what it met, None if the run was over."""
        noted = self.noted()
        if not noted and kind == "rank":
            kind = "launcher"  # there are no ranks yet
        seen = rng.choice(noted) if kind == "rank" else noted[0] if noted else {"phase": "start-up"}
        if self.job.poll() is not None:
            return None
        try:
            if kind == "group":
                os.killpg(self.job.pid, signal.SIGKILL)
            else:
                os.kill(seen["pid"] if kind == "rank" else self.job.pid, signal.SIGKILL)
        except ProcessLookupError:  # it has just ended by itself
            return None
        return Kill(kind, seen["phase"])

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
                if os.getsid(process.pid) == self.job.pid and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (ProcessLookupError, psutil.NoSuchProcess):
                continue
        return found


def one_run(folder: Path, num_ranks: int, num_kills: int, span_s: float, rng: random.Random) -> list[Kill]:
    """Kill a run several times, let it end, and return the kills that met it."""
    run_dir, kills = folder / "run", list[Kill]()
    for _ in range(num_kills):
        run, kind = Run(run_dir, num_ranks, folder), rng.choice(KINDS)
        run.wait_for_aim(rng.choices(list(AIMS), list(AIMS.values()))[0], span_s, rng)
        met = run.kill(kind, rng)
        left = run.left_after(GONE_WITHIN_S)
        if met is None:
            break  # it was over before its kill
        kills.append(replace(met, problem="left a process behind") if left else met)
    run = Run(run_dir, num_ranks, folder)
    if run.job.wait() != 0:
        sys.stderr.write(run.errors.read_text())
        return with_problem(kills, f"the last start ended with code {run.job.returncode}")
    return with_problem(kills, "the last start left a process behind") if run.left_after(GONE_WITHIN_S) else kills


def with_problem(kills: list[Kill], problem: str) -> list[Kill]:
    """All kills of a run that went wrong at its end."""
    return [replace(one, problem=problem) for one in kills]


def undisturbed(folder: Path, num_ranks: int) -> tuple[Path, float]:
    """Train straight; returns the run directory and the seconds that training took."""
    run = Run(folder / "run", num_ranks, folder)
    run.wait_for(TRAINING)
    started_s = time.monotonic()
    last, ended_s = folder / "run" / "checkpoints" / f"iteration_{ITERATIONS:08d}.pt", 0.0
    while run.job.poll() is None:
        ended_s = ended_s or (time.monotonic() if last.exists() else 0.0)
        time.sleep(0.01)
    if run.job.returncode:
        raise SystemExit(f"the undisturbed run failed:\n{run.errors.read_text()}")
    return folder / "run", ended_s - started_s


def judge(kills: list[Kill], run_dir: Path, wanted: Path) -> list[Kill]:
    """The kills, with what differs at the end of their run as their problem."""
    if any(one.problem for one in kills):
        return kills
    found = differences(result_of(wanted), result_of(run_dir))
    if parameter_sha256(run_dir) != parameter_sha256(wanted):
        found.insert(0, "parameter hash")
    return with_problem(kills, f"differs: {found[0]}") if found else kills


def table(kills: list[Kill]) -> str:
    """Kills that were resumed to the same end, of all, by kind and phase."""
    total, good = Counter(), Counter()
    for one in kills:
        total[one.kind, one.phase] += 1
        good[one.kind, one.phase] += not one.problem
    rows = [f"{'killed':<10}" + "".join(f"{phase:>14}" for phase in (*PHASES, "all"))]
    for kind in (*KINDS, "all"):
        row = f"{kind:<10}"
        for phase in (*PHASES, "all"):
            keys = [key for key in total if kind in (key[0], "all") and phase in (key[1], "all")]
            row += f"{sum(good[key] for key in keys):>8} of {sum(total[key] for key in keys):<3}"
        rows.append(row)
    return "\n".join(rows)


def main() -> int:
    """Kill, resume, compare; 0 if every kill point was resumed to the same end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=100, help="kills in all")
    parser.add_argument("--kills_per_run", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1, help="of kinds and delays")
    args = parser.parse_args()
    rng, kills, started_s = random.Random(args.seed), [], time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kill_points_") as temporary:
        folder = Path(temporary)
        (folder / "straight").mkdir()
        wanted, training_s = undisturbed(folder / "straight", args.ranks)
        print(f"undisturbed: {ITERATIONS} iterations in {training_s:.1f} s, parameters {parameter_sha256(wanted)}")
        while len(kills) < args.points:
            shutil.rmtree(folder / "killed", ignore_errors=True)
            (folder / "killed").mkdir()
            asked = min(args.kills_per_run, args.points - len(kills))
            met = one_run(folder / "killed", args.ranks, asked, 1.5 * training_s / args.kills_per_run, rng)
            met = judge(met, folder / "killed" / "run", wanted)
            kills += met
            what = ", ".join(f"{one.kind} in {one.phase}" for one in met)
            problem = next((one.problem for one in met if one.problem), "the same end")
            after_s = time.monotonic() - started_s
            print(f"{len(kills):>4} of {args.points}  {after_s:5.0f} s  {what}: {problem}", flush=True)
    good = sum(not one.problem for one in kills)
    print(f"\n{table(kills)}\n\n{good} of {len(kills)} kill points resumed to the same end, no process left behind"
          f" ({time.monotonic() - started_s:.0f} s, seed {args.seed}, {args.ranks} ranks)")  # fmt: skip
    return 0 if good == len(kills) else 1


if __name__ in ("__main__", "__mp_main__") and "--train" in sys.argv[1:2]:
    train_distributed.run_rank = noting_rank  # also where a rank's process imports this file anew
    if __name__ == "__main__":
        del sys.argv[1]
        sys.exit(train_distributed.main())
elif __name__ == "__main__":
    sys.exit(main())
