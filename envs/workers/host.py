"""The host: one process per rank that worker processes are forked from.

It has loaded all that workers need and runs nothing else, so a worker starts in hundredths of a
second and shares that memory. multiprocessing's own methods would run the main module of training
again in every worker, and a SIGTERM to the job would end its fork server with all workers. The host
ignores stop signals, and it and the workers die with the rank, however that ends.
"""

from __future__ import annotations

import json
import logging
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

from envs.vector.faults import WorkerFaultError
from rl_dist.process_group.process_ends import STOP_SIGNALS, die_with_parent

_LOGGER = logging.getLogger(__name__)
LOOK_S = 0.2  # between two looks at a worker that is waited for
START_S = 120.0  # at least, for the host to import what workers need
_MESSAGE_BYTES = 4096


class WorkerHost:
    """The host as its rank sees it."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._socket, theirs = socket.socketpair()
        code = "from envs.workers.host import serve; serve()"
        # -P: the current directory is no place for modules unless the rank looks there, too
        command = [sys.executable, "-P", "-c", code, str(theirs.fileno()), str(os.getpid())]
        paths = os.pathsep.join(sys.path)
        with theirs:
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            )

    @property
    def lives(self) -> bool:
        """Whether this process may ask it for workers."""
        return self.owner == os.getpid() and self._process.poll() is None

    def fork(self, limit_s: float, *descriptors: int) -> int:
        """Fork a worker that gets these descriptors; return its process id."""
        return self._ask({"fork": True}, limit_s and max(limit_s, START_S), descriptors)

    def exit_code(self, limit_s: float, pid: int) -> int:
        """Kill a worker if it still runs; return its code, or minus its signal's number."""
        return self._ask({"wait": pid}, limit_s)

    def _ask(
        self, question: dict[str, Any], limit_s: float, descriptors: tuple[int, ...] = ()
    ) -> int:
        """Return the answer of the host; one that does not come within the limit ends it."""
        self._socket.settimeout(limit_s or None)
        try:
            socket.send_fds(self._socket, [json.dumps(question).encode()], descriptors)
            answer = self._socket.recv(_MESSAGE_BYTES)
        except OSError as error:
            answer = b""
            if isinstance(error, TimeoutError):
                problem = "the host of worker processes (process %d) did not answer within %g s: "
                problem += "it and they are ended"
                _LOGGER.warning(problem, self._process.pid, limit_s)
                self._process.kill()
                self._process.wait()
        if not answer:
            raise WorkerFaultError("the host of worker processes has ended: see the lines above")
        value = json.loads(answer)
        if isinstance(value, list):
            raise OSError(*value)
        return value


_host: WorkerHost | None = None


def host() -> WorkerHost:
    """Return this process's host, started when it is first needed."""
    global _host
    if _host is None or not _host.lives:
        _host = WorkerHost()
    return _host


class WorkerProcess:
    """One worker as its rank sees it; it says nothing about environments."""

    def __init__(self, descriptors: tuple[int, ...], limit_s: float) -> None:
        """Start it within the limit (0: any), as its end must come."""
        ours, theirs = socket.socketpair()
        self._host = host()
        self._limit_s = limit_s
        with theirs:
            self.pid = self._host.fork(limit_s, theirs.fileno(), *descriptors)
        self._connection = Connection(ours.detach())
        self._poll = select.poll()
        self._poll.register(self._connection.fileno(), select.POLLIN)

    def send(self, message: Any) -> None:
        """Send a message; one that nobody can get is lost."""
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
        """End the worker, which is then found dead."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def end(self) -> str:
        """Make sure of its end; say how it came."""
        self._connection.close()
        try:
            code = self._host.exit_code(self._limit_s, self.pid)
        except (OSError, WorkerFaultError):
            return "ended with its host"
        known = -code in {one.value for one in signal.Signals}
        name = signal.Signals(-code).name if known else f"signal {-code}"
        return f"ended with code {code}" if code >= 0 else f"was ended by {name}"


# ---- in the host


def serve() -> None:
    """Fork workers and wait for those that end, until the rank is gone."""
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    die_with_parent(int(sys.argv[2]), signal.SIGKILL)
    from envs.workers.worker import work

    channel = socket.socket(fileno=int(sys.argv[1]))
    while True:
        data, descriptors, _, _ = socket.recv_fds(channel, _MESSAGE_BYTES, 8)
        if not data:
            return
        question = json.loads(data)
        answer: Any
        try:
            if "fork" in question:
                answer = _fork(channel, work, descriptors)
            else:
                os.kill(question["wait"], signal.SIGKILL)
                answer = os.waitstatus_to_exitcode(os.waitpid(question["wait"], 0)[1])
        except OSError as error:
            answer = [error.errno or 0, error.strerror or str(error)]
        channel.sendall(json.dumps(answer).encode())


def _fork(channel: socket.socket, work: Callable[..., None], descriptors: list[int]) -> int:
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
        work(*descriptors)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):  # an environment may have closed it
            sys.stdout.flush()
        os._exit(code)
