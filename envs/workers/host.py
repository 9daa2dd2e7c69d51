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
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from rl_dist.process_group.process_ends import STOP_SIGNALS, die_with_parent, how_it_ended

LOOK_S = 0.2  # between two looks at a worker that the rank waits for
_MAX_BYTES = 64  # in a message to or from the host
_NUM_FILES = 3  # that a worker gets


class WorkerHost:
    """The host as its rank sees it."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        code = "from envs.workers.host import serve; serve()"
        # -P: Python looks for modules in the current directory only if the rank does, too
        command = [sys.executable, "-P", "-c", code, str(theirs.fileno()), str(os.getpid())]
        with theirs:
            self.process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
            )

    def ask(self, pid: int, files: Sequence[int] = ()) -> int:
        """Kill a worker and return its exit code, or, for pid 0, fork one.

        The new worker gets the files; its process id is returned. The exit code of a worker that a
        signal has ended is minus the signal's number.
        """
        socket.send_fds(self._socket, [b"%d" % pid], files)
        answer = self._socket.recv(_MAX_BYTES)
        if not answer:
            raise ConnectionError("the host of worker processes has ended: see the lines above")
        return int(answer)


_host: WorkerHost | None = None


def host() -> WorkerHost:
    """Return this process's host, started when it is first needed."""
    global _host
    if _host is None or _host.process.poll() is not None:
        _host = WorkerHost()
    return _host


class WorkerProcess:
    """One worker as its rank sees it; knows nothing of environments."""

    def __init__(self, files: Sequence[int]) -> None:
        ours, theirs = socket.socketpair()
        self._end = ""
        self._host = host()
        with theirs:
            self.pid = self._host.ask(0, [theirs.fileno(), *files])
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

    def end(self) -> str:
        """End the worker and say how it ended; `receive` then returns None."""
        if not self._end:
            self._connection.close()
            try:
                self._end = how_it_ended(self._host.ask(self.pid))
            except OSError:
                self._end = "ended with its host"
        return self._end


# ---- in the host


def serve() -> None:
    """Fork workers and end them, until the rank is gone."""
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    host_pid = os.getpid()
    die_with_parent(int(sys.argv[2]), signal.SIGKILL)
    from envs.workers.worker import Worker  # after the lines above: it takes seconds

    channel = socket.socket(fileno=int(sys.argv[1]))
    while True:
        data, files, _, _ = socket.recv_fds(channel, _MAX_BYTES, _NUM_FILES)
        if not data:
            return
        if pid := int(data):
            os.kill(pid, signal.SIGKILL)
            answer = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        else:
            answer = os.fork()
            if not answer:
                die_with_parent(host_pid, signal.SIGKILL)
                channel.close()
                Worker(files).run()
                with suppress(Exception):  # an environment may have closed it
                    sys.stdout.flush()
                os._exit(0)
            for file in files:
                os.close(file)
        channel.sendall(b"%d" % answer)
