"""The host of a rank: a process that forks the rank's workers.

The host imports everything that workers need and does nothing else. Therefore a worker starts in
some hundredths of a second and shares the host's memory. The multiprocessing module is not used for
two reasons: it would run the main module of the training again in every worker, and a SIGTERM to
the job would end its fork server and all workers. The host ignores stop signals. When the rank
ends, the host is killed, and then the workers are killed.
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

LOOK_S = 0.2  # interval of progress checks while the rank waits for a worker
_MAX_BYTES = 64  # maximum size of a message to or from the host
_NUM_FILES = 3  # number of file descriptors passed to a worker


class WorkerHost:
    """The rank's handle of its host."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        code = "from envs.workers.host import serve; serve()"
        # -P: do not import from the current directory, unless it is in the rank's sys.path
        command = [sys.executable, "-P", "-c", code, str(theirs.fileno()), str(os.getpid())]
        with theirs:
            self.process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
            )

    def ask(self, pid: int, files: Sequence[int] = ()) -> int:
        """Kill a worker and return its exit code, or fork a new worker if pid is 0.

        A new worker inherits `files`, and its process id is returned. The exit code is negative if
        a signal ended the worker.
        """
        try:
            socket.send_fds(self._socket, [b"%d" % pid], files)
            return int(self._socket.recv(_MAX_BYTES))
        except (OSError, ValueError):
            problem = "the host of worker processes has ended: see the lines above"
            raise EnvironmentFaultError(problem) from None


_host: WorkerHost | None = None


def host() -> WorkerHost:
    """Return the host of this process; start one if none is running."""
    global _host
    if _host is None or _host.process.poll() is not None:
        _host = WorkerHost()
    return _host


class WorkerProcess:
    """The rank's handle of a worker process."""

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
        """Send a message; drop it if the worker has ended."""
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
        """Kill the worker and return a text that says how it ended."""
        if not self._end:
            self._connection.close()
            try:
                self._end = how_it_ended(self._host.ask(self.pid))
            except EnvironmentFaultError:
                self._end = "ended with its host"
        return self._end


# ---- code that runs in the host


def serve() -> None:
    """Fork and kill workers at the rank's requests, until the rank has ended."""
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    host_pid = os.getpid()
    die_with_parent(int(sys.argv[2]), signal.SIGKILL)
    from envs.workers.worker import Worker  # slow, so signals are already ignored above

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
                with suppress(Exception):  # an environment may have closed stdout
                    sys.stdout.flush()
                os._exit(0)
            for file in files:
                os.close(file)
        channel.sendall(b"%d" % answer)
