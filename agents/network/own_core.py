"""A user's own core: found by name, and tried before it trains."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rl_dist.checkpoint.trust import import_own
from rl_dist.errors import FOREIGN_ERRORS, UserError, one_line

STEPS, ROWS = 7, 3  # size of the trial
CONTRACT = "docs/own_environment.md has the contract of a core"


def make_core(name: str, *sizes: int) -> nn.Module:
    """Make the core `module:Class` of num_inputs, hidden_size and num_layers."""
    core_class = import_own("core", name)
    try:
        core = core_class(*sizes)
    except FOREIGN_ERRORS as error:
        raise UserError(f"core {name!r} cannot be made: {one_line(error)}: {CONTRACT}") from error
    states = getattr(core, "num_states", None)
    if not isinstance(core, nn.Module) or type(states) is not int or states < 0:
        raise UserError(f"core {name!r} is no torch module with num_states, a count: {CONTRACT}")
    return core


@torch.no_grad()
def try_core(name: str, core: Any, num_inputs: int, size: int) -> None:
    """Refuse a core that breaks the contract: run it whole and step by step."""
    generator = torch.Generator().manual_seed(0)
    like = next(core.parameters(), torch.zeros(()))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(like)

    inputs, state = normal(STEPS, ROWS, num_inputs), normal(core.num_states, ROWS, size)

    def run(inputs: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        outputs, after = core(inputs, state)
        shapes = tuple(outputs.shape), tuple(after.shape)
        expected = (*inputs.shape[:2], size), tuple(state.shape)
        if shapes != expected:
            raise UserError(f"core {name!r} returns shapes {shapes}, not {expected}: {CONTRACT}")
        return outputs, after

    def differs(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> bool:
        pairs = zip(one, other, strict=True)
        return not all(torch.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in pairs)

    try:
        whole = run(inputs, state)
        again = run(inputs, state)
        steps = []
        after = state
        for step in inputs:
            output, after = run(step[None], after)
            steps.append(output)
        fewer = run(inputs[:, :-1], state[:, :-1])
    except UserError:
        raise
    except FOREIGN_ERRORS as error:
        raise UserError(f"core {name!r} fails: {one_line(error)}: {CONTRACT}") from error
    problem = ""
    if differs(whole, again):
        problem = "gives other outputs at a second call: it keeps state inside, or draws at random"
    elif differs(whole, (torch.cat(steps), after)):
        problem = "gives other outputs step by step: it looks ahead, or its state is incomplete"
    elif differs((whole[0][:, :-1], whole[1][:, :-1]), fewer):
        problem = "gives other outputs beside other sequences: each must stand for itself"
    if problem:
        raise UserError(f"core {name!r} {problem}; {CONTRACT}")
