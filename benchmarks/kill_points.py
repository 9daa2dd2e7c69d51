"""Kill short runs on one to four CPU ranks at random moments: do they resume to the same end?

    python benchmarks/kill_points.py [--points 48] [--seed 1] [--ranks 1 2 3 4]

A run of Recall-v0 loses a rank, its launcher or the whole process group by a signal. With
`--max_restarts` its launcher must start the ranks again. Without, it must end by itself with an
error in one line and leave no process, and the same command resumes the run. That start is hit in
turn, until the run has met its share; the last start trains to the end, which must equal the
undisturbed run's: parameters, last checkpoint and metrics. If it does not, all hits of the run
count as failed. Every case comes up equally often. Most random moments meet a rollout or update, so
a part of the hits waits for the start-up or a checkpoint.
"""

from __future__ import annotations

import argparse
import itertools
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
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, whatever the directory

import psutil

from rl_dist.launch.child import SCRIPT
from rl_dist.resume_check import differences, parameter_sha256, result_of
from rl_dist.run_dir import JobState, RunDir

ITERATIONS = 20
FLAGS = (  # sizes that one to four ranks share
    "--env Recall-v0 --device cpu --num_envs 12 --num_steps 16 --bptt_steps 8 --batch_size 12 "
    "--hidden_size 8 --validate_every 0 --eval_episodes 2 --checkpoint_every 3 --resume auto "
    f"--total_steps {12 * 16 * ITERATIONS}"
)
VICTIMS = ("main rank", "other rank", "launcher", "group")
WAYS = ("SIGKILL", "SIGSEGV", "SIGABRT")
AIMS = {"starting": 0.2, "any moment": 0.5, "saving": 0.3}  # share of the hits
START_UP_S = 8.0
GONE_WITHIN_S = 30.0
AGAIN_WITHIN_S = 90.0
ENDED_WITHIN_S = 300.0


@dataclass(frozen=True)
class Case:
    """The victim and its way to die."""

    ranks: int
    restarting: bool  # by its launcher
    victim: str
    way: str


class Run:
    """One start of the training in its own process group."""

    def __init__(self, folder: Path, ranks: int, restarting: bool) -> None:
        self.run_dir, self.errors = RunDir(folder / "run"), folder / "stderr"
        restarts = 100 if restarting else 0
        flags = [*FLAGS.split(), f"--num_gpus={ranks}", f"--max_restarts={restarts}"]
        with self.errors.open("wb") as errors:
            self.job = subprocess.Popen(
                [sys.executable, SCRIPT, *flags, "--run_dir", self.run_dir.path],
                env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder)},
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )

    def wait_for(self, condition: Callable[[JobState], bool], patience_s: float) -> bool:
        """Wait until the state of this start meets a condition, the run is over, or patience."""
        deadline_s = time.monotonic() + patience_s
        while self.job.poll() is None and time.monotonic() < deadline_s:
            state = self.run_dir.state()
            with suppress(ProcessLookupError):  # the state is of an earlier start
                if state and os.getsid(state.launcher_pid) == self.job.pid and condition(state):
                    return True
            time.sleep(0.002)
        return False

    def hit(self, case: Case, aim: str, span_s: float, rng: random.Random) -> str:
        """Let the victim die; return the phase that it was in, or "" if the run was over."""
        if aim == "starting":
            time.sleep(rng.uniform(0.0, START_UP_S))
        else:
            self.wait_for(lambda state: state.phase == "training", ENDED_WITHIN_S)
            time.sleep(rng.uniform(0.0, span_s))
            if aim == "saving":
                self.wait_for(lambda state: state.phase == "saving", ENDED_WITHIN_S)
        victim = self.job.pid
        if case.victim.endswith("rank"):
            self.wait_for(lambda state: len(state.ranks) == case.ranks, ENDED_WITHIN_S)
            state = self.run_dir.state()
            assert state
            number = rng.randrange(1, case.ranks) if case.victim == "other rank" else 0
            victim = state.ranks[number].pid
            self.restarts = state.restarts
        if self.job.poll() is not None:
            return ""
        state = self.run_dir.state()
        try:
            kill = os.killpg if case.victim == "group" else os.kill
            kill(victim, signal.Signals[case.way])
        except ProcessLookupError:
            return ""
        return state.phase if state else "starting"

    def problem_after(self, case: Case) -> str:
        """Return what is wrong after a hit, or ""."""
        of_rank = case.victim.endswith("rank")
        if of_rank and case.restarting:
            before = self.restarts
            if self.wait_for(lambda state: state.restarts > before, AGAIN_WITHIN_S):
                return ""
        if left := self.left_after(GONE_WITHIN_S):
            return f"{len(left)} process(es) are left"
        lines = [line for line in self.errors.read_text().splitlines() if line[:6] == "error:"]
        if of_rank and (case.restarting or not self.job.returncode or len(lines) != 1):
            return f"code {self.job.returncode}, errors: {lines}"
        return ""

    def left_after(self, patience_s: float) -> list[psutil.Process]:
        """Return the processes that are left after a while, and kill them."""
        deadline_s = time.monotonic() + patience_s
        while (left := self._alive()) and time.monotonic() < deadline_s:
            self.job.poll()
            time.sleep(0.05)
        for process in left:
            process.kill()
        self.job.wait()
        return left

    def _alive(self) -> list[psutil.Process]:
        alive = []
        for process in psutil.process_iter():
            with suppress(ProcessLookupError, psutil.NoSuchProcess):
                of_run = os.getsid(process.pid) == self.job.pid
                if of_run and process.status() != psutil.STATUS_ZOMBIE:
                    alive.append(process)
        return alive


