"""A vector environment whose environments run in worker processes."""

import logging
import math
import os
import select
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, pairwise
from multiprocessing import Pipe
from typing import Any

import numpy as np
import torch
from torch import Tensor

from envs.vector.guards import GRACE_S, EnvironmentFaultError
from envs.vector.layout import Metrics, StepResult
from envs.vector.tensors import LIFE, STEP_FIELDS, ArrayEnv, Snapshot, step_result
from envs.workers.host import ask_host
from envs.workers.worker import STATUS, MadeEnv, shared_rows
from rl_dist.process_group.process_ends import how_it_ended

_LOGGER = logging.getLogger(__name__)
LOOK_S = 0.2  # interval of progress checks while the rank waits for a worker
CLOSE_S = 10.0  # a worker that makes no progress for this long during `close` is killed


class _Worker:
    """A rank's handle for one worker; `start` replaces the worker's process."""

    def __init__(self, rows: slice) -> None:
        self.rows = rows
        # the last question to the worker: name of a method, and its arguments
        self.question: tuple[object, ...] = ("begin",)

    def start(self, file: int) -> None:
        """Start the process; `file` is the memory file with the rows of all workers."""
        self._connection, theirs = Pipe()
        status_file = os.memfd_create("status")
        with theirs:
            self.pid = ask_host(0, [theirs.fileno(), status_file, file])
        self._poll = select.poll()
        self._poll.register(self._connection.fileno(), select.POLLIN)
        self.status = shared_rows(status_file, 1, STATUS)[0]
        os.close(status_file)
        self._beats = 0  # value of status["beats"] at the last check
        self.last_words = ""  # the reason in one line, if the worker ended its process itself
        self._end = ""  # how the process ended; "": it has not been ended

    def send(self, message: object) -> None:
        """Send a message; discard it if the process has ended."""
        with suppress(OSError):
            self._connection.send(message)

    def receive(self, heartbeat: Callable[[], None], limit_s: float) -> Any:
        """Return the next message, or None if the process has ended.

        While the process makes progress, `heartbeat` is called every LOOK_S seconds. After
        `limit_s` seconds without progress, the process is killed.
        """
        since_s = time.monotonic()
        try:
            while not self._poll.poll(1000 * LOOK_S):
                beats = int(self.status["beats"])
                now_s = time.monotonic()
                if beats != self._beats:
                    self._beats = beats
                    since_s = now_s
                    heartbeat()
                elif now_s - since_s > limit_s:
                    self.end()
                    self._end = "did not answer in time and was killed (--env_timeout)"
            return self._connection.recv()
        except (OSError, EOFError):
            return None

    def end(self) -> str:
        """Kill the process if it still runs; return a text that says how it ended."""
        if not self._end:
            self._connection.close()
            self._end = how_it_ended(ask_host(self.pid))
        return self._end


