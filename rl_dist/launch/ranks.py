"""Start and watch the ranks: here, as new processes, or under torchrun.

Signals: the first SIGINT, SIGTERM, SIGUSR1 or SIGHUP reaches every rank once the launcher, the
process group or any one rank has it; ranks stop at their next iteration end, save and leave, and
`launch` returns 128 + the signal's number. A second SIGINT or SIGTERM ends everything at once.
Ranks of a killed launcher get SIGTERM from the kernel and leave by themselves.

Errors in a rank end the job. A ValueError (UserError included) is a message for the user: printed
once (under torchrun once on each machine) as `error: ...`, with its exit code, mostly 2. Anything
else: traceback and rank, once, exit code 1. The traceback of either goes to the rank's log file. A
rank that ends without a report, by a signal or `os._exit`, has failed, whatever its exit code. With
`max_restarts`, all ranks start again after anything but a message for the user or a stop signal;
`fn` finds out by `restart_count()`.
"""

from __future__ import annotations

import atexit
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

from rl_dist.checkpoint.store import iteration_in_name, latest_checkpoint
from rl_dist.errors import print_error_once, report_to_caller, restarts_refused
from rl_dist.launch.rank import RankFunction, RankReport, flush_and_exit, run_as_rank, run_guarded
from rl_dist.process_group import process_ends
from rl_dist.process_group.addresses import (
    ADDRESS_VARIABLES,
    RESTART_COUNT,
    asked_for_address,
    check_copies,
    check_counts,
    elastic_count,
    may_start_again,
)
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
from rl_dist.process_group.world import close_any_world, leave_world, stop_flag, threads_per_rank
from rl_dist.run_dir import RunDir, launcher_pid
from rl_dist.telemetry import events

AGENT_PATIENCE_S = 10.0  # for torchrun, which looks after its ranks every 0.1 s
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
            RunDir(self.run_dir).update_state(phase="restarting", restarts=self.restarts)
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


def restart_count() -> int:
    """Return how often the ranks were started again before this start."""
    return elastic_count(RESTART_COUNT)


def launch(
    fn: RankFunction,
    args: tuple[Any, ...],
    num_ranks: int,
    *,
    max_restarts: int = 0,
    run_dir: Path | None = None,
    threads: int = 0,
    copies: bool = False,
) -> int:
    """Run `fn(*args)` on every rank and return the job's exit code.

    Under torchrun (RANK is set), and with one rank that shall not restart, `fn` runs in this
    process. Otherwise `fn` must be importable and `args` picklable: each rank is a new process.

    Args:
        max_restarts: how often all ranks start again after one died or failed.
        run_dir: where `fn` keeps its checkpoints, to print where a restart goes on from.
        threads: that each rank will set; 0: the cores, shared by the ranks.
        copies: a scheduler may start several of this command, each for itself.

    Returns:
        0, or the first non-zero code a rank returned; 1 a rank failed; 2 bad input; 128 + signal.
    """
    check_counts()
    if "RANK" not in os.environ and not copies:
        check_copies()
    elif restarts_refused():
        return 2
    restarts = restart_count()
    if "RANK" in os.environ or (num_ranks == 1 and not max_restarts):
        report = _run_here(fn, args)
    else:
        group = RankGroup(fn, args, num_ranks, max_restarts, run_dir, threads)
        report = group.run()
        restarts = group.restarts
    line = f"error: {report.summary}" if report.failed else report.summary
    if report.traceback:  # of one rank only: nobody else prints it
        sys.stderr.write(f"{report.traceback}{line}\n")
        sys.stderr.flush()
        report_to_caller(error=report.summary)
    elif line:
        print_error_once(line)
    if run_dir is not None and os.environ.get("RANK", "0") == "0":
        may_restart = may_start_again(report.exit_code - 128)
        RunDir(run_dir).record_exit(
            launcher_pid(), report.exit_code, report.summary, may_restart=may_restart
        )
        process_ends.report(exit_recorded=True)
    _notify_end(report, restarts)
    if report.failed and leave_world():
        # closing the process group could wait for ranks that are inside a collective
        atexit.register(flush_and_exit, report.exit_code or 1)
    return report.exit_code


def _run_here(fn: RankFunction, args: tuple[Any, ...]) -> RankReport:
    stop_flag.install()
    report = run_guarded(fn, args)
    if not report.failed:
        close_any_world()
    if report.exit_code - 128 in STOP_SIGNALS and not stop_flag.signum:
        _await_agent()
    stop_flag.uninstall()
    stop_flag.signum = 0
    return report


def _await_agent() -> None:
    """Let torchrun end this rank, which was stopped by a signal to another host's.

    That host's torchrun may end its ranks because a host has come or gone, and not every torchrun
    notices at the same time. Then a rank that left by itself would count as failed: it would use
    up a restart, or end the job.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    deadline_s = time.monotonic() + AGENT_PATIENCE_S
    while not stop_flag.signum and time.monotonic() < deadline_s:
        time.sleep(0.05)


def _notify_end(report: RankReport, restarts: int) -> None:
    """Send the one event of how a run ended; see `rl_dist.telemetry.events`."""
    code = report.exit_code
    facts: dict[str, Any] = {"exit_code": code, "restarts": restarts}
    if code == 0:
        event, message = "finished", "the run has finished"
    elif code - 128 in STOP_SIGNALS:
        event, message = "stopped", f"stopped by {signal.Signals(code - 128).name}, saved"
    else:
        event, message = "failed", f"ended with code {code}"
        facts["rank"] = report.rank
    if not may_start_again(code - 128):  # else `restarted` may follow
        events.notify(event, report.summary or message, **facts)
    pressed_twice = code == 128 + signal.SIGINT and report.summary
    events.close(2.0 if pressed_twice else events.LIMIT_S)
