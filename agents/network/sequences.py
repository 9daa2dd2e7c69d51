"""LSTM over [T, B] with episode resets, in dense pieces.

Only dense `nn.LSTM` calls without per-step masks run at full speed. A sequence is therefore cut at
every episode start into pieces that begin from zero state. Pieces of similar length are padded
together and run as one dense call each; or, where a network can reset its state by a step of its
own, all are run one after the other in the rows of a single call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

# (obs [L,N,F], state [N,S,H]) -> (outputs, each [L,N,...], state after the last step [N,S,H]); it
# may take resets [L,N,1], too: 1 at a step that leaves the state zero
Network = Callable[..., tuple[tuple[Tensor, ...], Tensor]]
PACKING = 1.07  # time of a step in packed rows, for its share of copying and of resets


@dataclass(frozen=True)
class PieceGroup:
    """Pieces of similar length, padded to the longest; one dense call.

    Rows of the table: the sequence that a piece was cut from, flat index t * N + n of its first
    cell, its length - 1, and 1 if it starts from the sequence's stored state, else 0.
    """

    table: Any  # [4, pieces] int64: an array, or a tensor where the sequences are
    longest: int


@dataclass(frozen=True)
class PackedRows:
    """Pieces in rows, with a step that resets the state between two; one dense call."""

    place: Any  # [T * N] int64, of cell t * N + n in the rows: step * rows + row
    resets: Any  # [resets] int64, places of the steps that reset
    first: Any  # [2, rows] int64: a sequence, and 1 if its stored state begins the row, else 0
    num_steps: int


Plan = list[PieceGroup] | PackedRows  # of some sequences; empty: there is nothing to cut


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
        call_steps: steps of one row that take as long as a call does, however few it has.
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
        if resets_inside:
            steps = sum(size * group.shape[1] for size, group in zip(sizes, groups, strict=True))
            most = int((steps + call_steps * (len(sizes) - 1)) / PACKING)
            if (packed := pack_rows(table, num_steps * len(batch), most)) is not None:
                plans.append(packed)
                continue
        plans.append([PieceGroup(*each) for each in zip(groups, sizes, strict=True)])
    return plans


def pack_rows(table: np.ndarray, num_cells: int, most: int) -> PackedRows | None:
    """Pack pieces into rows as long as the longest; None: over `most` cells.

    Args:
        table: as in `PieceGroup`, of all pieces.
        num_cells: of all sequences.
    """
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
    return PackedRows(place, resets, first, num_steps)


def best_fit(
    lengths: list[int], stateful: list[int], num_steps: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """Put pieces into rows of num_steps, a step apart.

    A stateful piece begins a row; the others follow, the longest first, where least is left.
    Returns the row of each, its first step there, and the number of rows.
    """
    row, begin = np.zeros((2, len(lengths)), np.int64)
    rows_with: dict[int, list[int]] = {}  # this many steps left; an empty row has one for free
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
            if not left:  # new rows, each for as many of these as it holds
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


def _tables(plan: Plan) -> list[Any]:
    """Return the index tables of a plan."""
    if isinstance(plan, PackedRows):
        return [plan.place, plan.resets, plan.first]
    return [group.table for group in plan]


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
    moved = to_device([*others, *(table for plan in plans for table in _tables(plan))], device)
    tables = iter(moved[len(others) :])
    placed: list[Plan] = []
    for plan in plans:
        if isinstance(plan, PackedRows):
            placed.append(PackedRows(next(tables), next(tables), next(tables), plan.num_steps))
        else:
            placed.append([PieceGroup(next(tables), group.longest) for group in plan])
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
        batch = np.arange(num_columns)
        plans = plan_pieces(episode_start.cpu().numpy(), [batch])
        (plan,), _ = plans_to_device(plans, obs.device)
    if isinstance(plan, PackedRows):
        return _run_packed(network, obs, state, plan)
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


def _run_packed(
    network: Network, obs: Tensor, state: Tensor, plan: PackedRows
) -> tuple[Tensor, ...]:
    """`run_sequence` in one call that resets the state inside."""
    columns, stateful = plan.first
    shape = (plan.num_steps, len(columns))
    # a step that resets, or pads, sees zeros: large numbers would open the gates it shuts
    rows = obs.new_zeros(shape[0] * shape[1], obs.shape[-1])
    rows = rows.index_copy(0, plan.place, obs.flatten(0, 1)).unflatten(0, shape)
    resets = obs.new_zeros(shape[0] * shape[1], 1).index_fill_(0, plan.resets, 1.0)
    before = state.index_select(0, columns) * stateful[:, None, None]
    outputs, _ = network(rows, before, resets.unflatten(0, shape))
    size = obs.shape[:2]
    return tuple(each.flatten(0, 1)[plan.place].unflatten(0, size) for each in outputs)


@torch.no_grad()
def state_after(
    network: Network,
    obs: Tensor,
    state: Tensor,
    episode_start: Tensor,
    starts: np.ndarray,
    resets_inside: bool = False,
) -> Tensor:
    """State [N, S, H] after the [T, N] steps that `run_sequence` would take.

    One dense call from each last episode start of a column to the next; a single one if the network
    takes resets, for the step before a start may reset: its own output is not wanted. `starts` is
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
