"""Plans of dense calls: sequences cut into pieces, which are grouped or packed.

Only dense `nn.LSTM` calls without per-step masks run at full speed. A sequence is therefore cut at
every episode start into pieces that begin from zero state. Pieces of similar length are padded
together, one dense call each; or, if a network can reset its state by a step in between, all lie
one after the other in the rows of a single call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

PACKING = 1.07  # time of a step in packed rows, for its share of copying and of resets


@dataclass(frozen=True)
class Plan:
    """The dense calls of N sequences of T steps; none: there is nothing to cut.

    A call pads pieces to the longest. Its table [4, pieces] has rows: the sequence that a piece
    was cut from, flat index t * N + n of its first cell, its length - 1, and 1 if it starts from
    the sequence's stored state, else 0.

    Packed pieces are one call of three tables: [T * N] place step * rows + row of each cell; places
    of the steps that reset; [2, rows] a sequence, and 1 if its stored state begins the row, else 0.
    """

    tables: list[Any]  # int64 arrays, or tensors where the sequences are
    lengths: list[int]  # steps of each call
    packed: bool = False


def plan_pieces(
    episode_start: np.ndarray,
    batches: Sequence[np.ndarray],
    call_steps: float = 0.0,
    resets_inside: bool = False,
) -> list[Plan]:
    """Cut batches of sequences at episode starts; group the pieces, or pack them.

    Groups are whole sequences, then lengths in (T/2, T), (T/4, T/2], ...: padding costs less than
    half of a group. Neighbours join where that costs less than a call.

    Args:
        episode_start: [T, S] bool.
        batches: columns of it, [N] each.
        call_steps: overhead of a call, in single-row steps.
        resets_inside: the network takes resets: pieces are packed where that costs less.
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

    # the pieces of each batch, by level
    plans = []
    for batch in batches:
        batch_counts = counts[batch]  # [N]
        ends = np.cumsum(batch_counts)
        if ends[-1] == len(batch):
            plans.append(Plan([], []))
            continue
        pieces = np.repeat(firsts[batch] - ends + batch_counts, batch_counts) + np.arange(ends[-1])
        order = np.argsort(level[pieces], kind="stable")
        pieces = pieces[order]
        column = np.repeat(np.arange(len(batch)), batch_counts)[order]
        first_cells = starts[pieces] * len(batch) + column
        table = np.stack([column, first_cells, lengths[pieces] - 1, stateful[pieces]])
        bounds = np.flatnonzero(np.diff(level[pieces], prepend=-2, append=99))  # between levels
        longest = np.maximum.reduceat(table[2], bounds[:-1]) + 1
        splits = cheapest_splits(np.diff(bounds).tolist(), longest.tolist(), call_steps)
        groups = np.split(table, bounds[splits[1:]], axis=1)
        plan = Plan(groups, longest[splits].tolist())
        if resets_inside:
            cells = [n * group.shape[1] for n, group in zip(plan.lengths, groups, strict=True)]
            most = int((sum(cells) + call_steps * (len(groups) - 1)) / PACKING)
            plan = pack_rows(table, num_steps * len(batch), most) or plan
        plans.append(plan)
    return plans


def cheapest_splits(counts: list[int], longest: list[int], call_steps: float) -> list[int]:
    """Return the first levels of the groups whose calls take the least time together.

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


def pack_rows(table: np.ndarray, num_cells: int, most: int) -> Plan | None:
    """Pack the pieces into rows as long as the longest; None: over `most` cells."""
    if num_cells > most:
        return None
    columns, first_cells, last, stateful = table
    lengths = last + 1
    num_steps, num_columns = int(lengths.max()), int(columns.max()) + 1
    row, begin, num_rows = best_fit(lengths.tolist(), stateful.tolist(), num_steps)
    if num_steps * num_rows > most:
        return None
    # every cell of a piece lies one row of cells behind the cell before it, here as there
    step = np.arange(num_cells) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    place = np.empty(num_cells, np.int64)
    cells = np.repeat(first_cells, lengths) + step * num_columns
    place[cells] = np.repeat(begin * num_rows + row, lengths) + step * num_rows
    first = np.zeros((2, num_rows), np.int64)
    first[:, row[stateful > 0]] = table[[0, 3]][:, stateful > 0]
    resets = ((begin - 1) * num_rows + row)[begin > 0]
    return Plan([place, resets, first], [num_steps], packed=True)


def best_fit(
    lengths: list[int], stateful: list[int], num_steps: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """Put pieces into rows of num_steps, a step apart.

    A stateful piece begins a row; the others follow, the longest first, where least is left.
    Returns the row of each, its first step there, and the number of rows.
    """
    row, begin = np.zeros((2, len(lengths)), np.int64)
    rows_with: dict[int, list[int]] = {}  # rows by steps left; an empty row has one for free
    waiting: dict[int, list[int]] = {}  # pieces by length
    num_rows = 0
    for piece, length in enumerate(lengths):
        if stateful[piece]:
            row[piece] = num_rows
            rows_with.setdefault(num_steps - length, []).append(num_rows)
            num_rows += 1
        else:
            waiting.setdefault(length, []).append(piece)
    for length in sorted(waiting, reverse=True):
        pieces = waiting[length]
        while pieces:
            left = min((n for n, rows in rows_with.items() if n > length and rows), default=0)
            if not left:  # new rows, filled with these
                left = num_steps + 1
                count = -(-len(pieces) // (left // (length + 1)))
                rows_with[left] = list(range(num_rows, num_rows + count))
                num_rows += count
            rows = rows_with[left][: len(pieces)]
            row[pieces[: len(rows)]], begin[pieces[: len(rows)]] = rows, num_steps + 1 - left
            rows_with[left] = rows_with[left][len(rows) :]
            rows_with.setdefault(left - length - 1, []).extend(rows)
            pieces = pieces[len(rows) :]
    return row, begin, num_rows


def plans_to_device(
    plans: list[Plan], device: torch.device, *others: np.ndarray
) -> tuple[list[Plan], list[Tensor]]:
    """Move plans, and other integer arrays, to a device by one copy."""
    tables = [table for plan in plans for table in plan.tables]
    moved = iter(to_device([*others, *tables], device))
    placed_others = list(islice(moved, len(others)))
    placed = [replace(plan, tables=list(islice(moved, len(plan.tables)))) for plan in plans]
    return placed, placed_others


def to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Move integer arrays to a device as int64; the host does not wait for it."""
    if not arrays:
        return []
    packed = torch.from_numpy(np.concatenate([array.ravel() for array in arrays], dtype=np.int64))
    if device.type == "cuda":
        packed = packed.pin_memory().to(device, non_blocking=True)
    parts = packed.split([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


def to_host(tensors: Sequence[Tensor]) -> list[np.ndarray]:
    """Read tensors as arrays; the host waits for a GPU once, for all of them."""
    if not tensors[0].is_cuda:
        return [tensor.numpy() for tensor in tensors]
    packed = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors])
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    parts = zip(packed.cpu().split(sizes), tensors, strict=True)
    return [part.clone().view(like.dtype).view(like.shape).numpy() for part, like in parts]
