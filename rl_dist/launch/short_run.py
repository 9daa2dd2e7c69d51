"""Short runs of the training script side by side, which do not communicate.

    result = measure_short_runs(["--num_envs", "32"], copies=2, threads=1, iterations=5)

As many independent one-rank trainings as a run would have ranks on this machine, each with a rank's
threads or a GPU of its own: what they cost each other (cores, caches, memory) is seen, and waiting
for each other is not. All are killed at the end, and when the caller dies.
"""

from __future__ import annotations

import json
import math
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from rl_dist.errors import UserError
from rl_dist.launch.child import SCRIPT, Child
from rl_dist.run_dir import RunDir

# Seeds differ, so that the copies' episodes do not end together. Nothing is saved or evaluated.
CHOSEN = {
    "total_steps": "1000000000000000",
    "validate_every": "0",
    "checkpoint_every": "1000000000",
    "keep_best": "off",
    "max_restarts": "0",
}
DROPPED = ("run_dir", "num_episodes", "on_event", "seed", "seeds", "profile")
POLL_S = 0.05
ROUNDS, ROUND_S = 3, 1.0  # a rate is known if rounds of at least a second agree on it
MOST_SPREAD = 1.5  # of the highest rate over the lowest
Record = dict[str, Any]


class ShortRunError(Exception):
    """A copy failed or made no progress; the message is for the user."""


class ShortRunTimeoutError(ShortRunError):
    """The copies work, but did not end in time."""


