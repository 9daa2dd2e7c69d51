"""The ranks of one machine, started by torch's elastic agent and watched."""

from __future__ import annotations

import json
import logging
import math
import multiprocessing
import multiprocessing.process
import os
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig as ElasticConfig
from torch.distributed.launcher.api import elastic_launch

from rl_dist.rank import RankFunction, Report, run_as_rank
from rl_dist.world import STOP_SIGNALS, stop_flag, threads_per_rank

DEATH_GRACE_S = 5.0  # for the other ranks to notice that one has failed


class Job:
    """Ranks on this machine, started by torch's agent and watched by this process.

    The agent runs in a thread whose stop signals are blocked. The ranks inherit the block, so no
    signal can meet a rank before its handlers stand; the main thread passes signals on.
    """

    def __init__(self, fn: RankFunction, args: tuple[Any, ...], num_ranks: int) -> None:
        self.fn, self.args, self.num_ranks = fn, args, num_ranks
        self.exit_codes: dict[int, int] = {}
        self.failure: BaseException | None = None
        self.foreign = set(multiprocessing.active_children())
        self.ranks: list[Any] = []  # the processes of the ranks, in rank order
        self.told = False  # whether the signal was passed on to them
        self.failed_at_s = math.inf  # when a rank was first seen dead
        self.first_dead: list[int] = []  # ranks that were dead by then
        self.ended = False  # by a second Ctrl-C

    def run(self) -> int:
        """Start the ranks, pass signals on, wait, and say what went wrong."""
        with tempfile.TemporaryDirectory(prefix="rl_dist_") as job_dir, self._environment():
            agent = threading.Thread(target=self._run_agent, args=(job_dir,), name="agent", daemon=True)
            relay = _Relay()
            try:
                agent.start()
                while agent.is_alive():
                    agent.join(0.1)
                    self._watch(relay)
            finally:
                if agent.is_alive():
                    self._kill_ranks(signal.SIGKILL)
                relay.close()
            if self.ended:
                say("stopped at once, nothing saved since the last checkpoint")
                return 128 + relay.signums[0]
            if isinstance(self.failure, ChildFailedError):
                return self._explain(job_dir, self.failure)
        if self.failure:
            raise self.failure
        return next((code for _, code in sorted(self.exit_codes.items()) if code), 0)

    def _run_agent(self, job_dir: str) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        config = ElasticConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=self.num_ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint=f"{job_dir}/rendezvous",
            rdzv_configs={"store_type": "file"},  # a private file: no port that others could reach
            local_addr="127.0.0.1",
            max_restarts=0,
            start_method="spawn",
            logs_specs=DefaultLogsSpecs(log_dir=f"{job_dir}/torch"),
        )
        try:
            codes = elastic_launch(config, run_as_rank)(self.fn, self.args, job_dir, os.getpid())
            self.exit_codes = {rank: code or 0 for rank, code in codes.items()}
        except BaseException as error:  # handed to the main thread, which raises or explains it
            self.failure = error

    def _watch(self, relay: _Relay) -> None:
        """Pass signals on to ranks; end what a second Ctrl-C or a failed rank leaves behind."""
        if len(self.ranks) < self.num_ranks:
            # active_children() would reap processes under the agent's feet
            children = set(multiprocessing.process._children) - self.foreign  # type: ignore[attr-defined]
            self.ranks = sorted(children, key=lambda process: process._identity)
        elif relay.signums and not self.told:
            self.told = True
            self._kill_ranks(relay.signums[0])
        if not self.first_dead:  # the agent sets return codes
            self.first_dead = [rank for rank, p in enumerate(self.ranks) if p._popen.returncode]
            self.failed_at_s = time.monotonic() if self.first_dead else math.inf
        self.ended = relay.signums.count(signal.SIGINT) > 1
        if self.ended or time.monotonic() - self.failed_at_s > DEATH_GRACE_S:
            self._kill_ranks(signal.SIGKILL)

    def _kill_ranks(self, signum: int) -> None:
        for process in self.ranks:
            if process.pid and process._popen.returncode is None:
                with suppress(ProcessLookupError):  # it has just left
                    os.kill(process.pid, signum)

    def _reports(self, job_dir: str) -> list[Report]:
        """Reports of failed ranks, the cause first."""
        found = [Report(**json.loads(path.read_text())) for path in Path(job_dir).glob("rank_*.json")]
        return sorted(found, key=lambda report: report.at_ns)

    def _explain(self, job_dir: str, error: ChildFailedError) -> int:
        """Print the cause once and return the job's exit code."""
        reports = self._reports(job_dir)
        for rank in self.first_dead:
            code = self.ranks[rank].exitcode or 0
            if code < 0:
                pid, name = self.ranks[rank].pid, signal.Signals(-code).name
                say(f"error: rank {rank} (process {pid}) was ended by {name}")
                return 1
        if not reports:
            rank, failure = error.get_first_failure()
            say(f"error: rank {rank} ended with code {failure.exitcode} and without a word")
            return 1
        say(reports[0].message)
        return reports[0].exit_code or 1

    @contextmanager
    def _environment(self) -> Iterator[None]:
        """Variables that the agent and new processes read before any of our code runs in them."""
        variables = {
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "OMP_NUM_THREADS": str(threads_per_rank(self.num_ranks)),
        }
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
    """Torch's agent reports at length what `_Job` says in a line; LOGLEVEL brings it back."""
    if "LOGLEVEL" in os.environ:
        return
    for name in ("torch.distributed.elastic", "torch.multiprocessing.spawn"):
        logging.getLogger(name).propagate = False
        logging.getLogger(name).addHandler(logging.NullHandler())


def say(message: str) -> None:
    """Tell the user, on stderr."""
    print(message, file=sys.stderr, flush=True)
