"""Test that a scan equals stepwise recurrence; invalid user cores and encoders are refused."""

import pytest
import torch
from policies import FORMS, make_policy

from agents.learner.network.cores import scan
from agents.learner.network.own_modules import (
    core_problem,
    encoder_problem,
    make_own,
    try_own,
)
from agents.learner.settings import PolicyConfig
from envs.vector.layout import Layout
from rl_dist.errors import UserError


def recurrence(keep, add, hidden):
    steps = []
    for keep_step, add_step in zip(keep, add, strict=True):
        hidden = keep_step * hidden + add_step
        steps.append(hidden)
    return torch.stack(steps)


@pytest.mark.parametrize("length", [1, 2, 7, 33])
def test_a_scan_and_its_gradients_equal_the_recurrence(length):
    generator = torch.Generator().manual_seed(length)
    inputs = [
        torch.rand(shape, generator=generator, dtype=torch.float64)
        for shape in ((length, 3, 4), (length, 3, 4), (3, 4))
    ]
    # In every third step, all gates are closed.
    inputs[0][1::3] = 1e-30
    for tensor in inputs:
        tensor.requires_grad_()
    results = []
    for compute in (scan, recurrence):
        hidden = compute(*inputs)
        results.append((hidden, *torch.autograd.grad(hidden.pow(3).sum(), inputs)))
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    "core, problem",
    [
        *((f"own_cores:{name}", "single steps") for name in ("Forgetful", "Herd")),
        ("own_cores:Thin", r"\(7, 3, 7\)"),
        ("own_cores:Broken", "no such shape"),
        ("own_cores:Stateless", "num_states"),
    ],
)
def test_a_core_that_breaks_the_contract_is_refused_in_one_line(core, problem):
    with pytest.raises(UserError, match=problem) as error:
        try_own("core", core, core_problem, make_own("core", core, 4, 8, 1), 4, 8)
    assert "\n" not in str(error.value) and core in str(error.value)


def test_a_core_that_meets_the_contract_passes_and_keeps_its_initial_weights():
    policy = make_policy(FORMS["own"])
    assert core_problem(policy.feature_core, 4, 8) == ""
    assert policy.feature_core.layer.bias.any(), "the core must keep torch's initial weights"


ENCODERS = {  # class in own_encoders -> the problem
    "Numberless": "num_outputs",
    "Narrow": r"maps \[2, ., 3\] to \[2, ., 4\], not \[2, ., 5\]",
    "Rounded": "returns torch.int64",
    "Infinite": "NaN or inf",
    "Counting": "second call",
    "Dropping": "second call",
    "Normed": "fails|mixes rows",
    "Mixing": "mixes rows",
    "LookingAhead": "mixes rows",
    "Detached": "passes no gradient to signs.weight, layer.weight",
    "Idle": "passes no gradient to more.weight, more.bias",
    "Altering": "changes the rows",
    "Broken": "fails: .*no such cell",
}
REAL = torch.tensor([[1.0, -2.0, 0.5], [3.0, 1.0, -1.0]])


def make_encoder(name):
    return make_own("encoder", f"own_encoders:{name}", Layout.vector(3), 8)


@pytest.mark.parametrize("rows", [REAL, REAL[:1].expand(5, 3)], ids=["different", "equal"])
@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_that_breaks_the_contract_is_refused_in_one_line(name, rows):
    with pytest.raises(UserError, match=ENCODERS[name]) as error:
        try_own("encoder", f"own_encoders:{name}", encoder_problem, make_encoder(name), rows)
    line = str(error.value)
    assert line.startswith(f"encoder 'own_encoders:{name}' ") and "own_environment.md" in line
    assert "\n" not in line


@pytest.mark.parametrize("name", ["Signs", "Frozen", "Plain", "Short"])
def test_an_encoder_that_meets_the_contract_passes_without_a_trace(name):
    encoder = make_encoder(name)
    assert encoder_problem(encoder, REAL) == ""
    assert all(parameter.grad is None for parameter in encoder.parameters())


def test_an_encoder_keeps_its_initial_weights():
    policy = make_policy(FORMS["own encoder of windows"])
    assert policy.feature_encoder.layer.bias.any()


@pytest.mark.parametrize(
    "flag, options",
    [
        ("core", {"policy": "own"}),
        ("core", {"core": "own_cores:Decay"}),
        ("feature_window", {"policy": "gru", "feature_window": 3}),
    ],
)
def test_flags_that_do_not_go_together_are_refused(flag, options):
    with pytest.raises(ValueError, match=f"{flag}.* does not fit policy"):
        PolicyConfig(**options)
