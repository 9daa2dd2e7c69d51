"""A worker: it steps environments of each group as a rank does in place."""

from __future__ import annotations

import logging
import math
import mmap
import os
import random
import threading
import traceback
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from envs import make_vector_env
from envs.vector.adapter import TorchVectorEnv
from envs.vector.guards import EnvironmentFaultError
from envs.vector.layout import TorchEnv
from rl_dist.errors import one_line

NO_ROW = -1
# attributes of a worker's environments that hold for those of all workers
FACTS = ("layout", "single_observation_space", "single_action_space", "spaces_json", "can_snapshot")
Columns = Mapping[str, tuple[tuple[int, ...], str]]  # shape and type by name


def status_columns(num_workers: int) -> Columns:
    """Return what each worker reports without a message.

    "beats" grow while work goes on; "row" is the global number of the environment that it is in.
    """
    return {"beats": ((num_workers,), "i8"), "row": ((num_workers,), "i8")}


def env_columns(num_envs: int, env: TorchEnv) -> Columns:
    """Return what goes to environments and comes from them, [B, ...]."""
    action_shape = env.single_action_space.shape
    action_type = "f8" if env.single_action_space.dtype.kind == "f" else "i8"
    numbers = {"rewards": "f8", "terminated": "?", "truncated": "?"}
    numbers |= {"restarts": "i8", "life_seeds": "i8"}
    return {
        "actions": ((num_envs, *action_shape), action_type),
        "obs": ((num_envs, env.layout.size), "f4"),
        "final_obs": ((num_envs, env.layout.size), "f4"),
        **{name: ((num_envs,), kind) for name, kind in numbers.items()},
    }


def shared_arrays(descriptor: int, columns: Columns) -> dict[str, np.ndarray]:
    """Map arrays onto a file in memory: all processes that map it share them."""
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


class Worker:
    """Answers what the rank asks, in order. A group is a batch and its rows."""

    def __init__(self, connection: int, status: int, data: int) -> None:
        self._connection = Connection(connection)
        self._sending = threading.Lock()
        self._files = status, data
        self._groups: list[tuple[TorchVectorEnv, slice]] = []
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
                    self._active, rows = self._groups[group]
                    value = getattr(self, name)(self._active, rows, *args)
            except (EnvironmentFaultError, ValueError) as error:
                kind = ValueError if isinstance(error, ValueError) else EnvironmentFaultError
                problem = kind(str(error))
            except Exception as error:
                traceback.print_exc()
                problem = RuntimeError(one_line(error))
            self._row[0] = NO_ROW
            self.send((number, problem, value))
            if name == "close":
                return

    def send(self, message: Any) -> None:
        """Send a message; threads may. One that nobody can get is lost."""
        with self._sending, suppress(OSError):
            self._connection.send(message)

    # ---- questions about all groups

    def begin(
        self, index: int, num_workers: int, num_envs: int, groups: list[slice], make: dict[str, Any]
    ) -> dict[str, Any]:
        """Make the environments of this worker, one for each row; return FACTS."""
        status = shared_arrays(self._files[0], status_columns(num_workers))
        self._beats, self._row = (status[name][index : index + 1] for name in ("beats", "row"))
        logging.getLogger().addHandler(_Forward(self))
        logging.getLogger().setLevel(make["log_level"])
        logging.captureWarnings(True)
        # forked workers share the states of these generators
        first = make["env_offset"] + groups[0].start
        random.seed(first)
        np.random.seed(first % 2**32)  # noqa: NPY002  # which old environments draw from
        torch.manual_seed(first)
        for rows in groups:
            env = make_vector_env(
                make["env_id"],
                rows.stop - rows.start,
                env_offset=make["env_offset"] + rows.start,
                end=self._end,
                heartbeat=self._beat,
                **make["options"],
            )
            self._groups.append((env, rows))
        env = self._groups[0][0]
        self._arrays = shared_arrays(self._files[1], env_columns(num_envs, env))
        return {name: getattr(env, name) for name in FACTS}

    def close(self) -> None:
        """Close all environments."""
        for env, _ in self._groups:
            self._active = env
            env.close()

    # ---- questions about one group

    def reset(self, env: TorchVectorEnv, rows: slice, seeds: list[int] | None) -> None:
        """Start all environments."""
        self._write(env, rows, obs=env.reset(seed=seeds)[0])

    def step(self, env: TorchVectorEnv, rows: slice) -> None:
        """Step by the actions in the shared arrays."""
        outcome = env.step(torch.from_numpy(self._arrays["actions"][rows]))
        columns = dict(zip(("obs", "rewards", "terminated", "truncated"), outcome[:4], strict=True))
        self._write(env, rows, **columns, final_obs=outcome[4]["final_obs"])

    def begin_again(self, env: TorchVectorEnv, rows: slice, lifetime_step: int) -> None:
        """Replace environments whose process has ended; the next step is truncated."""
        kept = (self._arrays[name][rows] for name in ("life_seeds", "restarts", "obs"))
        env.begin_again(lifetime_step, *kept)
        self._write(env, rows)

    def take_metrics(self, env: TorchVectorEnv, rows: slice) -> dict[str, tuple[float, int]]:
        """Return what the environments reported since the last call."""
        return env.take_metrics()

    def get_state(self, env: TorchVectorEnv, rows: slice) -> dict[str, np.ndarray]:
        """Return all the future depends on, as arrays: torch would send tensors by files."""
        return {name: tensor.numpy() for name, tensor in env.get_state().items()}

    def set_state(self, env: TorchVectorEnv, rows: slice, state: dict[str, np.ndarray]) -> None:
        """Continue exactly where `get_state` was called."""
        env.set_state({name: torch.from_numpy(array) for name, array in state.items()})
        self._write(env, rows)

    def _write(self, env: TorchVectorEnv, rows: slice, **columns: Any) -> None:
        """Write columns, and what a new process needs if this one ends."""
        columns |= {"restarts": env.restarts, "life_seeds": env.life_seeds}
        for name, values in columns.items():
            self._arrays[name][rows] = values

    # ---- threads

    def _beat(self) -> None:
        env = self._active
        row = env.watch.row if env else None
        self._row[0] = NO_ROW if env is None or row is None else env.env_offset + row
        self._beats += 1

    def _end(self, message: str) -> None:
        """End this process when a call cannot be interrupted; the rank says why."""
        self.send((None, "", (logging.ERROR, message)))
        os._exit(1)


class _Forward(logging.Handler):
    """Sends what is logged here to the rank, which logs it."""

    def __init__(self, worker: Worker) -> None:
        super().__init__()
        self._worker = worker

    def emit(self, record: logging.LogRecord) -> None:
        self._worker.send((None, record.name, (record.levelno, self.format(record))))


def work(connection: int, status: int, data: int) -> None:
    """Run a worker; its status and arrays are files in memory that the rank shares."""
    Worker(connection, status, data).run()