class Copy(Child):
    """One running training."""

    def __init__(self, flags: Sequence[str], folder: Path, number: int, **options: Any) -> None:
        self.run_dir = folder / f"copy_{number}"
        words = [SCRIPT, *flags, f"--seed={number + 1}", "--run_dir", self.run_dir]
        # N ranks have one session, too
        super().__init__(words, folder, self.run_dir.name, own_session=False, **options)

    def num_ended(self) -> int:
        """Return the number of iterations that have ended."""
        records = RunDir(self.run_dir).records(last=1)
        return records[-1]["iteration"] if records else 0

    def config(self) -> dict[str, Any]:
        """Return its configuration by section; empty: it has not written all of it yet."""
        try:
            return json.loads((self.run_dir / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}

    def gradient_bytes(self) -> int:
        """Return the bytes of its gradient; it has ended an iteration."""
        state = RunDir(self.run_dir).state()
        assert state is not None
        return state.gradient_bytes

    def memory_bytes(self) -> int:
        """Return the resident memory of its processes that they do not share; 0: unknown."""
        import psutil  # training imports this module, and goes without

        try:
            supervisor = psutil.Process(self.job.pid)
            everyone = [supervisor, *supervisor.children(recursive=True)]
            return sum(int(process.memory_full_info().uss) for process in everyone)
        except psutil.Error:
            return 0


@dataclass(frozen=True)
class ShortRunResult:
    """The measurements of copies while all of them trained."""

    # by copy: its metrics of the iterations that all copies trained through
    records: list[list[Record]]
    config: dict[str, Any]  # of the first copy, by section
    gradient_bytes: int
    copy_bytes: int = 0  # of memory that the first copy alone takes; 0: unknown


class SideBySide:
    """Trainings at the same time; a context manager."""

    def __init__(
        self,
        flags: Sequence[str],
        copies: int,
        threads: int,
        *,
        num_gpus: int | None = 1,
        device_type: str = "cpu",
    ) -> None:
        """Plan the trainings; they start where the context begins.

        Args:
            flags: of the training script, with the sizes that one rank has. How long, where, what
                to save and the seed are chosen here.
            copies: processes; with device_type "cuda" each has a GPU of its own.
            threads, num_gpus: threads and ranks of each copy; 0 threads: as training chooses; None:
                the ranks and devices that the flags mean.
        """
        if without(flags, ["resume"]) != list(flags):
            fix = "give the flags that the run was started with"
            raise UserError(f"--resume: short runs begin again from the start; {fix}")
        dropped, chosen = [*DROPPED], dict(CHOSEN)
        if num_gpus is not None:
            dropped.append("gpu_ids")
            chosen |= {"num_gpus": str(num_gpus), "device": device_type}
        if threads:
            chosen["threads"] = str(threads)
        self._flags = [
            *without(flags, (*dropped, *chosen)),
            *(f"--{k}={v}" for k, v in chosen.items()),
        ]
        self._num_copies = copies
        self._on_gpus = device_type == "cuda" and num_gpus is not None  # one for each copy
        self._folder = tempfile.TemporaryDirectory(prefix="short_run_")
        self.running: list[Copy] = []
        self._under_way = 1  # iterations that do not count at the next measurement

    def __enter__(self) -> Self:
        try:
            for number in range(self._num_copies):
                self.running.append(self._start(number))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for copy in self.running:
            copy.kill()
        self._folder.cleanup()

    def _start(self, number: int) -> Copy:
        variables = {"CUDA_VISIBLE_DEVICES": _gpu(number)} if self._on_gpus else {}
        return Copy(self._flags, Path(self._folder.name), number, variables=variables)

    def measure(
        self,
        iterations: int,
        timeout_s: float = 600.0,
        enough_s: float = math.inf,
        least_s: float = 0.0,
    ) -> list[list[Record]]:
        """Return the records of the next iterations, so many of the slowest copy.

        Args:
            timeout_s: for everything.
            enough_s: of training, after which two iterations are enough, the first included.
            least_s: of training, in which there may be more iterations.

        Raises:
            UserError: the script refuses the flags; its own words.
            ShortRunError: a copy failed in another way, or time is up (ShortRunTimeoutError).
        """
        deadline_s = time.monotonic() + timeout_s
        ready_s = math.inf  # when all had their configuration, soon after which they train
        began_s = math.inf  # when what is measured began
        before = [copy.num_ended() for copy in self.running]
        begun = [count + self._under_way for count in before]
        self._under_way = 1
        while True:
            ended = [copy.num_ended() for copy in self.running]
            if ready_s == math.inf and all(copy.config() for copy in self.running):
                ready_s = time.monotonic()
            if time.monotonic() - ready_s > enough_s:  # the one under way counts, too
                begun, iterations, least_s = before, 2, 0.0
            wanted = list(zip(ended, begun, strict=True))
            if all(count >= first for count, first in wanted):
                began_s = min(began_s, time.monotonic())
            enough = all(count >= first + iterations for count, first in wanted)
            if enough and time.monotonic() - began_s >= least_s:
                return [
                    RunDir(copy.run_dir).records()[first:]
                    for copy, first in zip(self.running, begun, strict=True)
                ]
            for copy in self.running:
                if copy.job.poll() is not None:
                    what = f"a short run of {SCRIPT.name} ended with code {copy.job.returncode}"
                    raise ShortRunError(f"{what}: {copy.error()}")
            if time.monotonic() > deadline_s:
                words = f"a short run took too long for {iterations} iterations"
                raise ShortRunTimeoutError(f"{words}; try smaller sizes")
            time.sleep(POLL_S)

    def measure_rounds(
        self, iterations: int = ROUNDS, timeout_s: float = 600.0, enough_s: float = math.inf
    ) -> list[list[Record]]:
        """Return the records of some rounds; if their rates differ, of a second try."""
        for _ in range(2):
            records = self.measure(iterations, timeout_s, enough_s, ROUNDS * ROUND_S)
            if is_steady(round_rates(records[0])):
                break
        return records

    def halt(self) -> None:
        """Stop all; the kernel wakes and ends them if the caller dies."""
        for copy in self.running:
            os.killpg(copy.job.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """Let all go on after `halt`."""
        for copy in self.running:
            os.killpg(copy.job.pid, signal.SIGCONT)
        # the one that was halted; and the spread of the next compares its steps with that
        self._under_way = 2


def measure_short_runs(
    flags: Sequence[str],
    copies: int,
    threads: int,
    iterations: int,
    *,
    warm_up: int = 2,
    timeout_s: float = 600.0,
    rounds_enough_s: float | None = None,
    device_type: str = "cpu",
) -> ShortRunResult:
    """Train copies and measure them while all of them train; see `SideBySide`.

    Args:
        iterations: measured of the slowest copy; others may have a few more or less.
        warm_up: iterations of the slowest copy before those.
        rounds_enough_s: measure rounds, for which this is `enough_s`.
    """
    with SideBySide(flags, copies, threads, device_type=device_type) as together:
        if warm_up:
            together.measure(warm_up - 1, timeout_s)
        if rounds_enough_s is None:
            records = together.measure(iterations, timeout_s)
        else:
            records = together.measure_rounds(iterations, timeout_s, rounds_enough_s)
        first = together.running[0]
        return ShortRunResult(records, first.config(), first.gradient_bytes(), first.memory_bytes())


def round_rates(records: Sequence[Record]) -> list[float]:
    """Return the steps/s of consecutive rounds, each of as many iterations."""
    rates = [record["time/sps"] for record in records]
    size = max(1, len(rates) // ROUNDS)
    starts = range(0, min(len(rates), ROUNDS * size), size)
    return [statistics.harmonic_mean(rates[start : start + size]) for start in starts]


def is_steady(rates: Sequence[float]) -> bool:
    """Return whether rounds agree on a rate."""
    return max(rates) <= MOST_SPREAD * min(rates)


def describe_rates(rates: Sequence[float]) -> str:
    """Return the rates and what is wrong with them, in words."""
    listed = ", ".join(f"{rate:,.0f}" for rate in rates)
    return f"{listed} steps/s in rounds of the same work (more than {MOST_SPREAD}x apart)"


def without(flags: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the flags without those of these names, however spelled."""
    kept: list[str] = []
    keep = True
    for word in flags:
        if word.startswith("--"):
            name = word[2:].partition("=")[0].replace("-", "_")
            keep = name not in names and name.removeprefix("no_") not in names
        if keep:
            kept.append(word)
    return kept


def _gpu(number: int) -> str:
    """Return the name of this process's GPU `number` for a process of its own."""
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return visible[number] if number < len(visible) else str(number)
