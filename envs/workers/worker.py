"""The worker process: steps environments and answers requests from its rank."""

from __future__ import annotations

import logging
import mmap
import os
import random
import threading
from collections.abc import Sequence
from contextlib import suppress
from logging.handlers import QueueHandler
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from envs import make_vector_env
from envs.vector.adapter import LIFE
from envs.vector.guards import EnvironmentFaultError
from envs.vector.layout import TorchEnv

# A worker reports its progress in shared memory. "beats" grows while its environments make
# progress. "number" is 1 + the global number of the environment being called, or 0 during no call.
STATUS = [("beats", "i8"), ("number", "i8")]
# Fields that survive a dead worker, so that its replacement can continue from them.
KEPT = [*LIFE, ("lifetime_step", "i8")]


def row_fields(env: TorchEnv) -> list[tuple[Any, ...]]:
    """Return the dtype fields of one environment's row in shared memory."""
    actions = env.single_action_space
    return [
        ("actions", "f8" if actions.dtype.kind == "f" else "i8", actions.shape),
        ("obs", "f4", (env.layout.size,)),
        ("final_obs", "f4", (env.layout.size,)),
        ("rewards", "f8"),
        ("terminated", "?"),
        ("truncated", "?"),
        *KEPT,
    ]


def shared_rows(file: int, count: int, fields: list[tuple[Any, ...]]) -> np.ndarray:
    """Map rows of a memory file; all processes that map the file share them."""
    kind = np.dtype(fields, align=True)
    os.ftruncate(file, count * kind.itemsize)
    return np.frombuffer(mmap.mmap(file, count * kind.itemsize), kind)


class Worker:
    """Answers questions; each names a method of this class or of its TorchVectorEnv."""

    def __init__(self, files: Sequence[int]) -> None:
        """Take 3 files: the connection to the rank, the status, all workers' rows."""
        connection, status_file, self._rows_file = files
        self._connection = Connection(connection)
        self._sending = threading.Lock()
        self._status = shared_rows(status_file, 1, STATUS)
        self._env: Any = None  # the TorchVectorEnv that `begin` makes

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
                value = getattr(self if hasattr(self, name) else self._env, name)(*args)
                self._rows["lifetime_step"] = self._env.lifetime_step
            except (EnvironmentFaultError, ValueError) as error:
                problem = error
            self._status["number"] = 0
            self._send("reply", (problem, value))

    def _send(self, kind: str, content: Any) -> None:
        """Send a message from any thread; drop it if the rank has ended."""
        with self._sending, suppress(OSError):
            self._connection.send((kind, content))

    def begin(
        self, rows: slice, num_rows: int, options: dict[str, Any], again: bool
    ) -> tuple[Any, ...]:
        """Make the environments of these rows; return their layout, spaces and abilities.

        Args:
            num_rows: number of environments in all workers together.
            options: arguments of `make_vector_env`, for all workers.
            again: True if this process replaces one that died.
        """
        logging.getLogger().addHandler(QueueHandler(self))  # type: ignore[arg-type]
        logging.getLogger().setLevel(logging.INFO)
        logging.captureWarnings(True)
        first = options["env_offset"] + rows.start
        # Without this, all forked workers would draw the same random numbers.
        random.seed(first)
        np.random.seed(first % 2**32)  # noqa: NPY002  # old environments use it
        torch.manual_seed(first)
        options |= {"num_envs": rows.stop - rows.start, "env_offset": first}
        env: Any = make_vector_env(**options, end=self._end, heartbeat=self._beat)
        self._rows = shared_rows(self._rows_file, num_rows, row_fields(env))[rows]
        env.lives = self._rows
        env.lifetime_step = int(self._rows["lifetime_step"][0])
        self._env = env
        if again:
            env.begin_again(self._rows["obs"])
        return env.layout, env.single_action_space, env.spaces_json, env.can_snapshot

    def reset(self, seeds: list[int] | None) -> None:
        """Start all environments."""
        self._rows["obs"] = self._env.reset(seed=seeds)[0]

    def step(self) -> None:
        """Step all environments with the actions in the shared rows."""
        rows = self._rows
        result = self._env.step(torch.from_numpy(rows["actions"]))
        rows["obs"], rows["rewards"], rows["terminated"], rows["truncated"], info = result
        rows["final_obs"] = info["final_obs"]

    def get_state(self) -> dict[str, np.ndarray]:
        """Return the snapshot as arrays; sending tensors would pass file descriptors."""
        return {name: tensor.numpy() for name, tensor in self._env.get_state().items()}

    def set_state(self, state: dict[str, np.ndarray]) -> None:
        """Restore a snapshot."""
        self._env.set_state({name: torch.from_numpy(array) for name, array in state.items()})

    # ---- called by environments and threads

    def put_nowait(self, record: logging.LogRecord) -> None:
        """Send a log record to the rank; QueueHandler calls this."""
        self._send("log", record)

    def _beat(self) -> None:
        row = self._env.watch.row if self._env else None
        self._status["number"] = 0 if row is None else 1 + self._env.env_offset + row
        self._status["beats"] += 1

    def _end(self, message: str) -> None:
        """End this process because a call hangs; the rank reports the message."""
        self._send("end", message)
        os._exit(1)
