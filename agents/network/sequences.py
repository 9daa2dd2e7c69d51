"""LSTM over [T, B] with episode resets, in dense pieces.

Only dense `nn.LSTM` calls without per-step masks run at full speed. A sequence is therefore cut at
every episode start into pieces that begin from zero state; pieces of similar length are padded
together and run as one dense call each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

# (obs [L,N,F], state [N,S,H]) -> (outputs, each [L,N,...], state after the last step [N,S,H])
Network = Callable[[Tensor, Tensor], tuple[tuple[Tensor, ...], Tensor]]


@dataclass(frozen=True)
class PieceGroup:
    """Pieces of similar length, padded to the longest; one dense call.

    Rows of the table: the sequence that a piece was cut from, flat index t * N + n of its first
    cell, its length - 1, and 1 if it starts from the sequence's stored state, else 0.
    """

    table: Any  # [4, pieces] int64: an array, or a tensor where the sequences are
    longest: int


Plan = list[PieceGroup]  # of some sequences; empty: there is nothing to cut


def plan_pieces(
    episode_start: np.ndarray, batches: Sequence[np.ndarray], call_steps: float = 0.0
) -> list[Plan]:
    """Cut batches of sequences at episode starts; group the pieces by length.

    Groups are whole sequences, then lengths in (T/2, T), (T/4, T/2], ...: padding costs less than
    half of a group. Neighbours join where that costs less than a call.

    Args:
        episode_start: [T, S] bool.
        batches: columns of it, [N] each.
        call_steps: steps of one row that take as long as a call does, however few it has.
    """
    # pieces of all sequences: column, first step and length of each
    num_steps, num_columns = episode_start.shape
    begins = episode_start.copy()
    begins[0] = True
    columns, starts = np.nonzero(begins.T)  # [pieces] each, sorted by column, then time
    next_starts = np.append(starts[1:], num_steps)
    last_of_column = np.append(columns[1:] != columns[:-1], True)
    lengths = np.where(last_of_column, num_steps, next_starts) - starts
    stateful = (starts == 0) & ~episode_start[0, columns]
    level = np.floor(np.log2(num_steps / lengths)).astype(np.int8)
    level[lengths == num_steps] = -1
    counts = np.bincount(columns, minlength=num_columns)  # [S] pieces of each column
    firsts = np.cumsum(counts) - counts

    # a batch's own ones, by level
    plans: list[Plan] = []
    for batch in batches:
        own = counts[batch]  # [N]
        ends = np.cumsum(own)
        if ends[-1] == len(batch):
            plans.append([])
            continue
        pieces = np.repeat(firsts[batch] - ends + own, own) + np.arange(ends[-1])
        order = np.argsort(level[pieces], kind="stable")
        pieces = pieces[order]
        column = np.repeat(np.arange(len(batch)), own)[order]
        first_cells = starts[pieces] * len(batch) + column
        table = np.stack([column, first_cells, lengths[pieces] - 1, stateful[pieces]])
        bounds = np.flatnonzero(np.diff(level[pieces], prepend=-2, append=99))  # of levels
        longest = np.maximum.reduceat(table[2], bounds[:-1]) + 1
        splits = cheapest_splits(np.diff(bounds).tolist(), longest.tolist(), call_steps)
        groups = np.split(table, bounds[splits[1:]], axis=1)
        sizes = longest[splits].tolist()
        plans.append([PieceGroup(*each) for each in zip(groups, sizes, strict=True)])
    return plans


def cheapest_splits(counts: list[int], longest: list[int], call_steps: float) -> list[int]:
    """Return the first levels of the groups whose calls take the least time together.

    Args:
        counts: pieces of each level, the level of the longest first.
        longest: steps of a level's longest piece.
    """
    best: list[tuple[float, list[int]]] = [(0.0, [])]  # of the first levels: time, groups
    for end in range(1, len(counts) + 1):
        ways = []
        for first, (time, groups) in enumerate(best):
            joint = call_steps + longest[first] * sum(counts[first:end])
            ways.append((time + joint, [*groups, first]))
        best.append(min(ways))
    return best[-1][1]


def plans_to_device(
    plans: list[Plan], device: torch.device, *others: np.ndarray
) -> tuple[list[Plan], list[Tensor]]:
    """Plans, and other integer arrays, on a device, by one copy."""
    groups = [group for plan in plans for group in plan]
    moved = to_device([*others, *(group.table for group in groups)], device)
    tables = iter(moved[len(others) :])
    placed = [[PieceGroup(next(tables), group.longest) for group in plan] for plan in plans]
    return placed, moved[: len(others)]


def run_sequence(
    network: Network,
    obs: Tensor,
    state: Tensor,
    episode_start: Tensor,
    plan: Plan | None = None,
) -> tuple[Tensor, ...]:
    """Run a recurrent network over [T, N] steps, reset at every episode start.

    Args:
        network: maps (obs [L, N, F], state [N, S, H]) to (outputs, each [L, N, ...], new state).
        obs: [T, N, F].
        state: [N, S, H] state before the first step.
        episode_start: [T, N] bool; True where the observation is the first of its episode.
        plan: of `plan_pieces` for these sequences; None: made here, which waits for a GPU.

    Returns:
        The network's outputs, each [T, N, ...]. No gradient crosses an episode start.
    """
    num_steps, num_columns = episode_start.shape
    if plan is None:
        batch = np.arange(num_columns)
        plans = plan_pieces(episode_start.cpu().numpy(), [batch])
        (plan,), _ = plans_to_device(plans, obs.device)
    if not plan:  # the whole block is one dense call
        return network(obs, state * ~episode_start[0][:, None, None])[0]

    # one dense call per group of pieces
    flat_obs = obs.flatten(0, 1)
    steps = torch.arange(num_steps, device=obs.device)[:, None]  # [T, 1]
    results, places = [], []
    for group in plan:
        columns, first_cells, last, stateful = group.table
        times = steps[: group.longest]
        # padding repeats the piece's own last cell: finite values, whose outputs go to a cell
        # behind all others, which nobody reads
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


@torch.no_grad()
def state_after(network: Network, obs: Tensor, state: Tensor, episode_start: Tensor) -> Tensor:
    """State [N, S, H] after the [T, N] steps that `run_sequence` would take.

    One dense call from each last episode start of a column to the next.
    """
    steps = torch.arange(len(obs), device=obs.device)[:, None]
    last = (steps * episode_start).amax(0)  # [N] 0: it has none, or at the first step
    cuts = sorted({0, *last.tolist()})
    for begin, end in zip(cuts, [*cuts[1:], len(obs)], strict=True):
        state = network(obs[begin:end], state * ~episode_start[begin][:, None, None])[1]
    return state


def to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Integer arrays as int64 tensors on a device; the host does not wait for it."""
    if not arrays:
        return []
    packed = torch.from_numpy(np.concatenate([array.ravel() for array in arrays], dtype=np.int64))
    if device.type == "cuda":
        packed = packed.pin_memory().to(device, non_blocking=True)
    parts = packed.split([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


def to_host(tensors: Sequence[Tensor]) -> list[np.ndarray]:
    """Tensors as arrays; the host waits once for a GPU, however many they are."""
    if not tensors[0].is_cuda:
        return [tensor.numpy() for tensor in tensors]
    packed = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors])
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    parts = packed.cpu().split(sizes)
    pairs = zip(parts, tensors, strict=True)
    return [part.clone().view(like.dtype).view(like.shape).numpy() for part, like in pairs]
