"""Compare `run_sequence`, which cuts and packs sequences, with single steps."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from policies import FORMS, SEVERAL, make_inputs, make_policy, planned, run_stepwise

from agents.learner.network.sequences import (
    cut_sequences,
    overhead_steps,
    plan_pieces,
    run_sequence,
    state_after,
)

SHAPES = [(1, 1), (1, 7), (2, 1), (5, 4), (17, 3), (32, 5)]


def patterns(num_steps, num_columns):
    """Return regular and random patterns of episode starts, each [T, N], by name."""
    t, n = np.indices((num_steps, num_columns))
    rng = np.random.default_rng(7)
    resets = {
        "none": t < 0,
        "everywhere": t >= 0,
        "first step": t == 0,
        "last step, first column only": (t == num_steps - 1) & (n == 0),
        "a different piece length in every column": (t + 1) % (n + 2) == 0,
    }
    for density in (0.02, 0.2, 0.9):
        resets[f"random {density}"] = rng.random((num_steps, num_columns)) < density
    return {name: torch.from_numpy(pattern) for name, pattern in resets.items()}


def run_in_one_call(*given):
    plan = planned(given[-1], 1e9)
    assert len(plan.calls) <= 1
    return run_sequence(*given, plan)


def run_packed(*given):
    return run_sequence(*given, planned(given[-1], 1e9, resets_inside=True))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_sequence_equals_its_single_steps_for_any_pattern_of_resets(shape):
    """Compare outputs, last state and gradients.

    Gradients must not flow back across an episode start.
    """
    policy = make_policy(FORMS["clstm"], SEVERAL)
    inputs = [tensor.requires_grad_() for tensor in make_inputs(policy, *shape)[:2]]
    for name, starts in patterns(*shape).items():
        results = []
        for run in (run_sequence, run_in_one_call, run_packed, run_stepwise):
            actor, values = run(policy.network, *inputs, starts)
            weights = torch.linspace(-1, 2, values.numel(), dtype=torch.float64).view_as(values)
            loss = (values * weights).sum() + actor.pow(3).sum()
            gradients = torch.autograd.grad(loss, [*inputs, *policy.parameters()])
            results.append((actor, values, *gradients))
        *results, wanted = results
        for result in results:
            torch.testing.assert_close(result, wanted, rtol=1e-11, atol=1e-12, msg=name)
        obs, after = inputs
        for step, flags in zip(obs, starts, strict=True):
            after = policy.network(step[None], after * ~flags[:, None, None]).state
        for inside in (False, True):
            reached = state_after(policy.network, *inputs, starts, inside)
            torch.testing.assert_close(reached, after, rtol=1e-11, atol=1e-12, msg=name)


def test_a_reset_clears_the_state_whatever_is_observed():
    policy = make_policy(FORMS["clstm"], SEVERAL).float()
    obs, state = (tensor.float() for tensor in make_inputs(policy, 17, 3)[:2])
    starts = patterns(17, 3)["random 0.2"]
    given = policy.network, obs * 1e8, state, starts
    torch.testing.assert_close(run_packed(*given), run_stepwise(*given), rtol=1e-5, atol=1e-6)
    inside, cut = (state_after(*given, way) for way in (True, False))
    torch.testing.assert_close(inside, cut, rtol=1e-5, atol=1e-6)


def test_pieces_of_some_sequences_are_those_of_these_sequences_alone():
    starts = patterns(17, 9)["random 0.2"].numpy()
    chosen = np.array([7, 0, 3, 4])
    some, alone = cut_sequences(starts).of(chosen), cut_sequences(starts[:, chosen])
    for name, values in vars(alone).items():
        np.testing.assert_array_equal(getattr(some, name), values)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_gpu_computes_large_minibatches_of_long_episodes_in_one_call(device):
    policy = make_policy(replace(FORMS["clstm"], hidden_size=128))
    starts = np.random.default_rng(0).random((32, 8192)) < 1 / 252
    overhead = overhead_steps(policy.cores, 1, torch.device(device))
    plan = plan_pieces(cut_sequences(starts), torch.device("cpu"), overhead)
    assert (len(plan.calls) == 1) == (device == "cuda")
