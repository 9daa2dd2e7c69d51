"""The ranks of one machine: started, watched, restarted and ended together."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from rl_dist.checkpoint.folder import iteration_in_name, latest_checkpoint
from rl_dist.hardware.addresses import asked_for_address
from rl_dist.hardware.plain_files import leads_to, plain_file
from rl_dist.launch.rank import RankFunction, RankPlace, Report, run_as_rank
from rl_dist.process_group.process_ends import EXIT_GRACE_S, STOP_SIGNALS, ReportPage, StopRelay, how_it_ended
from rl_dist.process_group.world import threads_per_rank
from rl_dist.telemetry import events

PREFIX, LOCK = "rl_dist_", "lock_of_launcher"

POLL_S = 0.05
DEATH_GRACE_S = 5.0  # for the other ranks to report that they failed, too


class RankGroup:
    """Ranks on this machine, each a new process.

    A rank leaves a report before it ends; one that ends without has failed, whatever its exit code. Stop signals are
    blocked while processes start, so that none meets a rank before its handlers are set; `run` passes them on.
    """

    def __init__(
        self,
        fn: RankFunction,
        args: tuple[Any, ...],
        num_ranks: int,
        max_restarts: int = 0,
        run_dir: Path | None = None,
    ) -> None:
        self.fn, self.args, self.num_ranks = fn, args, num_ranks
        self.max_restarts, self.run_dir = max_restarts, run_dir
        self.restarts = 0
        self.relay = StopRelay()
        self.job_dir = ""
        self.address: tuple[str, int] | None = None  # where the ranks meet; None: in `job_dir`
        self.processes: list[BaseProcess] = []  # in rank order
        self.pages: list[ReportPage] = []  # theirs
        self.first_dead: list[int] = []  # ranks that had ended when one was first seen to have failed

    def run(self) -> Report:
        """Start the ranks, again where that may help; return how the last ones ended."""
        try:
            self.address = asked_for_address()
        except ValueError as error:
            return Report(exit_code=2, message=f"error: {error}", summary=str(error))
        with job_directory() as self.job_dir:
            self.relay.install()
            try:
                report = self._run_once()
                while self._may_restart(report):
                    report = self._run_once()
                return report
            finally:
                self.relay.uninstall()

    def _run_once(self) -> Report:
        """One life of all ranks."""
        self.processes, self.pages, self.first_dead = [], [], []
        try:
            self._start()
            self._wait()
        except OSError as error:  # no memory, no more processes or descriptors
            words = f"the ranks cannot be started: {error}"
            return Report(exit_code=1, message=f"error: {words}", summary=words)
        finally:
            self._kill(signal.SIGKILL)
            for process in self.processes:
                process.join()
        return self._outcome()

    def _start(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        resource_tracker.ensure_running()  # its start unblocks signals
        with _signals_blocked(), _environment(OMP_NUM_THREADS=str(threads_per_rank(self.num_ranks))):
            for rank in range(self.num_ranks):
                page = ReportPage()
                group = self.num_ranks, self.restarts, self.job_dir
                place = RankPlace(rank, *group, page, os.getpid(), self.address)
                process = spawn.Process(target=run_as_rank, args=(self.fn, self.args, place), name=f"rank {rank}")
                process.start()
                self.processes.append(process)
                self.pages.append(page)

    def _wait(self) -> None:
        """Wait for all ranks; pass a stop signal on, and end what insisting or a failed rank leaves behind."""
        passed_on, deadline_s = False, None
        while self._alive():
            time.sleep(POLL_S)
            if self.relay.signums and not passed_on:
                passed_on = True
                self._kill(self.relay.signums[0])
            if deadline_s is None and (grace_s := self._grace_s()) is not None:
                deadline_s = time.monotonic() + grace_s
            if self.relay.insists or (deadline_s is not None and time.monotonic() > deadline_s):
                self._kill(signal.SIGKILL)

    def _grace_s(self) -> float | None:
        """How long ranks may still run; None: as long as they like."""
        ended = [rank for rank, process in enumerate(self.processes) if process.exitcode is not None]
        reports = self._reports() if ended else {}
        if any(rank not in reports or reports[rank].failed for rank in ended):
            self.first_dead = [rank for rank, process in enumerate(self.processes) if process.exitcode is not None]
            return DEATH_GRACE_S
        return EXIT_GRACE_S if len(reports) == self.num_ranks else None

    def _reports(self) -> dict[int, Report]:
        found = {rank: page.read() for rank, page in enumerate(self.pages)}
        return {rank: Report(**facts) for rank, facts in found.items() if facts}

    def _alive(self) -> list[BaseProcess]:
        return [process for process in self.processes if process.exitcode is None]

    def _kill(self, signum: int) -> None:
        for process in self._alive():
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(process.pid or 0, signum)

    def _outcome(self) -> Report:
        """What the ranks' ends mean for all: a death without a report explains the complaints of others."""
        reports = self._reports()
        signum = self.relay.signums[0] if self.relay.signums else 0
        if self.relay.insists:
            words = "stopped at once, nothing saved since the last checkpoint"
            return Report(exit_code=128 + signum, message=words, summary=words)
        if signum and any(process.exitcode == -signum for process in self.processes):
            words = f"stopped by {signal.Signals(signum).name} after training was saved"  # while judging
            return Report(exit_code=128 + signum, message=words, summary=words)
        failed = sorted((report for report in reports.values() if report.failed), key=lambda report: report.at_ns)
        own = [report for report in failed if not report.consequence]
        silent = [rank for rank in self.first_dead if rank not in reports]
        if own:
            return own[0]
        if silent:
            process = self.processes[silent[0]]
            words = f"rank {silent[0]} (process {process.pid}) {how_it_ended(process.exitcode or 0)}"
            return Report(exit_code=1, message=f"error: {words}", rank=silent[0], summary=words, at_ns=1)
        if failed:
            return failed[0]
        return Report(exit_code=next((r.exit_code for _, r in sorted(reports.items()) if r.exit_code), 0))

    def _may_restart(self, report: Report) -> bool:
        """Whether to start all ranks again; prints why and from where."""
        if not report.failed or report.by_user or self.relay.signums or self.restarts >= self.max_restarts:
            return False
        self.restarts += 1
        message = f"{report.summary}: restart {self.restarts} of {self.max_restarts}"
        iteration = None
        if self.run_dir is not None:
            newest = latest_checkpoint(self.run_dir)
            iteration = iteration_in_name(newest) if newest else 0
            message += f", going on from iteration {iteration}" if newest else " from the beginning, without checkpoint"
        say(message)
        where = {} if iteration is None else {"iteration": iteration}
        events.notify("restarted", message, restart=self.restarts, rank=report.rank, **where)
        Path(self.job_dir).mkdir(mode=0o700, exist_ok=True)  # a cleaner of temporary files may have taken it
        return True


@contextmanager
def _signals_blocked() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """Variables that new processes read before any of our code runs in them."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def say(message: str) -> None:
    """Tell the user, on stderr."""
    print(message, file=sys.stderr, flush=True)


@contextmanager
def job_directory() -> Iterator[str]:
    """A new folder that nobody else may enter; those of killed launchers go."""
    _remove_abandoned()
    with ExitStack() as held:
        while True:
            folder = held.enter_context(tempfile.TemporaryDirectory(prefix=PREFIX))
            lock = held.enter_context(open(Path(folder, LOCK), "wb"))
            fcntl.flock(lock, fcntl.LOCK_EX)
            if leads_to(lock.name, lock):  # else another launcher has just removed it, for it was not locked yet
                break
        yield folder


def _remove_abandoned() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            if os.lstat(folder).st_uid != os.getuid():
                continue
            with open(folder / LOCK, "rb", opener=plain_file) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if leads_to(lock.name, lock):
                    shutil.rmtree(folder)
        except OSError:  # in use, not ours, or already gone
            continue
