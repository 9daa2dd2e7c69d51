"""The host: one process per rank that worker processes are forked from.

It has loaded all that workers need and runs nothing else, so a worker starts in hundredths of a
second and shares that memory. multiprocessing's own methods would run the main module of training
again in every worker, and a SIGTERM to the job would end its fork server with all workers. The host
ignores stop signals, and it and the workers die with the rank, however that ends.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from envs.vector.guards import EnvironmentFaultError
from rl_dist.process_group.process_ends import STOP_SIGNALS, die_with_parent, how_it_ended

LOOK_S = 0.2  # between two looks at a worker that the rank waits for
ANSWER_S = 120.0  # longest time for an answer of the host, which first imports what workers need
_MAX_BYTES = 64  # in a message


class WorkerHost:
    """The host as its rank sees it."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._socket, theirs = socket.socketpair()
        code = "from envs.workers.host import serve; serve()"
        # -P: Python looks for modules in the current directory only if the rank does, too
        command = [sys.executable, "-P", "-c", code, str(theirs.fileno()), str(os.getpid())]
        with theirs:
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
            )

    @property
    def lives(self) -> bool:
        """True if this process may ask it for workers."""
        return self._owner == os.getpid() and self._process.poll() is None

    def ask(self, pid: int, *descriptors: int) -> int:
        """Kill a worker and return its exit code, or, for pid 0, fork one.

        The new worker gets the descriptors; its process id is returned. The exit code of a worker
        that a signal has ended is minus its number.
        """
        self._socket.settimeout(ANSWER_S)
        try:
            socket.send_fds(self._socket, [b"%d" % pid], descriptors)
            return int(self._socket.recv(_MAX_BYTES))
        except (OSError, ValueError):  # no answer in time, or none because the host has ended
            self._process.kill()
            self._process.wait()
        problem = f"the host of worker processes (process {self._process.pid}) ended or hung"
        raise EnvironmentFaultError(f"{problem}: see the lines above")


_host: WorkerHost | None = None


def host() -> WorkerHost:
    """Return this process's host, started when it is first needed."""
    global _host
    if _host is None or not _host.lives:
        _host = WorkerHost()
    return _host


class WorkerProcess:
    """One worker as its rank sees it; knows nothing of environments."""

    def __init__(self, *descriptors: int) -> None:
        ours, theirs = socket.socketpair()
        self._end = ""
        self._host = host()
        with theirs:
            self.pid = self._host.ask(0, theirs.fileno(), *descriptors)
        self._connection = Connection(ours.detach())
        self._poll = select.poll()
        self._poll.register(self._connection.fileno(), select.POLLIN)

    def send(self, message: Any) -> None:
        """Send a message; a message to a worker that has ended is lost."""
        with suppress(OSError):
            self._connection.send(message)

    def receive(self, meanwhile: Callable[[], None]) -> Any:
        """Return the next message, or None once the worker has ended."""
        try:
            while not self._poll.poll(1000 * LOOK_S):
                meanwhile()
            return self._connection.recv()
        except (OSError, EOFError):
            return None

    def kill(self) -> None:
        """End the worker; `receive` then returns None."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def end(self) -> str:
        """Make sure that the worker has ended and say how; frees its process id."""
        if not self._end:
            self._connection.close()
            try:
                self._end = how_it_ended(self._host.ask(self.pid))
            except EnvironmentFaultError:
                self._end = "ended with its host"
        return self._end


# ---- in the host


def serve() -> None:
    """Fork workers and wait for those that end, until the rank is gone."""
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    die_with_parent(int(sys.argv[2]), signal.SIGKILL)
    from envs.workers.worker import Worker

    channel = socket.socket(fileno=int(sys.argv[1]))
    while True:
        data, descriptors, _, _ = socket.recv_fds(channel, _MAX_BYTES, 8)
        if not data:
            return
        if pid := int(data):
            os.kill(pid, signal.SIGKILL)
            answer = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        else:
            answer = _fork(channel, Worker, descriptors)
        channel.sendall(b"%d" % answer)


def _fork(channel: socket.socket, worker: Callable[..., Any], descriptors: list[int]) -> int:
    host_pid = os.getpid()
    pid = os.fork()
    if pid:
        for descriptor in descriptors:
            os.close(descriptor)
        return pid
    code = 1
    try:
        die_with_parent(host_pid, signal.SIGKILL)
        channel.close()
        worker(*descriptors).run()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):  # an environment may have closed it
            sys.stdout.flush()
        os._exit(code)
