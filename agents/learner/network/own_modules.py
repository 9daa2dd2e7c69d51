"""Import a user's core or encoder by name, and check it before training."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rl_dist.checkpoint.trust import import_own
from rl_dist.errors import FOREIGN_ERRORS, UserError, one_line
from rl_dist.strategies.precision import autocast

STEPS = 7  # steps of the test input of a core
ROWS = 3  # sequences of that input, and most rows of the test input of an encoder
# For each kind of module: the attribute that holds its size, and the smallest allowed size.
SIZES = {"core": ("num_states", 0), "encoder": ("num_outputs", 1)}
CONTRACT = "docs/own_environment.md describes what it must do"


def make_own(kind: str, name: str, *arguments: object) -> Any:
    """Import a core or encoder given as `module:Class`, and create it with the arguments."""
    own_class = import_own(kind, name)
    attribute, smallest = SIZES[kind]
    try:
        module = own_class(*arguments)
        size = getattr(module, attribute)
        if not isinstance(module, nn.Module) or not isinstance(size, int) or size < smallest:
            raise TypeError(f"it must be a torch module with an integer {attribute} >= {smallest}")
    except FOREIGN_ERRORS as error:
        raise UserError(
            f"{kind} {name!r} cannot be created: {one_line(error)}; {CONTRACT}"
        ) from error
    return module


def try_core(name: str, core: Any, num_inputs: int, size: int) -> None:
    """Raise a UserError if a core does not work as docs/own_environment.md requires."""
    _refuse("core", name, partial(_core_problem, core, num_inputs, size))


def try_encoder(
    name: str,
    encoder: Any,
    rows: Tensor,  # [B, F] real observations, as the policy reads them
    low_precision: torch.dtype | None,
) -> None:
    """Raise a UserError if an encoder does not work as docs/own_environment.md requires."""
    with autocast(low_precision, rows.device):
        _refuse("encoder", name, partial(_encoder_problem, encoder, rows[:ROWS], low_precision))


def _refuse(kind: str, name: str, find_problem: Callable[[], str]) -> None:
    """Raise a UserError if a check finds a problem or fails."""
    try:
        problem = find_problem()
    except FOREIGN_ERRORS as error:
        problem = f"fails: {one_line(error)}"
    if problem:
        raise UserError(f"{kind} {name!r} {problem}; {CONTRACT}")


@torch.no_grad()
def _core_problem(core: Any, num_inputs: int, size: int) -> str:
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


def _encoder_problem(encoder: Any, rows: Tensor, low_precision: torch.dtype | None) -> str:
    """Run an encoder on rows alone and among others; return the first problem, or ''.

    The padding of sequences consists of rows of zeros. They also reveal an encoder that mixes rows
    if all real rows are equal. Like the rows of a window, the steps are not contiguous.
    """
    steps = torch.stack([torch.zeros_like(rows), rows, rows.flip(0)], 1).transpose(0, 1)
    results = []
    for inputs in (rows[0], rows, rows, steps):
        features = encoder(inputs)
        shape = [*inputs.shape[:-1], encoder.num_outputs]
        if list(features.shape) != shape:
            return f"maps {list(inputs.shape)} to {list(features.shape)}, not {shape}"
        if features.dtype not in (rows.dtype, low_precision):
            return f"returns {features.dtype}, not {rows.dtype}"
        if not features.isfinite().all():
            return "returns NaN or inf for real observations or for rows of zeros"
        results.append(features)

    # compare the features of the same rows
    _, together, again, by_step = results
    tolerance = 0.05 if low_precision else 5e-3  # precision tf32 rounds to 1e-3
    alone = torch.stack([encoder(row) for row in rows])
    limit = tolerance * alone.abs().max()
    if (together - again).abs().max() > limit:
        return "returns other features in a second call: it uses random numbers or stores state"
    for features in (together, by_step[1], by_step[2].flip(0)):
        if (features - alone).abs().max() > limit:
            return "mixes rows: the features of a row depend on the other rows of its batch"

    # DistributedDataParallel needs a gradient of every parameter
    trained = {name: p for name, p in encoder.named_parameters() if p.requires_grad}
    gradients: Sequence[Tensor | None] = [None] * len(trained)
    if trained and by_step.requires_grad:
        gradients = torch.autograd.grad(by_step.sum(), [*trained.values()], allow_unused=True)
    pairs = zip(trained, gradients, strict=True)
    unused = ", ".join(name for name, gradient in pairs if gradient is None)
    return f"passes no gradient to {unused}: use it, or freeze it" if unused else ""
