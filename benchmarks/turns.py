"""Define tasks and turns for comparing trainers; measure the machine's speed.

Before each iteration, a trainer calls `Turns.next`. This method reports the previous iteration and
waits for a line on standard input; it ends the process if standard input is closed. In this way,
several trainers take turns on one machine, one iteration at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import resource
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space

NUM_ENVS, NUM_STEPS, EPOCHS, MINIBATCHES, BPTT_STEPS = 64, 128, 4, 4, 32
STEPS = NUM_ENVS * NUM_STEPS  # steps per iteration
MINIBATCH_STEPS = STEPS // MINIBATCHES
LEARNING_RATE = 1e-9  # so low that policies, and thus the lengths of episodes, do not change
GAMMA, GAE_LAMBDA, CLIP, MAX_GRAD_NORM = 0.99, 0.95, 0.2, 0.5
ENT_COEF, VF_COEF = 0.01, 0.5

SIDE, PRODUCTS = 1024, 8  # size and number of the matrix products that measure the machine's speed
RESAMPLES = 10_000  # number of bootstrap samples

NUM_STOCKS, NUM_DAYS, EPISODE_STEPS = 30, 3000, 252
NUM_OBS = 1 + 6 * NUM_STOCKS


@dataclass(frozen=True)
class Task:
    """The sizes of a training job whose network has an LSTM, a tanh layer and two heads.

    The job "main" has a cascade of three LSTMs instead. It has the same number of steps as the
    other jobs, but only our trainer runs it. The jobs whose names begin with "many" have 4,096
    environments in torch, and only our trainer and the driver "bare" run them.
    """

    hidden_size: int
    num_obs: int
    num_actions: int
    discrete: bool
    cascade: bool = False
    num_envs: int = NUM_ENVS
    epochs: int = EPOCHS
    pixels: bool = False  # the input is Frames-v0, and a CNN with 512 outputs precedes the LSTM

    @property
    def many(self) -> bool:
        """Whether the environments are a large batch in torch."""
        return self.num_envs > NUM_ENVS

    @property
    def steps(self) -> int:
        """Environment steps per iteration."""
        return self.num_envs * NUM_STEPS

    @property
    def train_flops(self) -> float:
        """Floating-point operations of an iteration: acting, and EPOCHS passes of training."""
        size = self.hidden_size
        lstms = 2 * 4 * size * (self.num_obs + size) + self.cascade * 2 * 2 * 4 * size * 2 * size
        layers = 2 * size * size + 2 * size * (self.num_actions + 1)
        cnn = 2 * self.pixels * 9_343_000  # weights times places, of three convolutions and a layer
        return self.steps * (cnn + lstms + layers) * (1 + 3 * self.epochs)


TASKS = {
    "cartpole": Task(128, 4, 2, discrete=True),
    "stocks": Task(256, NUM_OBS, NUM_STOCKS, discrete=False),
    "pixels": Task(128, 512, 6, discrete=True, num_envs=8, pixels=True),
    "main": Task(128, 241, 30, discrete=False, cascade=True),
    "many_carts": Task(128, 4, 2, discrete=True, num_envs=4096, epochs=1),
    "many_portfolios": Task(128, 241, 30, discrete=False, cascade=True, num_envs=4096, epochs=1),
}


class StockLikeVectorEnv(VectorEnv[np.ndarray, np.ndarray, np.ndarray]):
    """StockLike-v0: random numbers with the shapes of the trading task, for timing.

    All environments are stepped as one batch. Their first episodes have different lengths, so that
    not all episodes end together.
    """

    metadata: dict[str, Any] = {"render_modes": [], "autoreset_mode": AutoresetMode.SAME_STEP}

    def __init__(self, num_envs: int = 1) -> None:
        self.table = np.random.default_rng(0).standard_normal((NUM_DAYS, NUM_OBS), np.float32)
        self.num_envs = num_envs
        self.single_observation_space = spaces.Box(-np.inf, np.inf, (NUM_OBS,), np.float32)
        self.single_action_space = spaces.Box(-1.0, 1.0, (NUM_STOCKS,), np.float32)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Start new episodes; `seed` may be a list with one seed per environment."""
        seeds = seed if isinstance(seed, list) else range(self.num_envs)
        rngs = (np.random.default_rng(env_seed) for env_seed in seeds)
        draws = np.array([rng.integers([NUM_DAYS, EPISODE_STEPS]) for rng in rngs])
        self.day, self.age = draws[:, 0], draws[:, 1]
        return self.table[self.day], {}

    def step(
        self, actions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Compute rewards from actions and the current table row; go to the next row."""
        rewards = (actions * self.table[self.day, :NUM_STOCKS]).mean(1)
        self.day = (self.day + 1) % NUM_DAYS
        self.age = (self.age + 1) % EPISODE_STEPS
        obs, terminated = self.table[self.day], self.age == 0
        info = {"final_obs": obs, "_final_obs": terminated} if terminated.any() else {}
        return obs, rewards, terminated, np.zeros(self.num_envs, bool), info


class Frames(gymnasium.Env[np.ndarray, np.int64]):
    """Frames-v0: random frames 4 x 84 x 84 in episodes of 100 to 299 steps, at almost no cost."""

    observation_space = spaces.Box(0, 255, (4, 84, 84), np.uint8)
    action_space = spaces.Discrete(6)
    frames = np.random.default_rng(0).integers(0, 256, (64, 4, 84, 84), np.uint8)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Draw the length of the episode."""
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(100, 300))
        return self.frames[self.left % 64], {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Show the next frame."""
        self.left -= 1
        return self.frames[self.left % 64], float(action), self.left == 0, False, {}


gymnasium.register("Frames-v0", entry_point="turns:Frames")
gymnasium.register("StockLike-v0", vector_entry_point="turns:StockLikeVectorEnv")


def vector_env(task: Task) -> VectorEnv[Any, Any, Any]:
    """Return the task's environments as one vector environment of Gymnasium."""
    if not task.discrete:
        return StockLikeVectorEnv(NUM_ENVS)
    env_id = "Frames-v0" if task.pixels else "CartPole-v1"
    makers = [lambda: gymnasium.make(env_id)] * task.num_envs
    return SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)


