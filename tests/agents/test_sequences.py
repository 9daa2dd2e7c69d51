"""run_sequence cuts, pads, groups and packs; run_stepwise is the plain truth it must equal."""

from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from policies import run_stepwise
from torch import nn

from agents.network.cores import LSTMCore
from agents.network.sequences import (
    PackedRows,
    cheapest_splits,
    pack_rows,
    plan_pieces,
    plans_to_device,
    run_sequence,
    state_after,
)

FEATURES, HIDDEN = 3, 5
SHAPES = [(1, 1), (1, 7), (2, 1), (2, 3), (3, 2), (5, 4), (8, 1), (16, 6), (17, 3), (32, 5)]


def make_network(seed=0):
    """An LSTM with two outputs: (obs, state [N, 2, H]) -> ((outputs, ...), state)."""
    torch.manual_seed(seed)
    core = LSTMCore(FEATURES, HIDDEN).double()
    head = nn.Linear(HIDDEN, 1).double()

    def network(obs, state, *resets):
        hidden, new = core(obs, state.permute(1, 0, 2).contiguous(), *resets)
        return (hidden, head(hidden).squeeze(-1)), torch.stack(new).permute(1, 0, 2)

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


def run_in_one_call(network, obs, state, starts):
    """run_sequence with pieces of all lengths together."""
    plans = plan_pieces(starts.numpy(), [np.arange(starts.shape[1])], call_steps=1e9)
    (plan,), _ = plans_to_device(plans, obs.device)
    return run_sequence(network, obs, state, starts, plan)


def packed_plan(starts, most=10**9):
    (plan,) = plan_pieces(starts.numpy(), [np.arange(starts.shape[1])], call_steps=1e9)
    return pack_rows(plan[0].table, starts.numel(), most) if plan else None


def run_packed(network, obs, state, starts):
    """run_sequence with all pieces in the rows of one call."""
    plan = packed_plan(starts)
    if plan is None:  # there is nothing to cut
        return run_sequence(network, obs, state, starts)
    (placed,), _ = plans_to_device([plan], obs.device)
    return run_sequence(network, obs, state, starts, placed)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_state_after_a_sequence_is_that_after_its_single_steps(shape):
    network, _ = make_network()
    for name, starts in patterns(*shape).items():
        obs, before = make_inputs(*shape)
        state = before
        for step, flags in zip(obs, starts, strict=True):
            state = network(step[None], state * ~flags[:, None, None])[1]
        for inside in (False, True):
            found = state_after(network, obs, before, starts, starts.numpy(), inside)
            torch.testing.assert_close(found, state, rtol=1e-11, atol=1e-12, msg=f"{shape} {name}")


@pytest.mark.parametrize("shape", SHAPES)
def test_the_sequence_equals_single_steps_for_any_pattern_of_resets(shape):
    network, parameters = make_network()
    for name, starts in patterns(*shape).items():
        results = []
        for run in (run_sequence, run_in_one_call, run_packed, run_stepwise):
            obs, state = (tensor.requires_grad_() for tensor in make_inputs(*shape))
            outputs = run(network, obs, state, starts)
            hidden, values = outputs
            weights = torch.linspace(-1, 2, values.numel(), dtype=torch.float64).view_as(values)
            loss = (values * weights).sum() + hidden.pow(3).sum()
            results.append((*outputs, *torch.autograd.grad(loss, [obs, state, *parameters])))
        for *found, wanted in zip(*results, strict=True):
            for got in found:
                torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-12, msg=name)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("call_steps", [0.0, 20.0, 1e9])
