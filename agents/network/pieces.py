"""Plan dense network calls for sequences that contain episode starts.

Episode starts cut sequences into pieces. A recurrent network is fast on dense blocks [steps, rows],
so pieces of similar length share a block: each row holds one piece, padded to the longest piece. If
the network can reset its state between two steps, one block may hold all pieces instead, with
several pieces in a row.
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

PACKING = 1.07  # time per step in packed rows, relative to padded rows


@dataclass(frozen=True)
class Plan:
    """Dense calls for N sequences of T steps; `calls` is empty if no cut is needed.

    A cell is one step of one sequence. The blocks of all calls are stored one after the other. The
    table has four parts:

    - for each cell t * N + n, its index in the stored blocks, [T * N];
    - for each row, the sequence of its first piece;
    - for each row, 1 if it begins with the stored state of that sequence, 0 if with zeros;
    - the indices of the steps that reset the state.
    """

    calls: list[tuple[int, int]]  # steps and rows of each block
    table: Any  # int64 array, or a tensor on the device of the sequences
    packed: bool = False  # True: rows hold several pieces, and the network needs resets


def plan_pieces(
    episode_start: np.ndarray,  # [T, N] bool
    call_steps: float = 0.0,  # overhead of a call, in single-row steps
    resets_inside: bool = False,  # the network accepts resets: pack pieces if that is faster
) -> Plan:
    """Cut sequences at episode starts; group the pieces by length, or pack them.

    Pieces have levels: 0 for whole sequences, 1 for lengths in (T/2, T), 2 for (T/4, T/2], and so
    on, so that less than half of a level's cells are padding. Neighbouring levels form one group if
    that saves time.
    """
    # cut the sequences, and sort the pieces by level
    num_steps, num_columns = episode_start.shape
    begins = episode_start.copy()
    begins[0] = True
    firsts = np.flatnonzero(begins.T)  # index n * T + t of each piece's first cell
    if len(firsts) == num_columns:
        return Plan([], np.zeros(0, np.int64))
    lengths = np.diff(np.append(firsts, begins.size))
    level = np.floor(np.log2(num_steps / lengths)).astype(np.int8) + (lengths < num_steps)
    order = np.argsort(level, kind="stable")
    lengths = lengths[order]
    columns, starts = np.divmod(firsts[order], num_steps)
    stateful = (starts == 0) & ~episode_start[0, columns]

    # join levels into groups; each group has a block with one row per piece
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

    # index of each piece's first cell in the stored blocks
    block = np.repeat(np.arange(len(num_rows)), num_rows)[row]
    stride = num_rows[block]  # index distance between successive steps of a row
    sizes = block_steps * num_rows
    first_rows, first_cells = np.cumsum(num_rows) - num_rows, np.cumsum(sizes) - sizes
    first_places = first_cells[block] + begin * stride + row - first_rows[block]

    # build the table
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
    """Group neighbouring levels for the least total time; return the first levels.

    Args:
        counts: number of pieces of each level, from the longest level to the shortest.
        longest: length of the longest piece of each level.
        call_steps: overhead of a call, in single-row steps.
    """
    best: list[tuple[float, list[int]]] = [
        (0.0, [])
    ]  # for the first 0, 1, ... levels: least time, and its splits
    for end in range(1, len(counts) + 1):
        ways = []
        for first, (time, splits) in enumerate(best):  # last group: levels first .. end - 1
            last_call = call_steps + longest[first] * sum(counts[first:end])
            ways.append((time + last_call, [*splits, first]))
        best.append(min(ways))
    return best[-1][1]


def best_fit(lengths: np.ndarray, stateful: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pack pieces into rows as long as the longest piece, at least one step apart.

    Every stateful piece begins a row. The other pieces follow in order of decreasing length, each
    in the row with the least sufficient room. Returns the row and the first step of each piece.
    """
    row, begin = np.zeros((2, len(lengths)), np.int64)
    # Room includes the reset step before a piece. An empty row needs no reset: it has 1 step more.
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
            if not room:  # add as many rows as these pieces need
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
    """Copy integer arrays to a device as int64, in one asynchronous transfer."""
    packed = torch.from_numpy(np.concatenate([array.ravel() for array in arrays], dtype=np.int64))
    if device.type == "cuda":
        packed = packed.pin_memory().to(device, non_blocking=True)
    parts = packed.split([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


def to_host(tensors: Sequence[Tensor]) -> list[np.ndarray]:
    """Copy bool and float64 tensors to host arrays; wait for the device only once."""
    packed = torch.cat([tensor.flatten().double() for tensor in tensors]).cpu()
    parts = packed.split([tensor.numel() for tensor in tensors])
    return [
        part.to(tensor.dtype).view(tensor.shape).numpy()
        for part, tensor in zip(parts, tensors, strict=True)
    ]
