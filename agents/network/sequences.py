"""Recurrent networks over [T, N] with episode resets, in a plan's dense calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from agents.network.pieces import Plan, plan_pieces, to_device

# A network maps obs [L, N, F] and the state [N, S, H] before them to outputs, each [L, N, ...], and
# the state after them. For packed plans it takes resets [L, N, 1] too: 1 where a step leaves the
# state zero.
Network = Callable[..., tuple[tuple[Tensor, ...], Tensor]]


def run_sequence(
    network: Network,
    obs: Tensor,  # [T, N, F]
    state: Tensor,  # [N, S, H] before the first step
    episode_start: Tensor,  # [T, N] bool; the observation is the first of its episode
    plan: Plan | None = None,  # from `plan_pieces`; None: plan here, which waits for a GPU
) -> tuple[Tensor, ...]:
    """Run a recurrent network over [T, N] steps, reset at every episode start.

    Returns the network's outputs, each [T, N, ...]. No gradient crosses an episode start.
    """
    if plan is None:
        plan = plan_pieces(episode_start.cpu().numpy())
        plan = replace(plan, table=to_device([plan.table], obs.device)[0])
    if not plan.calls:  # one dense call takes all sequences as they are
        return network(obs, state * ~episode_start[0][:, None, None])[0]

    # Copy all cells to their blocks. Padding and steps that reset see zeros: large numbers would
    # open the gates that a reset shuts.
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

    # one call for each block; then the outputs return to the order of the cells
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
    """Return the state [N, S, H] after the [T, N] steps of `run_sequence`.

    Only the last episode of each sequence matters. `starts` is `episode_start` on the host.
    """
    if resets_inside:
        # one call; the step before an episode resets, since nobody needs its output
        resets = torch.zeros_like(obs[..., :1])
        resets[:-1, :, 0] = episode_start[1:].to(obs.dtype)
        obs = obs.masked_fill(resets > 0.5, 0.0)  # large numbers would open the gates it shuts
        after: Tensor = network(obs, state * ~episode_start[0][:, None, None], resets)[1]
        return after
    # a call from each of the last starts to the next
    last = (np.arange(len(obs))[:, None] * starts).max(0)  # [N] 0: none, or the first step
    cuts = sorted({0, *last.tolist()})
    for begin, end in zip(cuts, [*cuts[1:], len(obs)], strict=True):
        state = network(obs[begin:end], state * ~episode_start[begin][:, None, None])[1]
    return state