@dataclass(eq=False)
class WorkerEnv(ArrayEnv):
    """Steps environments in worker processes, with `num_workers` processes per group.

    Each worker makes its environments with `make_vector_env`, so the results are the same as
    without workers, bit for bit. The rank sends questions to a worker; a question names a method to
    call. The rank sends the next question only after the worker has answered. Arrays are in shared
    memory, so the messages of a step are short.

    A worker ends its process if a call hangs and cannot be interrupted. If a worker is unable to do
    so, the rank kills it. The death of a worker is treated as a failure of all its environments. As
    long as restarts are left, a new process makes these environments again and answers the question
    that the dead worker did not answer.
    """

    num_envs: int
    num_workers: int
    num_groups: int = 1
    options: dict = field(default_factory=dict)  # other arguments of make_vector_env

    def __post_init__(self) -> None:
        self.device = torch.device(self.device)
        self.lives = np.zeros(self.num_envs, LIFE)
        # While the environments are being made, no worker is restarted, and there is no time limit.
        self._max_restarts = 0
        self._limit_s = math.inf
        self._groups = _split(slice(0, self.num_envs), self.num_groups)
        self._group_workers = [
            [_Worker(rows) for rows in _split(group, self.num_workers)] for group in self._groups
        ]
        self.workers: list[_Worker] = []  # workers that were started, ordered by their rows
        self._file = os.fdopen(os.memfd_create("environments"))
        try:
            for worker in chain.from_iterable(self._group_workers):
                self._start(worker)
                self.workers.append(worker)
            made_envs = self._answers(self.workers)
        except BaseException:
            self.close()
            raise
        first: MadeEnv = made_envs[0]
        self.layout = first.layout
        self.single_action_space = first.action_space
        self.spaces_json = first.spaces_json
        self.can_snapshot = first.can_snapshot
        self._rows = shared_rows(self._file.fileno(), self.num_envs, first.row_type)
        self.lives = self._rows["life"]
        self._max_restarts = self.env_restarts
        if self.env_timeout:  # leave the worker enough time to end a hanging call itself
            self._limit_s = self.env_timeout + GRACE_S + 1.0
        _LOGGER.info("%s runs in %d worker processes", self.env_id, len(self.workers))

    @property
    def groups(self) -> list[slice]:
        """One slice of rows per group."""
        return self._groups

    # ---- methods of a vector environment

    def reset_arrays(self, seeds: Sequence[int]) -> np.ndarray:
        """Start all environments; return their observations as a new array [B, F]."""
        self._ask_all("reset")  # the workers read the seeds from the shared memory
        return self._rows["obs"].copy()

    def step(self, actions: Tensor) -> StepResult:
        """Step all environments, see `TorchEnv.step`."""
        for group, rows in enumerate(self._groups):
            self.send(actions[rows], group)
        return self._result(self.workers, slice(0, self.num_envs))

    def send(self, actions: Tensor, group: int = 0) -> None:
        """Start a step of one group; `actions` is [rows in the group, ...]."""
        rows = self._groups[group]
        self.lives["lifetime_step"][rows] += 1
        self._rows["actions"][rows] = actions.detach().cpu().numpy()
        for worker in self._group_workers[group]:
            self._ask(worker, ("step",))

    def recv(self, group: int = 0) -> StepResult:
        """Wait for the step that `send` started; return the same values as `step`."""
        return self._result(self._group_workers[group], self._groups[group])

    def _result(self, workers: Sequence[_Worker], rows: slice) -> StepResult:
        self._answers(workers)
        return step_result([self._rows[name][rows].copy() for name in STEP_FIELDS], self.device)

    def check(self) -> None:
        """Let the workers check what their environments have returned."""
        self._ask_all("check")

    def take_metrics(self) -> Metrics:
        """Return (sum, count) of every metric that was reported since the last call."""
        metrics: Metrics = defaultdict(lambda: (0.0, 0))
        for reported in self._ask_all("take_metrics"):
            for name, (total, count) in reported.items():
                metrics[name] = metrics[name][0] + total, metrics[name][1] + count
        return metrics

    def get_arrays(self) -> Snapshot:
        """Return a snapshot as arrays."""
        states = self._ask_all("get_arrays")
        return {name: np.concatenate([state[name] for state in states]) for name in states[0]}

    def set_arrays(self, state: Snapshot) -> None:
        """Restore a snapshot, even if it was taken with a different number of workers."""
        for worker in self.workers:
            part = {name: array[worker.rows] for name, array in state.items()}
            self._ask(worker, ("set_arrays", part))
        self._answers(self.workers)

    def close(self) -> None:
        """Let the workers close their environments, then end the workers."""
        self._limit_s = CLOSE_S
        for worker in self.workers:
            self._ask(worker, ("close",))
        for worker in self.workers:
            while self._receive(worker):  # returns None after the process has ended
                pass
            worker.end()
            if worker.last_words:
                _LOGGER.warning("%s", worker.last_words)
        self.workers = []
        self._file.close()

    # ---- questions and answers

    def _ask_all(self, *question: object) -> list[Any]:
        """Ask all workers the same question; return their answers in order of rows."""
        for worker in self.workers:
            self._ask(worker, question)
        return self._answers(self.workers)

    def _ask(self, worker: _Worker, question: tuple[object, ...]) -> None:
        worker.question = question
        worker.send(question)

    def _answers(self, workers: Sequence[_Worker]) -> list[Any]:
        """Wait for the workers' answers and return them; raise a failed worker's error."""
        return [self._answer(worker) for worker in workers]

    def _answer(self, worker: _Worker) -> Any:
        """Wait for the answer from a worker or from the process that replaces it."""
        while (reply := self._receive(worker)) is None:
            self._replace(worker)
        problem, answer = reply
        if problem is not None:
            raise problem
        return answer

    def _receive(self, worker: _Worker) -> tuple[Exception | None, Any] | None:
        """Return a worker's next (problem, answer), or None if its process has ended."""
        while message := worker.receive(self.heartbeat, self._limit_s):
            kind, content = message
            if kind == "reply":
                return content
            if kind == "log":
                logging.getLogger(content.name).handle(content)
            else:
                worker.last_words = content
        return None

    # ---- workers that die

    def _replace(self, worker: _Worker) -> None:
        """Replace a process that has ended; raise an error if no restart is left.

        The new process is asked the question that the old process did not answer.
        """
        problem = f"its worker process {worker.pid} {worker.end()}"
        number = int(worker.status["number"])  # 0 if no environment was being called
        row = number - 1 - self.env_offset if number else None
        fault = worker.last_words or self.describe(row, problem, worker.rows)
        restarts = self.lives["restarts"][worker.rows]
        if (used := restarts.max()) >= self._max_restarts:
            raise EnvironmentFaultError(f"{fault} (after {used} restarts, --env_restarts)")
        _LOGGER.warning("%s; all environments of this worker are rebuilt", fault)
        restarts += 1
        self._start(worker, "begin_again")
        worker.send(worker.question)

    def _start(self, worker: _Worker, begin: str = "begin") -> None:
        """Start a process; `begin` names the method that makes its environments."""
        worker.start(self._file.fileno())
        rows = worker.rows
        options = self.options | {
            "env_id": self.env_id,
            "num_envs": rows.stop - rows.start,
            "env_offset": self.env_offset + rows.start,
            "env_timeout": self.env_timeout,
            "env_restarts": self.env_restarts,
        }
        worker.send((begin, rows, self.num_envs, options))


def _split(rows: slice, count: int) -> list[slice]:
    """Split rows into at most `count` slices whose lengths differ by at most 1."""
    size = rows.stop - rows.start
    count = min(count, size)
    edges = (rows.start + size * np.arange(count + 1) // count).tolist()
    return [slice(first, last) for first, last in pairwise(edges)]
