"""Comparing what was exported with the policy itself, step by step."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from agents.export.onnx_model import Runner
from agents.export.step import ExportedStep
from agents.network.normalize import Normalizer
from agents.policy import Policy
from agents.rollout import policy_input, shift_history
from agents.run.saved import LoadedAgent
from envs.vector.spaces import ActionDecoder, leaves, pick

BATCHES, NUM_STEPS = (1, 5), 64
RESET = 0.1  # probability of an episode start
TOLERANCE = 1e-5
Pair = tuple[np.ndarray, np.ndarray]  # rows found, rows expected


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

    It is relative to the largest value of the same number in all steps, which counts as 1 at least,
    or as half the range of a bounded action. Choices are compared by their logits: rounding may
    tell apart two that are equally likely.
    """
    original = Original.of(agent)
    generator = np.random.default_rng(seed)
    states: list[Pair] = []
    actions: list[Pair] = []
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
            states.append((state, original.flat_state(step, before)))
            if original.policy.discrete:
                pair = _logits(original, actor, found), _logits(original, actor, expected)
            else:
                pair = found, expected
            actions.append(pair)
    unit = 1.0 if original.policy.discrete else original.decoder.scale
    return max(_relative(states), _relative(actions, unit))


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


def _relative(pairs: list[Pair], unit: float | np.ndarray = 1.0) -> float:
    """Return the largest relative difference of found and expected rows; NaN is infinite."""
    found, expected = (np.concatenate(rows) for rows in zip(*pairs, strict=True))
    scale = np.maximum(unit, np.abs(expected).max(axis=0))
    differences = np.abs(found - expected) / scale
    return float(np.nan_to_num(differences, nan=np.inf).max(initial=0.0))


def _logits(original: Original, actor: Tensor, choices: np.ndarray) -> np.ndarray:
    """Return the original's logits of choices [B, D]; NaN of one that does not exist."""
    sizes, start = original.decoder.sizes, original.decoder.start
    digits = choices.astype(np.int64) - start
    exists = (digits >= 0) & (digits < sizes)
    places = np.cumsum(sizes) - sizes + np.where(exists, digits, 0)
    return np.where(exists, np.take_along_axis(actor.numpy(), places, axis=1), np.nan)
