"""The host: one process per rank that worker processes are forked from.

It has loaded all that workers need and runs nothing else, so a worker starts in hundredths of a
second and shares that memory. multiprocessing's own methods would run the main module of training
again in every worker, and a SIGTERM to the job would end its fork server with all workers. The host
ignores stop signals, and it and the workers die with the rank, however that ends.
"""

from __future__ import annotations

import ctypes
import json
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

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
LOOK_S = 0.2  # between two looks at a worker that is waited for
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
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

    def fork(self, *descriptors: int) -> int:
        """Fork a worker that gets these descriptors; return its process id."""
        return self._ask({"fork": True}, descriptors)

    def exit_code(self, pid: int) -> int:
        """Kill a worker if it still runs; its code, or minus its signal's number."""
        return self._ask({"wait": pid})

    def _ask(self, question: dict[str, Any], descriptors: tuple[int, ...] = ()) -> int:
        try:
            socket.send_fds(self._socket, [json.dumps(question).encode()], descriptors)
            answer = self._socket.recv(_MESSAGE_BYTES)
        except OSError:
            answer = b""
        if not answer:
            raise OSError("the host of worker processes has ended: see the output above")
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

    def __init__(self, descriptors: tuple[int, ...]) -> None:
        ours, theirs = socket.socketpair()
        self._host = host()
        with theirs:
            self.pid = self._host.fork(theirs.fileno(), *descriptors)
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
            code = self._host.exit_code(self.pid)
        except OSError:
            return "ended with its host"
        known = -code in {one.value for one in signal.Signals}
        name = signal.Signals(-code).name if known else f"signal {-code}"
        return f"ended with code {code}" if code >= 0 else f"was ended by {name}"


# ---- in the host


def serve() -> None:
    """Fork workers and wait for those that end, until the rank is gone."""
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    die_with(int(sys.argv[2]))
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
        die_with(host_pid)
        channel.close()
        work(*descriptors)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):  # an environment may have closed it
            sys.stdout.flush()
        os._exit(code)


def die_with(parent_pid: int) -> None:
    """Ask Linux to kill this process when its parent dies, however that comes."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before the call above
        os._exit(1)
