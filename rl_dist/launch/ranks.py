"""Start the ranks in this process, in new processes or under torchrun, and watch them.

SIGINT, SIGTERM, SIGUSR1 and SIGHUP stop the job. The launcher or any rank may receive the signal;
after Ctrl-C, all of them receive it. Then all ranks finish their iteration, save a checkpoint and
exit. A second SIGINT or SIGTERM ends everything immediately. If the launcher is killed, its ranks
receive SIGTERM; ranks that have not yet joined the other ranks receive SIGKILL.

An error in a rank ends the job. A ValueError, such as a UserError, is meant for the user: its
message is printed once (under torchrun once on each machine) as `error: ...`, and the exit code is
usually 2. Any other error is printed once with its traceback and rank; the exit code is 1. A rank
that ends without a report, because of a signal or `os._exit`, counts as failed even if its exit
code is 0.
"""

import atexit
import math
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rl_dist.checkpoint.store import iteration_in_name, latest_checkpoint
from rl_dist.errors import print_error_once, report_to_caller, restarts_refused
from rl_dist.files import is_first
from rl_dist.launch.one_rank import RankFunction, RankReport, run_as_rank, run_guarded
from rl_dist.process_group import process_ends
from rl_dist.process_group.join import (
    JOB_DIR_VARIABLE,
    RESTART_COUNT,
    elastic_count,
    may_start_again,
)
from rl_dist.process_group.process_ends import (
    SCRIPT_RAN_AGAIN,
    STOP_SIGNALS,
    TEARDOWN_S,
    ReportPage,
    StopFlag,
    how_it_ended,
    stopped_in_evaluation,
)
from rl_dist.process_group.world import close_world, stop_flag, threads_per_rank
from rl_dist.run_dir import RunDir, launcher_pid
from rl_dist.telemetry import events

# longest wait for a signal from torchrun, whose agent checks the ranks every 0.1 s
AGENT_PATIENCE_S = 10.0
POLL_S = 0.05
DEATH_GRACE_S = 5.0  # longest wait for the reports of other ranks after a rank has failed


def restart_count() -> int:
    """Return how many times the ranks of this job have been restarted so far."""
    return elastic_count(RESTART_COUNT)


# ---- in the launcher


