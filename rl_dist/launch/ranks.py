"""Start and watch the ranks: here, as new processes, or under torchrun.

Signals: the first SIGINT, SIGTERM, SIGUSR1 or SIGHUP reaches every rank once the launcher, the
process group or any one rank has it; ranks stop at their next iteration end, save and leave, and
`launch` returns 128 + the signal's number. A second SIGINT or SIGTERM ends everything immediately.
Ranks of a killed launcher get SIGTERM from the kernel and leave by themselves.

Errors in a rank end the job. A ValueError (UserError included) is a message for the user: printed
once (under torchrun once on each machine) as `error: ...`, with its exit code, mostly 2. Anything
else: traceback and rank, once, exit code 1. The traceback of either goes to the rank's log file. A
rank that ends without a report, by a signal or `os._exit`, has failed, whatever its exit code. With
`max_restarts`, all ranks start again after anything but a message for the user or a stop signal;
`restart_count()` counts these starts for `fn`.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

from rl_dist.checkpoint.store import iteration_in_name, latest_checkpoint
from rl_dist.errors import (
    one_line,
    outlive_readers,
    print_error_once,
    report_to_caller,
    restarts_refused,
)
from rl_dist.process_group import process_ends
from rl_dist.process_group.join import (
    ADDRESS_VARIABLES,
    RESTART_COUNT,
    check_copies,
    elastic_count,
    may_start_again,
    requested_address,
)
from rl_dist.process_group.process_ends import (
    EXIT_GRACE_S,
    FAILED_GRACE_S,
    SCRIPT_RAN_AGAIN,
    STOP_SIGNALS,
    ReportPage,
    StopFlag,
    how_it_ended,
    leave_with_parent,
    stopped_in_evaluation,
    unnamed_file,
)
from rl_dist.process_group.watchdog import JOB_DIR_VARIABLE
from rl_dist.process_group.world import (
    close_any_world,
    connection_broke,
    leave_world,
    stop_flag,
    threads_per_rank,
)
from rl_dist.run_dir import RunDir, launcher_pid
from rl_dist.telemetry import events

# for the log files only: `launch` prints to the console, once
logger = logging.getLogger(__name__)
logger.addHandler(logging.NullHandler())
# characters, of up to six bytes each in a page
LONGEST_TRACEBACK = 50_000
LONGEST_SUMMARY = 5_000
AGENT_PATIENCE_S = 10.0  # for torchrun, which looks after its ranks every 0.1 s
PREFIX = "rl_dist_"  # of a job directory, which only this user may enter
POLL_S = 0.05
DEATH_GRACE_S = 5.0  # for the other ranks to report that they failed, too
RankFunction = Callable[..., int | None]


@dataclass
class RankReport:
    """How one rank, or a group of them, ended."""

    exit_code: int
    rank: int = 0
    failed: bool = False  # it raised or died, instead of returning an exit code
    summary: str = ""  # for the user, in one line
    traceback: str = ""  # unless the user made a mistake
    by_user: bool = False  # a restart would not help
    # 0: it is the cause; 1: it names another rank as the cause; 2: it only lost a connection
    consequence: int = 0


# ---- in a rank


def run_guarded(fn: RankFunction, args: tuple[Any, ...]) -> RankReport:
    """Run `fn(*args)` and report how it ended."""
    rank = int(os.environ.get("RANK", 0))
    try:
        return RankReport(int(fn(*args) or 0), rank)
    except BaseException as error:  # SystemExit too: it may come from the user's code
        logger.exception("rank %d failed", rank)
        failure = RankReport(1, rank, failed=True, consequence=2 * connection_broke(error))
        if isinstance(error, ValueError):
            failure.summary = one_line(error, LONGEST_SUMMARY, named=False)
            failure.exit_code = getattr(error, "exit_code", 2)
            failure.by_user = failure.exit_code == 2
        else:
            failure.summary = f"rank {rank} failed with {one_line(error, LONGEST_SUMMARY)}"
            failure.traceback = traceback.format_exc()[-LONGEST_TRACEBACK:]
        return failure


def run_as_rank(
    fn: RankFunction,
    args: tuple[Any, ...],
    variables: Mapping[str, str],
    page: ReportPage,
    launcher_pid: int,
) -> None:
    """Run `fn` as this rank's process; stop signals are blocked until `install`."""
    for name in ADDRESS_VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(variables)
    outlive_readers()
    # A spawned process would spawn its own children, such as a DataLoader's workers: seconds each,
    # and only for what can be pickled. They must start as they do without ranks.
    multiprocessing.set_start_method(None, force=True)
    stop_flag.install()  # a second signal ends nothing here: the launcher counts Ctrl-C
    # Python restores their deadly defaults while it shuts down
    atexit.register(stop_flag.replace, signal.SIG_IGN)
    leave_with_parent(launcher_pid)
    process_ends.report_to(page)
    report = run_guarded(fn, args)
    process_ends.report(**vars(report))
    events.close()
    if report.failed:  # without teardown, which could wait for the other ranks forever
        flush_and_exit(report.exit_code or 1)
    close_any_world()