class Turns:
    """Lets a trainer wait for its turns and report what it measured.

    All other output of the trainer is redirected to standard error.

    Args:
        trainer: name of the trainer, for the first report.
        orders: file with one line per turn; None: standard input.
        reports: file to write reports to; None: standard output.
    """

    def __init__(
        self, trainer: str, orders: TextIO | None = None, reports: TextIO | None = None
    ) -> None:
        self._orders = orders or sys.stdin
        self._reports = reports or os.fdopen(silence(), "w", buffering=1)
        self._about = {"trainer": trainer, "torch": torch.__version__}
        self._began = 0.0

    def next(self, **measured: Any) -> None:
        """Report the iteration that ended, if there was one, and wait for the next turn."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # the iteration ends when the GPU has finished
        ended = time.perf_counter()
        if self._began:
            measured["seconds"] = ended - self._began
        measured["peak_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(json.dumps(measured | self._about), file=self._reports)
        self._about = {}
        if not self._orders.readline():
            os._exit(0)  # the trainer's code cannot catch or delay this exit
        self._began = time.perf_counter()


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the option --device; the help text begins with `doc`."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=form)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    return parser


def silence() -> int:
    """Redirect standard output to standard error; return the old output's descriptor."""
    reports = os.dup(1)
    os.dup2(2, 1)
    return reports


# ---- measurements of the machine


def cpu_name() -> str:
    """Return the processor's model name from /proc/cpuinfo, else Python's name for it."""
    match = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    return match[1] if match else platform.processor()


def describe(threads: int, device: str) -> dict[str, Any]:
    """Return the machine's load and the properties that determine its speed."""
    return {
        "cpu": cpu_name(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "threads": threads,
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
    }


def median_interval(samples: Iterable[float], digits: int = 3) -> list[float]:
    """Return the rounded median and its 95 % interval from a bootstrap."""
    values = np.asarray(list(samples))
    picks = np.random.default_rng(0).integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.percentile(np.median(values[picks], axis=1), [2.5, 97.5])
    return [round(float(value), digits) for value in (np.median(values), low, high)]


def product_gflops(device: str) -> float:
    """Return the speed of a fixed matrix product in GFLOP/s, the best of several runs."""
    left = torch.ones(SIDE, SIDE, device=device)
    best_s = float("inf")
    for _ in range(PRODUCTS):
        began = time.perf_counter()
        (left @ left)[0, 0].item()  # waits for a GPU
        best_s = min(best_s, time.perf_counter() - began)
    return 2.0 * SIDE**3 / best_s / 1e9
