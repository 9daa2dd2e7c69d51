"""Start the ranks: here, through torch's elastic launcher, or under torchrun.

Signals: the first SIGINT, SIGTERM, SIGUSR1 or SIGHUP reaches every rank once the launcher, the
process group or any one rank has it; ranks stop at their next iteration end, save and leave, and
`launch` returns 128 + the signal's number. A second SIGINT ends everything at once. Ranks of a
killed launcher get SIGTERM from the kernel and leave by themselves.

Errors in a rank end the job. A ValueError (UserError included) is a message for the user: printed
once as `error: ...`, exit code 2. Anything else: traceback and rank, once, exit code 1. The
traceback of either goes to the rank's log file.
"""

from __future__ import annotations

import atexit
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
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig as ElasticConfig
from torch.distributed.launcher.api import elastic_launch

from rl_dist.strategy import STRATEGIES
from rl_dist.world import (
    JOB_DIR_VARIABLE,
    STOP_SIGNALS,
    UserError,
    close_any_world,
    die_with_parent,
    stop_flag,
    threads_per_rank,
)

__all__ = ["LaunchConfig", "ResolvedLaunch", "UserError", "launch", "resolve"]

logger = logging.getLogger(__name__)  # for the log files only: `launch` itself tells the console, once
logger.addHandler(logging.NullHandler())
RankFunction = Callable[..., int | None]
DEATH_GRACE_S = 5.0  # for the other ranks to notice that one has failed


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """On how many processes and on what hardware a job runs."""

    num_gpus: int = field(
        default=-1,
        metadata={
            "help": "ranks on this machine, one per GPU; -1 = all. Without a GPU: CPU processes, -1 is one",
            "unit": "ranks",
        },
    )
    device: str = field(default="auto", metadata={"help": "where to train", "choices": ("auto", "cpu", "cuda")})
    strategy: str = field(
        default="auto",
        metadata={"help": "gradients over ranks; auto = ddp on several ranks", "choices": STRATEGIES},
    )
    precision: str = field(
        default="auto",
        metadata={"help": "auto = fp32; fp64 is for proofs", "choices": ("auto", "fp32", "fp64")},
    )

    def __post_init__(self) -> None:
        if self.num_gpus < -1:
            raise ValueError(f"num_gpus must be -1 (all) or at least 0, got {self.num_gpus}")
        for name, choices in (
            ("device", ("auto", "cpu", "cuda")),
            ("strategy", STRATEGIES),
            ("precision", ("auto", "fp32", "fp64")),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")

    @property
    def dtype(self) -> torch.dtype:
        """Type of the parameters."""
        return torch.float64 if self.precision == "fp64" else torch.float32


@dataclass(frozen=True, kw_only=True)
class ResolvedLaunch:
    """What `resolve` decided."""

    num_ranks: int
    device_type: str  # "cpu" or "cuda"
    message: str  # one line for the user, to be printed once


def resolve(config: LaunchConfig) -> ResolvedLaunch:
    """Decide the number of ranks and their device on this machine.

    Raises:
        ValueError: more ranks than GPUs, cuda without a GPU, strategy none with several ranks, or
            num_gpus against what torchrun started.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if config.device == "cuda" and gpus == 0:
        raise ValueError("device cuda: torch sees no CUDA GPU on this machine; use --device cpu")
    if config.device == "cuda" and config.num_gpus == 0:
        raise ValueError("num_gpus 0 contradicts device cuda; leave one of them out")
    on_gpu = config.device != "cpu" and gpus > 0 and config.num_gpus != 0
    if "RANK" in os.environ:
        num_ranks = _adopted_ranks(config.num_gpus)
    elif on_gpu:
        num_ranks = gpus if config.num_gpus == -1 else config.num_gpus
    else:
        num_ranks = max(1, config.num_gpus)
    if on_gpu and "RANK" not in os.environ and num_ranks > gpus:
        raise ValueError(f"num_gpus is {num_ranks}, but this machine has {gpus}; use at most {gpus}, or -1")
    if config.strategy == "none" and num_ranks > 1:
        raise ValueError(f"strategy none works with one rank only, got {num_ranks}; use ddp or auto")
    return ResolvedLaunch(
        num_ranks=num_ranks,
        device_type="cuda" if on_gpu else "cpu",
        message=_describe(num_ranks, on_gpu, gpus),
    )


def _adopted_ranks(num_gpus: int) -> int:
    """World size of torchrun's environment, which `--num_gpus` may repeat but not change."""
    size = int(os.environ["WORLD_SIZE"])
    if num_gpus not in (-1, size, int(os.environ.get("LOCAL_WORLD_SIZE", size))):
        raise ValueError(f"num_gpus is {num_gpus}, but the launcher started {size} ranks; leave it out")
    return size


def _describe(num_ranks: int, on_gpu: bool, gpus: int) -> str:
    ranks = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
    if on_gpu:
        return f"{ranks} over NCCL, one GPU each ({torch.cuda.get_device_name(0)})"
    why = "no CUDA GPU found" if gpus == 0 else "the CPU was asked for"
    processes = "1 CPU process" if num_ranks == 1 else f"{num_ranks} CPU processes over gloo"
    return f"{why}: {ranks} as {processes}, {threads_per_rank(num_ranks)} thread(s) each"


def launch(fn: RankFunction, args: tuple[Any, ...], num_ranks: int) -> int:
    """Run `fn(*args)` on every rank and return the job's exit code.

    Under torchrun (RANK is set) and with one rank, `fn` runs in this process. Otherwise `fn` must be
    importable and `args` picklable: each rank is a new process.

    Returns:
        0, or the first non-zero code a rank returned; 1 a rank failed; 2 bad input; 128 + signal.
    """
    if "RANK" in os.environ or num_ranks == 1:
        stop_flag.install()
        try:
            report = _run_guarded(fn, args)
            close_any_world(failed=report.at_ns > 0)
        finally:
            stop_flag.uninstall()
        if report.message:
            _say(report.message)
        return report.exit_code
    return _Job(fn, args, num_ranks).run()


@dataclass
class _Report:
    """How one rank ended."""

    exit_code: int
    message: str = ""  # for the user
    rank: int = 0
    at_ns: int = 0  # when it raised (0: it returned); the earliest is the cause, the others consequences


def _run_guarded(fn: RankFunction, args: tuple[Any, ...]) -> _Report:
    rank = int(os.environ.get("RANK", 0))
    try:
        return _Report(exit_code=int(fn(*args) or 0), rank=rank)
    except ValueError as error:
        logger.exception("rank %d stops", rank)
        message = "error: " + " ".join(str(error).split())
        code = getattr(error, "exit_code", 2)
    except SystemExit as leaving:
        if leaving.code is None or isinstance(leaving.code, int):
            return _Report(exit_code=leaving.code or 0, rank=rank)
        message, code = str(leaving.code), 1
    except Exception:
        logger.exception("rank %d failed", rank)
        message, code = f"{traceback.format_exc()}error: rank {rank} failed, see the traceback above", 1
    return _Report(exit_code=code, message=message, rank=rank, at_ns=time.monotonic_ns())


def _run_as_rank(fn: RankFunction, args: tuple[Any, ...], job_dir: str, launcher_pid: int) -> int:
    """The main function of a rank's process; stop signals are blocked until `install`."""
    stop_flag.install(second_ends=False)  # the launcher counts Ctrl-C
    atexit.register(_ignore_stop_signals)  # Python restores their deadly defaults while it shuts down
    die_with_parent(launcher_pid)
    os.environ[JOB_DIR_VARIABLE] = job_dir
    report = _run_guarded(fn, args)
    if report.at_ns:
        _leave_failed(report, Path(job_dir, f"rank_{report.rank}.json"))
    close_any_world()
    threading.Thread(target=_leave_when_orphaned, args=(launcher_pid, report.exit_code), daemon=True).start()
    return report.exit_code


def _leave_failed(report: _Report, path: Path) -> None:
    """Say why and leave without teardown, which could wait for the other ranks for ever."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(vars(report)))
    part.replace(path)
    sys.stdout.flush()
    sys.stderr.flush()
    logging.shutdown()
    os._exit(report.exit_code or 1)


def _ignore_stop_signals() -> None:
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)


def _leave_when_orphaned(launcher_pid: int, exit_code: int) -> None:
    """A rank that is done waits for its launcher to read the result: not for a dead one."""
    while os.getppid() == launcher_pid:
        time.sleep(0.2)
    os._exit(exit_code)


class _Job:
    """Ranks on this machine, started by torch's elastic agent and watched by this process.

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
                _say("stopped at once, nothing saved since the last checkpoint")
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
            codes = elastic_launch(config, _run_as_rank)(self.fn, self.args, job_dir, os.getpid())
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

    def _reports(self, job_dir: str) -> list[_Report]:
        """Reports of failed ranks, the cause first."""
        found = [_Report(**json.loads(path.read_text())) for path in Path(job_dir).glob("rank_*.json")]
        return sorted(found, key=lambda report: report.at_ns)

    def _explain(self, job_dir: str, error: ChildFailedError) -> int:
        """Print the cause once and return the job's exit code."""
        reports = self._reports(job_dir)
        for rank in self.first_dead:
            code = self.ranks[rank].exitcode or 0
            if code < 0:
                pid, name = self.ranks[rank].pid, signal.Signals(-code).name
                _say(f"error: rank {rank} (process {pid}) was ended by {name}")
                return 1
        if not reports:
            rank, failure = error.get_first_failure()
            _say(f"error: rank {rank} ended with code {failure.exitcode} and without a word")
            return 1
        _say(reports[0].message)
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


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