@dataclass
class LocalJob:
    """One start of a job whose ranks are new processes on this machine."""

    fn: RankFunction
    args: tuple[object, ...]
    num_ranks: int
    threads: int  # threads of each rank
    directory: RunDir | None
    stop: StopFlag  # the stop flag of the launcher
    processes: list[BaseProcess] = field(default_factory=list)  # in rank order
    pages: list[ReportPage] = field(default_factory=list)  # in rank order
    # the ranks that `_wait` first noticed to have died without a report; later ones are not added
    silent: list[int] = field(default_factory=list)

    def run(self, restarts: int) -> RankReport:
        """Start all ranks, wait for them and return one report for the whole job."""
        store = os.memfd_create("store")
        with tempfile.TemporaryDirectory(prefix="rl_dist_") as job_dir:
            # Keep the file of the store in memory: on a full disk, only a part of a record might be
            # written, and torch's FileStore would wait forever for the rest of the record.
            Path(job_dir, f"store_{restarts}").symlink_to(f"/proc/{os.getpid()}/fd/{store}")
            variables = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(self.num_ranks))
            variables |= {JOB_DIR_VARIABLE: job_dir, RESTART_COUNT: str(restarts)}
            try:
                with _prepared_for_starts(self.threads):
                    self._start(variables)
                self._wait()
            finally:
                self._kill(signal.SIGKILL)
                for process in self.processes:
                    process.join()
                os.close(store)
        return self._outcome()

    def _start(self, variables: dict[str, str]) -> None:
        """Start all ranks with these environment variables."""
        spawn = multiprocessing.get_context("spawn")
        for rank in range(self.num_ranks):
            numbered = variables | dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
            self.pages.append(ReportPage())
            arguments = self.fn, self.args, numbered, self.pages[rank], os.getpid()
            process = spawn.Process(target=run_as_rank, args=arguments)
            process.start()
            self.processes.append(process)

    def _wait(self) -> None:
        """Wait until all ranks have ended or a deadline has passed; pass on a stop signal once."""
        passed_on = False
        deadline_s = math.inf
        while time.monotonic() < deadline_s and not self.stop.insists:
            time.sleep(POLL_S)
            ended = {rank for rank, p in enumerate(self.processes) if p.exitcode is not None}
            reports = self._reports()
            # a rank that ends in order sends its report first
            self.silent = self.silent or sorted(ended - reports.keys())
            if len(ended) == self.num_ranks:
                return
            if not passed_on and (signum := self._stop_signal()):
                passed_on = True
                self._kill(signum)
            # A failure, or the report of the last rank, sets the deadline. If ranks have only lost
            # their connection, another rank is the cause. On a busy machine, the report of that
            # rank may come late, so wait longer.
            failed = [reports[rank] for rank in ended & reports.keys() if reports[rank].failed]
            patience_s = math.inf
            if self.silent or any(report.consequence < 2 for report in failed):
                patience_s = DEATH_GRACE_S
            elif failed or len(reports) == self.num_ranks:
                patience_s = TEARDOWN_S
            deadline_s = min(deadline_s, time.monotonic() + patience_s)

    def _kill(self, signum: int) -> None:
        """Send a signal to all ranks that are still running."""
        for process in self.processes:
            if process.exitcode is None:
                with suppress(ProcessLookupError):  # the rank has just ended
                    os.kill(process.pid or 0, signum)

    def _outcome(self) -> RankReport:
        """Return one report for the whole job.

        If a rank reports itself as the cause of a failure, return its report. Otherwise, if a rank
        died without a report, this rank is the cause: the other ranks failed only because they lost
        their connection to it.
        """
        signum = self._stop_signal()
        if self.stop.insists:
            summary = "stopped immediately; nothing was saved after the last checkpoint"
            return RankReport(128 + signum, summary=summary)
        if signum and any(process.exitcode == -signum for process in self.processes):
            run_dir = self.directory.path if self.directory else None
            return RankReport(128 + signum, summary=stopped_in_evaluation(signum, run_dir))
        reports = sorted(self._reports().values(), key=lambda report: report.consequence)
        failed = [report for report in reports if report.failed]
        reported_cause = failed and failed[0].consequence == 0
        if self.silent and not reported_cause:
            rank = self.silent[0]
            process = self.processes[rank]
            code = process.exitcode or 0
            summary = f"rank {rank} (process {process.pid}) {how_it_ended(code)}"
            return RankReport(2 if code == SCRIPT_RAN_AGAIN else 1, rank, True, summary)
        if failed:
            return failed[0]
        return RankReport(max(report.exit_code for report in reports))

    def _stop_signal(self) -> int:
        """Return the stop signal that the launcher received or that killed a rank, or 0.

        While they train, ranks handle stop signals themselves. During the final evaluation,
        everything is already saved, so a stop signal kills the rank.
        """
        codes = {-process.exitcode for process in self.processes if process.exitcode}
        return self.stop.signum or next((s for s in STOP_SIGNALS if s in codes), 0)

    def _reports(self) -> dict[int, RankReport]:
        pages = {rank: page.read() for rank, page in enumerate(self.pages)}
        return {rank: RankReport(**facts) for rank, facts in pages.items() if facts}


def _announce_restart(
    report: RankReport, restarts: int, max_restarts: int, directory: RunDir | None
) -> None:
    """Print why the job restarts, and from which iteration; send event `restarted`."""
    message = f"{report.summary}: restart {restarts} of {max_restarts}"
    facts = {"restart": restarts, "rank": report.rank}
    if directory is not None:
        checkpoint = latest_checkpoint(directory.path)
        facts["iteration"] = iteration_in_name(checkpoint) if checkpoint else 0
        message += f", continuing from iteration {facts['iteration']}"
        directory.update_state(phase="restarting", restarts=restarts)
    print(message, file=sys.stderr, flush=True)
    events.notify("restarted", message, **facts)


@contextmanager
def _prepared_for_starts(threads: int) -> Iterator[None]:
    """Block stop signals and set OMP_NUM_THREADS while processes are started."""
    resource_tracker.ensure_running()  # starting the tracker later would unblock the signals
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    user_value = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = str(threads)
    try:
        yield
    finally:
        del os.environ["OMP_NUM_THREADS"]
        if user_value is not None:
            os.environ["OMP_NUM_THREADS"] = user_value
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


