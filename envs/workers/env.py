"""A vector environment whose environments run in worker processes."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from envs.vector.guards import GRACE_S, EnvironmentFaultError
from envs.vector.layout import StepResult
from envs.vector.tensors import STEP_FIELDS, TensorVectorEnv, step_result, to_tensors
from envs.workers.host import WorkerProcess
from envs.workers.worker import KEPT, STATUS, row_fields, shared_rows

_LOGGER = logging.getLogger(__name__)
CLOSE_S = 10.0  # longest time without progress while environments are closed
TIMEOUT_MARGIN_S = GRACE_S + 1.0  # the worker ends a hanging call itself within this time
Reply = tuple[Exception | None, Any]  # (problem, None) or (None, answer)


@dataclass(eq=False)
class _Worker:
    """A worker process and the rows of its environments."""

    rows: slice
    process: WorkerProcess = field(init=False)
    status: Any = field(init=False)  # see `worker.STATUS`
    question: tuple[Any, ...] = ("begin",)  # last question: method name and arguments
    beats: int = 0  # last value of status["beats"] that was seen
    since_s: float = 0.0  # time of the last question or of the last new beat
    last_words: str = ""  # why the process was ended, in one line


class WorkerEnv(TensorVectorEnv):
    """Steps environments in worker processes, with `num_workers` processes per group.

    Each worker makes its environments with `make_vector_env`, so the results are the same as
    without workers, bit for bit. A question from the rank to a worker names a method to call. The
    worker answers before it gets the next question. Arrays are in shared memory, so the messages of
    a step are short.

    If a worker dies, or hangs in a call that it cannot interrupt, this counts as a failure of its
    environments. As long as restarts are left, a new process makes these environments again and
    answers the open question.
    """

    def __init__(
        self,
        env_id: str,
        num_envs: int,
        num_workers: int,
        num_groups: int = 1,
        *,
        env_offset: int = 0,
        device: str | torch.device = "cpu",
        env_timeout: float = 0.0,
        env_restarts: int = 0,
        heartbeat: Callable[[], None] = lambda: None,
        kind: str = "environment",
        **options: Any,
    ) -> None:
        """Start the workers and let them make the environments.

        Args:
            num_workers: number of processes per group.
            options: further arguments of `make_vector_env`.
        """
        self.num_envs = num_envs
        self.device = torch.device(device)
        self.env_offset = env_offset
        self._name = f"{kind} {env_id}"
        self._heartbeat = heartbeat
        self._limit_text = f"did not come back within {env_timeout:g} s (--env_timeout)"
        options |= {"env_id": env_id, "env_offset": env_offset, "kind": kind}
        self._options = options | {"env_timeout": env_timeout, "env_restarts": env_restarts}

        # No time limits and no restarts apply until all environments have been made.
        self._limit_s = math.inf
        self._max_restarts = 0
        self._rows = np.zeros(num_envs, KEPT)

        self._groups = _split(slice(0, num_envs), min(num_groups, num_envs))
        self._file = os.memfd_create("environments")
        self._workers: list[_Worker] = []  # ordered by their rows
        self._group_workers: list[list[_Worker]] = []  # workers per group
        try:
            for group in self._groups:
                count = min(num_workers, group.stop - group.start)
                workers = [_Worker(rows) for rows in _split(group, count)]
                self._group_workers.append(workers)
                for worker in workers:
                    self._start(worker)
                    self._workers.append(worker)
            facts = self._answers(self._workers)
        except BaseException:
            self.close()
            raise
        layout, actions, self.spaces_json, self.can_snapshot = facts[0]
        self.set_spaces(layout, actions)
        self._rows = shared_rows(self._file, num_envs, row_fields(self))
        self._max_restarts = env_restarts
        if env_timeout:
            self._limit_s = env_timeout + TIMEOUT_MARGIN_S
        _LOGGER.info("%s in %d worker processes", env_id, len(self._workers))

    @property
    def groups(self) -> list[slice]:
        """Slice of rows of each group."""
        return self._groups

    @property
    def restarts(self) -> list[int]:
        """Number of restarts of each environment, [B]."""
        return self._rows["restarts"].tolist()

    @property
    def process_ids(self) -> list[int]:
        """Process id of each worker."""
        return [worker.process.pid for worker in self._workers]

    # ---- methods of a vector environment

    def reset(
        self, *, seed: Any = None, options: dict[str, Any] | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        """Start all environments, see `TorchVectorEnv.reset`."""
        if seed is not None:
            self._rows["life_seed"] = seed
            self._rows["lifetime_step"] = 0
        self._ask_all("reset", lambda rows: (seed and seed[rows],))
        return to_tensors([self._rows["obs"].copy()], self.device)[0], {}

    def step(self, actions: Tensor) -> StepResult:
        """Step all environments, see `TorchVectorEnv.step`."""
        for group, rows in enumerate(self._groups):
            self.send(actions[rows], group)
        return self._result(self._workers, slice(0, self.num_envs))

    def send(self, actions: Tensor, group: int = 0) -> None:
        """Start a step of one group with its actions [rows in the group, ...]."""
        self._rows["actions"][self._groups[group]] = actions.detach().cpu().numpy()
        for worker in self._group_workers[group]:
            self._ask(worker, ("step",))

    def recv(self, group: int = 0) -> StepResult:
        """Wait for the step that `send` started; return the same values as `step`."""
        return self._result(self._group_workers[group], self._groups[group])

    def _result(self, workers: Sequence[_Worker], rows: slice) -> StepResult:
        self._answers(workers)
        return step_result([self._rows[name][rows].copy() for name in STEP_FIELDS], self.device)

    def take_metrics(self) -> dict[str, tuple[float, int]]:
        """Return (sum, count) of every metric that was reported since the last call."""
        metrics: dict[str, tuple[float, int]] = {}
        for reported in self._ask_all("take_metrics"):
            for name, (total, count) in reported.items():
                before = metrics.get(name, (0.0, 0))
                metrics[name] = before[0] + total, before[1] + count
        return metrics

    def get_state(self) -> dict[str, Tensor]:
        """Return a complete snapshot of the environments, see `TorchEnv.get_state`."""
        states = self._ask_all("get_state")
        return {
            name: torch.from_numpy(np.concatenate([state[name] for state in states]))
            for name in states[0]
        }

    def set_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore a snapshot; it may come from a different number of workers."""
        self._ask_all(
            "set_state", lambda rows: ({name: t[rows].numpy() for name, t in state.items()},)
        )

    def close_extras(self, **kwargs: Any) -> None:
        """Let the workers close their environments; kill workers that take too long."""
        for worker in self._workers:
            self._ask(worker, ("close",))
        self._limit_s = CLOSE_S
        self._limit_text = "did not close"
        for worker in self._workers:
            while self._receive(worker):
                pass
            worker.process.end()
            if worker.last_words:
                _LOGGER.warning("%s", worker.last_words)
        os.close(self._file)

    # ---- questions and answers

    def _ask_all(
        self, name: str, args: Callable[[slice], tuple[Any, ...]] = lambda rows: ()
    ) -> list[Any]:
        """Ask all workers; return their answers, ordered by their rows.

        `args` receives a worker's rows and returns the arguments of its question.
        """
        for worker in self._workers:
            self._ask(worker, (name, *args(worker.rows)))
        return self._answers(self._workers)

    def _ask(self, worker: _Worker, question: tuple[Any, ...]) -> None:
        worker.question = question
        worker.since_s = time.monotonic()
        worker.process.send(question)

    def _answers(self, workers: Sequence[_Worker]) -> list[Any]:
        """Wait for all workers; return their answers or raise the first problem."""
        replies = [self._reply(worker) for worker in workers]
        for problem, _ in replies:
            if problem is not None:
                raise problem
        return [value for _, value in replies]

    def _reply(self, worker: _Worker) -> Reply:
        """Wait for the reply from a worker or from the process that replaces it."""
        while (reply := self._receive(worker)) is None:
            if fault := self._replace(worker):
                return fault, None
        return reply

    def _receive(self, worker: _Worker) -> Reply | None:
        """Return a worker's next reply, or None if the worker has ended."""
        while message := worker.process.receive(partial(self._look_after, worker)):
            kind, content = message
            if kind == "reply":
                return content
            if kind == "log":
                logging.getLogger(content.name).handle(content)
            else:
                worker.last_words = content
        return None

    # ---- workers that die or hang

    def _look_after(self, worker: _Worker) -> None:
        """Report a worker's progress; kill the worker after too long without progress."""
        beats = int(worker.status["beats"])
        now_s = time.monotonic()
        if beats != worker.beats:
            worker.beats = beats
            worker.since_s = now_s
            self._heartbeat()
        if now_s - worker.since_s > self._limit_s:
            worker.last_words = self._named(worker, self._limit_text)
            worker.process.end()

    def _named(self, worker: _Worker, problem: str) -> str:
        """Return one line that names the environment, its step and the problem."""
        number = int(worker.status["number"]) - 1
        which = f"one of {self._numbers(worker)}" if number < 0 else str(number)
        step = int(self._rows["lifetime_step"][worker.rows.start]) + (worker.question[0] == "step")
        return f"{self._name} number {which} at its step {step}: {problem}"

    def _numbers(self, worker: _Worker) -> str:
        """Return the range of global numbers of a worker's environments as text."""
        return f"{self.env_offset + worker.rows.start}..{self.env_offset + worker.rows.stop - 1}"

    def _replace(self, worker: _Worker) -> Exception | None:
        """Replace a dead process; return the error if no restart is left.

        The new process is asked the question that the old process did not answer.
        """
        numbers = self._numbers(worker)
        restarts = self._rows["restarts"][worker.rows]
        reply = None
        while reply is None:  # every attempt uses up one restart
            how = worker.process.end()
            problem = f"its worker process {worker.process.pid} (environments {numbers}) {how}"
            fault = worker.last_words or self._named(worker, problem)
            if (used := restarts.max()) >= self._max_restarts:
                again = f" (after {used} restarts, --env_restarts)" * bool(used)
                return EnvironmentFaultError(f"{fault}{again}")
            _LOGGER.warning("%s; %s are made again in a new process", fault, numbers)
            restarts += 1
            self._start(worker, again=True)
            reply = self._receive(worker)
        problem_again, _ = reply
        if problem_again is None:
            worker.process.send(worker.question)
        return problem_again

    def _start(self, worker: _Worker, again: bool = False) -> None:
        """Start a process that makes the environments; `again`: it replaces a dead one."""
        status_file = os.memfd_create("status")
        worker.process = WorkerProcess([status_file, self._file])
        worker.status = shared_rows(status_file, 1, STATUS)[0]
        os.close(status_file)
        worker.since_s = time.monotonic()
        worker.last_words = ""
        worker.process.send(("begin", worker.rows, self.num_envs, self._options, again))


def _split(rows: slice, count: int) -> list[slice]:
    """Split rows into contiguous slices whose lengths differ by at most 1."""
    edges = [rows.start + (rows.stop - rows.start) * i // count for i in range(count + 1)]
    return [slice(first, last) for first, last in pairwise(edges)]
