"""Import a user's core by name, and check it before training."""

from typing import Any

import torch
from torch import nn

from rl_dist.checkpoint.trust import import_own
from rl_dist.errors import FOREIGN_ERRORS, UserError, one_line

STEPS = 7  # steps of the test input
ROWS = 3  # sequences of the test input
CONTRACT = "docs/own_environment.md describes what a core must do"


def make_core(name: str, *sizes: int) -> nn.Module:
    """Import `module:Class`; create a core with `sizes`: num_inputs, hidden_size, num_layers."""
    core_class = import_own("core", name)
    try:
        core = core_class(*sizes)
        if not isinstance(core, nn.Module) or not isinstance(core.num_states, int):
            raise TypeError("it must be a torch module with an integer num_states")
    except FOREIGN_ERRORS as error:
        raise UserError(
            f"core {name!r} cannot be created: {one_line(error)}: {CONTRACT}"
        ) from error
    return core


def try_core(name: str, core: Any, num_inputs: int, size: int) -> None:
    """Raise a UserError if a core does not work as docs/own_environment.md requires."""
    try:
        problem = _problem(core, num_inputs, size)
    except FOREIGN_ERRORS as error:
        problem = f"fails: {one_line(error)}"
    if problem:
        raise UserError(f"core {name!r} {problem}; {CONTRACT}")


@torch.no_grad()
def _problem(core: Any, num_inputs: int, size: int) -> str:
    """Run a core on sequences and on single steps; return the first problem, or ''."""
    generator = torch.Generator().manual_seed(0)
    like = next(core.parameters(), torch.zeros(()))
    inputs = torch.randn(STEPS, ROWS, num_inputs, generator=generator).to(like)
    state = torch.randn(core.num_states, ROWS, size, generator=generator).to(like)
    whole = core(inputs, state)
    shapes = [tuple(part.shape) for part in whole]
    expected = [(STEPS, ROWS, size), tuple(state.shape)]
    if shapes != expected:
        return f"returns shapes {shapes}, not {expected}"

    # Run single steps without the last sequence. If the core mixes sequences, the outputs of the
    # other sequences change.
    outputs = []
    after = state[:, :-1]
    for step in inputs[:, :-1]:
        output, after = core(step[None], after)
        outputs.append(output)
    for part, stepwise in zip(whole, (torch.cat(outputs), after), strict=True):
        if not torch.allclose(part[:, :-1], stepwise, rtol=1e-3, atol=1e-4):
            return (
                "gives different outputs for single steps: it looks ahead, mixes sequences, keeps "
                "state in the module, uses random numbers, or returns an incomplete state"
            )
    return ""
