"""A worker: it steps chunks of environments as a rank does in place."""

from __future__ import annotations

import logging
import math
import mmap
import os
import random
import sys
import threading
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from envs import make_vector_env
from envs.vector.adapter import TorchVectorEnv
from envs.vector.faults import EnvironmentFaultError
from envs.vector.hangs import own_place_of
from rl_dist.errors import one_line

NO_ROW = -1
LAST_WORDS_BYTES = 1000
_LOGGER = logging.getLogger(__name__)
# of the adapter, for the environment that stands for all chunks
FACTS = (
    "layout",
    "single_observation_space",
    "single_action_space",
    "spaces_json",
    "can_snapshot",
)
Columns = Mapping[str, tuple[tuple[int, ...], str]]  # shape and type by name


def status_columns(num_workers: int) -> Columns:
    """Return what each worker says without a message."""
    return {
        "beats": ((num_workers,), "i8"),  # grows while work goes on
        "row": ((num_workers,), "i8"),  # global number of the environment that it is in
        "last_words": ((num_workers, LAST_WORDS_BYTES), "u1"),
    }


def env_columns(num_envs: int, num_obs: int, action_shape: tuple[int, ...]) -> Columns:
    """Return what goes to environments and comes from them, [B, ...]."""
    numbers = ("rewards", "f8"), ("terminated", "?"), ("truncated", "?")
    counts = ("restarts", "i8"), ("life_seeds", "i8")
    return {
        "int_actions": ((num_envs, *action_shape), "i8"),
        "float_actions": ((num_envs, *action_shape), "f8"),
        "obs": ((num_envs, num_obs), "f4"),
        "final_obs": ((num_envs, num_obs), "f4"),
        **{name: ((num_envs,), kind) for name, kind in (*numbers, *counts)},
    }


