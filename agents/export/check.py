"""Compare what was exported with the policy itself, step by step."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from agents.export.step import ExportedStep
from agents.rollout import policy_input, shift_history
from agents.run.saved import LoadedAgent
from envs.vector.spaces import ActionDecoder, leaves, pick

BATCHES, NUM_STEPS = (1, 5), 64
RESET = 0.1  # probability of an episode start
TOLERANCE = 1e-5
# obs [B, F], state [B, D], episode_start [B] -> actions [B, ...], state [B, D]
Runner = Callable[[np.ndarray, np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


def largest_difference(agent: LoadedAgent, step: ExportedStep, run: Runner, seed: int = 0) -> float:
    """Return the largest difference of actions over episodes with resets.

    It is relative to the largest value of the same number in all steps, which counts as 1 at least,
    or as half the range of a bounded action. Choices are compared by their logits: rounding may
    tell apart two that are equally likely.
    """
    policy = copy.deepcopy(agent.policy).float().cpu()
    policy.low_precision = None
    normalizer = copy.deepcopy(agent.normalizer).cpu()
    decoder = ActionDecoder(agent.spaces[1], "of this policy")
    generator = np.random.default_rng(seed)
    rows: list[tuple[np.ndarray, np.ndarray]] = []  # found, expected
    for batch in BATCHES:
        vectors, history = policy.initial_state(batch), policy.empty_history(batch)
        state = np.zeros((batch, step.state_size), np.float32)
        for number in range(NUM_STEPS):
            obs = sample_rows(agent, decoder, generator, batch)
            start = (generator.random(batch) < RESET) | (number == 0)
            action, state = run(obs, state, start)
            if action.shape != (batch, *step.action_shape) or state.shape[1:] != (step.state_size,):
                return float("inf")

            # the same step by the path that evaluation takes
            begins = torch.from_numpy(start)
            history = history * ~begins[:, None, None]
            with torch.no_grad():
                seen = policy_input(normalizer, history, torch.from_numpy(obs), torch.float32)
                decided, actor, _, vectors = policy.decide(seen, vectors, begins)
            history = shift_history(history, seen)
            nested = decoder(decided)
            parts = [pick(nested, path).reshape(batch, -1) for path, _ in leaves(decoder.target)]
            pair = np.asarray(action).reshape(batch, -1), np.concatenate(parts, axis=1)
            if policy.discrete:
                pair = _logits(decoder, actor, pair[0]), _logits(decoder, actor, pair[1])
            rows.append(pair)
    found, expected = map(np.concatenate, zip(*rows, strict=True))
    scale = np.maximum(1.0 if policy.discrete else decoder.scale, np.abs(expected).max(axis=0))
    differences = np.abs(found - expected) / scale
    return float(np.nan_to_num(differences, nan=np.inf).max(initial=0.0))


def sample_rows(
    agent: LoadedAgent, decoder: ActionDecoder, generator: np.random.Generator, batch: int
) -> np.ndarray:
    """Return random rows [B, F] by the training's statistics; masks allow something."""
    policy, moments = agent.policy, agent.normalizer.moments
    rows = (generator.random((batch, policy.num_obs)) < 0.5).astype(np.float32)
    columns = policy.layout.columns("vector")
    mean, variance = (values[columns].cpu().numpy() for values in (moments.mean, moments.variance))
    noise = generator.standard_normal((batch, len(columns)))
    rows[:, columns] = mean + 2.0 * np.sqrt(variance) * noise
    if policy.mask_columns:
        rows[:, np.array(policy.mask_columns)[np.cumsum(decoder.sizes) - 1]] = 1.0
    return rows


def _logits(decoder: ActionDecoder, actor: Tensor, choices: np.ndarray) -> np.ndarray:
    """Return the actor's outputs for choices [B, D]; NaN for one that does not exist."""
    digits = choices.astype(np.int64) - decoder.start
    exists = (digits >= 0) & (digits < decoder.sizes)
    places = np.cumsum(decoder.sizes) - decoder.sizes + np.where(exists, digits, 0)
    return np.where(exists, np.take_along_axis(actor.numpy(), places, axis=1), np.nan)
