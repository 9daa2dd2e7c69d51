"""Plans of dense calls for sequences that episode starts cut into pieces.

A recurrent network is fast on blocks of cells [steps, rows]. Pieces of similar length share a
block, one in each row, padded to the longest. If the network can reset its state between two
steps, all pieces share one block instead, and a row holds several.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

PACKING = 1.07  # time of a step in packed rows relative to others: cells are copied, states reset


@dataclass(frozen=True)
class Plan:
    """The dense calls of N sequences of T steps. No calls: the sequences need no cut.

    The blocks of all calls lie one after the other. The table has four parts: for each cell
    t * N + n its place in the blocks, [T * N]; for each row the sequence of its first piece, and 1
    if that sequence's stored state begins the row, else 0; the places of the steps that reset.
    """

    calls: list[tuple[int, int]]  # steps and rows of each block
    table: Any  # int64 array, or a tensor on the device of the sequences
    packed: bool = False  # rows hold several pieces, with resets in between


def plan_pieces(
    episode_start: np.ndarray,  # [T, N] bool
    call_steps: float = 0.0,  # overhead of a call, in single-row steps
    resets_inside: bool = False,  # the network takes resets: pieces are packed where it is faster
) -> Plan:
    """Cut sequences at episode starts; group the pieces by length, or pack them.

    Groups are whole sequences, then lengths in (T/2, T), (T/4, T/2], ...: padding costs less than
    half of a group. Neighbours join where that costs less than a call.
    """
    # the pieces: sequence, first step, length, and whether the stored state precedes
    num_steps, num_columns = episode_start.shape
    begins = episode_start.copy()
    begins[0] = True
    firsts = np.flatnonzero(begins.T)  # n * T + t of each piece's first cell
    if len(firsts) == num_columns:
        return Plan([], np.zeros(0, np.int64))
    lengths = np.diff(np.append(firsts, begins.size))
    level = np.floor(np.log2(num_steps / lengths)).astype(np.int8) + (lengths < num_steps)
    order = np.argsort(level, kind="stable")
    lengths = lengths[order]
    columns, starts = np.divmod(firsts[order], num_steps)
    stateful = (starts == 0) & ~episode_start[0, columns]

    # groups of levels: every piece has a row
    counts = np.bincount(level)
    counts = counts[counts > 0]  # pieces of each level
    longest = np.maximum.reduceat(lengths, np.cumsum(counts) - counts)
    splits = cheapest_splits(counts.tolist(), longest.tolist(), call_steps)
    num_rows = np.add.reduceat(counts, splits)
    block_steps = longest[splits]
    row, begin = np.arange(len(order)), np.zeros(len(order), np.int64)

    # or one block, if that takes less time
    packed = False
    most = (block_steps @ num_rows + call_steps * (len(splits) - 1)) / PACKING  # cells
    if resets_inside and begins.size <= most:
        best_row, best_begin = best_fit(lengths, stateful)
        packed = bool(longest[0] * (best_row.max() + 1) <= most)
        if packed:
            row, begin = best_row, best_begin
            num_rows, block_steps = row.max(keepdims=True) + 1, longest[:1]

    # places of all cells: those of a piece are one row of the block apart
    call = np.repeat(np.arange(len(num_rows)), num_rows)[row]  # of each piece
    sizes = block_steps * num_rows
    first_places = (np.cumsum(sizes) - sizes - np.cumsum(num_rows) + num_rows)[call]
    first_places += begin * num_rows[call] + row
    step = np.arange(begins.size) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    cells = np.repeat(starts * num_columns + columns, lengths) + step * num_columns
    places = np.empty(begins.size, np.int64)
    places[cells] = np.repeat(first_places, lengths) + step * np.repeat(num_rows[call], lengths)
    rows = np.zeros((2, num_rows.sum()), np.int64)
    rows[:, row[begin == 0]] = np.stack([columns, stateful])[:, begin == 0]
    resets = (first_places - num_rows[call])[begin > 0]
    calls = list(zip(block_steps.tolist(), num_rows.tolist(), strict=True))
    return Plan(calls, np.concatenate([places, rows.ravel(), resets]), packed)


def cheapest_splits(counts: list[int], longest: list[int], call_steps: float) -> list[int]:
    """Return the first levels of the groups that take the least time together.

    Args:
        counts: pieces of each level, the level of the longest first.
        longest: steps of a level's longest piece.
    """
    best: list[tuple[float, list[int]]] = [(0.0, [])]  # time and groups of the first levels
    for end in range(1, len(counts) + 1):
        ways = []
        for first, (time, groups) in enumerate(best):
            joint = call_steps + longest[first] * sum(counts[first:end])
            ways.append((time + joint, [*groups, first]))
        best.append(min(ways))
    return best[-1][1]


def best_fit(lengths: np.ndarray, stateful: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Put pieces into rows as long as the longest, a step apart.

    A stateful piece begins a row; the others follow, the longest first, where least room is left.
    Returns the row of each piece, and its first step there.
    """
    row, begin = np.zeros((2, len(lengths)), np.int64)
    whole = int(lengths.max()) + 1  # room of an empty row; its first piece needs no reset before
    num_rows = 0
    rows_by_room: dict[int, list[int]] = defaultdict(list)
    waiting: dict[int, list[int]] = defaultdict(list)  # pieces by length
    for piece, length in enumerate(lengths.tolist()):
        if stateful[piece]:
            row[piece] = num_rows
            rows_by_room[whole - length - 1].append(num_rows)
            num_rows += 1
        else:
            waiting[length].append(piece)
    for length in sorted(waiting, reverse=True):
        pieces = waiting[length]
        while pieces:
            room = min((n for n, rows in rows_by_room.items() if n > length and rows), default=0)
            if not room:  # new rows, filled with these pieces
                room = whole
                count = -(-len(pieces) // (whole // (length + 1)))
                rows_by_room[whole] = list(range(num_rows, num_rows + count))
                num_rows += count
            rows = rows_by_room[room][: len(pieces)]
            del rows_by_room[room][: len(rows)]
            rows_by_room[room - length - 1] += rows
            row[pieces[: len(rows)]] = rows
            begin[pieces[: len(rows)]] = whole - room
            pieces = pieces[len(rows) :]
    return row, begin


def to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Copy integer arrays to a device as int64, in one transfer without waiting."""
    packed = torch.from_numpy(np.concatenate([array.ravel() for array in arrays], dtype=np.int64))
    if device.type == "cuda":
        packed = packed.pin_memory().to(device, non_blocking=True)
    parts = packed.split([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


def to_host(tensors: Sequence[Tensor]) -> list[np.ndarray]:
    """Read flags and float64 numbers as arrays; the host waits for a GPU once."""
    packed = torch.cat([tensor.flatten().double() for tensor in tensors]).cpu()
    parts = packed.split([tensor.numel() for tensor in tensors])
    return [
        part.to(tensor.dtype).view(tensor.shape).numpy()
        for part, tensor in zip(parts, tensors, strict=True)
    ]