def test_every_cell_of_a_plan_is_run_once_and_padding_costs_less_than_calls(shape, call_steps):
    for name, starts in patterns(*shape).items():
        (plan,) = plan_pieces(starts.numpy(), [np.arange(shape[1])], call_steps)
        cells = []
        assert len(plan) <= (np.log2(shape[0]) + 2 if call_steps < 1e9 else 1), name
        for group in plan:
            for column, first, last, stateful in group.table.T:
                assert first % shape[1] == column
                assert stateful == (first < shape[1] and not starts[0, column])
                cells += [first + t * shape[1] for t in range(last + 1)]
            # every piece is longer than half of what it is padded to, where calls cost nothing
            assert call_steps or 2 * (group.table[2].min() + 1) > max(group.longest, 1), name
        assert not plan or sorted(cells) == list(range(shape[0] * shape[1])), name
        assert plan or not starts[1:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_reset_shuts_the_gates_whatever_is_observed(dtype):
    network, parameters = make_network()
    for parameter in parameters:
        parameter.data = parameter.data.to(dtype)
    starts = patterns(17, 3)["random 0.2"]
    for scale in (1.0, 1e4, 1e8):
        obs, state = (each.to(dtype) for each in make_inputs(17, 3))
        found = run_packed(network, obs * scale, state, starts)
        wanted = run_stepwise(network, obs * scale, state, starts)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
        given = obs * scale, state, starts, starts.numpy()
        found, wanted = (state_after(network, *given, inside) for inside in (True, False))
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_packed_rows_hold_every_cell_once_and_a_step_before_every_piece_but_the_first(shape):
    num_columns = shape[1]
    for name, starts in patterns(*shape).items():
        plan = packed_plan(starts)
        if plan is None:
            assert not starts[1:].any(), name
            continue
        num_rows = plan.first.shape[1]
        rows = np.full(plan.num_steps * num_rows, -1)  # the cell in each place
        rows[plan.place] = np.arange(starts.numel())
        assert (rows >= 0).sum() == starts.numel(), name
        assert (rows[plan.resets] == -1).all(), name
        begins = starts.clone()
        begins[0] = True
        for cell in begins.flatten().nonzero()[:, 0].tolist():
            column, place = cell % num_columns, plan.place[cell]
            if place >= num_rows:
                assert place - num_rows in plan.resets, name
                assert cell >= num_columns or starts[0, column], name
            else:
                stateful = cell < num_columns and not starts[0, column]
                assert plan.first[1, place] == stateful, name
                assert plan.first[0, place] == column or not stateful, name
        for cell in (~begins).flatten().nonzero()[:, 0].tolist():
            assert plan.place[cell] == plan.place[cell - num_columns] + num_rows, name


def test_pieces_are_packed_where_that_takes_fewer_steps():
    rng = np.random.default_rng(1)
    batch = [np.arange(64)]
    for density in (0.5, 0.0, 0.003, 0.02, 0.1):
        starts = rng.random((32, 64)) < density
        (pieces,) = plan_pieces(starts, batch, call_steps=100.0)
        (plan,) = plan_pieces(starts, batch, call_steps=100.0, resets_inside=True)
        taken = sum(100 + group.longest * group.table.shape[1] for group in pieces)
        if isinstance(plan, PackedRows):
            cells = plan.num_steps * plan.first.shape[1]
            assert 100 + cells < taken and cells < 1.15 * starts.size
        else:
            assert density < 0.01 or density == 0.5  # one row's step for every step between
    assert isinstance(plan, PackedRows)


@pytest.mark.parametrize("call_steps", [0.0, 3.0, 40.0, 1000.0])
def test_no_other_grouping_of_the_levels_takes_less_time(call_steps):
    rng = np.random.default_rng(0)
    for number in range(1, 7):
        counts = rng.integers(1, 40, number).tolist()
        longest = sorted(rng.integers(1, 33, number).tolist(), reverse=True)

        def time(splits, counts=counts, longest=longest):
            groups = pairwise([*splits, len(counts)])
            return sum(call_steps + longest[a] * sum(counts[a:b]) for a, b in groups)

        ways = [(0, *rest) for r in range(number) for rest in combinations(range(1, number), r)]
        assert time(cheapest_splits(counts, longest, call_steps)) == min(map(time, ways))


def test_plans_of_batches_are_those_of_their_sequences_alone():
    for name, starts in patterns(17, 12).items():
        rng = np.random.default_rng(3)
        batches = [rng.permutation(12)[:5] for _ in range(4)] + [np.array([7, 7, 2])]
        plans = plan_pieces(starts.numpy(), batches)
        for batch, plan in zip(batches, plans, strict=True):
            (alone,) = plan_pieces(starts[:, batch].numpy(), [np.arange(len(batch))])
            assert [group.longest for group in plan] == [group.longest for group in alone], name
            for got, wanted in zip(plan, alone, strict=True):
                assert np.array_equal(got.table, wanted.table), name


def test_no_gradient_crosses_an_episode_start():
    network, _ = make_network()
    obs, state = make_inputs(12, 4)
    obs.requires_grad_()
    state.requires_grad_()
    starts = torch.zeros(12, 4, dtype=torch.bool)
    cuts = [1, 5, 11, 6]
    for column, cut in enumerate(cuts):
        starts[cut, column] = True
    hidden, _ = run_sequence(network, obs, state, starts)
    late = sum(hidden[cut:, column].sum() for column, cut in enumerate(cuts))
    on_obs, on_state = torch.autograd.grad(late, [obs, state])
    assert on_state.abs().max() == 0
    for column, cut in enumerate(cuts):
        assert on_obs[:cut, column].abs().max() == 0
        assert on_obs[cut:, column].abs().amax(-1).min() > 0
