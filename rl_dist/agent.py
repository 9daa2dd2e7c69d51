"""The ranks of one machine, started, watched and restarted by torch's agent."""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.distributed import HashStore
from torch.distributed.elastic.agent.server import WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.api import RunResult
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from rl_dist import events
from rl_dist.checkpoint import load_latest
from rl_dist.rank import RankFunction, Report, failure_reports, run_as_rank
from rl_dist.rendezvous import DEFAULT_ADDRESS, DEFAULT_PORT, asked_for_address
from rl_dist.world import STOP_SIGNALS, stop_flag, threads_per_rank

DEATH_GRACE_S = 5.0  # for the other ranks to notice that one has failed


class Job:
    """Ranks on this machine, started by torch's agent and watched by this process.

    The agent runs in a thread whose stop signals are blocked. The ranks inherit the block, so no
    signal can meet a rank before its handlers stand; the main thread passes signals on.
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
        self.address: tuple[str, int] | None = None  # where the ranks meet; None: in `job_dir`
        self.job_dir = ""
        self.relay: _Relay
        self.start = _Start([])  # the latest
        self.result: RunResult | None = None
        self.failure: BaseException | None = None  # of the agent itself
        self.cause = Report(exit_code=1)  # why the latest start failed
        self.restarts = 0
        self.ended = False  # by a second Ctrl-C

    def run(self) -> Report:
        """Start the ranks, pass signals on, wait, and tell what came of it."""
        try:
            self.address = asked_for_address()
        except ValueError as error:
            return Report(exit_code=2, message=f"error: {error}", summary=str(error))
        with tempfile.TemporaryDirectory(prefix="rl_dist_") as self.job_dir, self._environment():
            agent = threading.Thread(target=self._run_agent, name="agent", daemon=True)
            self.relay = _Relay()
            try:
                agent.start()
                while agent.is_alive():
                    agent.join(0.1)
                    self._watch()
            finally:
                if agent.is_alive():
                    self.start.kill(signal.SIGKILL)
                self.relay.close()
        if self.ended:
            words = "stopped at once, nothing saved since the last checkpoint"
            return Report(exit_code=128 + self.relay.signums[0], message=words, summary=words)
        if self.failure:
            raise self.failure
        if self.result is None or self.result.is_failed():
            signum = self.relay.signums[0] if self.relay.signums else 0
            if signum and any(process.exitcode == -signum for process in self.start.processes):
                words = f"stopped by {signal.Signals(signum).name} after training was saved"  # while judging
                return Report(exit_code=128 + signum, message=words, summary=words)
            return self.cause
        codes = [code or 0 for _, code in sorted(self.result.return_values.items())]
        return Report(exit_code=next((code for code in codes if code), 0))

    def _run_agent(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            spec = WorkerSpec(
                role="rank",
                local_world_size=self.num_ranks,
                entrypoint=run_as_rank,
                args=(self.fn, self.args, self.job_dir, os.getpid(), self.address is not None),
                rdzv_handler=_Alone(),
                max_restarts=self.max_restarts,
                master_addr=self.address and self.address[0],
                master_port=self.address and self.address[1],
            )
            self.result = _Agent(self, spec).run()
        except BaseException as error:  # handed to the main thread, which raises it
            self.failure = error

    def _watch(self) -> None:
        """Pass signals on to ranks; end what a second Ctrl-C or a failed rank leaves behind."""
        start = self.start  # the agent may put another in its place
        start.look()
        if self.relay.signums and start.processes and not start.told:
            start.told = True
            start.kill(self.relay.signums[0])
        self.ended = self.relay.signums.count(signal.SIGINT) > 1
        if self.ended or time.monotonic() - start.failed_at_s > DEATH_GRACE_S:
            start.kill(signal.SIGKILL)

    def started(self, processes: list[Any]) -> None:
        """Take over the processes of a start; called by the agent."""
        self.start = _Start(processes)

    def may_restart(self, left: int) -> bool:
        """Whether ranks that have ended shall start again; says so. Called by the agent."""
        self.start.look()
        self.cause = self.start.cause(self.job_dir)
        if not left or self.cause.by_user or self.relay.signums:
            return False
        self.restarts += 1
        message = f"{self.cause.summary}: restart {self.restarts} of {self.max_restarts}"
        iteration = None
        if self.run_dir is not None:
            newest = load_latest(self.run_dir)
            iteration = newest.state["iteration"] if newest else 0
            message += f", going on from iteration {iteration}" if newest else " from the beginning, without checkpoint"
        say(message)
        where = {} if iteration is None else {"iteration": iteration}
        events.notify("restarted", message, restart=self.restarts, rank=self.cause.rank, **where)
        for report in Path(self.job_dir).glob("rank_*.json"):
            report.unlink()
        Path(self.job_dir).mkdir(mode=0o700, exist_ok=True)  # a cleaner of temporary files may have taken it
        return True

    @contextmanager
    def _environment(self) -> Iterator[None]:
        """Variables that the agent and new processes read before any of our code runs in them."""
        variables = {"OMP_NUM_THREADS": str(threads_per_rank(self.num_ranks))}
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        _quieten_agent()
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value


class _Agent(LocalElasticAgent):
    """Torch's agent; the job learns of new processes and has a say in restarts."""

    def __init__(self, job: Job, spec: WorkerSpec) -> None:
        super().__init__(spec, DefaultLogsSpecs(log_dir=f"{job.job_dir}/torch"), start_method="spawn")
        self._job = job

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        pids = super()._start_workers(worker_group)
        self._job.started(self._pcontext._pc.processes)  # type: ignore[union-attr]
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)  # where one has failed, all have ended when this returns
        failed = result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY)
        if failed and not self._job.may_restart(self._remaining_restarts):
            self._remaining_restarts = 0
        return result