def undisturbed(folder: Path, ranks: int) -> tuple[Path, float]:
    """Train without hits; return the run directory and the seconds of training."""
    folder.mkdir()
    run = Run(folder, ranks, restarting=False)
    run.wait_for(lambda state: state.phase == "training", ENDED_WITHIN_S)
    started_s = time.monotonic()
    run.wait_for(lambda state: state.iteration == ITERATIONS, ENDED_WITHIN_S)
    seconds = time.monotonic() - started_s
    if run.job.wait(ENDED_WITHIN_S):
        raise SystemExit(f"the undisturbed run failed:\n{run.errors.read_text()}")
    return run.run_dir.path, seconds


def hit_and_resume(
    folder: Path, cases: list[Case], span_s: float, rng: random.Random
) -> dict[Case, tuple[str, str]]:
    """Hit one run several times, then let it end; return phase and problem by case."""
    met: dict[Case, tuple[str, str]] = {}
    ranks, restarting = cases[0].ranks, cases[0].restarting
    run = Run(folder, ranks, restarting)
    for case in cases:
        phase = run.hit(case, rng.choices(list(AIMS), list(AIMS.values()))[0], span_s, rng)
        if not phase:
            break
        met[case] = phase, run.problem_after(case)
        if run.job.poll() is not None:
            run = Run(folder, ranks, restarting)
    with suppress(subprocess.TimeoutExpired):
        run.job.wait(ENDED_WITHIN_S)
    if run.left_after(GONE_WITHIN_S) or run.job.returncode:
        end = f"the last start ended with code {run.job.returncode}: {run.errors.read_text()}"
        return {case: (phase, problem or end) for case, (phase, problem) in met.items()}
    return met


def difference(run_dir: Path, wanted: Path) -> str:
    """Return what differs at the end of a run, or ""."""
    if parameter_sha256(run_dir) != parameter_sha256(wanted):
        return "parameters differ"
    return next(iter(differences(result_of(wanted), result_of(run_dir))), "")


def main() -> int:
    """Hit, resume, compare; return 0 if every run came to the same end."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--points", type=int, default=84, help="hits; 84: every case once")
    parser.add_argument("--hits_per_run", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--seed", type=int, default=1, help="of the cases' order and the moments")
    args = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    rng = random.Random(args.seed)
    cases = [
        Case(ranks, restarting, victim, way)
        for ranks, restarting, victim, way in itertools.product(
            args.ranks, (False, True), VICTIMS, WAYS
        )
        if ranks > 1 or victim != "other rank"
    ]
    waiting = rng.sample(cases, min(args.points, len(cases)))
    tries, good = Counter[str](), Counter[str]()
    straight: dict[int, tuple[Path, float]] = {}
    with tempfile.TemporaryDirectory(prefix="kill_points_") as temporary:
        while waiting:
            first = waiting[0]
            ranks, killed = first.ranks, Path(temporary, "killed")
            same = [c for c in waiting if (c.ranks, c.restarting) == (ranks, first.restarting)]
            if ranks not in straight:
                straight[ranks] = undisturbed(Path(temporary, f"straight_{ranks}"), ranks)
            wanted, training_s = straight[ranks]
            shutil.rmtree(killed, ignore_errors=True)
            killed.mkdir()
            span_s = 1.5 * training_s / args.hits_per_run
            met = hit_and_resume(killed, same[: args.hits_per_run], span_s, rng)
            end = difference(killed / "run", wanted)
            for case, (phase, problem) in met.items():
                waiting.remove(case)
                problem = problem or end
                for name in (f"{case.victim} {case.way}", f"{ranks} rank(s)", phase, "all"):
                    tries[name] += 1
                    good[name] += not problem
                print(f"{case} in {phase}: {problem or 'the same end'}", flush=True)
    for name, count in sorted(tries.items()):
        print(f"{name:<24}{good[name]:>4} of {count}")
    return int(good["all"] != tries["all"])


if __name__ == "__main__":
    sys.exit(main())
