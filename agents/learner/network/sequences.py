"""Run recurrent networks over [T, N] steps with episode resets, in dense blocks.

Episode starts divide sequences into pieces. A recurrent network is fast on dense blocks of
[steps, rows], so pieces of similar length share a block: each row contains one piece, padded to the
length of the longest. If the network can reset its state between two steps, a single block can
contain all pieces instead, with several pieces in each row.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

# Calling one layer of a core has a fixed overhead. In that time, a core with the following number
# of weights computes one step of one row. The overhead is 0.8 ms on a CPU (measured) and about 1 ms
# on a GPU: 75 operators, and the steps of a call follow one another. At 50 TFLOP/s, a GPU computes
# 6 operations for each of the weights in this time (an estimate that no GPU has confirmed).
CALL_WEIGHTS = {"cpu": 10_000_000, "cuda": 8_000_000_000}
PACKING = 1.07  # time per step in packed rows (with resets), relative to padded rows


class NetworkResult(NamedTuple):
    """Results of a recurrent network for L steps of N sequences."""

    outputs: tuple[Tensor, ...]  # each [L, N, ...]
    state: Any  # [N, S, H] after the last step


# A network takes inputs [L, N, E] and the state [N, S, H] that precedes the first step. For packed
# plans, it also takes resets [L, N, 1], which are 1 at a step after which the state must be zero.
RecurrentNetwork = Callable[..., NetworkResult]


@dataclass(frozen=True)
class Pieces:
    """The P pieces into which episode starts cut N sequences of T steps.

    The pieces are sorted by sequence, those of a sequence by time. The length of a piece determines
    its level: 0 for whole sequences, 1 for lengths in (T/2, T), 2 for (T/4, T/2], and so on.
    """

    counts: np.ndarray  # [N] number of pieces of each sequence
    starts: np.ndarray  # [P] first step of each piece, counted from the start of its sequence
    lengths: np.ndarray  # [P]
    levels: np.ndarray  # [P]
    stateful: np.ndarray  # [P] bool: the piece begins with the initial state of its sequence

    def of(self, sequences: np.ndarray) -> "Pieces":
        """Return the pieces of some sequences, in the order of these sequences."""
        counts = self.counts[sequences]
        last = np.cumsum(self.counts)[sequences]  # index after the last piece of each sequence
        index = np.arange(counts.sum()) + np.repeat(last - np.cumsum(counts), counts)
        fields = (self.starts, self.lengths, self.levels, self.stateful)
        return Pieces(counts, *(field[index] for field in fields))


def cut_sequences(episode_start: np.ndarray) -> Pieces:
    """Cut sequences at their episode starts [T, N]."""
    num_steps = len(episode_start)
    begins = episode_start.T.copy()  # [N, T]
    begins[:, 0] = True
    firsts = np.flatnonzero(begins)  # index n * T + t of each piece's first step
    lengths = np.diff(np.append(firsts, begins.size))
    columns, starts = np.divmod(firsts, num_steps)
    return Pieces(
        counts=begins.sum(1),
        starts=starts,
        lengths=lengths,
        levels=np.floor(np.log2(num_steps / lengths)).astype(np.int8) + (lengths < num_steps),
        stateful=(starts == 0) & ~episode_start[0, columns],
    )


@dataclass(frozen=True)
class Plan:
    """Dense calls for N sequences of T steps; `calls` is empty if no episode starts inside them.

    A cell is one step of one sequence. The blocks of all calls are stored one after the other. All
    tensors are int64, on the device of the sequences.
    """

    calls: list[tuple[int, int]]  # steps and rows of each block
    packed: bool  # True: rows hold several pieces, so the network must accept resets
    bases: Tensor  # [P] where step 0 of a piece's sequence would be in the stored blocks
    strides: Tensor  # [P] distance between the places of two steps of a piece
    columns: Tensor  # for each row, the index of the sequence to which its first piece belongs
    stateful: Tensor  # for each row, 1 if it begins with that sequence's initial state, else 0
    reset_places: Tensor  # indices, in the stored blocks, of the steps that reset the state

    def places(self, episode_start: Tensor) -> Tensor:
        """Return, for each cell t * N + n, its index in the stored blocks, [T * N].

        Args:
            episode_start: [T, N] bool, from which the plan was made.
        """
        begins = episode_start.T.clone()  # [N, T]
        begins[:, 0] = True
        pieces = begins.flatten().cumsum(0) - 1  # [N * T] index of the piece of each cell
        bases, strides = (
            table.index_select(0, pieces).view_as(begins) for table in (self.bases, self.strides)
        )
        steps = torch.arange(begins.shape[1], device=begins.device)
        return torch.addcmul(bases, steps, strides).T.flatten()


def plan_pieces(
    pieces: Pieces,
    device: torch.device,  # device of the sequences
    call_steps: float = 0.0,  # overhead of a network call, measured in steps of one row
    resets_inside: bool = False,  # True: the network accepts resets, so pack pieces if faster
) -> Plan:
    """Group pieces by length, or pack them.

    All pieces of a level belong to the same group, so less than half of a level's cells are
    padding. Neighbouring levels are joined into one group if that saves time.
    """
    num_columns = len(pieces.counts)
    if len(pieces.lengths) == num_columns:
        return Plan([], False, *[torch.empty(0)] * 5)
    order = np.argsort(pieces.levels, kind="stable")
    lengths = pieces.lengths[order]
    stateful = pieces.stateful[order]
    columns = np.repeat(np.arange(num_columns), pieces.counts)[order]

    # join levels into groups; each group has a block with one row per piece
    counts = np.bincount(pieces.levels)
    counts = counts[counts > 0]  # number of pieces in each level that has pieces
    longest = np.maximum.reduceat(lengths, np.cumsum(counts) - counts)  # longest piece per level
    splits = cheapest_splits(counts.tolist(), longest.tolist(), call_steps)
    num_rows = np.add.reduceat(counts, splits)  # rows of each block
    block_steps = longest[splits]
    row = np.arange(len(order))  # row of each piece
    begin = np.zeros_like(row)  # position in this row of the piece's first step

    # Pack the pieces into one block if that takes less time. This is so if the block has at most
    # `most_cells` cells.
    packed = False
    most_cells = (block_steps @ num_rows + call_steps * (len(splits) - 1)) / PACKING
    if resets_inside and lengths.sum() <= most_cells:
        packed_row, packed_begin = best_fit(lengths, stateful)
        packed = bool(longest[0] * (packed_row.max() + 1) <= most_cells)
        if packed:
            row = packed_row
            begin = packed_begin
            num_rows = row.max(keepdims=True) + 1
            block_steps = longest[:1]

    # for each piece, find the index of its first cell in the stored blocks
    strides = np.repeat(num_rows, num_rows)[row]  # index distance between two steps of a row
    later_cells = (block_steps - 1) * num_rows  # number of cells of each block after its first step
    offsets = np.cumsum(later_cells) - later_cells
    first_places = np.repeat(offsets, num_rows)[row] + row + begin * strides

    # find the initial state of each row, and the reset step before each later piece of a row
    is_first = begin == 0
    row_columns = np.zeros(num_rows.sum(), np.int64)
    row_columns[row[is_first]] = columns[is_first]
    row_stateful = np.zeros_like(row_columns)
    row_stateful[row[is_first]] = stateful[is_first]
    reset_places = (first_places - strides)[~is_first]

    calls = list(zip(block_steps.tolist(), num_rows.tolist(), strict=True))
    by_piece = np.empty((2, len(order)), np.int64)  # in the order of `pieces`
    by_piece[:, order] = first_places - pieces.starts[order] * strides, strides
    tables = [*by_piece, row_columns, row_stateful, reset_places]
    return Plan(calls, packed, *to_device_together(tables, device))


def overhead_steps(cores: Sequence[nn.Module], num_layers: int, device: torch.device) -> float:
    """Return the overhead of calling all cores once, measured in steps of one row."""
    num_weights = sum(p.numel() for core in cores for p in core.parameters())
    return CALL_WEIGHTS[device.type] * num_layers * len(cores) / max(num_weights, 1)


def cheapest_splits(counts: list[int], longest: list[int], call_steps: float) -> list[int]:
    """Group neighbouring levels to minimise time; return each group's first level.

    Args:
        counts: number of pieces in each level; the first level has the longest pieces.
        longest: length of the longest piece in each level.
        call_steps: fixed overhead of a call, measured in steps of one row.
    """
    # entry n: the shortest time for the first n levels, and the first level of each group
    best: list[tuple[float, list[int]]] = [(0.0, [])]
    for end in range(1, len(counts) + 1):
        best.append(
            min(  # the last group has the levels first .. end - 1
                (time + (call_steps + longest[first] * sum(counts[first:end])), [*splits, first])
                for first, (time, splits) in enumerate(best)
            )
        )
    return best[-1][1]


def best_fit(lengths: np.ndarray, stateful: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pack pieces into rows as long as the longest piece, with gaps between pieces.

    Every stateful piece begins a row. Then the other pieces are placed, the longest first. Each
    piece goes into the row with the least free room among those with enough room for the piece.
    Returns the row of each piece and the position of the piece's first step in this row.
    """
    row = np.zeros_like(lengths)
    begin = np.zeros_like(lengths)
    num_rows = int(stateful.sum())
    row[stateful] = np.arange(num_rows)
    # A piece needs room for its steps and, as a gap, for 1 reset step before them. Only the first
    # piece of a row needs no reset step, so the room of an empty row is set 1 step larger.
    empty_room = int(lengths.max()) + 1
    rows_by_room: dict[int, list[int]] = defaultdict(list)
    for number, length in enumerate(lengths[stateful].tolist()):
        rows_by_room[empty_room - length - 1].append(number)
    for length in np.unique(lengths[~stateful])[::-1].tolist():
        pieces = np.flatnonzero(~stateful & (lengths == length))
        while len(pieces):
            room = min((n for n, rows in rows_by_room.items() if n > length and rows), default=0)
            if not room:  # add as many rows as these pieces need
                room = empty_room
                new_rows = math.ceil(len(pieces) / (empty_room // (length + 1)))
                rows_by_room[empty_room] = list(range(num_rows, num_rows + new_rows))
                num_rows += new_rows
            rows = rows_by_room[room][: len(pieces)]
            del rows_by_room[room][: len(rows)]
            rows_by_room[room - length - 1] += rows
            placed = pieces[: len(rows)]
            row[placed] = rows
            begin[placed] = empty_room - room
            pieces = pieces[len(rows) :]
    return row, begin


def run_sequence(
    network: RecurrentNetwork,
    inputs: Tensor,  # [T, N, E]
    state: Tensor,  # [N, S, H] before the first step
    episode_start: Tensor,  # [T, N] bool: obs is the first observation of its episode
    plan: Plan | None = None,  # from `plan_pieces`; None: plan here, which waits for the GPU
) -> tuple[Tensor, ...]:
    """Run a recurrent network over [T, N] steps; reset it at every episode start.

    Returns the network's outputs, each [T, N, ...]. No gradient flows across an episode start.
    """
    if plan is None:
        plan = plan_pieces(cut_sequences(episode_start.cpu().numpy()), inputs.device)
    if not plan.calls:  # one dense call processes the uncut sequences
        return network(inputs, state * ~episode_start[0][:, None, None]).outputs

    # Copy all cells into the blocks. The inputs of padding and of reset steps remain zero, because
    # large inputs could open gates that a reset must shut.
    num_rows = [rows for _, rows in plan.calls]
    block_sizes = [steps * rows for steps, rows in plan.calls]
    places = plan.places(episode_start)
    cells = inputs.new_zeros(sum(block_sizes), inputs.shape[-1])
    cells.index_copy_(0, places, inputs.flatten(0, 1))
    before = state.index_select(0, plan.columns) * plan.stateful[:, None, None]
    resets = []
    if plan.packed:
        flags = inputs.new_zeros(len(cells), 1).index_fill_(0, plan.reset_places, 1.0)
        resets = [flags.unflatten(0, plan.calls[0])]

    # call the network once per block, then restore the order of the cells
    blocks = zip(plan.calls, cells.split(block_sizes), before.split(num_rows), strict=True)
    results = [
        network(block.unflatten(0, shape), block_state, *resets).outputs
        for shape, block, block_state in blocks
    ]
    outputs = []
    for parts in zip(*results, strict=True):
        flat = torch.cat([part.flatten(0, 1) for part in parts])
        outputs.append(flat.index_select(0, places).unflatten(0, episode_start.shape))
    return tuple(outputs)


@torch.no_grad()
def state_after(
    network: RecurrentNetwork,
    inputs: Tensor,
    state: Tensor,
    episode_start: Tensor,
    resets_inside: bool,
) -> Tensor:
    """Return the state [N, S, H] after the last of the [T, N] steps.

    The arguments are as in `run_sequence`. With `resets_inside`, one call processes all steps.
    """
    if resets_inside:
        # Turn the step before each episode start into a reset step, so that a single call processes
        # the whole sequences. The outputs of these steps are lost, but only the last state is used.
        resets = torch.zeros_like(inputs[..., :1])
        resets[:-1, :, 0] = episode_start[1:].to(inputs.dtype)
        inputs = inputs.masked_fill(resets > 0.5, 0.0)  # zero inputs, as in `run_sequence`
        return network(inputs, state * ~episode_start[0][:, None, None], resets).state
    for step, starts in zip(inputs, episode_start, strict=True):
        state = network(step[None], state * ~starts[:, None, None]).state
    return state


def to_device_together(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Copy arrays [n] of one type to a device in one transfer."""
    sizes = [len(array) for array in arrays]
    return list(to_device(np.concatenate(arrays), device).split(sizes))


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy an array to a device; if that is a GPU, do not wait for the copy."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
