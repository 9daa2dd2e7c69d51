"""A DataLoader shared out over ranks: the same batches whatever their number.

The batch size of the loader is the total over ranks. While training, batch k of an epoch holds the same samples on any
number of ranks; while evaluating, every sample is seen exactly once, by one rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from rl_dist.errors import UserError
from rl_dist.process_group.world import World


class SharedLoader(DataLoader):
    """One rank's share of a DataLoader; made by `Strategy.loader`."""

    seed: int
    rank: int
    global_batch_size: int
    training: bool
    lengths: list[int]  # samples of each batch

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch: its number decides the order and the seeds of workers."""
        if isinstance(self.sampler, DistributedSampler):
            self.sampler.set_epoch(epoch)
        assert self.generator is not None
        self.generator.manual_seed(epoch_seed(self.seed, epoch, self.rank))


def epoch_seed(seed: int, epoch: int, rank: int) -> int:
    """A seed for what a rank draws in an epoch."""
    return int(np.random.SeedSequence([seed, epoch, rank]).generate_state(1, np.uint64)[0]) >> 1


def shared_loader(loader: DataLoader, world: World, *, training: bool, seed: int = 0) -> SharedLoader:
    """This rank's share of `loader`; see `Strategy.loader`.

    Raises:
        UserError: it has no length, draws samples in a way of its own, or cannot be shared out.
    """
    if not isinstance(loader, DataLoader):
        raise UserError(f"batches come from a torch DataLoader, got a {type(loader).__name__}: make one of it")
    shuffles = isinstance(loader.sampler, RandomSampler)
    _refuse_foreign(loader, shuffles)
    batch_size, num_samples = int(loader.batch_size or 0), len(loader.dataset)  # type: ignore[arg-type]
    options: dict[str, Any]
    if training:
        _check_training(batch_size, num_samples, world.size)
        sampler: DistributedSampler = DistributedSampler(
            loader.dataset, world.size, world.rank, shuffle=shuffles, seed=seed, drop_last=True
        )
        options = {"batch_size": batch_size // world.size, "sampler": sampler, "drop_last": True}
    else:
        options = {"batch_sampler": evaluation_batches(num_samples, batch_size, world.rank, world.size)}
    workers = loader.num_workers > 0
    shared: SharedLoader = SharedLoader(
        loader.dataset,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory or world.device.type == "cuda",
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        prefetch_factor=loader.prefetch_factor if workers else None,
        persistent_workers=workers,
        generator=torch.Generator(),  # its own: loading draws nothing from the generators of the module
        **options,
    )
    shared.seed, shared.rank, shared.global_batch_size, shared.training = seed, world.rank, batch_size, training
    shared.lengths = (
        [batch_size // world.size] * len(shared) if training else [len(batch) for batch in options["batch_sampler"]]
    )
    shared.set_epoch(0)
    return shared


def evaluation_batches(num_samples: int, batch_size: int, rank: int, num_ranks: int) -> list[range]:
    """A rank's batches of sample numbers: over all ranks each sample once.

    Every rank gets the same number of batches, none of them empty: a module that communicates in its forward pass
    would wait for ever otherwise. Shares differ by one sample at most, and so do the sizes of batches.

    Raises:
        UserError: fewer samples than ranks.
    """
    if not num_samples:
        raise UserError("there is no sample to evaluate: the dataset is empty")
    if num_samples < num_ranks:
        raise UserError(f"{num_samples} samples cannot be evaluated on {num_ranks} ranks: use fewer ranks")
    largest = math.ceil(num_samples / num_ranks)
    count = min(math.ceil(largest / max(1, batch_size // num_ranks)), num_samples // num_ranks)
    share = _cut(range(num_samples), num_ranks)[rank]
    return _cut(share, count)


def _cut(numbers: range, parts: int) -> list[range]:
    """Consecutive parts of nearly the same length."""
    bounds = [len(numbers) * part // parts for part in range(parts + 1)]
    return [numbers[first:last] for first, last in zip(bounds[:-1], bounds[1:], strict=True)]


def _refuse_foreign(loader: DataLoader, shuffles: bool) -> None:
    """Refuse loaders whose batches cannot be told before they are drawn."""
    if isinstance(loader.dataset, IterableDataset) or not hasattr(loader.dataset, "__len__"):
        raise UserError("a dataset without a length cannot be shared out over ranks: give it __len__ and __getitem__")
    if loader.batch_size is None:
        raise UserError("a loader with a batch_sampler of its own cannot be shared out: give batch_size and shuffle")
    replaced = isinstance(loader.sampler, RandomSampler) and (
        loader.sampler.replacement or loader.sampler.num_samples != len(loader.dataset)
    )
    if replaced or not (shuffles or type(loader.sampler) is SequentialSampler):
        name = type(loader.sampler).__name__
        raise UserError(f"a loader with sampler {name} of its own cannot be shared out: leave it out, or use shuffle")


def _check_training(batch_size: int, num_samples: int, num_ranks: int) -> None:
    if batch_size % num_ranks:
        near = sorted({batch_size // num_ranks * num_ranks, -(-batch_size // num_ranks) * num_ranks} - {0})
        raise UserError(
            f"batch_size {batch_size} is the total over {num_ranks} ranks, which does not divide it: "
            f"try {' or '.join(map(str, near))}"
        )
    if num_samples < batch_size:
        raise UserError(f"batch_size {batch_size} is more than the {num_samples} samples to train on: make it smaller")


def pair_of(batch: Any) -> Any:
    """A batch, if it is a pair of inputs and targets.

    Raises:
        UserError: it is something else, such as one dict of both.
    """
    if isinstance(batch, list | tuple) and len(batch) == 2:
        return batch
    got = f"a {type(batch).__name__}"
    if isinstance(batch, Mapping):
        got += f" of {', '.join(map(str, batch))}"
    elif isinstance(batch, list | tuple):
        got += f" of {len(batch)}"
    raise UserError(
        f"a batch must be a pair (inputs, targets), got {got}: "
        "give the DataLoader a collate_fn that makes one; inputs and targets may be dicts or tuples"
    )


def to_device(batch: Any, device: torch.device) -> Any:
    """A batch with all its tensors on a device, whatever they are nested in."""
    if isinstance(batch, torch.Tensor | PackedSequence):  # of which a part stays on the CPU
        return batch.to(device, non_blocking=True)  # type: ignore[arg-type]
    if isinstance(batch, Mapping):
        return {name: to_device(value, device) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device) for value in batch)
    return batch