def flush_and_exit(code: int) -> NoReturn:
    """Flush output and logs, and end this process without teardown."""
    sys.stdout.flush()
    sys.stderr.flush()
    logging.shutdown()
    os._exit(code)


def restart_count() -> int:
    """Return how many times the ranks were started again before this start."""
    return elastic_count(RESTART_COUNT)


# ---- in the launcher


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
    signals: StopFlag = field(default_factory=StopFlag)
    job_dir: str = ""
    processes: list[BaseProcess] = field(default_factory=list)  # in rank order
    pages: list[ReportPage] = field(default_factory=list)  # in rank order
    # ranks that had ended when the first failure was seen
    first_dead: list[int] = field(default_factory=list)

    def run(self) -> RankReport:
        """Start the ranks, again while that may help; return how the last ones ended."""
        with tempfile.TemporaryDirectory(prefix=PREFIX) as self.job_dir:
            self.signals.install()
            try:
                while self._may_restart(report := self._run_once()):
                    pass
                return report
            finally:
                self.signals.uninstall()

    def _run_once(self) -> RankReport:
        """Start all ranks once and wait for their end."""
        self.processes, self.pages, self.first_dead = [], [], []
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
        with _prepared_for_starts(self.threads or threads_per_rank(self.num_ranks)):
            for rank in range(self.num_ranks):
                page = ReportPage()
                args = self.fn, self.args, self._variables(rank), page, os.getpid()
                process = spawn.Process(target=run_as_rank, args=args, name=f"rank {rank}")
                process.start()
                self.processes.append(process)
                self.pages.append(page)

    def _variables(self, rank: int) -> dict[str, str]:
        """Return the environment of a rank, under torchrun's names."""
        variables = {JOB_DIR_VARIABLE: self.job_dir, RESTART_COUNT: str(self.restarts)}
        variables |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
        variables |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(self.num_ranks))
        address = map(str, requested_address() or ())  # none: they meet in `job_dir`
        return variables | dict(zip(ADDRESS_VARIABLES, address, strict=False))

    def _wait(self) -> None:
        """Wait for all ranks; pass a stop signal on, and kill those that a failure left behind."""
        passed_on = False
        deadline_s: float | None = None
        while len(self._ended()) < self.num_ranks:
            time.sleep(POLL_S)
            if not passed_on and (signum := self._stop_signal()):
                passed_on = True
                self._kill(signum)
            if deadline_s is None and (grace_s := self._grace_s()) is not None:
                deadline_s = time.monotonic() + grace_s
            if self.signals.insists or (deadline_s is not None and time.monotonic() > deadline_s):
                self._kill(signal.SIGKILL)

    def _stop_signal(self) -> int:
        """Return the first stop signal to the launcher or to a rank that it ended; 0: none came.

        A rank handles stop signals until all is saved. The final evaluation is simply ended by one.
        """
        codes = {-process.exitcode for process in self.processes if process.exitcode}
        return self.signals.signum or next((s for s in STOP_SIGNALS if s in codes), 0)

    def _grace_s(self) -> float | None:
        """Return how long ranks may still run; None: without a limit."""
        reports = self._reports()
        ended = self._ended()
        if any(rank not in reports or reports[rank].failed for rank in ended):
            self.first_dead = ended
            return DEATH_GRACE_S
        if len(reports) < self.num_ranks:
            return None
        return FAILED_GRACE_S if any(r.failed for r in reports.values()) else EXIT_GRACE_S

    def _reports(self) -> dict[int, RankReport]:
        pages = {rank: page.read() for rank, page in enumerate(self.pages)}
        return {rank: RankReport(**facts) for rank, facts in pages.items() if facts}

    def _ended(self) -> list[int]:
        return [rank for rank, p in enumerate(self.processes) if p.exitcode is not None]

    def _kill(self, signum: int) -> None:
        for process in self.processes:
            if process.exitcode is None:
                with suppress(ProcessLookupError):  # it has just ended
                    os.kill(process.pid or 0, signum)

    def _outcome(self) -> RankReport:
        """Return the report of the group.

        A rank that died without a report is the cause; other ranks' connection errors follow from
        it.
        """
        reports = self._reports()
        signum = self._stop_signal()
        if self.signals.insists:
            summary = "stopped immediately, nothing saved since the last checkpoint"
            return RankReport(128 + signum, summary=summary)
        if signum and any(process.exitcode == -signum for process in self.processes):
            return RankReport(128 + signum, summary=stopped_in_evaluation(signum, self.run_dir))
        failed = [report for report in reports.values() if report.failed]
        failed.sort(key=lambda report: report.consequence)
        silent = [rank for rank in self.first_dead if rank not in reports]
        if silent and not (failed and failed[0].consequence == 0):
            process = self.processes[silent[0]]
            code = process.exitcode or 0
            summary = f"rank {silent[0]} (process {process.pid}) {how_it_ended(code)}"
            again = code == SCRIPT_RAN_AGAIN
            return RankReport(1 + again, silent[0], failed=True, summary=summary, by_user=again)
        if failed:
            return failed[0]
        return RankReport(next((r.exit_code for r in reports.values() if r.exit_code), 0))

    def _may_restart(self, report: RankReport) -> bool:
        """Decide to start all ranks again or not; print why and from where."""
        hopeless = not report.failed or report.by_user or self.signals.signum
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
def _prepared_for_starts(threads: int) -> Iterator[None]:
    """Block stop signals, and set the variable that OpenMP of a new process reads first."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    limit = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = str(threads)
    try:
        yield
    finally:
        del os.environ["OMP_NUM_THREADS"]
        if limit is not None:
            os.environ["OMP_NUM_THREADS"] = limit
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextmanager
def store_in_memory(path: str) -> Iterator[None]:
    """Keep the file in which ranks will meet in memory, on Linux.

    A full disk could cut a record short, and torch's FileStore waits forever for the rest.
    """
    if sys.platform != "linux":
        yield
        return
    memory = unnamed_file()
    try:
        Path(path).symlink_to(f"/proc/{os.getpid()}/fd/{memory}")
        yield
    finally:
        os.close(memory)


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

    Under torchrun (RANK is set), and with one rank that must not restart, `fn` runs in this
    process. Otherwise `fn` must be importable and `args` picklable: each rank is a new process.

    Args:
        max_restarts: how many times all ranks start again after one died or failed.
        run_dir: where `fn` keeps its checkpoints, to print where a restart continues.
        threads: that each rank will set; 0: the cores, shared by the ranks.
        copies: a scheduler may start several copies of this command, each of which works alone.

    Returns:
        0, or the first non-zero code a rank returned; 1 a rank failed; 2 bad input; 128 + signal.
    """
    restarts = restart_count()
    if "RANK" not in os.environ and not copies:
        check_copies()
    elif restarts_refused():
        return 2
    if "RANK" in os.environ or (num_ranks == 1 and not max_restarts):
        report = _run_here(fn, args)
    else:
        group = RankGroup(fn, args, num_ranks, max_restarts, run_dir, threads)
        report, restarts = group.run(), group.restarts
    line = f"error: {report.summary}" if report.failed else report.summary
    if report.traceback:  # of one rank only: no other rank prints it
        sys.stderr.write(f"{report.traceback}{line}\n")
        sys.stderr.flush()
        report_to_caller(error=report.summary)
    elif line:
        print_error_once(line)
    may_restart = may_start_again(report.exit_code - 128)
    if run_dir is not None and os.environ.get("RANK", "0") == "0":
        pid, code = launcher_pid(), report.exit_code
        RunDir(run_dir).record_exit(pid, code, report.summary, may_restart=may_restart)
        process_ends.report(exit_recorded=True)
    if not may_restart:  # else the event `restarted` may follow
        _notify_end(report, restarts)
    pressed_twice = report.exit_code == 128 + signal.SIGINT and report.summary
    events.close(2.0 if pressed_twice else events.LIMIT_S)
    if report.failed and leave_world():
        # closing the process group could wait for ranks that are inside a collective
        atexit.register(flush_and_exit, report.exit_code or 1)
    return report.exit_code


def _run_here(fn: RankFunction, args: tuple[Any, ...]) -> RankReport:
    stop_flag.install(second_ends=True)
    report = run_guarded(fn, args)
    if not report.failed:
        close_any_world()
    if report.exit_code - 128 in STOP_SIGNALS and "TORCHELASTIC_RUN_ID" in os.environ:
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
    deadline_s = time.monotonic() + AGENT_PATIENCE_S
    while not stop_flag.signum and time.monotonic() < deadline_s:
        time.sleep(POLL_S)


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
    events.notify(event, report.summary or message, **facts)
