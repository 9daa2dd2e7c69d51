"""The vector environment whose environments live in worker processes."""

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
    parts: list[_Part] = field(default_factory=list)
    beats: int = 0  # seen last
    since_s: float = 0.0  # time of the last beat
    problem: str = ""  # the reason why it was killed
    last_words: str = ""


@dataclass
class _Part:
    """The environments of one worker and group."""

    worker: _Worker
    group: int
    rows: slice
    question: tuple[Any, ...] = ()  # number, name, group, arguments; (): it is answered


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
        self._files = [os.memfd_create("status"), os.memfd_create("environments")]
        self._status = shared_rows(self._files[0], num_workers, STATUS)
        self._rows: np.ndarray | None = None
        self._workers: list[_Worker] = []
        try:
            for index in range(num_workers):
                self._workers.append(_Worker(index, WorkerProcess(*self._files)))
            self._parts = [
                _Part(worker, group, rows)
                for group, group_rows in enumerate(self._groups)
                for worker, rows in zip(self._workers, _split(group_rows, num_workers), strict=True)
            ]
            for part in self._parts:
                part.worker.parts.append(part)
            questions = [self._begin(worker) for worker in self._workers]
            for worker, question in zip(self._workers, questions, strict=True):
                layout, actions, self.spaces_json, self.can_snapshot = self._required(
                    worker, question
                )
        except BaseException:
            self.close()
            raise
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
        self._on_parts("reset", lambda rows: (seed and seed[rows],))
        return to_tensors([self._column("obs").copy()], self.device)[0], {}

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
        """Step all environments, as `TorchVectorEnv` does."""
        for group, rows in enumerate(self._groups):
            self.send(actions[rows], group)
        return self._outcome(self._parts, slice(0, self.num_envs))

    def send(self, actions: Tensor, group: int = 0) -> None:
        """Let a group step by its actions [rows of it, ...], and return before it has."""
        self._column("actions")[self._groups[group]] = actions.detach().cpu().numpy()
        for part in self._parts_of(group):
            self._ask(part, "step")

    def recv(self, group: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
        """Wait for a group's step; return what `step` returns for its environments."""
        return self._outcome(self._parts_of(group), self._groups[group])

    def _parts_of(self, group: int) -> list[_Part]:
        return [part for part in self._parts if part.group == group]

    def _outcome(
        self, parts: Sequence[_Part], rows: slice
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
        self._answers(parts)
        names = ("obs", "rewards", "terminated", "truncated", "final_obs")
        arrays = [self._column(name)[rows].copy() for name in names]
        obs, rewards, terminated, truncated, final_obs = to_tensors(arrays, self.device)
        return obs, rewards, terminated, truncated, {"final_obs": final_obs}

    def take_metrics(self) -> dict[str, tuple[float, int]]:
        """Return sum and count of each metric since the last call."""
        metrics: dict[str, tuple[float, int]] = {}
        for reported in self._on_parts("take_metrics"):
            for name, (total, count) in reported.items():
                before = metrics.get(name, (0.0, 0))
                metrics[name] = before[0] + total, before[1] + count
        return metrics

    def get_state(self) -> dict[str, Tensor]:
        """Return all the future depends on: CPU tensors [B, ...], float64 or int64."""
        states = self._on_parts("get_state")
        return {
            name: torch.from_numpy(np.concatenate([state[name] for state in states]))
            for name in states[0]
        }

    def set_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue exactly where `get_state` was called, on any number of workers."""
        self._on_parts(
            "set_state", lambda rows: ({name: t[rows].numpy() for name, t in state.items()},)
        )

    def close_extras(self, **kwargs: Any) -> None:
        """Let the workers close their environments; kill those that take too long."""
        until_s = time.monotonic() + CLOSE_S
        for worker in self._workers:
            self._send(worker, "close", None)
        for worker in self._workers:
            self._reply(worker, (), partial(self._hurry, worker, until_s))
            worker.process.end()
        for file in self._files:
            os.close(file)

    def _hurry(self, worker: _Worker, until_s: float) -> None:
        self._heartbeat()
        if time.monotonic() > until_s:
            _LOGGER.warning("%s: worker process %d did not close", self._name, worker.process.pid)
            worker.process.kill()

    # ---- questions and answers

    def _on_parts(self, name: str, args: Callable[[slice], tuple] = lambda rows: ()) -> list[Any]:
        """Ask all parts; return their answers in the order of environments."""
        for part in self._parts:
            self._ask(part, name, *args(part.rows))
        return self._answers(self._parts)

    def _ask(self, part: _Part, name: str, *args: Any) -> None:
        part.question = self._send(part.worker, name, part.group, *args)

    def _send(self, worker: _Worker, *question: Any) -> tuple[Any, ...]:
        """Ask a worker by name, group and arguments; return the question with its number."""
        self._num_questions += 1
        name, group, *args = question
        numbered = self._num_questions, name, group, tuple(args)
        worker.process.send(numbered)
        return numbered

    def _answers(self, parts: Sequence[_Part]) -> list[Any]:
        """Return all answers; of several faults the one of the first environment is raised."""
        answers, faults = [], []
        for part in parts:
            try:
                while (reply := self._reply(part.worker, part.question)) is None:
                    self._begin_again(part)
                part.question = ()
                answers.append(_value(reply))
            except EnvironmentFaultError as fault:
                faults.append(fault)
        if faults:
            raise faults[0]
        return answers

    def _reply(
        self, worker: _Worker, question: tuple[Any, ...], wait: Callable[[], None] | None = None
    ) -> tuple[Any, ...] | None:
        """Wait for the reply to a question; return None if the worker has ended."""
        worker.since_s = time.monotonic()
        while reply := worker.process.receive(wait or partial(self._look_after, worker)):
            number, name, record = reply
            if number in question[:1]:
                return reply
            if number is None and name:
                logging.getLogger(name).log(*record)
            elif number is None:
                worker.last_words = record[1]
        return None

    def _required(self, worker: _Worker, question: tuple[Any, ...]) -> Any:
        """Return a worker's answer to a question; its end is a fault."""
        reply = self._reply(worker, question)
        if reply is None:
            raise self._fault(worker, 0)
        return _value(reply)

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

    def _fault(self, worker: _Worker, step: int) -> EnvironmentFaultError:
        """Return why a worker has ended, in one line."""
        how = worker.process.end()
        if worker.last_words:
            return EnvironmentFaultError(worker.last_words)
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
        ranges = [f"{first + p.rows.start}..{first + p.rows.stop - 1}" for p in worker.parts]
        return " and ".join(ranges)

    def _begin_again(self, part: _Part) -> None:
        """Replace the process of a part, which has ended, or raise its fault."""
        worker = part.worker
        restarts = self._column("restarts")
        steps_before = int(self._column("lifetime_step")[part.rows.start])
        fault = self._fault(worker, steps_before + (part.question[1] == "step"))
        used = max(int(restarts[part.rows].max()) for part in worker.parts)
        if used >= self._max_restarts:
            again = f" (after {used} restarts, --env_restarts)" if used else ""
            raise EnvironmentFaultError(f"{fault}{again}")
        _LOGGER.warning("%s; %s are made again in a new process", fault, self._numbers(worker))
        self._status["row"][worker.index] = NO_ROW
        worker.process = WorkerProcess(*self._files)
        worker.problem = worker.last_words = ""
        self._required(worker, self._begin(worker))
        for part in worker.parts:
            restarts[part.rows] += 1
            self._required(worker, self._send(worker, "begin_again", part.group))
        for part in worker.parts:
            if part.question:
                worker.process.send(part.question)

    def _begin(self, worker: _Worker) -> tuple[Any, ...]:
        """Let a worker make its environments; its answer holds facts about them."""
        groups = [part.rows for part in worker.parts]
        args = worker.index, len(self._workers), self.num_envs, groups, self._options
        return self._send(worker, "begin", None, *args)


def _value(reply: tuple[Any, ...]) -> Any:
    """Return the value of a reply, or raise its problem."""
    _, problem, value = reply
    if problem is not None:
        raise problem
    return value


def _split(rows: slice, count: int) -> list[slice]:
    """Split rows into contiguous slices that differ in length by one at most."""
    edges = [rows.start + (rows.stop - rows.start) * i // count for i in range(count + 1)]
    return [slice(first, last) for first, last in pairwise(edges)]
