"""Distribute the batches of a DataLoader over ranks, and time a DataLoader."""

import copy
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from rl_dist.errors import UserError
from rl_dist.process_group.world import World

CHECK_S = 2.0  # duration of the measurement in `check_loader`


def check_shares(loader: DataLoader, world: World, *, training: bool) -> None:
    """Raise UserError if the batches of a loader cannot be divided among the ranks.

    The sampler must be torch's SequentialSampler, or torch's RandomSampler without replacement. In
    evaluation, it must draw every sample exactly once. In training, the batch size must be
    divisible by the number of ranks and must not exceed the number of samples. Every rank needs at
    least one sample.
    """
    size = loader.batch_size
    sampler: Any = loader.sampler
    sampler_type = type(sampler)
    if (
        size is None
        or sampler_type not in (SequentialSampler, RandomSampler)
        or getattr(sampler, "replacement", False)
        or (not training and len(sampler) != len(sampler.data_source))
        or type(loader).__iter__ is not DataLoader.__iter__
    ):
        raise UserError(
            f"a {sampler_type.__name__} with these options (in an evaluation, num_samples too), a "
            "batch_sampler or your own __iter__ cannot be divided among ranks: use "
            "DataLoader(dataset, batch_size=N, shuffle=True or False)"
        )
    num_samples = len(sampler)
    if num_samples < world.size:
        raise UserError(f"{num_samples} samples are too few for {world.size} ranks")
    if training and (size % world.size or size > num_samples):
        nearest = max(1, min(size, num_samples) // world.size) * world.size
        raise UserError(
            f"batch_size {size} (over all ranks) must be divisible by {world.size} ranks and must "
            f"not exceed the {num_samples} samples: use {nearest}"
        )


def shared_batches(
    loader: DataLoader, world: World, *, training: bool, seed: int = 0, epoch: int = 0
) -> Iterator[tuple[int, object, object]]:
    """Yield (number of samples, inputs, targets) of this rank's share of each batch.

    The batch size is a total over ranks. In training, batch k of an epoch consists of the same
    samples for any number of ranks, and an incomplete last batch is omitted. In evaluation, exactly
    one rank processes each sample. All ranks have the same number of batches, because the ranks of
    a sharded module communicate in each batch. The tensors are on the rank's device.

    Args:
        seed: seed for the order of the samples and for the workers.
        epoch: number of the epoch, which also changes a random order.
    """
    rank = world.rank
    ranks = world.size
    size: Any = loader.batch_size
    sampler: Any = copy.copy(loader.sampler)
    sampler.generator = torch.Generator().manual_seed(seed + epoch)
    num_samples = len(sampler)
    if training:
        order = list(sampler)
        starts = range(rank, num_samples - size + 1 + rank, size)
        batches = [order[first : first - rank + size : ranks] for first in starts]
    else:
        largest_share = -(-num_samples // ranks)
        num_batches = min(-(-largest_share // max(1, size // ranks)), num_samples // ranks)
        batches = _cut(_cut(range(num_samples), ranks)[rank], num_batches)
    # NCCL's threads do not survive a fork: docs.pytorch.org/docs/stable/distributed.html
    start_method = "forkserver" if loader.num_workers and world.backend == "nccl" else None
    rank_loader: DataLoader = DataLoader(
        loader.dataset,
        batch_sampler=batches,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        prefetch_factor=loader.prefetch_factor,
        pin_memory=world.device.type == "cuda",
        multiprocessing_context=loader.multiprocessing_context or start_method,
        # use a separate generator, so that the state of torch's global generator does not change
        generator=torch.Generator().manual_seed(epoch_seed(seed, epoch, rank)),
    )
    for indices, batch in zip(batches, rank_loader, strict=True):
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise UserError(
                f"a batch must be (inputs, targets), but the dataset or its collate_fn gives a "
                f"{type(batch).__name__} of {len(batch)}: let the dataset return a pair, whose "
                "parts may be tensors, tuples or dicts"
            )
        inputs, targets = to_device(batch, world.device)
        yield len(indices), inputs, targets
        world.heartbeat()


def _cut(numbers: Sequence[int], parts: int) -> list[Any]:
    """Split a sequence into consecutive parts of equal length, up to a difference of 1."""
    bounds = [len(numbers) * part // parts for part in range(parts + 1)]
    return [numbers[first:last] for first, last in itertools.pairwise(bounds)]


def epoch_seed(seed: int, epoch: int, rank: int) -> int:
    """Compute the seed of one rank in one epoch."""
    return int(np.random.SeedSequence([seed, epoch, rank]).generate_state(1, np.uint64)[0]) >> 1


def to_device(batch: Any, device: torch.device | str) -> Any:
    """Move all tensors of a batch, which may be nested, to a device."""

    def can_move(value: object) -> bool:
        return hasattr(value, "to")  # a PackedSequence is moved as a whole

    return tree_map(
        lambda value: value.to(device, non_blocking=True) if can_move(value) else value,
        batch,
        is_leaf=can_move,
    )


def check_loader(
    loader: DataLoader[Any], step: Callable[[Any], object], device: torch.device | str = "cpu"
) -> dict[str, float]:
    """Run training steps for 2 seconds; time the steps and the waits for the next batch.

        >>> check_loader(DataLoader(dataset, num_workers=2), step)
        {'wait_s': 0.0001, 'step_s': 0.02}

    If more than 5 % of the time is spent waiting, increase num_workers or make __getitem__ faster.
    The first batch is not measured, because its time includes the start of the workers.

    Args:
        step: trains a copy of the model on one batch (forward, backward, optimizer step). The
            tensors of the batch are on `device`.
    """
    # two times for each batch: when it was loaded, and when its step ended
    moments: list[float] = []
    for batch in loader:
        moments.append(time.perf_counter())
        step(to_device(batch, device))
        if str(device).startswith("cuda"):
            torch.cuda.synchronize(device)
        moments.append(time.perf_counter())
        if moments[-1] - moments[1] > CHECK_S:
            break
    # the time from one moment to the next: in turn, a wait for a batch and a step
    spans = [end - start for start, end in itertools.pairwise(moments[1:])]
    return {"wait_s": fmean(spans[::2]), "step_s": fmean(spans[1::2])}
