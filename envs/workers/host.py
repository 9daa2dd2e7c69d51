"""The host of a rank: a process that forks the rank's workers.

The host imports everything that workers need and otherwise only forks and kills workers. Therefore
a worker starts in a few hundredths of a second and shares the host's memory. Python's package
multiprocessing is not used for two reasons: it would run the training's main module again in every
worker, and a SIGTERM to the job would end the fork server of multiprocessing and thus all workers.

The host ignores stop signals. When the rank ends, the connection between rank and host breaks. Then
the host ends, and its death kills the workers. The host must not use `die_with_parent`: Linux would
kill the host when the *thread* that started it ends, but later trainings in the same process still
need the host.
"""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache

from envs.vector.guards import EnvironmentFaultError
from rl_dist.process_group.process_ends import STOP_SIGNALS, die_with_parent

_MAX_BYTES = 64  # maximum size of a message to or from the host
_NUM_FILES = 3  # number of file descriptors passed to a worker


@cache
def _host() -> tuple[socket.socket, subprocess.Popen]:
    """Start this process's host; return the connection to it and the host's process."""
    ours, theirs = socket.socketpair()
    # Pass sys.path as arguments, because a path in PYTHONPATH cannot contain a colon.
    # -P: do not import from the current directory unless the rank's sys.path contains it.
    code = "import sys; sys.path[:] = sys.argv[2:]; import rl_dist; rl_dist.claim('envs'); "
    code += "from envs.workers.host import serve; serve()"
    command = [sys.executable, "-P", "-c", code, str(theirs.fileno()), *sys.path]
    with theirs:
        process = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
    return ours, process


def ask_host(pid: int, files: Sequence[int] = ()) -> int:
    """Let the host fork a worker or kill one.

    If `pid` is 0, the host forks a worker that inherits `files`; return the worker's process id.
    Otherwise, the host kills the worker with this process id; return the worker's exit code, which
    is negative if a signal ended the worker. If the host has died, its workers have died, too. The
    next fork then starts a new host.
    """
    if not pid and _host()[1].poll() is not None:
        _host.cache_clear()
    connection, process = _host()
    try:
        socket.send_fds(connection, [b"%d" % pid], files)
        return int(connection.recv(_MAX_BYTES))
    except (OSError, ValueError):
        process.kill()
        process.wait()
        if pid:
            return -signal.SIGKILL
        problem = "the process that starts workers has ended: see the lines above"
        raise EnvironmentFaultError(problem) from None


# ---- code that runs in the host process


def serve() -> None:
    """Fork and kill workers at the rank's requests, until the rank has ended."""
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    host_pid = os.getpid()
    from envs.workers.worker import Worker  # slow import, so ignore signals first

    channel = socket.socket(fileno=int(sys.argv[1]))
    workers: set[int] = set()
    while True:
        data, files, _, _ = socket.recv_fds(channel, _MAX_BYTES, _NUM_FILES)
        if not data:
            return
        if (pid := int(data)) in workers:
            workers.remove(pid)
            os.kill(pid, signal.SIGKILL)
            answer = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        elif pid:  # a worker of an earlier host, which has died with that host
            answer = -signal.SIGKILL
        else:
            answer = os.fork()
            if not answer:
                die_with_parent(host_pid, signal.SIGKILL)
                channel.close()
                Worker(files).run()
                with suppress(Exception):  # an environment may have closed stdout
                    sys.stdout.flush()
                os._exit(0)
            workers.add(answer)
            for file in files:
                os.close(file)
        channel.sendall(b"%d" % answer)
