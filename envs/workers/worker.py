"""The worker process: steps environments and answers requests from its rank."""

import logging
import mmap
import os
import random
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from logging.handlers import QueueHandler
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import torch

from envs import make_vector_env
from envs.vector.guards import EnvironmentFaultError
from envs.vector.layout import Layout
from envs.vector.space_json import Space
from envs.vector.tensors import LIFE, STEP_FIELDS

# A worker reports its progress in shared memory. "beats" grows while its environments make
# progress. "number" is 1 + the global number of the environment being called, or 0 between calls.
STATUS = np.dtype([("beats", "i8"), ("number", "i8")])


class MadeEnv(NamedTuple):
    """Answer to the question "begin": facts about the environments of a worker."""

    layout: Layout
    action_space: Space
    spaces_json: str
    can_snapshot: bool
    row_type: np.dtype  # fields of a row in the shared memory


def shared_rows(file: int, count: int, row_type: np.dtype) -> np.ndarray:
    """Map the rows of a memory file; all processes that map the file share the rows."""
    os.ftruncate(file, count * row_type.itemsize)
    return np.frombuffer(mmap.mmap(file, count * row_type.itemsize), row_type)


class Worker:
    """Answers the rank's questions. A question is the name of a handler, and its arguments."""

    def __init__(self, files: Sequence[int]) -> None:
        """Open the three descriptors: connection to the rank, status file, shared rows."""
        connection, status_file, rows_file = files
        self._rows_file = rows_file
        self._connection = Connection(connection)
        self._sending = threading.Lock()
        self._status = shared_rows(status_file, 1, STATUS)
        self._env: Any = None  # the TorchVectorEnv that `begin` makes
        self._handlers: dict[str, Callable[..., object]] = {
            "begin": self.begin,
            "begin_again": self.begin_again,
            "reset": self.reset,
            "step": self.step,
            "close": lambda: None,  # used if `begin` has failed; `begin` replaces it
        }

    def run(self) -> None:
        """Answer questions until the question "close" or until the rank has ended."""
        name = ""
        while name != "close":
            try:
                name, *args = self._connection.recv()
            except (EOFError, ConnectionError):
                return
            value = problem = None
            try:
                value = self._handlers[name](*args)
            except (EnvironmentFaultError, ValueError) as error:
                problem = error
            self._status["number"] = 0
            # After begin_again, the rank sends the next question without waiting for an answer.
            if problem or name != "begin_again":
                self._send("reply", (problem, value))

    def _send(self, kind: str, content: object) -> None:
        """Send a message from any thread; discard it if the rank has ended."""
        with self._sending, suppress(OSError):
            self._connection.send((kind, content))

    def begin(self, rows: slice, num_rows: int, options: dict) -> MadeEnv:
        """Make this worker's environments, which have the given rows of the shared memory.

        Args:
            num_rows: number of environments of all workers of the rank.
            options: arguments of `make_vector_env`.
        """
        logging.getLogger().addHandler(QueueHandler(self))  # type: ignore[arg-type]
        logging.getLogger().setLevel(logging.INFO)
        logging.captureWarnings(True)
        first = options["env_offset"]
        # Without these seeds, all forked workers would draw the same random numbers.
        random.seed(first)
        np.random.seed(first % 2**32)  # noqa: NPY002  # old environments use this generator
        torch.manual_seed(first)
        env: Any = make_vector_env(**options, end=self._end, heartbeat=self._beat)
        actions = env.single_action_space
        row_shape = (env.layout.size,)
        row_type = np.dtype(
            [
                ("actions", "f8" if actions.dtype.kind == "f" else "i8", actions.shape),
                ("obs", env.row_type, row_shape),
                ("final_obs", env.row_type, row_shape),
                ("rewards", "f8"),
                ("terminated", "?"),
                ("truncated", "?"),
                ("life", LIFE),
            ],
            align=True,
        )
        self._rows = shared_rows(self._rows_file, num_rows, row_type)[rows]
        env.lives = self._rows["life"]
        self._env = env
        for name in ("check", "take_metrics", "get_arrays", "set_arrays", "close"):
            self._handlers[name] = getattr(env, name)
        return MadeEnv(env.layout, actions, env.spaces_json, env.can_snapshot, row_type)

    def begin_again(self, rows: slice, num_rows: int, options: dict) -> None:
        """Make the environments of a worker that died, and continue its work."""
        self.begin(rows, num_rows, options)
        self._env.begin_again(self._rows["obs"])

    def reset(self) -> None:
        """Start all environments with the seeds in the shared rows."""
        self._rows["obs"] = self._env.reset_arrays(self._env.lives["life_seed"].tolist())

    def step(self) -> None:
        """Step all environments with the actions in the shared rows."""
        results = self._env.step_arrays(self._rows["actions"])
        for name, array in zip(STEP_FIELDS, results, strict=True):
            self._rows[name] = array

    # ---- called by environments and threads

    def put_nowait(self, record: logging.LogRecord) -> None:
        """Send a log record to the rank; QueueHandler calls this."""
        self._send("log", record)

    def _beat(self) -> None:
        """Report progress, and the environment that is being called, in the shared status."""
        row = self._env.watch.row if self._env else None
        self._status["number"] = 0 if row is None else 1 + self._env.env_offset + row
        self._status["beats"] += 1

    def _end(self, message: str) -> None:
        """End this process because a call hangs; first send the message to the rank."""
        self._send("end", message)
        os._exit(1)