class _Alone(RendezvousHandler):
    """Where the only agent of a job meets nobody else: in memory, not in a file or at a port."""

    def get_backend(self) -> str:
        return "alone"

    def get_run_id(self) -> str:
        return "alone"

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo(DEFAULT_ADDRESS, DEFAULT_PORT))

    def num_nodes_waiting(self) -> int:
        return 0

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def shutdown(self) -> bool:
        return True


@dataclass
class _Start:
    """The processes of the ranks from one start to the next."""

    processes: list[Any]  # in rank order; the agent sets their return codes
    told: bool = False  # whether the signal was passed on to them
    first_dead: list[int] = field(default_factory=list)  # ranks that were dead when one was first seen so
    failed_at_s: float = math.inf

    def look(self) -> None:
        """Remember which ranks died first, and when."""
        if not self.first_dead:
            self.first_dead = [rank for rank, p in enumerate(self.processes) if p._popen.returncode]
            self.failed_at_s = time.monotonic() if self.first_dead else math.inf

    def kill(self, signum: int) -> None:
        """Send a signal to every rank that has not ended."""
        for process in self.processes:
            if process.pid and process._popen.returncode is None:
                with suppress(ProcessLookupError):  # it has just left
                    os.kill(process.pid, signum)

    def cause(self, job_dir: str) -> Report:
        """What went wrong first: a death without a word explains the others' complaints."""
        reports = failure_reports(job_dir)
        dead = [rank for rank in self.first_dead if not (reports and self.processes[rank].exitcode == -signal.SIGTERM)]
        for rank in dead:  # those left out were ended by the agent, because of the one that reported
            process = self.processes[rank]
            if process.exitcode < 0:
                words = f"rank {rank} (process {process.pid}) was ended by {signal.Signals(-process.exitcode).name}"
                return Report(exit_code=1, message=f"error: {words}", rank=rank, summary=words)
        silent = sorted(set(dead) - {report.rank for report in reports})
        if reports and not silent:
            return reports[0]
        rank = silent[0] if silent else 0
        words = f"rank {rank} ended with code {self.processes[rank].exitcode} and without a word"
        return Report(exit_code=1, message=f"error: {words}", rank=rank, summary=words)


class _Relay:
    """Collects the stop signals that reach the launcher; one key press counts once."""

    def __init__(self) -> None:
        self.signums: list[int] = []
        self.previous = {
            s: signal.signal(s, self._on_signal)
            for s in STOP_SIGNALS
            if not (s == signal.SIGHUP and signal.getsignal(s) is signal.SIG_IGN)  # nohup
        }
        self.last_s = 0.0

    def _on_signal(self, signum: int, frame: Any) -> None:
        now = time.monotonic()
        if not self.signums or now - self.last_s > stop_flag.SAME_KEYPRESS_S:
            self.signums.append(signum)
        self.last_s = now

    def close(self) -> None:
        for signum, handler in self.previous.items():
            signal.signal(signum, handler)


def _quieten_agent() -> None:
    """Torch's agent reports at length what `Job` says in a line; LOGLEVEL brings it back."""
    if "LOGLEVEL" in os.environ:
        return
    for name in ("torch.distributed.elastic", "torch.multiprocessing.spawn"):
        logging.getLogger(name).propagate = False
        logging.getLogger(name).addHandler(logging.NullHandler())


def say(message: str) -> None:
    """Tell the user, on stderr."""
    print(message, file=sys.stderr, flush=True)
