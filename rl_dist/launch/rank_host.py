"""The host: one process per machine that the ranks of a job are forked from.

It has imported torch and the modules of ours that its launcher has, so one import serves all ranks
and all restarts. It starts no thread, computes nothing and never meets a GPU, and what is the
user's, the main module too, is imported in each rank: a rank finds all that as a new process does.
Stop signals stay blocked in it. It dies with the launcher, and the ranks hear of that.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import context, popen_spawn_posix, spawn
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np

from rl_dist.launch.rank import RankFunction, run_as_rank
from rl_dist.process_group.process_ends import ReportPage, die_with_parent

OURS = ("agents", "envs", "rl_dist")  # to import them starts and touches nothing
END_POLL_S = 0.01


class HostLostError(Exception):
    """The host has ended before its launcher told it to."""


class RankHost:
    """The host as its launcher sees it, and the ranks that it forked last."""

    def __init__(
        self, fn: RankFunction, args: tuple[Any, ...], pages: Sequence[ReportPage]
    ) -> None:
        """Start a host whose ranks report to these pages; the caller has blocked stop signals."""
        self.num_ranks = len(pages)
        self.pids: list[int] = []  # in rank order, of those that are known to have started
        self.exit_codes: dict[int, int] = {}  # by rank
        self._asked = False
        ours, theirs = socket.socketpair()
        self._connection = Connection(ours.detach())
        with theirs:
            parts, descriptors = _packed(spawn.get_preparation_data("rank"), (fn, args, pages))
            paths = [str(path) for path in sys.path]
            code = f"import sys; sys.path[:] = {paths}; from rl_dist.launch import rank_host; "
            code += f"rank_host.serve({theirs.fileno()}, {os.getpid()})"
            self._process = subprocess.Popen(
                [*spawn.get_command_line()[:-2], code],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno(), *descriptors],
            )
        loaded = [name for name, module in sys.modules.items() if module is not None]
        for message in ([name for name in loaded if name.split(".")[0] in OURS], *parts):
            self._send(message)

    def fork(self, variables: Sequence[Mapping[str, str]]) -> None:
        """Begin to start all ranks, each with its variables; `look` says what came of it."""
        self.pids = []
        self.exit_codes = {}
        self._send(variables)

    @property
    def has_started(self) -> bool:
        """Whether all ranks are known to have started."""
        return len(self.pids) == self.num_ranks

    @property
    def runs(self) -> bool:
        """Whether some rank runs, or may yet start."""
        return len(self.exit_codes) < self.num_ranks

    def look(self, patience_s: float) -> None:
        """Find out which ranks have started and ended.

        A host that still imports says it later.

        Raises:
            HostLostError: it has ended.
            OSError: a rank cannot be started.
        """
        if not self._asked:
            self._send(None)
            self._asked = True
        try:
            if not self._connection.poll(patience_s):
                return
            self.pids, self.exit_codes, refused = self._connection.recv()
        except (EOFError, OSError) as lost:
            raise HostLostError from lost
        self._asked = False
        if refused:
            raise OSError(*refused)

    def kill(self, signum: int) -> None:
        """Send a signal to all ranks that run."""
        for rank, pid in enumerate(self.pids):
            if rank not in self.exit_codes:
                with suppress(ProcessLookupError):  # with its host
                    os.kill(pid, signum)

    def end_ranks(self) -> None:
        """Kill the ranks that run, and wait until they have ended."""
        while self.runs and self.has_started:
            self.kill(signal.SIGKILL)
            time.sleep(END_POLL_S)
            self.look(END_POLL_S)

    def close(self) -> int:
        """End the host and what is left of its ranks; return its exit code."""
        self.kill(signal.SIGKILL)
        self._connection.close()
        if not self.has_started:  # it may be importing; the ranks that we do not know die with it
            self._process.kill()
        return self._process.wait()

    def _send(self, message: Any) -> None:
        try:
            self._connection.send(message)
        except OSError as lost:
            raise HostLostError from lost


class _Descriptors:
    """What `multiprocessing.reduction.DupFd` asks to send open files to a new process."""

    DupFd = popen_spawn_posix.Popen.DupFd

    def __init__(self) -> None:
        self.sent: list[int] = []

    def duplicate_for_child(self, descriptor: int) -> int:
        self.sent.append(descriptor)
        return descriptor


def _packed(*parts: Any) -> tuple[list[bytes], list[int]]:
    """Serialise as multiprocessing does; the descriptors that have to be inherited."""
    descriptors = _Descriptors()
    context.set_spawning_popen(descriptors)  # type: ignore[arg-type]  # has what is asked for
    try:
        return [bytes(ForkingPickler.dumps(part)) for part in parts], descriptors.sent
    finally:
        context.set_spawning_popen(None)


# ---- in the host


def serve(descriptor: int, launcher_pid: int) -> None:
    """Fork ranks until the launcher is gone; return in each, its work done."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored, nobody learns of a death
    die_with_parent(launcher_pid, signal.SIGKILL)
    connection = Connection(descriptor)
    names, *parts = (connection.recv() for _ in range(3))
    for name in names:
        with suppress(ImportError):  # a rank that needs it says so
            importlib.import_module(name)
    gc.freeze()  # the ranks share that memory as long as nobody touches it
    host_pid = os.getpid()
    pids: list[int] = []
    exit_codes: dict[int, int] = {}
    error: tuple[Any, ...] | None = None
    while True:
        try:
            question = connection.recv()
        except (EOFError, OSError):
            os._exit(0)
        if question is None:
            _note_ends(pids, exit_codes)
            connection.send((pids, exit_codes, error))
            continue
        pids.clear()
        exit_codes.clear()
        try:
            for rank, variables in enumerate(question):
                pid = os.fork()
                if pid == 0:
                    connection.close()
                    return _be(rank, parts, variables, host_pid)
                pids.append(pid)
        except OSError as refused:
            error = refused.args


def _note_ends(pids: Sequence[int], exit_codes: dict[int, int]) -> None:
    """Note the exit code, or minus the signal's number, of each rank that has ended."""
    for rank, pid in enumerate(pids):
        if rank not in exit_codes:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                exit_codes[rank] = os.waitstatus_to_exitcode(status)


def _be(rank: int, parts: Sequence[bytes], variables: Mapping[str, str], host_pid: int) -> None:
    """Become a rank: what multiprocessing does in a spawned process, then the rank's work."""
    np.random.seed()  # noqa: NPY002  # what draws from it shall not draw alike on all ranks
    die_with_parent(host_pid, signal.SIGKILL)  # until the rank can stop in order
    me = multiprocessing.current_process()
    me._inheriting = True  # type: ignore[attr-defined]  # a script without a guard is told so
    spawn.prepare(ForkingPickler.loads(parts[0]))
    fn, args, pages = ForkingPickler.loads(parts[1])
    del me._inheriting  # type: ignore[attr-defined]
    me.name = f"rank {rank}"
    run_as_rank(fn, args, variables, pages[rank], host_pid)
