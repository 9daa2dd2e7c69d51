"""run_sequence cuts, pads, groups and packs; run_stepwise is the plain truth it must equal."""

from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from policies import run_stepwise
from torch import nn

from agents.network.cores import LSTMCore
from agents.network.minibatches import to_sequences
from agents.network.pieces import cheapest_splits, pack_rows, plan_pieces, plans_to_device
from agents.network.sequences import run_sequence, state_after

FEATURES, HIDDEN = 3, 5
SHAPES = [(1, 1), (1, 7), (2, 1), (2, 3), (3, 2), (5, 4), (8, 1), (16, 6), (17, 3), (32, 5)]


def make_network(dtype=torch.float64):
    """An LSTM with two outputs: (obs, state [N, 2, H]) -> ((outputs, ...), state)."""
    torch.manual_seed(0)
    core = LSTMCore(FEATURES, HIDDEN).to(dtype)
    head = nn.Linear(HIDDEN, 1).to(dtype)

    def network(obs, state, *resets):
        hidden, new = core(obs, state.permute(1, 0, 2).contiguous(), *resets)
        return (hidden, head(hidden).squeeze(-1)), torch.stack(new).permute(1, 0, 2)

    return network, [*core.parameters(), *head.parameters()]


def make_inputs(num_steps, num_columns, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    obs = torch.randn(num_steps, num_columns, FEATURES, dtype=dtype, generator=generator)
    return obs, torch.randn(num_columns, 2, HIDDEN, dtype=dtype, generator=generator)


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


def run_in_one_call(network, obs, state, starts, packed=False):
    """run_sequence with pieces of all lengths together, padded or packed."""
    (plan,) = plan_pieces(starts.numpy(), [np.arange(starts.shape[1])], call_steps=1e9)
    assert len(plan.tables) <= 1
    if packed and plan.tables:
        plan = pack_rows(plan.tables[0], starts.numel(), most=10**9)
    (plan,), _ = plans_to_device([plan], obs.device)
    return run_sequence(network, obs, state, starts, plan)


def run_packed(*given):
    return run_in_one_call(*given, packed=True)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_sequence_equals_its_single_steps_for_any_pattern_of_resets(shape):
    """Outputs, gradients (so none crosses an episode start), and the state after it."""
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
        after = state
        for step, flags in zip(obs, starts, strict=True):
            after = network(step[None], after * ~flags[:, None, None])[1]
        for inside in (False, True):
            found = state_after(network, obs, state, starts, starts.numpy(), inside)
            torch.testing.assert_close(found, after, rtol=1e-11, atol=1e-12, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1.0, 1e4, 1e8])
def test_a_reset_shuts_the_gates_whatever_is_observed(dtype, scale):
    network, _ = make_network(dtype)
    starts = patterns(17, 3)["random 0.2"]
    obs, state = make_inputs(17, 3, dtype)
    given = obs * scale, state, starts
    found, wanted = run_packed(network, *given), run_stepwise(network, *given)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    found, wanted = (state_after(network, *given, starts.numpy(), way) for way in (True, False))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_pieces_are_packed_where_that_takes_fewer_steps():
    rng = np.random.default_rng(1)
    batch = [np.arange(64)]
    for density in (0.5, 0.0, 0.003, 0.02, 0.1):
        starts = rng.random((32, 64)) < density
        (pieces,) = plan_pieces(starts, batch, call_steps=100.0)
        (plan,) = plan_pieces(starts, batch, call_steps=100.0, resets_inside=True)
        groups = zip(pieces.lengths, pieces.tables, strict=True)
        taken = sum(100 + steps * table.shape[1] for steps, table in groups)
        if plan.packed:
            cells = plan.lengths[0] * plan.tables[2].shape[1]
            assert 100 + cells < taken and cells < 1.15 * starts.size
        else:
            assert density < 0.01 or density == 0.5  # one row's step for every step between
    assert plan.packed


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
        for batch, plan in zip(batches, plan_pieces(starts.numpy(), batches), strict=True):
            (alone,) = plan_pieces(starts[:, batch].numpy(), [np.arange(len(batch))])
            assert plan.lengths == alone.lengths, name
            assert all(map(np.array_equal, plan.tables, alone.tables)), name


def test_sequences_are_steps_of_one_environment_in_order():
    values = torch.arange(6 * 2 * 1).view(6, 2, 1)  # [T, B, 1]; t * 2 + b
    columns = to_sequences(values, 3)[:, :, 0].T.tolist()  # [L, K * B, 1]
    assert columns == [[0, 2, 4], [1, 3, 5], [6, 8, 10], [7, 9, 11]]  # (k, b) is column k * B + b
