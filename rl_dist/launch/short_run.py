"""Short runs of the training script side by side, which do not communicate.

    trial = run_trial(["--num_envs", "32", "--batch_size", "64"], copies=2, threads=1, iterations=5)

As many independent one-rank trainings as a run would have ranks on this machine, each with a rank's threads or a GPU
of its own: what they cost each other (cores, caches, memory) is seen, and waiting for each other is not. All are
killed at the end, and when the caller dies.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_dist.errors import UserError
from rl_dist.launch.child_process import SCRIPT, errors_of, kill_group, start
from rl_dist.telemetry.metrics import METRICS_FILE

# Seeds differ, so that the copies' episodes do not end together. Nothing is saved or judged.
CHOSEN = {
    "total_steps": "1000000000000000",
    "validate_every": "0",
    "checkpoint_every": "1000000000",
    "keep_best": "off",
    "max_restarts": "0",
}
DROPPED = ("run_dir", "num_episodes", "on_event", "seed", "num_gpus", "gpu_ids", "profile", *CHOSEN)
POLL_S = 0.05


class TrialFailed(Exception):
    """A copy failed or made no progress; the message is for the user."""


class TrialTooLong(TrialFailed):
    """The copies work, but did not end in time."""


@dataclass
class Copy:
    """One running training."""

    job: subprocess.Popen[bytes]
    run_dir: Path
    errors: Path

    def _metrics(self) -> bytes:
        path = self.run_dir / METRICS_FILE
        return path.read_bytes() if path.exists() else b""

    def num_iterations(self) -> int:
        """Iterations that it has ended."""
        return self._metrics().count(b"\n")

    def records(self) -> list[dict[str, Any]]:
        """Its metrics of the iterations it has ended."""
        return [json.loads(line) for line in self._metrics().rpartition(b"\n")[0].splitlines()]

    def config(self) -> dict[str, Any]:
        """Its configuration by section."""
        return json.loads((self.run_dir / "config.json").read_text(encoding="utf-8"))

    def log(self) -> str:
        """Its log so far."""
        return (self.run_dir / "logs" / "rank_0.log").read_text(encoding="utf-8", errors="replace")

    def memory_bytes(self) -> int:
        """Resident memory of all its processes that they do not share; 0: unknown."""
        import psutil  # training imports this module, and goes without

        try:
            supervisor = psutil.Process(self.job.pid)
            everyone = [supervisor, *supervisor.children(recursive=True)]
            return sum(int(process.memory_full_info().uss) for process in everyone)
        except psutil.Error:
            return 0


@dataclass(frozen=True)
class Trial:
    """What copies measured while all of them trained."""

    records: list[list[dict[str, Any]]]  # by copy: its metrics of the iterations that all copies trained through
    config: dict[str, Any]  # of the first copy, by section
    log: str  # of the first copy
    copy_bytes: int = 0  # of memory that the first copy alone takes; 0: unknown


class SideBySide:
    """Trainings at the same time, which can be halted; a context manager.

    Args:
        flags: of the training script, with the sizes that one rank has. How long, where, what to save and the seed
            are chosen here.
        copies: processes; with device_type "cuda" each has a GPU of its own.
        threads: of each copy.
        num_gpus: ranks of each copy.

    Raises:
        UserError: the script was not content with the flags; its own words.
        TrialFailed: a copy failed in another way, or took too long.
    """

    def __init__(
        self,
        flags: Sequence[str],
        copies: int,
        threads: int,
        *,
        num_gpus: int = 1,
        device_type: str = "cpu",
        script: Path = SCRIPT,
    ) -> None:
        if copies < 1 or threads < 1:
            raise UserError(f"copies {copies} and threads {threads} must be at least 1")
        if without(flags, ["resume"]) != list(flags):
            raise UserError("--resume: short runs begin anew; give the flags that the run was started with")
        self._how = flags, copies, threads, num_gpus, device_type, script
        self._folder = tempfile.TemporaryDirectory(prefix="trial_")
        self.running: list[Copy] = []
        self.on_wait: Callable[[int], None] = lambda slowest: None  # with the iterations that all have ended
        self._under_way = 1  # iterations that do not count at the next measurement

    def __enter__(self) -> SideBySide:
        flags, copies, threads, num_gpus, device_type, script = self._how
        try:
            for number in range(copies):
                chosen = [*without(flags, DROPPED), f"--num_gpus={num_gpus}", f"--seed={number + 1}"]
                copy = _start(chosen, number, threads, device_type, script, Path(self._folder.name))
                self.running.append(copy)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *reason: object) -> None:
        for copy in self.running:
            kill_group(copy.job)
        self._folder.cleanup()

    def measure(self, iterations: int, timeout_s: float = 600.0) -> list[list[dict[str, Any]]]:
        """The records of each copy's next whole iterations, so many of the slowest."""
        deadline_s = time.monotonic() + timeout_s
        begun = [copy.num_iterations() + self._under_way for copy in self.running]
        self._under_way = 1
        ended = _wait(self.running, [count + iterations for count in begun], deadline_s, self.on_wait)
        found = [copy.records() for copy in self.running]
        return [records[a:b] for records, a, b in zip(found, begun, ended, strict=True)]

    def halt(self) -> None:
        """Stop all, in the middle of whatever they do.

        Should the caller die meanwhile, the kernel wakes and ends them: their process groups are then orphaned.
        """
        for copy in self.running:
            os.killpg(copy.job.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """Let all go on after `halt`."""
        for copy in self.running:
            os.killpg(copy.job.pid, signal.SIGCONT)
        self._under_way = 2  # the one that was halted; and the spread of the next compares its steps with that


def run_trial(
    flags: Sequence[str],
    copies: int,
    threads: int,
    iterations: int,
    *,
    warm_up: int = 2,
    timeout_s: float = 600.0,
    on_wait: Callable[[float], None] = lambda share: None,
    **options: Any,
) -> Trial:
    """Train copies side by side; what each measured while all of them trained.

    Args:
        flags, copies, threads: as of `SideBySide`, and `options` (device_type, script) as well.
        iterations: measured of the slowest copy; others may have a few more or less.
        warm_up: iterations of the slowest copy before those.
        on_wait: called over and over with the share that is done; starting counts as one iteration.

    Raises:
        UserError, TrialFailed: as of `SideBySide`.
    """
    if iterations < 1 or warm_up < 0:
        raise UserError(f"iterations {iterations} must be at least 1, warm_up {warm_up} at least 0")
    with SideBySide(flags, copies, threads, **options) as together:
        first = together.running[0]
        total = warm_up + iterations + 1
        together.on_wait = lambda slowest: on_wait(min(1.0, (slowest + (slowest > 0)) / total))
        if warm_up:
            together.measure(warm_up - 1, timeout_s)
        return Trial(together.measure(iterations, timeout_s), first.config(), first.log(), first.memory_bytes())


def without(flags: Sequence[str], names: Sequence[str]) -> list[str]:
    """The flags but for those of these names, however spelled, and their values."""
    kept: list[str] = []
    keep = True
    for word in flags:
        if word.startswith("--"):
            name = word[2:].partition("=")[0].replace("-", "_")
            keep = name not in names and name.removeprefix("no_") not in names
        if keep:
            kept.append(word)
    return kept


def _start(flags: Sequence[str], number: int, threads: int, device_type: str, script: Path, folder: Path) -> Copy:
    run_dir, errors = folder / f"copy_{number}", folder / f"copy_{number}.err"
    chosen = [f"--{name}={value}" for name, value in CHOSEN.items()]
    variables = {"OMP_NUM_THREADS": str(threads)}
    if device_type == "cuda":
        variables["CUDA_VISIBLE_DEVICES"] = _gpu(number)
    with errors.open("wb") as stderr:
        job = start(
            [script, *flags, *chosen, "--device", device_type, "--run_dir", run_dir],
            variables=variables,
            own_session=False,  # N ranks have one session, too
            stdout=subprocess.DEVNULL,
            stderr=stderr,
        )
    return Copy(job, run_dir, errors)


def _gpu(number: int) -> str:
    """The name of this process's GPU `number` for a process of its own."""
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return visible[number] if number < len(visible) else str(number)


def _wait(
    copies: list[Copy], least: list[int], deadline_s: float, on_wait: Callable[[int], None]
) -> list[int]:
    """Wait until every copy has so many iterations; returns how many each then has."""
    while True:
        counts = [copy.num_iterations() for copy in copies]
        on_wait(min(counts))
        if all(count >= wanted for count, wanted in zip(counts, least, strict=True)):
            return counts
        for copy in copies:
            if copy.job.poll() is not None:
                raise _failure(copy)
        if time.monotonic() > deadline_s:
            told = f"{min(counts)} iterations of {max(least)}"
            raise TrialTooLong(f"a short run took too long: {told}; try smaller sizes")
        time.sleep(POLL_S)


def _failure(copy: Copy) -> Exception:
    lines = copy.errors.read_text(errors="replace").splitlines()
    errors = errors_of(lines)
    if copy.job.returncode == 2 and errors:
        return UserError(errors[-1])
    said = "; ".join(errors[-1:] or lines[-3:]) or "it said nothing"
    return TrialFailed(f"a short run of {SCRIPT.name} ended with code {copy.job.returncode}: {said}")
