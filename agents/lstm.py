"""LSTM over [T, B] with episode resets, in dense pieces.

Only dense `nn.LSTM` calls without per-step masks run at full speed. A sequence is therefore cut at
every episode start into pieces that begin from zero state; pieces of similar length are padded
together and run as one dense call each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# (obs [L,N,F], state [N,S,H]) -> (outputs, each [L,N,...], state after the last step [N,S,H])
Network = Callable[[Tensor, Tensor], tuple[tuple[Tensor, ...], Tensor]]


@dataclass(frozen=True)
class PieceGroup:
    """Pieces of similar length, padded to the longest; one dense call."""

    cells: np.ndarray  # [length, pieces] flat index t * N + n of each padded cell
    columns: np.ndarray  # [pieces] sequence that each piece was cut from
    stateful: np.ndarray  # [pieces] bool; starts from the sequence's stored state, else from zero


@dataclass(frozen=True)
class PiecePlan:
    """How a [T, N] block is cut into dense calls, and how their outputs are put back."""

    groups: list[PieceGroup]
    inverse: np.ndarray  # [T*N] position of every cell in the concatenated outputs of the groups


def plan_pieces(episode_start: np.ndarray) -> PiecePlan:
    """Cut [T, N] sequences at episode starts and group the pieces by length.

    Groups are whole sequences, then lengths in (T/2, T), (T/4, T/2], ...: padding costs less than
    half of a group.
    """
    # pieces: column, first step and length of each
    num_steps, num_columns = episode_start.shape
    begins = episode_start.copy()
    begins[0] = True
    columns, starts = np.nonzero(begins.T)  # [pieces] each, sorted by column, then time
    next_starts = np.append(starts[1:], num_steps)
    last_of_column = np.append(columns[1:] != columns[:-1], True)
    lengths = np.where(last_of_column, num_steps, next_starts) - starts
    stateful = (starts == 0) & ~episode_start[0, columns]

    # one group per level of length
    level = np.where(lengths == num_steps, -1, np.floor(np.log2(num_steps / lengths))).astype(int)
    groups = []
    inverse = np.empty(num_steps * num_columns, dtype=np.int64)
    offset = 0
    for value in np.unique(level):
        chosen = np.flatnonzero(level == value)
        longest = int(lengths[chosen].max())
        times = np.arange(longest)[:, None]
        real = times < lengths[chosen]  # [longest, pieces]
        # padding repeats the piece's own last cell: finite values whose outputs nobody reads
        steps = starts[chosen] + np.minimum(times, lengths[chosen] - 1)
        cells = steps * num_columns + columns[chosen]
        groups.append(PieceGroup(cells, columns[chosen], stateful[chosen]))
        inverse[cells[real]] = offset + np.flatnonzero(real.ravel())
        offset += cells.size
    return PiecePlan(groups, inverse)


def run_sequence(
    network: Network, obs: Tensor, state: Tensor, episode_start: Tensor
) -> tuple[Tensor, ...]:
    """Run a recurrent network over [T, N] steps, reset at every episode start.

    Args:
        network: maps (obs [L, N, F], state [N, S, H]) to (outputs, each [L, N, ...], new state).
        obs: [T, N, F].
        state: [N, S, H] state before the first step.
        episode_start: [T, N] bool; True where the observation is the first of its episode.

    Returns:
        The network's outputs, each [T, N, ...]. No gradient crosses an episode start.
    """
    starts = episode_start.cpu().numpy()
    if not starts[1:].any():  # nothing to cut: the whole block is one dense call
        return network(obs, state * ~episode_start[0][:, None, None])[0]

    # one dense call per group of pieces
    plan = plan_pieces(starts)
    flat_obs = obs.flatten(0, 1)
    results = []
    for group in plan.groups:
        cells = torch.from_numpy(group.cells).to(obs.device)
        columns = torch.from_numpy(group.columns).to(obs.device)
        keep = torch.from_numpy(group.stateful).to(obs.device)
        group_obs = flat_obs.index_select(0, cells.flatten()).unflatten(0, cells.shape)
        results.append(network(group_obs, state.index_select(0, columns) * keep[:, None, None])[0])

    # the outputs of all groups, put back in their places
    inverse = torch.from_numpy(plan.inverse).to(obs.device)
    flat = (
        torch.cat([part.flatten(0, 1) for part in parts]) for parts in zip(*results, strict=True)
    )
    return tuple(part.index_select(0, inverse).unflatten(0, starts.shape) for part in flat)


def to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Integer arrays as int64 tensors on a device; the host does not wait for it."""
    packed = torch.from_numpy(np.concatenate([array.ravel() for array in arrays], dtype=np.int64))
    if device.type == "cuda":
        packed = packed.pin_memory().to(device, non_blocking=True)
    parts = packed.split([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]
