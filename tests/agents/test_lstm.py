"""run_sequence cuts, pads and groups; run_stepwise is the plain truth it must equal."""

import numpy as np
import pytest
import torch
from torch import nn

from agents.lstm import plan_pieces, run_sequence, run_stepwise

FEATURES, HIDDEN = 3, 5
SHAPES = [(1, 1), (1, 7), (2, 1), (2, 3), (3, 2), (5, 4), (8, 1), (16, 6), (17, 3), (32, 5)]


def make_network(seed=0):
    """An LSTM with two outputs, as a network maps (obs, state [N, 2, H]) to ((outputs, ...), state)."""
    torch.manual_seed(seed)
    core, head = nn.LSTM(FEATURES, HIDDEN).double(), nn.Linear(HIDDEN, 1).double()

    def network(obs, state):
        parts = state.permute(1, 0, 2).contiguous()
        hidden, new = core(obs, (parts[0:1], parts[1:2]))
        return (hidden, head(hidden).squeeze(-1)), torch.cat(new).permute(1, 0, 2)

    return network, [*core.parameters(), *head.parameters()]


def make_inputs(num_steps, num_columns, seed=0):
    generator = torch.Generator().manual_seed(seed)
    obs = torch.randn(num_steps, num_columns, FEATURES, dtype=torch.float64, generator=generator)
    state = torch.randn(num_columns, 2, HIDDEN, dtype=torch.float64, generator=generator)
    return obs, state


def patterns(num_steps, num_columns):
    """Resets by name: none, all, one, edges, staircases, and random ones of every density."""
    empty = np.zeros((num_steps, num_columns), dtype=bool)
    rng = np.random.default_rng(7)
    found = {"none": empty, "everywhere": ~empty}
    for name, t in (("first step", 0), ("last step", num_steps - 1), ("middle", num_steps // 2)):
        found[name] = empty.copy()
        found[name][t] = True
        found[f"{name}, first column only"] = empty.copy()
        found[f"{name}, first column only"][t, 0] = True
    t, n = np.indices((num_steps, num_columns))
    found["staircase"] = t % (n + 1) == 0
    found["every column another piece length"] = (t + 1) % (n + 2) == 0
    found["checkerboard"] = (t + n) % 2 == 0
    for density in (0.02, 0.2, 0.5, 0.9):
        found[f"random {density}"] = rng.random((num_steps, num_columns)) < density
    return {name: torch.from_numpy(pattern) for name, pattern in found.items()}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_sequence_equals_single_steps_for_any_pattern_of_resets(shape):
    network, parameters = make_network()
    for name, starts in patterns(*shape).items():
        results = []
        for run in (run_sequence, run_stepwise):
            obs, state = (tensor.requires_grad_() for tensor in make_inputs(*shape))
            outputs = run(network, obs, state, starts)
            weights = torch.linspace(-1, 2, outputs[1].numel(), dtype=torch.float64).view_as(outputs[1])
            loss = (outputs[1] * weights).sum() + outputs[0].pow(3).sum()
            results.append((*outputs, *torch.autograd.grad(loss, [obs, state, *parameters])))
        for got, wanted in zip(*results, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-12, msg=f"{shape} {name}")


@pytest.mark.parametrize("shape", SHAPES)
def test_every_cell_of_a_plan_is_run_once_and_padding_stays_below_half(shape):
    for name, starts in patterns(*shape).items():
        plan = plan_pieces(starts.numpy())
        cells = np.concatenate([group.cells.ravel() for group in plan.groups])
        assert np.array_equal(cells[plan.inverse], np.arange(shape[0] * shape[1])), name
        assert len(plan.groups) <= np.log2(shape[0]) + 2, name
        for group in plan.groups:  # every piece is longer than half of what it is padded to
            own = [len(np.unique(column)) for column in group.cells.T]
            assert 2 * min(own) > len(group.cells) or len(group.cells) == 1, name


def test_a_reset_gives_what_a_fresh_episode_would():
    network, _ = make_network()
    obs, state = make_inputs(9, 2)
    starts = torch.zeros(9, 2, dtype=torch.bool)
    starts[4, 0] = True
    hidden, _ = run_sequence(network, obs, state, starts)
    fresh, _ = network(obs[4:, :1], torch.zeros(1, 2, HIDDEN, dtype=torch.float64))[0]
    torch.testing.assert_close(hidden[4:, 0], fresh[:, 0])
    untouched, _ = network(obs[:, 1:], state[1:])[0]
    torch.testing.assert_close(hidden[:, 1], untouched[:, 0])


@pytest.mark.parametrize("run", [run_sequence, run_stepwise])
def test_the_stored_state_is_forgotten_if_the_first_step_starts_an_episode(run):
    network, _ = make_network()
    obs, state = make_inputs(6, 3)
    state.requires_grad_()
    starts = torch.zeros(6, 3, dtype=torch.bool)
    starts[0, 1] = starts[3, 2] = True
    hidden, values = run(network, obs, state, starts)
    (gradient,) = torch.autograd.grad(hidden.sum() + values.sum(), state)
    assert gradient[1].abs().max() == 0
    assert gradient[0].abs().min() > 0 and gradient[2].abs().min() > 0
    other, _ = run(network, obs, state.detach() * torch.tensor([1.0, 9.0, 1.0])[:, None, None], starts)
    torch.testing.assert_close(other, hidden)


@pytest.mark.parametrize("run", [run_sequence, run_stepwise])
def test_no_gradient_crosses_an_episode_start(run):
    network, _ = make_network()
    obs, state = make_inputs(12, 4)
    obs.requires_grad_()
    state.requires_grad_()
    starts = torch.zeros(12, 4, dtype=torch.bool)
    cuts = [1, 5, 11, 6]
    for column, cut in enumerate(cuts):
        starts[cut, column] = True
    hidden, _ = run(network, obs, state, starts)
    late = sum(hidden[cut:, column].sum() for column, cut in enumerate(cuts))
    on_obs, on_state = torch.autograd.grad(late, [obs, state])
    assert on_state.abs().max() == 0
    for column, cut in enumerate(cuts):
        assert on_obs[:cut, column].abs().max() == 0
        assert on_obs[cut:, column].abs().amax(-1).min() > 0


def test_columns_do_not_see_each_other():
    network, _ = make_network()
    obs, state = make_inputs(10, 4)
    starts = patterns(10, 4)["random 0.2"]
    together = run_sequence(network, obs, state, starts)[0]
    for column in range(4):
        pick = slice(column, column + 1)
        alone = run_sequence(network, obs[:, pick], state[pick], starts[:, pick])[0]
        torch.testing.assert_close(together[:, pick], alone)


def test_neither_input_is_changed():
    network, _ = make_network()
    obs, state = make_inputs(8, 3)
    starts = patterns(8, 3)["random 0.5"]
    before = obs.clone(), state.clone(), starts.clone()
    run_sequence(network, obs, state, starts)
    assert all(torch.equal(now, was) for now, was in zip((obs, state, starts), before, strict=True))
