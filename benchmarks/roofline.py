"""Where the parts of an iteration lie below the roofs of a machine: its memory and its arithmetic.

Part of `make bench` (throughput.py); speed_plot.py draws it. Arithmetic and bytes are counted, not
measured. Bytes are those that have to travel if caches keep nothing between operators: arrays that
an operator reads or writes, once each, and what the LSTM keeps for its way back. Roofs are a copy
of large arrays and a product of large matrices. They and the operators are timed as the best of
several, iterations as medians.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from machine import product_gflops
from torch import nn
from turns import BPTT_STEPS, EPOCHS, MINIBATCH_STEPS, MINIBATCHES, NUM_ENVS, NUM_STEPS, Task

COPIED = 64 * 2**20  # numbers; more than any cache holds
REPEATS = 15
ADAM = 7  # numbers that a step reads or writes for each parameter


@dataclass(frozen=True)
class Cost:
    """Floating-point operations, and numbers that travel."""

    flops: float
    numbers: float

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.numbers + other.numbers)

    def __mul__(self, times: float) -> Cost:
        return Cost(times * self.flops, times * self.numbers)

    @property
    def flop_per_byte(self) -> float:
        """Arithmetic intensity in fp32."""
        return self.flops / (4.0 * self.numbers)


def lstm_weights(inputs: int, size: int) -> int:
    """Parameters of one LSTM."""
    return 4 * size * (inputs + size + 2)


def lstm_forward(steps: int, inputs: int, size: int) -> Cost:
    """Of so many steps; gates and cells are kept for the way back."""
    numbers = steps * (inputs + 6 * size) + lstm_weights(inputs, size)
    return Cost(2 * steps * 4 * size * (inputs + size), numbers)


def lstm_backward(steps: int, inputs: int, size: int) -> Cost:
    """Gradients of inputs and weights."""
    numbers = steps * (2 * inputs + 7 * size) + 2 * lstm_weights(inputs, size)
    return Cost(2 * lstm_forward(steps, inputs, size).flops, numbers)


def lstm_cell(rows: int, inputs: int, size: int) -> Cost:
    """One step of so many environments, without a way back."""
    numbers = rows * (inputs + 4 * size) + lstm_weights(inputs, size)
    return Cost(2 * rows * 4 * size * (inputs + size), numbers)


def layer(rows: int, inputs: int, outputs: int, backward: bool) -> Cost:
    """Forward, and its gradients."""
    weights = inputs * outputs
    cost = Cost(2 * rows * weights, rows * (inputs + outputs) + weights)
    if backward:
        cost += Cost(4 * rows * weights, rows * (2 * inputs + outputs) + 2 * weights)
    return cost


def heads(rows: int, task: Task, backward: bool = True) -> Cost:
    """The tanh layer, and actor and critic as one layer."""
    size = task.hidden_size
    outputs = layer(rows, size, task.num_actions + 1, backward)
    return layer(rows, size, size, backward) + outputs


def iteration(task: Task) -> Cost:
    """All of a work's LSTMs, layers and Adam's steps; its flops are those of `train_flops`."""
    size = task.hidden_size
    widths = [task.num_obs] + [size, size] * task.cascade  # of the inputs of its LSTMs
    acting = heads(NUM_ENVS, task, backward=False)
    learning = heads(MINIBATCH_STEPS, task)
    weights = size * (size + task.num_actions + 1)
    for width in widths:
        acting += lstm_cell(NUM_ENVS, width, size)
        learning += lstm_forward(MINIBATCH_STEPS, width, size)
        learning += lstm_backward(MINIBATCH_STEPS, width, size)
        weights += lstm_weights(width, size)
    steps = (learning + Cost(0, ADAM * weights)) * (EPOCHS * MINIBATCHES)
    return acting * NUM_STEPS + steps


def best_s(call: Callable[[], object]) -> float:
    """The shortest of several."""
    taken = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return min(taken)


def bandwidth_gb_s() -> float:
    """Bytes read and written by a copy of large arrays."""
    source, target = torch.ones(COPIED), torch.ones(COPIED)
    return 2 * 4 * COPIED / best_s(lambda: target.copy_(source)) / 1e9


def operators(task: Task) -> Iterator[tuple[str, Cost, float]]:
    """The parts of an iteration: name, cost, seconds. Of a cascade its first LSTM."""
    inputs, size = task.num_obs, task.hidden_size
    rows = MINIBATCH_STEPS // BPTT_STEPS
    lstm = nn.LSTM(inputs, size)
    obs = torch.randn(BPTT_STEPS, rows, inputs, requires_grad=True)
    outputs = lstm(obs)[0]
    found = [obs, *lstm.parameters()]
    ones = torch.ones_like(outputs)

    def lstm_back() -> None:
        torch.autograd.grad(outputs, found, ones, retain_graph=True)

    features = torch.randn(MINIBATCH_STEPS, size, requires_grad=True)
    network = nn.Sequential(nn.Linear(size, size), nn.Tanh(), nn.Linear(size, task.num_actions + 1))
    wanted = [features, *network.parameters()]

    def heads_both() -> None:
        torch.autograd.grad(network(features).sum(), wanted)

    state = (torch.zeros(NUM_ENVS, size), torch.zeros(NUM_ENVS, size))
    obs_now = torch.randn(NUM_ENVS, inputs)

    @torch.no_grad()
    def cell() -> None:
        torch.lstm_cell(obs_now, state, *lstm.all_weights[0])

    steps = MINIBATCH_STEPS
    yield "LSTM forward", lstm_forward(steps, inputs, size), best_s(lambda: lstm(obs))
    yield "LSTM backward", lstm_backward(steps, inputs, size), best_s(lstm_back)
    yield "layers", heads(steps, task), best_s(heads_both)
    yield "cell while collecting", lstm_cell(NUM_ENVS, inputs, size), best_s(cell)


def roofline(works: dict[str, Task], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Both roofs, and a point for each operator of each work and for its whole iteration."""
    roofs = {"gb_per_s": round(bandwidth_gb_s(), 1), "gflops": product_gflops()}
    points = []
    for letter, task in works.items():
        parts = [(name, cost, cost.flops / s / 1e9) for name, cost, s in operators(task)]
        parts += [("iteration", iteration(task), r["gflops"]) for r in rows if r["work"] == letter]
        for name, cost, gflops in parts:
            point = {"work": letter, "part": name, "flop_per_byte": round(cost.flop_per_byte, 1)}
            points.append(point | {"gflops": round(gflops, 1)})
        roofs["gflops"] = round(max(roofs["gflops"], product_gflops()), 1)
    return {**roofs, "points": points}
