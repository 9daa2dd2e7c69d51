"""Plans of dense calls for sequences that episode starts cut into pieces.

A recurrent network is fast on blocks of cells [steps, rows]. Pieces of similar length share a
block, one in each row, padded to the longest. If the network can reset its state between two
steps, all pieces may share one block instead, and a row holds several.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

PACKING = 1.07  # time of a step in packed rows relative to one in padded rows


@dataclass(frozen=True)
class Plan:
    """The dense calls of N sequences of T steps. No calls: nothing has to be cut.

    The blocks of all calls lie one after the other. The table has four parts:

    - for each cell t * N + n its place in the blocks, [T * N];
    - for each row the sequence of its first piece;
    - for each row 1 if that sequence's stored state begins it, else 0;
    - the places of the steps that reset the state.
    """

    calls: list[tuple[int, int]]  # steps and rows of each block
    table: Any  # int64 array, or a tensor on the device of the sequences
    packed: bool = False  # the network takes resets


def plan_pieces(
    episode_start: np.ndarray,  # [T, N] bool
    call_steps: float = 0.0,  # cost of a call, in steps of one row
    resets_inside: bool = False,  # the network can take resets: pack where that is faster
) -> Plan:
    """Cut sequences at episode starts; group the pieces by length, or pack them.

    A group's level is 0 for whole sequences, then 1 for lengths in (T/2, T), 2 for (T/4, T/2], ...:
    padding costs less than half of a group. Neighbours join where that saves time.
    """
    # cut the sequences, and sort the pieces by level
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

    # join levels to groups: a block for each group, a row for each piece
    counts = np.bincount(level)
    counts = counts[counts > 0]
    longest = np.maximum.reduceat(lengths, np.cumsum(counts) - counts)
    splits = cheapest_splits(counts.tolist(), longest.tolist(), call_steps)
    num_rows = np.add.reduceat(counts, splits)  # rows of each block
    block_steps = longest[splits]
    row, begin = np.arange(len(order)), np.zeros(len(order), np.int64)

    # pack the pieces into one block if that takes less time
    packed = False
    most_cells = (block_steps @ num_rows + call_steps * (len(splits) - 1)) / PACKING
    if resets_inside and begins.size <= most_cells:
        packed_row, packed_begin = best_fit(lengths, stateful)
        packed = bool(longest[0] * (packed_row.max() + 1) <= most_cells)
        if packed:
            row, begin = packed_row, packed_begin
            num_rows, block_steps = row.max(keepdims=True) + 1, longest[:1]

    # the place of each piece's first cell
    block = np.repeat(np.arange(len(num_rows)), num_rows)[row]
    stride = num_rows[block]  # places between two steps of a row
    sizes = block_steps * num_rows
    first_rows, first_cells = np.cumsum(num_rows) - num_rows, np.cumsum(sizes) - sizes
    first_places = first_cells[block] + begin * stride + row - first_rows[block]

    # the table
    step = np.arange(begins.size) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    cells = np.repeat(starts * num_columns + columns, lengths) + step * num_columns
    places = np.empty(begins.size, np.int64)
    places[cells] = np.repeat(first_places, lengths) + step * np.repeat(stride, lengths)
    rows = np.zeros((2, num_rows.sum()), np.int64)
    rows[:, row[begin == 0]] = np.stack([columns, stateful])[:, begin == 0]
    resets = (first_places - stride)[begin > 0]
    calls = list(zip(block_steps.tolist(), num_rows.tolist(), strict=True))
    return Plan(calls, np.concatenate([places, rows.ravel(), resets]), packed)


def cheapest_splits(counts: list[int], longest: list[int], call_steps: float) -> list[int]:
    """Return the first level of each group, so that all calls together are fastest.

    Args:
        counts: number of pieces of each level, the level of the longest first.
        longest: length of a level's longest piece.
    """
    best: list[tuple[float, list[int]]] = [
        (0.0, [])
    ]  # time and splits of the first 0, 1, ... levels
    for end in range(1, len(counts) + 1):
        ways = []
        for first, (time, splits) in enumerate(best):  # the last group is first .. end - 1
            last_call = call_steps + longest[first] * sum(counts[first:end])
            ways.append((time + last_call, [*splits, first]))
        best.append(min(ways))
    return best[-1][1]


def best_fit(lengths: np.ndarray, stateful: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Put pieces into rows of the longest piece's length, at least one step apart.

    A stateful piece begins a row. The others follow, the longest first, each in the row that has
    the least room for it. Returns the row of each piece, and its first step there.
    """
    row, begin = np.zeros((2, len(lengths)), np.int64)
    # room includes the step before a piece, at which the state is reset; an empty row needs none
    whole = int(lengths.max()) + 1
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
            if not room:  # open the rows that these pieces fill
                room = whole
                new_rows = math.ceil(len(pieces) / (whole // (length + 1)))
                rows_by_room[whole] = list(range(num_rows, num_rows + new_rows))
                num_rows += new_rows
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
