"""The worker process: it steps environments exactly as a rank does in place."""

from __future__ import annotations

import logging
import mmap
import os
import random
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from envs import make_vector_env
from envs.vector.adapter import TorchVectorEnv
from envs.vector.guards import EnvironmentFaultError
from envs.vector.layout import TorchEnv

NO_ROW = -1
# reported without messages: "beats" grow while its environments make progress;
# "row" is the global number of the environment that it calls
STATUS = [("beats", "i8"), ("row", "i8")]


def row_fields(env: TorchEnv) -> list[tuple[Any, ...]]:
    """Return the fields of an environment's row in the shared memory."""
    actions = env.single_action_space
    return [
        ("actions", "f8" if actions.dtype.kind == "f" else "i8", actions.shape),
        ("obs", "f4", (env.layout.size,)),
        ("final_obs", "f4", (env.layout.size,)),
        ("rewards", "f8"),
        ("terminated", "?"),
        ("truncated", "?"),
        # for a process that replaces one that died
        ("restarts", "i8"),
        ("life_seeds", "i8"),
        ("lifetime_step", "i8"),
    ]


def shared_rows(descriptor: int, count: int, fields: list[tuple[Any, ...]]) -> np.ndarray:
    """Map rows onto a file in memory, shared by all processes that map it."""
    kind = np.dtype(fields, align=True)
    os.ftruncate(descriptor, count * kind.itemsize)
    return np.frombuffer(mmap.mmap(descriptor, count * kind.itemsize), kind)


class Worker:
    """Answers the rank's questions in order; a group is a batch and its rows."""

    def __init__(self, connection: int, status: int, data: int) -> None:
        """Take a connection to the rank, and the files in memory that it shares."""
        self._connection = Connection(connection)
        self._sending = threading.Lock()
        self._files = status, data
        self._groups: list[tuple[TorchVectorEnv, slice]] = []
        self._active: TorchVectorEnv | None = None

    def run(self) -> None:
        """Work until the rank closes the connection."""
        name = ""
        while name != "close":
            try:
                name, group, args = self._connection.recv()
            except (EOFError, ConnectionError):
                return
            value = problem = None
            try:
                if group is not None:
                    self._active, rows = self._groups[group]
                    args = self._active, rows, *args
                value = getattr(self, name)(*args)
            except (EnvironmentFaultError, ValueError) as error:
                problem = error
            self._status["row"] = NO_ROW
            self.send("reply", problem, value)

    def send(self, *message: Any) -> None:
        """Send a message, from any thread; if the rank has ended, it is lost."""
        with self._sending, suppress(OSError):
            self._connection.send(message)

    # ---- questions about all groups

    def begin(
        self, index: int, num_workers: int, num_envs: int, groups: list[slice], make: dict[str, Any]
    ) -> tuple[Any, ...]:
        """Make the environments of this worker; return facts that hold for all workers."""
        self._status = shared_rows(self._files[0], num_workers, STATUS)[index : index + 1]
        logging.getLogger().addHandler(_Forward(self))
        logging.getLogger().setLevel(logging.INFO)
        logging.captureWarnings(True)
        # forked workers would else share the states of these generators
        first = make["env_offset"] + groups[0].start
        random.seed(first)
        np.random.seed(first % 2**32)  # noqa: NPY002  # which old environments draw from
        torch.manual_seed(first)
        for rows in groups:
            options = make | {
                "num_envs": rows.stop - rows.start,
                "env_offset": make["env_offset"] + rows.start,
            }
            env = make_vector_env(**options, end=self._end, heartbeat=self._beat)
            self._groups.append((env, rows))
        self._rows = shared_rows(self._files[1], num_envs, row_fields(env))
        return env.layout, env.single_action_space, env.spaces_json, env.can_snapshot

    def close(self) -> None:
        """Close all environments; the process then ends."""
        for env, _ in self._groups:
            self._active = env
            env.close()

    # ---- questions about one group

    def reset(self, env: TorchVectorEnv, rows: slice, seeds: list[int] | None) -> None:
        """Start all environments."""
        self._write(env, rows, obs=env.reset(seed=seeds)[0])

    def step(self, env: TorchVectorEnv, rows: slice) -> None:
        """Step by the actions in the shared rows."""
        obs, rewards, terminated, truncated, info = env.step(
            torch.from_numpy(self._rows["actions"][rows])
        )
        self._write(
            env,
            rows,
            obs=obs,
            rewards=rewards,
            terminated=terminated,
            truncated=truncated,
            final_obs=info["final_obs"],
        )

    def begin_again(self, env: TorchVectorEnv, rows: slice) -> None:
        """Replace environments of a process that died; their next step is truncated."""
        env.begin_again(self._rows[rows])
        self._write(env, rows)

    def take_metrics(self, env: TorchVectorEnv, rows: slice) -> dict[str, tuple[float, int]]:
        """Return the metrics that environments reported since the last call."""
        return env.take_metrics()

    def get_state(self, env: TorchVectorEnv, rows: slice) -> dict[str, np.ndarray]:
        """Return the snapshot as arrays, because torch would send tensors by files."""
        return {name: tensor.numpy() for name, tensor in env.get_state().items()}

    def set_state(self, env: TorchVectorEnv, rows: slice, state: dict[str, np.ndarray]) -> None:
        """Continue exactly where `get_state` was called."""
        env.set_state({name: torch.from_numpy(array) for name, array in state.items()})
        self._write(env, rows)

    def _write(self, env: TorchVectorEnv, rows: slice, **columns: Any) -> None:
        """Write columns, and those that a new process needs if this one dies."""
        columns["restarts"] = env.restarts
        columns["life_seeds"] = env.life_seeds
        columns["lifetime_step"] = env.lifetime_step
        for name, values in columns.items():
            self._rows[name][rows] = values

    # ---- called by threads

    def _beat(self) -> None:
        env = self._active
        row = env.watch.row if env else None
        self._status["row"] = NO_ROW if env is None or row is None else env.env_offset + row
        self._status["beats"] += 1

    def _end(self, message: str) -> None:
        """End this process when a call cannot be interrupted; the rank reports why."""
        self.send("end", "", message)
        os._exit(1)


class _Forward(logging.Handler):
    """Sends log records to the rank, which logs them."""

    def __init__(self, worker: Worker) -> None:
        super().__init__()
        self._worker = worker

    def emit(self, record: logging.LogRecord) -> None:
        self._worker.send("log", record.name, (record.levelno, self.format(record)))
