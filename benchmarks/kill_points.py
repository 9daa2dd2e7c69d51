"""Kill short runs on CPU ranks at random moments; check that they resume exactly.

    python benchmarks/kill_points.py [--points 108] [--seed 1] [--ranks 1 2 3 4]

Each run trains Recall-v0 on one to four ranks. A hit kills a rank, the launcher, the supervisor or
the whole process group with a signal. If a rank is killed and `--max_restarts` is set, the launcher
must start the ranks again. Otherwise all processes of the run must end by themselves; if only a
rank was killed, the run must also print exactly one error line. The same command then resumes the
run. Every run is hit several times and then trains to the end. Its parameters, last checkpoint and
metrics must equal the results of an undisturbed run; otherwise all hits of the run have failed. A
case is a combination of number of ranks, `--max_restarts` on or off, victim and signal; a hit tests
one case, and no case is tested twice. Most random moments fall into a rollout or an update, so some
hits are aimed at the start-up or at the writing of a checkpoint.
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
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # can be started from any directory

import psutil

from rl_dist.launch.child import SCRIPT
from rl_dist.resume_check import differences, result_of
from rl_dist.run_dir import JobState, RunDir

ITERATIONS, HITS_PER_RUN = 20, 5
FLAGS = (  # all sizes can be divided among one to four ranks
    "--env Recall-v0 --device cpu --num_envs 12 --num_steps 16 --bptt_steps 8 --batch_size 12 "
    "--hidden_size 8 --validate_every 0 --eval_episodes 2 --checkpoint_every 3 --resume auto "
    f"--total_steps {12 * 16 * ITERATIONS}"
)
VICTIMS = ("main rank", "other rank", "launcher", "supervisor", "group")
WAYS = ("SIGKILL", "SIGSEGV", "SIGABRT")
# moment of a hit: fraction of all hits that are aimed at this moment
AIMS = {"starting": 0.2, "any moment": 0.5, "saving": 0.3}
START_UP_S = 8.0
GONE_WITHIN_S = 30.0
AGAIN_WITHIN_S = 90.0
ENDED_WITHIN_S = 300.0


@dataclass(frozen=True)
class Case:
    """A kind of hit: the victim, the signal, and the flags of the run that is hit."""

    ranks: int
    restarting: bool  # the run uses --max_restarts
    victim: str
    way: str


class Run:
    """One start of a training, in a new session and process group."""

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

    def wait_for(self, condition: Callable[[JobState], bool], patience_s: float) -> JobState | None:
        """Wait until the run's state meets a condition; return the state.

        Return None if the run ends or `patience_s` seconds pass before that.
        """
        deadline_s = time.monotonic() + patience_s
        while self.job.poll() is None and time.monotonic() < deadline_s:
            state = self.run_dir.state()
            with suppress(ProcessLookupError):  # the state is that of an earlier start
                if state and os.getsid(state.launcher_pid) == self.job.pid and condition(state):
                    return state
            time.sleep(0.002)
        return None

    def wait_for_phase(self, phase: str) -> None:
        """Wait until the run reaches a phase or ends."""
        self.wait_for(lambda state: state.phase == phase, ENDED_WITHIN_S)

    def hit(self, case: Case, aim: str, span_s: float, rng: random.Random) -> str:
        """Kill the victim; return a description of what went wrong afterwards, or "".

        Raises ProcessLookupError: the run ended before the hit.
        """
        if aim == "starting":
            time.sleep(rng.uniform(0.0, START_UP_S))
        else:
            self.wait_for_phase("training")
            time.sleep(rng.uniform(0.0, span_s))
            if aim == "saving":
                self.wait_for_phase("saving")
        is_rank, victim, restarts = case.victim.endswith("rank"), self.job.pid, 0
        if is_rank or case.victim == "launcher":
            state = self.wait_for(lambda state: len(state.ranks) == case.ranks, ENDED_WITHIN_S)
            if state is None:
                raise ProcessLookupError
            number = rng.randrange(1, case.ranks) if case.victim == "other rank" else 0
            victim = state.ranks[number].pid if is_rank else state.launcher_pid
            restarts = state.restarts
        if self.job.poll() is not None:
            raise ProcessLookupError
        kill = os.killpg if case.victim == "group" else os.kill
        kill(victim, signal.Signals[case.way])

        is_restarted = is_rank and case.restarting
        if is_restarted and self.wait_for(lambda now: now.restarts > restarts, AGAIN_WITHIN_S):
            return ""
        if num_left := self.num_left():
            return f"{num_left} process(es) are still running"
        if is_rank and self.job.returncode == 0 and self.run_dir.summary():
            raise ProcessLookupError
        lines = [line for line in self.errors.read_text().splitlines() if line[:6] == "error:"]
        if is_rank and (case.restarting or not self.job.returncode or len(lines) != 1):
            return f"exit code {self.job.returncode}, error lines: {lines}"
        return ""

    def num_left(self) -> int:
        """Wait for all processes to end; kill those still alive and return their number."""
        deadline_s = time.monotonic() + GONE_WITHIN_S
        while (left := self._alive()) and time.monotonic() < deadline_s:
            self.job.poll()
            time.sleep(0.05)
        for process in left:
            process.kill()
        self.job.wait()
        return len(left)

    def _alive(self) -> list[psutil.Process]:
        alive = []
        for process in psutil.process_iter():
            with suppress(ProcessLookupError, psutil.NoSuchProcess):
                in_session = os.getsid(process.pid) == self.job.pid
                if in_session and process.status() != psutil.STATUS_ZOMBIE:
                    alive.append(process)
        return alive


def undisturbed(folder: Path, ranks: int) -> tuple[Path, float]:
    """Train without hits; return the run directory and the training time in seconds."""
    folder.mkdir()
    run = Run(folder, ranks, restarting=False)
    run.wait_for_phase("training")
    started_s = time.monotonic()
    run.wait_for(lambda state: state.iteration == ITERATIONS, ENDED_WITHIN_S)
    seconds = time.monotonic() - started_s
    if run.job.wait(ENDED_WITHIN_S):
        raise SystemExit(f"the undisturbed run failed:\n{run.errors.read_text()}")
    return run.run_dir.path, seconds


def hit_and_resume(
    folder: Path, cases: list[Case], expected: Path, span_s: float, rng: random.Random
) -> dict[Case, str]:
    """Hit a run once for each case, then let it finish.

    Returns:
        For each case, a description of what went wrong, or "".
    """
    problems: dict[Case, str] = {}
    ranks, restarting = cases[0].ranks, cases[0].restarting
    run = Run(folder, ranks, restarting)
    with suppress(ProcessLookupError):
        for case in cases:
            aim = rng.choices(list(AIMS), list(AIMS.values()))[0]
            problems[case] = run.hit(case, aim, span_s, rng)
            if run.job.poll() is not None:
                run = Run(folder, ranks, restarting)
    with suppress(subprocess.TimeoutExpired):
        run.job.wait(ENDED_WITHIN_S)
    end = ""
    if run.num_left() or run.job.returncode:
        end = f"the last start exited with code {run.job.returncode}: {run.errors.read_text()}"
    elif lines := differences(result_of(expected), result_of(run.run_dir.path)):
        end = lines[0]
    return {case: problem or end for case, problem in problems.items()}


def main() -> int:
    """Hit and resume runs; return 0 if all end with the result of an undisturbed run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--points", type=int, default=108, help="number of hits; the default covers every case"
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--seed", type=int, default=1, help="seed for choosing cases and moments")
    args = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    rng = random.Random(args.seed)
    cases = [
        Case(ranks, restarting, victim, way)
        for ranks, restarting, victim, way in itertools.product(
            args.ranks, (False, True), VICTIMS, WAYS
        )
        if ranks > 1 or victim not in ("other rank", "launcher")
    ]
    waiting = rng.sample(cases, min(args.points, len(cases)))
    num_hits = num_good = 0
    straight: dict[int, tuple[Path, float]] = {}
    with tempfile.TemporaryDirectory(prefix="kill_points_") as temporary:
        while waiting:
            ranks, killed = waiting[0].ranks, Path(temporary, "killed")
            same = [c for c in waiting if (c.ranks, c.restarting) == (ranks, waiting[0].restarting)]
            if ranks not in straight:
                straight[ranks] = undisturbed(Path(temporary, f"straight_{ranks}"), ranks)
            expected, training_s = straight[ranks]
            shutil.rmtree(killed, ignore_errors=True)
            killed.mkdir()
            span_s = 1.5 * training_s / HITS_PER_RUN
            problems = hit_and_resume(killed, same[:HITS_PER_RUN], expected, span_s, rng)
            for case, problem in problems.items():
                waiting.remove(case)
                num_hits += 1
                num_good += not problem
                print(f"{case}: {problem or 'same result'}", flush=True)
    print(f"{num_good} of {num_hits} hits left the result unchanged")
    return int(num_good != num_hits)


if __name__ == "__main__":
    sys.exit(main())
