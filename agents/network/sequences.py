"""Recurrent networks over [T, N] with episode resets, in a plan's dense calls."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from agents.network.pieces import Plan, plan_pieces, plans_to_device

# (obs [L,N,F], state [N,S,H]) -> (outputs, each [L,N,...], state after the last step [N,S,H]); it
# may take resets [L,N,1], too: 1 at a step that leaves the state zero
Network = Callable[..., tuple[tuple[Tensor, ...], Tensor]]


def run_sequence(
    network: Network,
    obs: Tensor,
    state: Tensor,
    episode_start: Tensor,
    plan: Plan | None = None,
) -> tuple[Tensor, ...]:
    """Run a recurrent network over [T, N] steps, reset at every episode start.

    Args:
        network: maps (obs [L, N, F], state [N, S, H]) to (outputs, each [L, N, ...], new state);
            for packed rows it takes resets [L, N, 1], too.
        obs: [T, N, F].
        state: [N, S, H] state before the first step.
        episode_start: [T, N] bool; True where the observation is the first of its episode.
        plan: of `plan_pieces` for these sequences; None: made here, which waits for a GPU.

    Returns:
        The network's outputs, each [T, N, ...]. No gradient crosses an episode start.
    """
    num_steps, num_columns = episode_start.shape
    if plan is None:
        plans = plan_pieces(episode_start.cpu().numpy(), [np.arange(num_columns)])
        (plan,), _ = plans_to_device(plans, obs.device)
    if plan.packed:
        return _run_packed(network, obs, state, plan)
    if not plan.tables:  # the whole block is one dense call
        return network(obs, state * ~episode_start[0][:, None, None])[0]

    # one dense call per group of pieces
    flat_obs = obs.flatten(0, 1)
    steps = torch.arange(num_steps, device=obs.device)[:, None]  # [T, 1]
    results, places = [], []
    for table, longest in zip(plan.tables, plan.lengths, strict=True):
        columns, first_cells, last, stateful = table
        times = steps[:longest]
        # padding repeats the piece's last cell: finite values, whose outputs go to a cell behind
        # all others, which nobody reads
        cells = first_cells.add(torch.minimum(times, last), alpha=num_columns)  # [longest, pieces]
        places.append(cells.masked_fill(times > last, num_steps * num_columns).flatten())
        group_obs = flat_obs.index_select(0, cells.flatten()).unflatten(0, cells.shape)
        before = state.index_select(0, columns) * stateful[:, None, None]
        results.append(network(group_obs, before)[0])

    # the outputs of all groups, put back in their places
    place = torch.cat(places)
    outputs = []
    for parts in zip(*results, strict=True):
        flat = torch.cat([part.flatten(0, 1) for part in parts])
        whole = flat.new_empty(num_steps * num_columns + 1, *flat.shape[1:])
        outputs.append(whole.index_copy_(0, place, flat)[:-1].unflatten(0, episode_start.shape))
    return tuple(outputs)


def _run_packed(network: Network, obs: Tensor, state: Tensor, plan: Plan) -> tuple[Tensor, ...]:
    """Run all pieces in one call that resets the state inside."""
    place, reset_places, (columns, stateful) = plan.tables
    shape = (*plan.lengths, len(columns))  # [steps, rows]
    # a step that resets, or pads, sees zeros: large numbers would open the gates it shuts
    rows = obs.new_zeros(shape[0] * shape[1], obs.shape[-1])
    rows = rows.index_copy(0, place, obs.flatten(0, 1)).unflatten(0, shape)
    resets = obs.new_zeros(shape[0] * shape[1], 1).index_fill_(0, reset_places, 1.0)
    before = state.index_select(0, columns) * stateful[:, None, None]
    outputs, _ = network(rows, before, resets.unflatten(0, shape))
    return tuple(out.flatten(0, 1)[place].unflatten(0, obs.shape[:2]) for out in outputs)


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

    One dense call from each last episode start of a column to the next; a single one if the network
    takes resets: the step before a start may reset, for its output is not wanted. `starts` is
    `episode_start` on the host.
    """
    if resets_inside:
        resets = torch.zeros_like(obs[..., :1])
        resets[:-1, :, 0] = episode_start[1:].to(obs.dtype)
        obs = obs.masked_fill(resets > 0.5, 0.0)  # large numbers would open the gates it shuts
        after: Tensor = network(obs, state * ~episode_start[0][:, None, None], resets)[1]
        return after
    last = (np.arange(len(obs))[:, None] * starts).max(0)  # [N] 0: none, or at the first step
    cuts = sorted({0, *last.tolist()})
    for begin, end in zip(cuts, [*cuts[1:], len(obs)], strict=True):
        state = network(obs[begin:end], state * ~episode_start[begin][:, None, None])[1]
    return state
