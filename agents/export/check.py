"""Comparing what was exported with the policy itself, step by step."""

from __future__ import annotations

import copy
import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agents.export.formats import Runner
from agents.export.step import ExportedStep
from agents.network.normalize import Normalizer
from agents.policy import Policy
from agents.rollout import policy_input, shift_history
from agents.run.saved import LoadedAgent
from envs.vector.spaces import ActionDecoder, leaves, pick

BATCHES, NUM_STEPS = (1, 5), 64
RESET = 0.1  # probability of an episode start
TOLERANCE = 1e-5
TIMED_STEPS = 50


@dataclass
class Original:
    """The policy in torch, by the path that evaluation takes; float32."""

    policy: Policy
    normalizer: Normalizer
    decoder: ActionDecoder

    @staticmethod
    def of(agent: LoadedAgent) -> Original:
        """Return a loaded agent's."""
        policy = copy.deepcopy(agent.policy).float().cpu()
        policy.low_precision = None
        decoder = ActionDecoder(agent.spaces[1], "of this policy")
        return Original(policy, copy.deepcopy(agent.normalizer).cpu(), decoder)

    def start(self, batch: int) -> tuple[Tensor, Tensor]:
        """Return the state [B, S, H] and the window [B, n-1, F] before the first step."""
        return self.policy.initial_state(batch), self.policy.empty_history(batch)

    def __call__(
        self, obs: Tensor, before: tuple[Tensor, Tensor], start: Tensor
    ) -> tuple[np.ndarray, Tensor, tuple[Tensor, Tensor]]:
        """Return flat actions [B, n], the actor's outputs [B, A] and the state after."""
        state, history = before
        history = history * ~start[:, None, None]
        seen = policy_input(self.normalizer, history, obs, torch.float32)
        actions, actor, _, after = self.policy.decide(seen, state, start)
        own = self.decoder(actions, len(obs))
        parts = [
            np.reshape(pick(own, path), (len(obs), -1)) for path, _ in leaves(self.decoder.target)
        ]
        return np.concatenate(parts, axis=1), actor, (after, shift_history(history, seen))

    def flat_state(self, step: ExportedStep, after: tuple[Tensor, Tensor]) -> np.ndarray:
        """Return the state as the exported step has it, [B, D]."""
        vectors, history = after
        num_actor, num_own = self.policy.actor_core.num_states, self.policy.num_decision_states
        kept = torch.cat([vectors[:, :num_actor], vectors[:, num_own:]], dim=1).flatten(1)
        return torch.cat([kept[:, : step.memory_size], history.flatten(1)], dim=1).numpy()


def largest_difference(agent: LoadedAgent, step: ExportedStep, run: Runner, seed: int = 0) -> float:
    """Return the largest difference of actions and states over episodes with resets.

    In units of 1, or of half the range of a bounded action; relative beyond that. Of a choice it is
    by how much the original prefers its own: rounding may tell apart two that are equally likely.
    """
    original = Original.of(agent)
    generator = np.random.default_rng(seed)
    largest = 0.0
    for batch in BATCHES:
        before = original.start(batch)
        state = np.zeros((batch, step.state_size), np.float32)
        for number in range(NUM_STEPS):
            obs = sample_rows(original, generator, batch)
            start = (generator.random(batch) < RESET) | (number == 0)
            with torch.no_grad():
                expected, actor, before = original(
                    torch.from_numpy(obs), before, torch.from_numpy(start)
                )
            action, state = run(obs, state, start)
            if action.shape != (batch, *step.action_shape) or state.shape[1:] != (step.state_size,):
                return float("inf")
            found = np.asarray(action).reshape(batch, -1)
            differences = [_relative(state, original.flat_state(step, before))]
            if original.policy.discrete:
                differences.append(_preference(original, actor, expected, found))
            else:
                differences.append(_relative(found, expected, original.decoder.scale))
            largest = max(largest, *differences)
    return largest


def sample_rows(original: Original, generator: np.random.Generator, batch: int) -> np.ndarray:
    """Return random rows [B, F] by the training's statistics and the kinds of parts."""
    moments = original.normalizer.moments
    rows = np.zeros((batch, original.policy.num_obs), np.float32)
    for part, place in original.policy.layout.slices():
        shape = (batch, part.size)
        if part.kind == "vector":
            mean, variance = moments.mean[place].numpy(), moments.variance[place].numpy()
            rows[:, place] = mean + 2.0 * np.sqrt(variance) * generator.standard_normal(shape)
        elif part.kind == "image":
            rows[:, place] = generator.random(shape)
        else:
            rows[:, place] = generator.random(shape) < 0.5
    first = 0
    for size in original.decoder.sizes if original.policy.mask_columns else ():
        columns = original.policy.mask_columns[first : first + size]
        rows[np.arange(batch), generator.choice(columns, batch)] = 1.0  # one is always allowed
        first += size
    return rows


def _relative(found: np.ndarray, expected: np.ndarray, unit: float | np.ndarray = 1.0) -> float:
    """Return the largest difference in units, relative where beyond one; NaN is infinite."""
    differences = np.abs(found - expected) / np.maximum(unit, np.abs(expected))
    return float(np.nan_to_num(differences, nan=np.inf).max(initial=0.0))


def _preference(
    original: Original, actor: Tensor, expected: np.ndarray, found: np.ndarray
) -> float:
    """Return by how much the original prefers its choices [B, D] to those found."""
    sizes, start = original.decoder.sizes, original.decoder.start
    if ((found < start) | (found >= start + sizes)).any():
        return float("inf")
    firsts = np.cumsum(sizes) - sizes
    logits = actor.numpy()
    own, other = (
        np.take_along_axis(logits, values.astype(np.int64) - start + firsts, axis=1)
        for values in (expected, found)
    )
    return float((own - other).max())


def latencies(agent: LoadedAgent, step: ExportedStep, run: Runner) -> dict[str, Any]:
    """Return median times of one environment's step, in torch and as exported."""
    original = Original.of(agent)
    obs = sample_rows(original, np.random.default_rng(0), 1)
    state, start = np.zeros((1, step.state_size), np.float32), np.zeros(1, bool)
    before, inputs = original.start(1), (torch.from_numpy(obs), torch.from_numpy(start))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    times: dict[str, list[float]] = {"exported": [], "torch": []}
    try:
        for _ in range(TIMED_STEPS):  # in turns: what else the machine does slows both
            began = time.perf_counter()
            run(obs, state, start)
            between = time.perf_counter()
            with torch.no_grad():
                original(inputs[0], before, inputs[1])
            times["exported"].append(between - began)
            times["torch"].append(time.perf_counter() - between)
    finally:
        torch.set_num_threads(threads)
    found = {name: 1e3 * statistics.median(each) for name, each in times.items()}
    return found | {"unit": "ms", "batch": 1, "cpu": torch.backends.cpu.get_cpu_capability()}
