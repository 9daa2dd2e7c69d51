"""Import a user's core by name, and check it before training."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rl_dist.checkpoint.trust import import_own
from rl_dist.errors import FOREIGN_ERRORS, UserError, one_line

STEPS, ROWS = 7, 3  # size of the test input
CONTRACT = "docs/own_environment.md has the contract of a core"


def make_core(name: str, *sizes: int) -> nn.Module:
    """Import `module:Class` and create it with num_inputs, hidden_size, num_layers."""
    core_class = import_own("core", name)
    try:
        core = core_class(*sizes)
    except FOREIGN_ERRORS as error:
        raise UserError(f"core {name!r} cannot be made: {one_line(error)}: {CONTRACT}") from error
    states = getattr(core, "num_states", None)
    if not isinstance(core, nn.Module) or type(states) is not int or states < 0:
        raise UserError(
            f"core {name!r} must be a torch module with an integer num_states: {CONTRACT}"
        )
    return core


def try_core(name: str, core: Any, num_inputs: int, size: int) -> None:
    """Raise a UserError if a core breaks the contract."""
    try:
        problem = _problem(core, num_inputs, size)
    except FOREIGN_ERRORS as error:
        problem = f"fails: {one_line(error)}"
    if problem:
        raise UserError(f"core {name!r} {problem}; {CONTRACT}")


@torch.no_grad()
def _problem(core: Any, num_inputs: int, size: int) -> str:
    """Run a core in several ways; describe how it breaks the contract, or return ''."""
    generator = torch.Generator().manual_seed(0)
    like = next(core.parameters(), torch.zeros(()))
    inputs = torch.randn(STEPS, ROWS, num_inputs, generator=generator).to(like)
    state = torch.randn(core.num_states, ROWS, size, generator=generator).to(like)
    whole = core(inputs, state)
    shapes = [tuple(part.shape) for part in whole]
    expected = [(STEPS, ROWS, size), tuple(state.shape)]
    if shapes != expected:
        return f"returns shapes {shapes}, not {expected}"
    if _differ(whole, core(inputs, state)):
        return "gives other outputs at a second call: it keeps state inside, or draws at random"

    # try single steps, then try without the last sequence
    outputs, after = [], state
    for step in inputs:
        output, after = core(step[None], after)
        outputs.append(output)
    if _differ(whole, (torch.cat(outputs), after)):
        return "gives other outputs step by step: it looks ahead, or its state is incomplete"
    fewer = core(inputs[:, :-1], state[:, :-1])
    if _differ([part[:, :-1] for part in whole], fewer):
        return "gives other outputs beside other sequences: each must be computed alone"
    return ""


def _differ(parts: Any, others: Any) -> bool:
    """Return True if any pair of tensors differs by more than rounding errors."""
    pairs: list[tuple[Tensor, Tensor]] = list(zip(parts, others, strict=True))
    return not all(torch.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in pairs)
