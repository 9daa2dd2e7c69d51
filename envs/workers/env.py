"""The vector environment whose environments live in worker processes."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from torch import Tensor

from envs.vector.adapter import to_tensors
from envs.vector.faults import EnvironmentFaultError, WorkerFaultError
from envs.vector.hangs import GRACE_S
from envs.vector.layout import Layout, TorchEnv
from envs.workers.host import WorkerProcess
from envs.workers.worker import FACTS, NO_ROW, env_columns, shared_arrays, status_columns

_LOGGER = logging.getLogger(__name__)
_STEP_KEY = "lifetime_step"
CLOSE_S = 10.0  # for environments to close
ANSWERS = ("obs", "rewards", "terminated", "truncated", "final_obs")


@dataclass
class _Part:
    """The environments of one worker and group, and what was asked of them last."""

    worker: int
    group: int
    rows: slice
    number: int = 0  # of the question
    name: str = ""  # of the question
    has_begun_again: bool = False  # and its next step is the one that its end cut short

    @property
    def count(self) -> int:
        return self.rows.stop - self.rows.start


@dataclass
class _Worker:
    """A process, and the environments it holds of each group."""

    process: WorkerProcess
    parts: list[_Part]
    since_s: float = 0.0  # when it last said that work goes on
    problem: str = ""  # for which it was killed


class WorkerEnv(VectorEnv[Tensor, Tensor, Tensor], TorchEnv):
    """Environments in processes, each with a contiguous part of every group.

    What a worker does is what `TorchVectorEnv` does in place, with the same numbers, seeds, guards
    and snapshots, so the results are the same bit for bit. Arrays lie in shared memory; a step is
    one short message to and from each worker, where Gymnasium's AsyncVectorEnv sends two for every
    environment, has one process for each, and ends with EOFError when one is killed.

    A worker that dies, or hangs where nothing can interrupt it, is a fault of its environments: it
    is named, or with restarts left for all of them they begin again in a new process.
    """

    layout: Layout
    spaces_json: str
    can_snapshot: bool

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
        end: Any = None,  # of the rank: it is never hung itself
        **options: Any,
    ) -> None:
        """Start the workers and make the environments; options: see `make_vector_env`."""
        self.env_id = env_id
        self.num_envs = num_envs
        self.env_offset = env_offset
        self.device = torch.device(device)
        self.kind = kind
        self.metadata = {"render_modes": [], "autoreset_mode": AutoresetMode.SAME_STEP}
        self._groups = _split(slice(0, num_envs), min(num_groups, num_envs))
        self._timeout_s = env_timeout
        self._max_restarts = env_restarts
        self._heartbeat = heartbeat
        self._questions = 0
        self._lifetime_steps = [0] * len(self.groups)
        kept = {"env_timeout": env_timeout, "env_restarts": env_restarts, "kind": kind}
        self._make = {"env_id": env_id, "env_offset": env_offset, "options": options | kept}
        self._make["path"] = sys.path

        # files in memory, then the workers, the environments, and what is known only then
        num_workers = min(num_workers, *(rows.stop - rows.start for rows in self.groups))
        self._files = _memory_file(), _memory_file()
        self._status = shared_arrays(self._files[0], status_columns(num_workers))
        self._beats = self._status["beats"].copy()
        self._workers: list[_Worker] = []
        self._arrays: dict[str, np.ndarray] = {}
        shares = [_split(rows, num_workers) for rows in self.groups]
        try:
            for index in range(num_workers):
                parts = [_Part(index, group, share[index]) for group, share in enumerate(shares)]
                self._workers.append(_Worker(self._new_process(), parts))
            self._begin()
        except BaseException:
            self.close()
            raise
        _LOGGER.info("%s in %d worker processes", env_id, num_workers)

    def _new_process(self) -> WorkerProcess:
        return WorkerProcess(self._files, self._timeout_s)

    def _begin(self) -> None:
        """Make the environments, and the arrays that they need."""
        facts = self._on_workers("begin", self._beginning)[0]
        for name in FACTS:
            setattr(self, name, facts[name])
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        num_obs, shape = self.single_observation_space.shape, self.single_action_space.shape
        self._columns = env_columns(self.num_envs, num_obs[0], shape)  # type: ignore[index, arg-type]
        self._on_workers("share", lambda index: (self._columns,))
        self._arrays = shared_arrays(self._files[1], self._columns)

    @property
    def groups(self) -> list[slice]:
        """Rows that step together."""
        return self._groups

    @property
    def num_workers(self) -> int:
        """Number of processes."""
        return len(self._workers)

    @property
    def restarts(self) -> list[int]:
        """How often each environment was made again, [B]."""
        return self._arrays["restarts"].tolist()

    # ---- what a vector environment does

    def reset(
        self, *, seed: int | Sequence[int] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        """Start all environments, as `TorchVectorEnv` does."""
        if seed is not None:
            if isinstance(seed, int) or len(seed) != self.num_envs:
                raise ValueError(f"seed must be a list of {self.num_envs} integers, got {seed}")
            self._arrays["life_seeds"][:] = list(seed)
            self._lifetime_steps = [0] * len(self.groups)
        self._on_parts("reset", lambda rows: (None if seed is None else list(seed[rows]),))
        return self._tensors(slice(0, self.num_envs), "obs")[0], {}

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
        """Step all environments, as `TorchVectorEnv` does."""
        for group, rows in enumerate(self.groups):
            self.send(actions[rows], group)
        self._read([part for worker in self._workers for part in worker.parts])
        return self._answers(slice(0, self.num_envs))

    def send(self, actions: Tensor, group: int = 0) -> None:
        """Let a group step by its actions [its environments, ...], and return at once."""
        rows = self.groups[group]
        wanted = (rows.stop - rows.start, *(self.single_action_space.shape or ()))
        if tuple(actions.shape) != wanted:
            raise ValueError(f"actions must have shape {wanted}, got {tuple(actions.shape)}")
        kind = "float" if actions.is_floating_point() else "int"
        self._arrays[f"{kind}_actions"][rows] = actions.detach().cpu().numpy()
        self._lifetime_steps[group] += 1
        for worker in self._workers:
            self._ask(worker.parts[group], "step", kind)

    def recv(self, group: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
        """Wait for a group's step; return what `step` does, of its environments."""
        self._read([worker.parts[group] for worker in self._workers])
        return self._answers(self.groups[group])

    def take_metrics(self) -> dict[str, tuple[float, int]]:
        """Return sum and count of what environments reported, as `TorchVectorEnv` does."""
        parts = [p for w in self._workers for p in w.parts if not p.has_begun_again]
        for part in parts:
            self._ask(part, "take_metrics")
        found: dict[str, tuple[float, int]] = {}
        for part in parts:
            # of a worker that has ended there is nothing; the next step finds its end
            metrics = self._next(self._workers[part.worker], part.number)[1]
            for name, (total, count) in (metrics or {}).items():
                sums = found.get(name, (0.0, 0))
                found[name] = (sums[0] + total, sums[1] + count)
        return found

    def get_state(self) -> dict[str, Tensor]:
        """Return all the future depends on: CPU tensors [B, ...], float64 or int64."""
        states = self._on_parts("get_state")
        while None in states:  # of environments that have begun again meanwhile
            states = self._on_parts("get_state")
        return {
            name: torch.from_numpy(np.concatenate([state[name] for state in states]))
            for name in states[0]
        }

    def set_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue exactly where `get_state` was called, on any number of workers."""
        arrays = {name: tensor.detach().cpu().numpy() for name, tensor in state.items()}
        self._on_parts("set_state", lambda rows: ({n: a[rows] for n, a in arrays.items()},))
        self._lifetime_steps = [int(state[_STEP_KEY][0])] * len(self.groups)

    def close_extras(self, **kwargs: Any) -> None:
        """Let the workers close their environments and end, in whatever way."""
        until_s = time.monotonic() + CLOSE_S
        for worker in self._workers:
            worker.process.send((0, "close", None, ()))
        for worker in self._workers:
            while reply := worker.process.receive(partial(self._hurry, worker, until_s)):
                self._log(reply)
            worker.process.end()
        for file in self._files:
            os.close(file)

    def _hurry(self, worker: _Worker, until_s: float) -> None:
        self._heartbeat()
        if time.monotonic() > until_s:
            _LOGGER.warning("%s: worker process %d did not close", self.env_id, worker.process.pid)
            worker.process.kill()

    def _answers(self, rows: slice) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
        obs, rewards, terminated, truncated, final_obs = self._tensors(rows, *ANSWERS)
        return obs, rewards, terminated, truncated, {"final_obs": final_obs}

    def _tensors(self, rows: slice, *names: str) -> list[Tensor]:
        """Return fresh tensors of some rows."""
        return to_tensors([self._arrays[name][rows].copy() for name in names], self.device)

    # ---- questions and answers

    def _on_parts(self, name: str, args: Callable[[slice], tuple] = lambda rows: ()) -> list[Any]:
        """Ask all parts; return their answers in the order of environments."""
        by_group = [[worker.parts[g] for worker in self._workers] for g in range(len(self.groups))]
        parts = [part for parts in by_group for part in parts]
        # the truncation of a part that has begun again waits for its next step
        pending = [part for part in parts if part.has_begun_again and name == "get_state"]
        for part in parts:
            part.has_begun_again = False
            self._ask(part, name, *args(part.rows))
        answers = self._read(parts)
        for part in pending:
            part.has_begun_again = True
        return answers

    def _ask(self, part: _Part, name: str, *args: Any) -> None:
        self._questions += 1
        part.number, part.name = self._questions, name
        if not part.has_begun_again:
            message = self._questions, name, part.group, args
            self._workers[part.worker].process.send(message)

    def _read(self, parts: Sequence[_Part]) -> list[Any]:
        """Return all answers; of several faults the one of the first environment is raised."""
        found, problems = [], []
        for part in parts:
            try:
                found.append(self._answer(part))
            except EnvironmentFaultError as fault:
                problems.append(fault)
        if problems:
            raise problems[0]
        return found

    def _answer(self, part: _Part) -> Any:
        worker = self._workers[part.worker]
        while not part.has_begun_again:
            found, value = self._next(worker, part.number)
            if found:
                return value
            self._begin_again(worker, part)
        part.has_begun_again = part.name == "get_state"  # else the step that was cut short
        return None

    def _on_workers(self, name: str, args: Callable[[int], tuple]) -> list[Any]:
        """Ask all workers what is about all their parts."""
        self._questions += 1
        for index, worker in enumerate(self._workers):
            worker.process.send((self._questions, name, None, args(index)))
        return [self._of_worker(worker) for worker in self._workers]

    def _of_worker(self, worker: _Worker) -> Any:
        found, value = self._next(worker, self._questions)
        if not found:
            raise self._fault(worker, 0)
        return value

    def _beginning(self, index: int) -> tuple[Any, ...]:
        chunks = [(part.rows.start, part.count) for part in self._workers[index].parts]
        level = logging.getLogger().level
        return index, self.num_workers, level, chunks, self._make

    def _next(self, worker: _Worker, number: int) -> tuple[bool, Any]:
        """Wait for the answer to a question; not found: the worker has ended."""
        worker.since_s = time.monotonic()
        while reply := worker.process.receive(partial(self._look_after, worker)):
            if reply[0] == number:
                if reply[1] is not None:
                    raise reply[1]
                return True, reply[2]
            self._log(reply)  # else of a question that a fault cut short
        return False, None

    def _log(self, reply: tuple[int | None, Any, Any]) -> None:
        if reply[0] is None:
            logging.getLogger(reply[1]).log(*reply[2])

    # ---- workers that end

    def _look_after(self, worker: _Worker) -> None:
        """Say that work goes on as long as it does; kill a worker in which nothing moves."""
        index = worker.parts[0].worker
        moved = self._status["beats"] != self._beats  # [workers]
        self._beats = self._status["beats"].copy()
        now_s = time.monotonic()
        if moved.any():
            self._heartbeat()
        if moved[index]:
            worker.since_s = now_s
        limit_s = self._timeout_s + GRACE_S + 1.0  # the worker itself knows sooner, if it can
        if self._arrays and self._timeout_s and now_s - worker.since_s > limit_s:
            worker.problem = f"did not come back within {self._timeout_s:g} s (--env_timeout)"
            worker.process.kill()

    def _fault(self, worker: _Worker, step: int) -> WorkerFaultError:
        """Return why a worker has ended, in one line."""
        index = worker.parts[0].worker
        how = worker.process.end()
        last_words = self._status["last_words"][index].tobytes().rstrip(b"\0")
        if last_words:
            return WorkerFaultError(last_words.decode(errors="replace"))
        row, numbers = int(self._status["row"][index]), self._numbers(worker)
        number = f"one of {numbers}" if row == NO_ROW else str(row)
        problem = worker.problem
        if not problem:
            problem = f"its worker process {worker.process.pid} (environments {numbers}) {how}"
        named = f"{self.kind} {self.env_id} number {number} at its step {step}"
        return WorkerFaultError(f"{named}: {problem}")

    def _numbers(self, worker: _Worker) -> str:
        """Return the global numbers of a worker's environments."""
        first = self.env_offset
        ranges = [f"{first + p.rows.start}..{first + p.rows.stop - 1}" for p in worker.parts]
        return " and ".join(ranges)

    def _begin_again(self, worker: _Worker, cause: _Part) -> None:
        """Put a new process in the place of one that has ended, or raise its fault."""
        index = cause.worker
        fault = self._fault(worker, self._lifetime_steps[cause.group])
        restarts = self._arrays["restarts"]
        used = max(int(restarts[part.rows].max()) for part in worker.parts)
        if used >= self._max_restarts or cause.name == "set_state":
            again = f" (after {used} restarts, --env_restarts)" if used else ""
            raise WorkerFaultError(f"{fault}{again}")
        numbers = self._numbers(worker)
        _LOGGER.warning("%s; %s are made again in a new process", fault, numbers)
        self._status["last_words"][index] = 0
        self._status["row"][index] = NO_ROW
        worker.process, worker.problem = self._new_process(), ""
        for name, args in (("begin", self._beginning(index)), ("share", (self._columns,))):
            self._questions += 1
            worker.process.send((self._questions, name, None, args))
            self._of_worker(worker)
        for part in worker.parts:
            rows, last_obs = part.rows, self._arrays["obs"][part.rows].copy()
            life_seeds = self._arrays["life_seeds"][rows].tolist()
            counts = (restarts[rows] + 1).tolist()
            step = self._lifetime_steps[part.group]
            self._questions += 1
            args = life_seeds, counts, step
            worker.process.send((self._questions, "begin_again", part.group, args))
            self._of_worker(worker)
            self._arrays["final_obs"][rows] = last_obs
            self._arrays["rewards"][rows] = 0.0
            self._arrays["terminated"][rows] = False
            self._arrays["truncated"][rows] = True
            part.has_begun_again = True


def _split(rows: slice, count: int) -> list[slice]:
    """Split rows into contiguous slices that differ in length by one at most."""
    edges = [rows.start + (rows.stop - rows.start) * i // count for i in range(count + 1)]
    return [slice(first, last) for first, last in zip(edges, edges[1:], strict=False)]


def _memory_file() -> int:
    with contextlib.suppress(AttributeError, OSError):  # another system, or a strict container
        return os.memfd_create("environments")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
