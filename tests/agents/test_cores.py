"""Cores: scans equal step-by-step recurrences; user-defined cores are checked."""

import pytest
import torch
from policies import make_policy

from agents.network.cores import MinGRUCore, scan
from agents.network.own_core import make_core, try_core
from agents.policy import PolicyConfig
from rl_dist.errors import UserError


@pytest.mark.parametrize("length", [1, 2, 3, 7, 32, 33])
def test_a_scan_is_the_recurrence_and_so_are_its_gradients(length):
    generator = torch.Generator().manual_seed(length)
    keep, add, first = (
        torch.rand(*shape, 3, 4, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in ((length,), (length,), ())
    )
    hidden, steps = first, []
    for k, a in zip(keep, add, strict=True):
        hidden = k * hidden + a
        steps.append(hidden)
    expected, found = torch.stack(steps), scan(keep, add, first)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
    for loss in (found, expected):
        loss.pow(3).sum().backward()
        grads = [each.grad for each in (keep, add, first)]
        if loss is found:
            kept = [grad.clone() for grad in grads]
            keep.grad = add.grad = first.grad = None
    for got, wanted in zip(kept, grads, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-14)


def test_a_scan_keeps_its_digits_over_gates_that_close_completely():
    keep = torch.full((512, 1, 2), 1e-30)
    keep[1::2] = 1.0
    found = scan(keep, torch.ones(512, 1, 2), torch.full((1, 2), 1e30))
    assert found[:, 0, 0].tolist() == [2.0, 3.0] + [1.0, 2.0] * 255


def test_slow_units_of_a_mingru_remember_for_long_to_begin_with():
    policy = make_policy(PolicyConfig(hidden_size=8, policy="mingru"))
    core = policy.feature_core
    assert isinstance(core, MinGRUCore)
    state = torch.ones(1, 1, 8, dtype=torch.float64)
    outputs, _ = core(torch.zeros(64, 1, 4, dtype=torch.float64), state)
    assert outputs[-1, 0, 0] < 1e-9 and 0.3 < outputs[-1, 0, -1] < 0.5  # (64 / 65) ** 64


@pytest.mark.parametrize(
    ("core", "problem"),
    [
        ("own_cores:Hoarder", "keeps state inside"),
        ("own_cores:Prophet", "looks ahead"),
        ("own_cores:Forgetful", "state is incomplete"),
        ("own_cores:Herd", "stand for itself"),
        ("own_cores:Thin", r"\(7, 3, 7\)"),
        ("own_cores:Broken", "no such shape"),
        ("own_cores:Stateless", "num_states"),
        ("own_cores:Absent", "Absent"),
        ("no_such_module:Core", "there is no module no_such_module in /"),
        ("own_cores", "module:name"),
    ],
)
def test_a_core_that_breaks_the_contract_is_refused_in_one_line(core, problem):
    with pytest.raises(UserError, match=problem) as error:
        try_core(core, make_core(core, 4, 8, 1), 4, 8)
    assert "\n" not in str(error.value) and core in str(error.value)


def test_a_core_that_keeps_the_contract_passes_and_initialises_itself():
    policy = make_policy(PolicyConfig(hidden_size=8, policy="own", core="own_cores:Decay"))
    try_core("own_cores:Decay", policy.feature_core, 4, 8)
    assert policy.feature_core.layer.bias.any(), "torch's own initialisation is kept"


@pytest.mark.parametrize(
    "options",
    [
        {"policy": "own"},
        {"core": "own_cores:Decay"},
        {"policy": "gru", "feature_window": 3},
        {"policy": "mlp", "memory": False},
    ],
)
def test_flags_that_would_do_nothing_are_refused(options):
    with pytest.raises(ValueError, match=r"drop|does not go with"):
        PolicyConfig(**options)
