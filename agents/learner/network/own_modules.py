"""Import a user's core or encoder by name, and check it before training."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rl_dist.checkpoint.trust import import_own
from rl_dist.errors import FOREIGN_ERRORS, UserError, one_line

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


def try_own(kind: str, name: str, find_problem: Callable[..., str], *arguments: object) -> None:
    """Raise a UserError if `find_problem(*arguments)` finds a problem in a module, or fails."""
    try:
        problem = find_problem(*arguments)
    except FOREIGN_ERRORS as error:
        problem = f"fails: {one_line(error)}"
    if problem:
        raise UserError(f"{kind} {name!r} {problem}; {CONTRACT}")


@torch.no_grad()
def core_problem(core: Any, num_inputs: int, size: int) -> str:
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


def encoder_problem(
    encoder: Any,
    rows: Tensor,  # [B, F] real observations, as the policy reads them
) -> str:
    """Run an encoder on rows alone and among others; return the first problem, or ''.

    As in the policy, inputs are [L, N, F] and need not be contiguous. Rows of zeros pad sequences;
    they also reveal mixed rows if all real rows are equal.
    """
    rows = rows[:ROWS]
    zeros = torch.zeros_like(rows)
    steps = torch.stack([torch.cat([rows, zeros]), torch.cat([zeros, rows])], 1).transpose(0, 1)
    before = steps.clone()
    features, again = encoder(steps), encoder(steps)
    alone = torch.cat([encoder(row[None].clone()) for row in rows.split(1)], 1)
    shape = [*steps.shape[:2], encoder.num_outputs]
    if list(features.shape) != shape:
        return f"maps {list(steps.shape)} to {list(features.shape)}, not {shape}"
    if not features.is_floating_point():
        return f"returns {features.dtype}, not {rows.dtype}"
    if not features.isfinite().all():
        return "returns NaN or inf for real observations or for rows of zeros"

    # compare the features of the same rows; precision tf32 rounds to 1e-3, bf16 to 1e-2
    limit = (5e-3 if features.dtype == rows.dtype else 0.05) * alone.abs().max()
    if not torch.equal(steps, before):
        return "changes the rows that it gets, which are also recorded: change a copy"
    if (features - again).abs().max() > limit:
        return "returns other features in a second call: it uses random numbers or stores state"
    for part in (features[:1, : len(rows)], features[1:, len(rows) :]):
        if (part - alone).abs().max() > limit:
            return "mixes rows: the features of a row depend on the other rows of its batch"

    # DistributedDataParallel needs a gradient of every parameter. With `anchor`, the sum has a
    # gradient even if the features have none.
    anchor = torch.zeros((), requires_grad=True)
    trained = {name: p for name, p in encoder.named_parameters() if p.requires_grad}
    inputs = [*trained.values(), anchor]
    gradients = torch.autograd.grad(features.sum() + anchor, inputs, allow_unused=True)
    unused = [name for name, grad in zip(trained, gradients, strict=False) if grad is None]
    return f"passes no gradient to {', '.join(unused)}: use it, or freeze it" if unused else ""
