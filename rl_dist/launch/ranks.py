"""The ranks of one machine: started, watched, restarted and ended together."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from rl_dist.checkpoint.folder import iteration_in_name, latest_checkpoint
from rl_dist.hardware.addresses import ADDRESS_VARIABLES, RESTART_COUNT, asked_for_address
from rl_dist.launch.rank import RankFunction, RankReport, run_as_rank
from rl_dist.process_group.process_ends import (
    EXIT_GRACE_S,
    FAILED_GRACE_S,
    SCRIPT_RAN_AGAIN,
    STOP_SIGNALS,
    ReportPage,
    StopRelay,
    how_it_ended,
    stopped_in_evaluation,
)
from rl_dist.process_group.watchdog import JOB_DIR_VARIABLE
from rl_dist.process_group.world import threads_per_rank
from rl_dist.telemetry import events
from rl_dist.telemetry.state_file import update_state

PREFIX = "rl_dist_"  # of a job directory, which nobody else may enter
POLL_S = 0.05
DEATH_GRACE_S = 5.0  # for the other ranks to report that they failed, too


@dataclass
class RankGroup:
    """Ranks on this machine, each a new process.

    A rank leaves a report before it ends; one that ends without has failed, whatever its exit code.
    Stop signals are blocked while processes start, so that none meets a rank before its handlers
    are set; `run` passes them on.
    """

    fn: RankFunction
    args: tuple[Any, ...]
    num_ranks: int
    max_restarts: int = 0
    run_dir: Path | None = None
    threads: int = 0  # of each rank; 0: the cores, shared by the ranks
    restarts: int = 0
    relay: StopRelay = field(default_factory=StopRelay)
    job_dir: str = ""
    # where the ranks meet; None: in `job_dir`
    address: tuple[str, int] | None = field(default_factory=asked_for_address)
    processes: list[BaseProcess] = field(default_factory=list)  # in rank order
    pages: list[ReportPage] = field(default_factory=list)  # theirs
    # ranks that had ended when one was first seen to have failed
    first_dead: list[int] = field(default_factory=list)

    def run(self) -> RankReport:
        """Start the ranks, again where that may help; return how the last ones ended."""
        with tempfile.TemporaryDirectory(prefix=PREFIX) as self.job_dir:
            self.relay.install()
            try:
                while self._may_restart(report := self._run_once()):
                    pass
                return report
            finally:
                self.relay.uninstall()

    def _run_once(self) -> RankReport:
        """Start all ranks once and wait for their end."""
        self.processes = []
        self.pages = []
        self.first_dead = []
        try:
            with store_in_memory(f"{self.job_dir}/store_{self.restarts}"):
                self._start()
                self._wait()
        except OSError as error:  # no memory, no more processes or descriptors
            problem = f"the ranks cannot be started: {error}"
            return RankReport(1, failed=True, summary=problem, by_user=True)
        finally:
            self._kill(signal.SIGKILL)
            for process in self.processes:
                process.join()
        return self._outcome()

    def _start(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        resource_tracker.ensure_running()  # its start unblocks signals
        threads = self.threads or threads_per_rank(self.num_ranks)
        with _prepared_for_starts({"OMP_NUM_THREADS": str(threads)}):
            for rank in range(self.num_ranks):
                page = ReportPage()
                place = self._variables(rank), page, os.getpid()
                process = spawn.Process(
                    target=run_as_rank, args=(self.fn, self.args, *place), name=f"rank {rank}"
                )
                process.start()
                self.processes.append(process)
                self.pages.append(page)

    def _variables(self, rank: int) -> dict[str, str]:
        """Return the environment of a rank, in torchrun's words."""
        found = {JOB_DIR_VARIABLE: self.job_dir, RESTART_COUNT: str(self.restarts)}
        found |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
        found |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(self.num_ranks))
        address = map(str, self.address or ())
        return found | dict(zip(ADDRESS_VARIABLES, address, strict=False))

    def _wait(self) -> None:
        """Wait for all ranks; pass a stop signal on, and kill those that a failure left behind."""
        passed_on = False
        deadline_s: float | None = None
        while self._alive():
            time.sleep(POLL_S)
            if not passed_on and (signum := self._stop_signal()):
                passed_on = True
                self._kill(signum)
            if deadline_s is None and (grace_s := self._grace_s()) is not None:
                deadline_s = time.monotonic() + grace_s
            if self.relay.insists or (deadline_s is not None and time.monotonic() > deadline_s):
                self._kill(signal.SIGKILL)

    def _stop_signal(self) -> int:
        """The first stop signal to the launcher or to a rank that it ended; 0: none came.

        A rank handles stop signals until all is saved. The final evaluation is simply ended by one.
        """
        ended_by = (-process.exitcode for process in self.processes if process.exitcode)
        return next((one for one in (*self.relay.signums, *ended_by) if one in STOP_SIGNALS), 0)

    def _grace_s(self) -> float | None:
        """Return how long ranks may still run; None: as long as they like."""
        ended = self._ended()
        reports = self._reports() if ended else {}
        if any(rank not in reports or reports[rank].failed for rank in ended):
            self.first_dead = self._ended()
            return DEATH_GRACE_S
        if len(reports) < self.num_ranks:
            return None
        return FAILED_GRACE_S if any(one.failed for one in reports.values()) else EXIT_GRACE_S

    def _reports(self) -> dict[int, RankReport]:
        found = {rank: page.read() for rank, page in enumerate(self.pages)}
        return {rank: RankReport(**facts) for rank, facts in found.items() if facts}

    def _ended(self) -> list[int]:
        return [rank for rank, one in enumerate(self.processes) if one.exitcode is not None]

    def _alive(self) -> list[BaseProcess]:
        return [process for process in self.processes if process.exitcode is None]

    def _kill(self, signum: int) -> None:
        for process in self._alive():
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(process.pid or 0, signum)

    def _outcome(self) -> RankReport:
        """Return the report of the group: a silent death explains the complaints of other ranks."""
        reports = self._reports()
        signum = self._stop_signal()
        if self.relay.insists:
            words = "stopped at once, nothing saved since the last checkpoint"
            return RankReport(128 + signum, summary=words)
        if signum and any(process.exitcode == -signum for process in self.processes):
            words = stopped_in_evaluation(signum, self.run_dir)
            return RankReport(128 + signum, summary=words)
        failed = [one for _, one in sorted(reports.items()) if one.failed]
        failed.sort(key=lambda one: one.consequence)
        silent = [rank for rank in self.first_dead if rank not in reports]
        if silent and not (failed and failed[0].consequence == 0):
            process = self.processes[silent[0]]
            code = process.exitcode or 0
            words = f"rank {silent[0]} (process {process.pid}) {how_it_ended(code)}"
            again = code == SCRIPT_RAN_AGAIN
            return RankReport(1 + again, silent[0], failed=True, summary=words, by_user=again)
        if failed:
            return failed[0]
        codes = (report.exit_code for _, report in sorted(reports.items()))
        return RankReport(next((code for code in codes if code), 0))

    def _may_restart(self, report: RankReport) -> bool:
        """Decide to start all ranks again or not; print why and from where."""
        hopeless = not report.failed or report.by_user or self.relay.signums
        if hopeless or self.restarts >= self.max_restarts:
            return False
        self.restarts += 1
        message = f"{report.summary}: restart {self.restarts} of {self.max_restarts}"
        facts = {"restart": self.restarts, "rank": report.rank}
        if self.run_dir is not None:
            newest = latest_checkpoint(self.run_dir)
            facts["iteration"] = iteration_in_name(newest) if newest else 0
            message += f", going on from iteration {facts['iteration']}"
            update_state(self.run_dir, phase="restarting", restarts=self.restarts)
        print(message, file=sys.stderr, flush=True)
        events.notify("restarted", message, **facts)
        return True


@contextmanager
def _prepared_for_starts(variables: dict[str, str]) -> Iterator[None]:
    """Block stop signals, and set the variables that libraries of a new process read first."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextmanager
def store_in_memory(path: str) -> Iterator[None]:
    """Keep the file in which ranks will meet in memory, where the system can.

    A full disk could cut a record short, and torch's FileStore reads on for ever for the rest.
    """
    with ExitStack() as held:
        with suppress(AttributeError, OSError):  # else it will be a file on the disk
            memory = os.memfd_create("store")
            held.callback(os.close, memory)
            target = Path(f"/proc/{os.getpid()}/fd/{memory}")
            target.stat()  # an error where /proc is missing
            Path(path).symlink_to(target)
        yield
