"""The host of a rank: the process from which its workers are forked.

The host has imported all that workers need and does nothing else. So a worker starts within
hundredths of a second, and its memory is shared with the host. multiprocessing could not do that:
it would run the main module of the training again in every worker, and a SIGTERM to the job would
end its fork server and all workers. The host ignores stop signals. It dies with its rank, and the
workers die with it.
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

from envs.vector.guards import EnvironmentFaultError
from rl_dist.process_group.process_ends import STOP_SIGNALS, die_with_parent, how_it_ended

LOOK_S = 0.2  # time between two looks at a worker that the rank waits for
_MAX_BYTES = 64  # largest message to or from the host
_NUM_FILES = 3  # number of files that a worker gets


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
        """Kill a worker and return its exit code; pid 0 forks a worker instead.

        The new worker gets the files, and its process id is returned. An exit code is negative if a
        signal has ended the worker.
        """
        try:
            socket.send_fds(self._socket, [b"%d" % pid], files)
            return int(self._socket.recv(_MAX_BYTES))
        except (OSError, ValueError):
            problem = "the host of worker processes has ended: see the lines above"
            raise EnvironmentFaultError(problem) from None


_host: WorkerHost | None = None


def host() -> WorkerHost:
    """Return the host of this process; start it if there is none."""
    global _host
    if _host is None or _host.process.poll() is not None:
        _host = WorkerHost()
    return _host


class WorkerProcess:
    """A worker as its rank sees it."""

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
        """Send a message; it is lost if the worker has ended."""
        with suppress(OSError):
            self._connection.send(message)

    def receive(self, meanwhile: Callable[[], None]) -> Any:
        """Return the next message, or None if the worker has ended.

        `meanwhile` is called every LOOK_S seconds.
        """
        try:
            while not self._poll.poll(1000 * LOOK_S):
                meanwhile()
            return self._connection.recv()
        except (OSError, EOFError):
            return None

    def end(self) -> str:
        """Kill the worker and return how it ended, in words."""
        if not self._end:
            self._connection.close()
            try:
                self._end = how_it_ended(self._host.ask(self.pid))
            except EnvironmentFaultError:
                self._end = "ended with its host"
        return self._end


# ---- in the host


def serve() -> None:
    """Fork and kill workers as the rank asks, until the rank has ended."""
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    host_pid = os.getpid()
    die_with_parent(int(sys.argv[2]), signal.SIGKILL)
    from envs.workers.worker import Worker  # takes seconds, so signals are ignored before

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