# ---- launch a job


def launch(fn: RankFunction, args: tuple[Any, ...], num_ranks: int, **options: Any) -> int:
    """Run `fn(*args)` on every rank as `run_ranks` does, and return the job's exit code.

    The code is 1 if a rank failed, 2 for a user error, 128 + n if signal n stopped the job, and
    otherwise the largest code that a rank returned, normally 0.
    """
    return run_ranks(fn, args, num_ranks, **options).exit_code


def run_ranks(
    fn: RankFunction,
    args: tuple[object, ...],
    num_ranks: int,
    *,
    max_restarts: int = 0,
    directory: RunDir | None = None,
    threads: int = 0,
) -> RankReport:
    """Run `fn(*args)` on every rank; return one report for the whole job.

    Under torchrun, or with a single rank and no restarts, `fn` runs in this process. Otherwise each
    rank is a new process; `fn` must be importable and `args` picklable.

    Args:
        max_restarts: how often all ranks may be restarted after one of them has died or failed.
            There is no restart after a user error or a stop signal.
        directory: run directory of `fn`, for messages and state.json.
        threads: number of threads of each rank; 0: `threads_per_rank` decides.
    """
    if restarts_refused():
        return RankReport(2)
    restarts = restart_count()
    if "RANK" in os.environ or (num_ranks == 1 and not max_restarts):
        report = _run_here(fn, args)
    else:
        threads = threads or threads_per_rank(num_ranks)
        stop = StopFlag()
        stop.install()
        try:
            while True:
                report = LocalJob(fn, args, num_ranks, threads, directory, stop).run(restarts)
                is_over = not report.failed or report.exit_code == 2 or stop.signum
                if is_over or restarts >= max_restarts:
                    break
                restarts += 1
                _announce_restart(report, restarts, max_restarts, directory)
        finally:
            stop.uninstall()
    _print_end(report)
    may_restart = may_start_again(report.exit_code - 128)  # torchrun may restart this rank
    if directory is not None and is_first():
        code = report.exit_code
        directory.record_exit(launcher_pid(), code, report.summary, may_restart=may_restart)
        process_ends.report(exit_recorded=True)
    if not may_restart:  # a restart sends its own event, `restarted`
        _notify_end(report, restarts)
    events.close()
    if report.failed and dist.is_initialized() and dist.get_world_size() > 1:
        # Exit without leaving the process group: leaving it could wait for ranks that are inside a
        # collective call.
        atexit.register(process_ends.flush_and_leave, report.exit_code or 1)
    else:
        close_world()
    return report


def _run_here(fn: RankFunction, args: tuple[object, ...]) -> RankReport:
    """Run `fn(*args)` in this process, which is a rank."""
    stop_flag.install(second_ends=True)
    report = run_guarded(fn, args)
    if not report.failed:
        close_world()
    if may_start_again(signal.SIGTERM) and report.exit_code - 128 in STOP_SIGNALS:
        # When a host joins or leaves, the torchrun of another host may notice the change first and
        # stop its ranks; this rank then stops together with them. Wait until the torchrun of this
        # host sends the signal, too. If the rank exited earlier, torchrun would count the exit as a
        # failure, and would use up a restart or end the job.
        deadline_s = time.monotonic() + AGENT_PATIENCE_S
        while not stop_flag.signum and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
    stop_flag.uninstall()
    return report


def _print_end(report: RankReport) -> None:
    """Print the error or the summary in a report, if there is one."""
    line = f"error: {report.summary}" if report.failed else report.summary
    if report.traceback:  # no other rank prints this traceback
        print(report.traceback + line, file=sys.stderr, flush=True)
        report_to_caller(error=report.summary)
    elif line:
        print_error_once(line)


def _notify_end(report: RankReport, restarts: int) -> None:
    """Send the event for the end of a job; see `rl_dist.telemetry.events`."""
    code = report.exit_code
    event = "stopped" if code - 128 in STOP_SIGNALS else "failed" if code else "finished"
    message = report.summary or f"{event} with code {code}"
    events.notify(event, message, exit_code=code, restarts=restarts, rank=report.rank)
