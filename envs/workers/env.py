"""A vector environment with its environments in worker processes."""

from __future__ import annotations

import logging
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
from envs.vector.tensors import TensorVectorEnv, to_tensors
from envs.workers.host import WorkerProcess
from envs.workers.worker import NO_ROW, STATUS, row_fields, shared_rows

_LOGGER = logging.getLogger(__name__)
CLOSE_S = 10.0  # for environments to close


@dataclass
class _Worker:
    """A process, and the environments of each group that it holds."""

    index: int
    process: WorkerProcess
    rows: list[slice]  # of each group
    unanswered: list[_Question] = field(default_factory=list)  # in the order of their answers
    beats: int = 0  # seen last
    since_s: float = 0.0  # time of the last beat
    problem: str = ""  # the reason why it was killed
    last_words: str = ""


@dataclass
class _Question:
    """A question to a worker about a group (None: about all), and its reply."""

    worker: _Worker
    name: str
    group: int | None
    args: tuple[Any, ...]
    reply: tuple[Any, Any] | None = None  # a problem or None, and a value


class WorkerEnv(TensorVectorEnv):
    """Environments in processes, each with a contiguous part of every group.

    A worker does what `TorchVectorEnv` does in place, with the same numbers, seeds, guards and
    snapshots, so the results are the same bit for bit. Arrays lie in shared memory; a step is one
    short message to and from each worker, where Gymnasium's AsyncVectorEnv sends two for every
    environment, has one process for each, and ends with EOFError when one is killed.

    A worker that dies, or hangs where nothing can interrupt it, is a fault of its environments. The
    fault is named; or, with restarts left for all of them, they begin again in a new process, which
    first answers the questions that the dead one left unanswered.
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
        """Start the workers and make the environments; options: see `make_vector_env`."""
        self.num_envs = num_envs
        self.device = torch.device(device)
        self._name = f"{kind} {env_id}"
        self.env_offset = env_offset
        self._timeout_s = env_timeout
        self._max_restarts = env_restarts
        self._heartbeat = heartbeat
        self._num_questions = 0
        self._groups = _split(slice(0, num_envs), min(num_groups, num_envs))
        options |= {"env_id": env_id, "env_offset": env_offset, "kind": kind}
        self._options = options | {"env_timeout": env_timeout, "env_restarts": env_restarts}

        # files in memory, the workers, their environments, and the rows that these need
        num_workers = min(num_workers, *(rows.stop - rows.start for rows in self._groups))
        shares = [_split(rows, num_workers) for rows in self._groups]
        self._files = [os.memfd_create("status"), os.memfd_create("environments")]
        self._status = shared_rows(self._files[0], num_workers, STATUS)
        self._rows: np.ndarray | None = None
        self._steps: dict[int, list[_Question]] = {}  # steps of each group
        self._workers: list[_Worker] = []
        try:
            for index in range(num_workers):
                process = WorkerProcess(*self._files)
                rows = [share[index] for share in shares]
                self._workers.append(_Worker(index, process, rows))
            facts = self._answers([self._begin(worker, num_workers) for worker in self._workers])
        except BaseException:
            self.close()
            raise
        layout, actions, self.spaces_json, self.can_snapshot = facts[0]
        self.set_spaces(layout, actions)
        self._rows = shared_rows(self._files[1], num_envs, row_fields(self))
        _LOGGER.info("%s in %d worker processes", env_id, num_workers)

    @property
    def groups(self) -> list[slice]:
        """Rows that step together."""
        return self._groups

    @property
    def restarts(self) -> list[int]:
        """Number of times that each environment was made again, [B]."""
        return self._column("restarts").tolist()

    @property
    def process_ids(self) -> list[int]:
        """Process of each worker."""
        return [worker.process.pid for worker in self._workers]

    def _column(self, name: str) -> np.ndarray:
        """Return a column of the shared rows, [B, ...]."""
        assert self._rows is not None
        return self._rows[name]

    # ---- what a vector environment does

    def reset(
        self, *, seed: Any = None, options: dict[str, Any] | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        """Start all environments, as `TorchVectorEnv` does."""
        if seed is not None:
            self._column("life_seeds")[:] = seed
            self._column("lifetime_step")[:] = 0
        self._on_all("reset", lambda rows: (seed and seed[rows],))
        return to_tensors([self._column("obs").copy()], self.device)[0], {}

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
        """Step all environments, as `TorchVectorEnv` does."""
        for group, rows in enumerate(self._groups):
            self.send(actions[rows], group)
        questions = [question for sent in self._steps.values() for question in sent]
        return self._outcome(questions, slice(0, self.num_envs))

    def send(self, actions: Tensor, group: int = 0) -> None:
        """Let a group step by its actions [rows of it, ...], and return before it has."""
        self._column("actions")[self._groups[group]] = actions.detach().cpu().numpy()
        self._steps[group] = self._on_group(group, "step")

    def recv(self, group: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
        """Wait for a group's step; return what `step` returns for its environments."""
        return self._outcome(self._steps[group], self._groups[group])

    def _outcome(
        self, questions: Sequence[_Question], rows: slice
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
        self._answers(questions)
        names = ("obs", "rewards", "terminated", "truncated", "final_obs")
        arrays = [self._column(name)[rows].copy() for name in names]
        obs, rewards, terminated, truncated, final_obs = to_tensors(arrays, self.device)
        return obs, rewards, terminated, truncated, {"final_obs": final_obs}

    def take_metrics(self) -> dict[str, tuple[float, int]]:
        """Return sum and count of each metric since the last call."""
        metrics: dict[str, tuple[float, int]] = {}
        for reported in self._on_all("take_metrics"):
            for name, (total, count) in reported.items():
                before = metrics.get(name, (0.0, 0))
                metrics[name] = before[0] + total, before[1] + count
        return metrics

    def get_state(self) -> dict[str, Tensor]:
        """Return all the future depends on: CPU tensors [B, ...], float64 or int64."""
        states = self._on_all("get_state")
        return {
            name: torch.from_numpy(np.concatenate([state[name] for state in states]))
            for name in states[0]
        }

    def set_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue exactly where `get_state` was called, on any number of workers."""
        self._on_all(
            "set_state", lambda rows: ({name: t[rows].numpy() for name, t in state.items()},)
        )

    def close_extras(self, **kwargs: Any) -> None:
        """Let the workers close their environments; kill those that take too long."""
        until_s = time.monotonic() + CLOSE_S
        for worker in self._workers:
            self._ask(worker, "close", None)
        for worker in self._workers:
            while self._receive(worker, partial(self._hurry, worker, until_s)):
                pass
            worker.process.end()
        for file in self._files:
            os.close(file)

    def _hurry(self, worker: _Worker, until_s: float) -> None:
        self._heartbeat()
        if time.monotonic() > until_s:
            _LOGGER.warning("%s: worker process %d did not close", self._name, worker.process.pid)
            worker.process.kill()

    # ---- questions and answers

    def _on_all(self, name: str, args: Callable[[slice], tuple] = lambda rows: ()) -> list[Any]:
        """Ask all workers about all groups; return their answers in the order of environments."""
        groups = range(len(self._groups))
        return self._answers([q for group in groups for q in self._on_group(group, name, args)])

    def _on_group(
        self, group: int, name: str, args: Callable[[slice], tuple] = lambda rows: ()
    ) -> list[_Question]:
        return [self._ask(w, name, group, *args(w.rows[group])) for w in self._workers]

    def _ask(self, worker: _Worker, name: str, group: int | None, *args: Any) -> _Question:
        question = _Question(worker, name, group, args)
        worker.unanswered.append(question)
        worker.process.send((name, group, args))
        return question

    def _answers(self, questions: Sequence[_Question]) -> list[Any]:
        """Return all answers; of several faults the one of the first environment is raised."""
        answers, faults = [], []
        for question in questions:
            try:
                answers.append(self._answer(question))
            except EnvironmentFaultError as fault:
                faults.append(fault)
        if faults:
            raise faults[0]
        return answers

    def _answer(self, question: _Question, *, may_restart: bool = True) -> Any:
        """Wait for an answer and return it; a new process answers if the worker has died."""
        worker = question.worker
        worker.since_s = time.monotonic()
        while question.reply is None:
            if not self._receive(worker, partial(self._look_after, worker)):
                self._begin_again(question, may_restart)
        problem, value = question.reply
        if problem is not None:
            raise problem
        return value

    def _receive(self, worker: _Worker, meanwhile: Callable[[], None]) -> bool:
        """Wait for a worker's next message and handle it; return False if the worker has ended."""
        message = worker.process.receive(meanwhile)
        if message is None:
            return False
        kind, first, second = message
        if kind == "reply":
            worker.unanswered.pop(0).reply = first, second
        elif kind == "log":
            logging.getLogger(first).log(*second)
        else:
            worker.last_words = second
        return True

    # ---- workers that end

    def _look_after(self, worker: _Worker) -> None:
        """Report a worker's progress to the rank; kill a worker that makes none."""
        beats = int(self._status["beats"][worker.index])
        now_s = time.monotonic()
        if beats != worker.beats:
            worker.beats = beats
            worker.since_s = now_s
            self._heartbeat()
        limit_s = self._timeout_s + GRACE_S + 1.0  # the worker itself knows sooner, if it can
        is_timed = self._rows is not None and self._timeout_s
        if is_timed and now_s - worker.since_s > limit_s:
            worker.problem = f"did not come back within {self._timeout_s:g} s (--env_timeout)"
            worker.process.kill()

    def _fault(self, question: _Question) -> EnvironmentFaultError:
        """Return why a worker has ended without an answer, in one line."""
        worker = question.worker
        how = worker.process.end()
        if worker.last_words:
            return EnvironmentFaultError(worker.last_words)
        step = int(question.name == "step")
        if self._rows is not None:
            step += int(self._rows["lifetime_step"][worker.rows[question.group or 0].start])
        row = int(self._status["row"][worker.index])
        numbers = self._numbers(worker)
        number = f"one of {numbers}" if row == NO_ROW else str(row)
        problem = f"its worker process {worker.process.pid} (environments {numbers}) {how}"
        return EnvironmentFaultError(
            f"{self._name} number {number} at its step {step}: {worker.problem or problem}"
        )

    def _numbers(self, worker: _Worker) -> str:
        """Return the global numbers of a worker's environments."""
        first = self.env_offset
        ranges = [f"{first + rows.start}..{first + rows.stop - 1}" for rows in worker.rows]
        return " and ".join(ranges)

    def _begin_again(self, question: _Question, may_restart: bool) -> None:
        """Replace a worker's process, which has ended, or raise its fault."""
        worker = question.worker
        fault = self._fault(question)
        if self._rows is None or not may_restart:
            raise fault
        restarts = self._rows["restarts"]
        used = max(int(restarts[rows].max()) for rows in worker.rows)
        if used >= self._max_restarts:
            again = f" (after {used} restarts, --env_restarts)" if used else ""
            raise EnvironmentFaultError(f"{fault}{again}")
        _LOGGER.warning("%s; %s are made again in a new process", fault, self._numbers(worker))
        self._status["row"][worker.index] = NO_ROW
        unanswered = worker.unanswered
        worker.unanswered = []
        worker.process = WorkerProcess(*self._files)
        worker.problem = worker.last_words = ""
        self._answer(self._begin(worker, len(self._workers)), may_restart=False)
        for group, rows in enumerate(worker.rows):
            restarts[rows] += 1
            self._answer(self._ask(worker, "begin_again", group), may_restart=False)
        worker.unanswered = unanswered
        for left in unanswered:
            worker.process.send((left.name, left.group, left.args))

    def _begin(self, worker: _Worker, num_workers: int) -> _Question:
        """Let a worker make its environments; its answer holds facts about them."""
        args = worker.index, num_workers, self.num_envs, worker.rows, self._options
        return self._ask(worker, "begin", None, *args)


def _split(rows: slice, count: int) -> list[slice]:
    """Split rows into contiguous slices that differ in length by one at most."""
    edges = [rows.start + (rows.stop - rows.start) * i // count for i in range(count + 1)]
    return [slice(first, last) for first, last in pairwise(edges)]