def shared_arrays(descriptor: int, columns: Columns) -> dict[str, np.ndarray]:
    """Map arrays onto a file in memory: whoever maps it shares them."""
    offsets: dict[str, int] = {}
    size = 0
    for name, (shape, kind) in columns.items():
        offsets[name] = size
        size += -(-math.prod(shape) * np.dtype(kind).itemsize // 64) * 64
    if os.fstat(descriptor).st_size < size:
        os.ftruncate(descriptor, size)
    memory = mmap.mmap(descriptor, size)
    return {
        name: np.ndarray(shape, kind, memory, offsets[name])
        for name, (shape, kind) in columns.items()
    }


class Chunk:
    """Environments of one worker that step together, and their rows."""

    def __init__(self, env: TorchVectorEnv, rows: slice) -> None:
        self.env = env
        self.rows = rows
        self.arrays: dict[str, np.ndarray] = {}

    def _write(self, **columns: Any) -> None:
        counts = {"restarts": self.env.restarts, "life_seeds": self.env.life_seeds}
        for name, values in (columns | counts).items():
            self.arrays[name][self.rows] = values

    def reset(self, seeds: list[int] | None) -> None:
        """Start all; see `TorchVectorEnv.reset`."""
        self._write(obs=self.env.reset(seed=seeds)[0])

    def begin_again(self, life_seeds: list[int], restarts: list[int], lifetime_step: int) -> None:
        """Start all in the place of environments whose process has ended."""
        self._write(obs=self.env.begin_again(life_seeds, restarts, lifetime_step)[0])

    def step(self, kind: str) -> None:
        """Step by the actions in the shared arrays."""
        actions = torch.from_numpy(self.arrays[f"{kind}_actions"][self.rows])
        obs, rewards, terminated, truncated, info = self.env.step(actions)
        self._write(
            obs=obs,
            rewards=rewards,
            terminated=terminated,
            truncated=truncated,
            final_obs=info["final_obs"],
        )

    def take_metrics(self) -> dict[str, tuple[float, int]]:
        """Return what the environments reported of themselves since the last call."""
        return self.env.take_metrics()

    def get_state(self) -> dict[str, np.ndarray]:
        """Return all the future depends on, as arrays: torch would send tensors by files."""
        return {name: tensor.numpy() for name, tensor in self.env.get_state().items()}

    def set_state(self, state: dict[str, np.ndarray]) -> None:
        """Continue exactly where `get_state` was called."""
        self.env.set_state({name: torch.from_numpy(array) for name, array in state.items()})
        self._write()


class Worker:
    """Answers what the rank asks, in order."""

    def __init__(self, connection: int, status: int, data: int) -> None:
        self._connection = Connection(connection)
        self._sending = threading.Lock()
        self._status, self._data = status, data
        self._chunks: list[Chunk] = []
        self._active: TorchVectorEnv | None = None

    def run(self) -> None:
        """Work until the rank closes the connection."""
        while True:
            try:
                number, name, group, args = self._connection.recv()
            except (EOFError, OSError):
                return
            value: Any = None
            problem: Exception | None = None
            try:
                if group is None:
                    value = getattr(self, name)(*args)
                else:
                    self._active = self._chunks[group].env
                    value = getattr(self._chunks[group], name)(*args)
            except EnvironmentFaultError as fault:
                problem = fault
            except ValueError as error:
                problem = ValueError(str(error))
            except Exception as error:
                traceback.print_exc()
                problem = RuntimeError(one_line(error))
            self._here["row"][0] = NO_ROW
            self.send((number, problem, value))
            if name == "close":
                return

    def send(self, message: Any) -> None:
        """Send a message; threads may."""
        with self._sending:
            self._connection.send(message)

    def begin(
        self, index: int, num_workers: int, log_level: int, chunks: list[Any], make: dict[str, Any]
    ) -> dict[str, Any]:
        """Make chunks, each (first row, number of environments); return FACTS."""
        arrays = shared_arrays(self._status, status_columns(num_workers))
        self._here = {name: array[index : index + 1] for name, array in arrays.items()}
        logging.getLogger().addHandler(_Forward(self))
        logging.getLogger().setLevel(log_level)
        logging.captureWarnings(True)
        threading.excepthook = self._log_end_of_thread
        sys.path[:] = make["path"]
        # what shares a generator of its process shall not draw the same in every one
        first = make["env_offset"] + chunks[0][0]
        random.seed(first)
        np.random.seed(first % 2**32)  # noqa: NPY002  # which old environments draw from
        torch.manual_seed(first)
        for row, count in chunks:
            own = {
                "env_offset": make["env_offset"] + row,
                "end": self._end,
                "heartbeat": self._beat,
            }
            env = make_vector_env(make["env_id"], count, **make["options"], **own)
            self._chunks.append(Chunk(env, slice(row, row + count)))
        return {name: getattr(self._chunks[0].env, name) for name in FACTS}

    def share(self, columns: Columns) -> None:
        """Share arrays with the rank from now on."""
        arrays = shared_arrays(self._data, columns)
        for chunk in self._chunks:
            chunk.arrays = arrays

    def close(self) -> None:
        """Close all environments."""
        for chunk in self._chunks:
            self._active = chunk.env
            chunk.env.close()

    def _log_end_of_thread(self, args: threading.ExceptHookArgs) -> None:
        """Warn of a thread of an environment that an exception has ended."""
        error = args.exc_value
        if error is None or isinstance(error, SystemExit):
            return
        envs = [chunk.env for chunk in self._chunks]
        numbers = [f"{env.env_offset}..{env.env_offset + env.num_envs - 1}" for env in envs]
        where = f"worker process {os.getpid()} of {envs[0].env_id} ({' and '.join(numbers)})"
        why = f"{one_line(error)}{own_place_of(error)}"
        _LOGGER.warning("%s: a thread ended: %s", where, why)

    def _beat(self) -> None:
        env = self._active
        row = env.row_under_way if env else None
        self._here["row"][0] = NO_ROW if env is None or row is None else env.env_offset + row
        self._here["beats"] += 1

    def _end(self, message: str) -> None:
        """End this process when a call cannot be interrupted; the rank finds the message."""
        data = message.encode()[:LAST_WORDS_BYTES]
        self._here["last_words"][0, : len(data)] = np.frombuffer(data, np.uint8)
        os._exit(1)


class _Forward(logging.Handler):
    """Sends what is logged here to the rank, which logs it."""

    def __init__(self, worker: Worker) -> None:
        super().__init__()
        self._worker = worker

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._worker.send((None, record.name, (record.levelno, self.format(record))))
        except OSError:  # the rank has gone, or an environment has closed the connection
            self.handleError(record)


def work(connection: int, status: int, data: int) -> None:
    """Be a worker: of a rank, with files in memory for its status and its arrays."""
    Worker(connection, status, data).run()
