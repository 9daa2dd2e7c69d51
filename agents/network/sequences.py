"""Run recurrent networks over [T, N] steps with episode resets, in dense calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from agents.network.pieces import Plan, plan_pieces, to_device

# A network maps obs [L, N, F] and the state [N, S, H] before the first step to outputs, each
# [L, N, ...], and the state after the last step. For packed plans it also takes resets [L, N, 1]:
# 1 at a step after which the state must be zero.
Network = Callable[..., tuple[tuple[Tensor, ...], Tensor]]


def run_sequence(
    network: Network,
    obs: Tensor,  # [T, N, F]
    state: Tensor,  # [N, S, H] before the first step
    episode_start: Tensor,  # [T, N] bool: obs is the first observation of its episode
    plan: Plan | None = None,  # from `plan_pieces`; None: make it here and wait for the GPU
) -> tuple[Tensor, ...]:
    """Run a recurrent network over [T, N] steps, reset at every episode start.

    Returns the network's outputs, each [T, N, ...]. No gradient crosses an episode start.
    """
    if plan is None:
        plan = plan_pieces(episode_start.cpu().numpy())
        plan = replace(plan, table=to_device([plan.table], obs.device)[0])
    if not plan.calls:  # one dense call processes the uncut sequences
        return network(obs, state * ~episode_start[0][:, None, None])[0]

    # Copy all cells into the blocks. Inputs of padding and of reset steps stay zero: large inputs
    # could open gates that a reset must shut.
    num_rows = [rows for _, rows in plan.calls]
    sizes = [episode_start.numel(), sum(num_rows), sum(num_rows)]
    places, columns, stateful, reset_places = plan.table.tensor_split(np.cumsum(sizes).tolist())
    block_sizes = [steps * rows for steps, rows in plan.calls]
    cells = obs.new_zeros(sum(block_sizes), obs.shape[-1])
    cells = cells.index_copy(0, places, obs.flatten(0, 1))
    before = state.index_select(0, columns) * stateful[:, None, None]
    resets = []
    if plan.packed:
        flags = obs.new_zeros(len(cells), 1).index_fill_(0, reset_places, 1.0)
        resets = [flags.unflatten(0, plan.calls[0])]

    # call the network once per block, then restore the order of the cells
    blocks = zip(plan.calls, cells.split(block_sizes), before.split(num_rows), strict=True)
    results = [
        network(block.unflatten(0, shape), block_state, *resets)[0]
        for shape, block, block_state in blocks
    ]
    outputs = []
    for parts in zip(*results, strict=True):
        flat = torch.cat([part.flatten(0, 1) for part in parts])
        outputs.append(flat.index_select(0, places).unflatten(0, episode_start.shape))
    return tuple(outputs)


@torch.no_grad()
def state_after(
    network: Network,
    obs: Tensor,
    state: Tensor,
    episode_start: Tensor,
    starts: np.ndarray,
    resets_inside: bool = False,
) -> Tensor:
    """Return the state [N, S, H] after the last of the [T, N] steps.

    Only the last episode of each sequence affects this state. Arguments are those of
    `run_sequence`; `starts` is a copy of `episode_start` on the host.
    """
    if resets_inside:
        # One call: the last step before an episode resets the state, as its output is not needed.
        resets = torch.zeros_like(obs[..., :1])
        resets[:-1, :, 0] = episode_start[1:].to(obs.dtype)
        obs = obs.masked_fill(resets > 0.5, 0.0)  # see `run_sequence`
        after: Tensor = network(obs, state * ~episode_start[0][:, None, None], resets)[1]
        return after
    # one call for each interval between the last episode starts of the sequences
    last = (np.arange(len(obs))[:, None] * starts).max(0)  # [N] last start; 0: none, or step 0
    cuts = sorted({0, *last.tolist()})
    for begin, end in zip(cuts, [*cuts[1:], len(obs)], strict=True):
        state = network(obs[begin:end], state * ~episode_start[begin][:, None, None])[1]
    return state
