"""What every driver shares: its flags, the tasks, and the turns in which drivers iterate.

A driver is a process that trains without end. Before each iteration it calls `Turns.next`, which
reports the iteration before it and waits for a line on standard input; the end of the input ends
the process. So several trainers take turns on one machine, an iteration each.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TextIO

NUM_ENVS, NUM_STEPS, EPOCHS, MINIBATCHES, BPTT_STEPS = 64, 128, 4, 4, 32
STEPS = NUM_ENVS * NUM_STEPS  # of an iteration
MINIBATCH_STEPS = STEPS // MINIBATCHES
LEARNING_RATE = 1e-9  # so the lengths of episodes, on which speed depends, are alike for all
GAMMA, GAE_LAMBDA, CLIP, MAX_GRAD_NORM = 0.99, 0.95, 0.2, 0.5
ENT_COEF, VF_COEF = 0.01, 0.5


@dataclass(frozen=True)
class Task:
    """A piece of work: an LSTM reads the observations, a tanh layer and two heads follow it.

    The main job is our own: a cascade of three LSTMs, of as many steps; peers do not train it.
    """

    name: str
    hidden_size: int
    num_obs: int
    num_actions: int
    discrete: bool

    cascade: bool = False
    steps = STEPS

    @property
    def train_flops(self) -> float:
        """Floating-point operations of an iteration: acting, then EPOCHS forward and backward."""
        size = self.hidden_size
        lstms = 2 * 4 * size * (self.num_obs + size) + self.cascade * 2 * 2 * 4 * size * 2 * size
        layers = 2 * size * size + 2 * size * (self.num_actions + 1)
        return self.steps * (lstms + layers) * (1 + 3 * EPOCHS)


TASKS = {
    "cartpole": Task("cartpole", 128, 4, 2, True),
    "stocks": Task("stocks", 256, 181, 30, False),
    "main": Task("main", 128, 241, 30, False, cascade=True),
}


def arguments() -> tuple[Task, int]:
    """Return the task and the number of threads that the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--threads", type=int, default=2)
    args, _ = parser.parse_known_args()  # a driver may have more flags
    return TASKS[args.task], args.threads


class Turns:
    """A trainer's side of the turns; everything else that it prints goes to standard error.

    Args:
        orders, reports: what it reads and writes; None: standard input and output.
        cpu_s: returns the seconds of CPU that the trainer has used.
        about: told once, with the first report.
    """

    def __init__(
        self,
        orders: TextIO | None = None,
        reports: TextIO | None = None,
        cpu_s: Callable[[], float] = time.process_time,
        **about: Any,
    ) -> None:
        self._orders = orders or sys.stdin
        self._reports = reports or os.fdopen(silence(), "w", buffering=1)
        self._cpu_s = cpu_s
        self._about = about
        self._began = self._cpu_began = 0.0

    def next(self, **measured: Any) -> None:
        """Report the iteration that ended, if there was one, and wait for the next turn."""
        ended = time.perf_counter()
        if self._began:
            measured["seconds"] = ended - self._began
            measured["cpu_s"] = self._cpu_s() - self._cpu_began
        print(json.dumps(measured | self._about), file=self._reports)
        self._about = {}
        if not self._orders.readline():
            os._exit(0)  # whatever the trainer would still do
        self._cpu_began, self._began = self._cpu_s(), time.perf_counter()


def silence() -> int:
    """Send what this process prints to standard error; return what was standard output."""
    reports = os.dup(1)
    os.dup2(2, 1)
    return reports
