"""A DataLoader shared out over ranks: the same batches whatever their number.

The batch size of the loader is the total over ranks. While training, batch k of an epoch holds the
same samples on any number of ranks; while evaluating, one rank sees each sample exactly once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from rl_dist.errors import UserError, one_line
from rl_dist.process_group.world import World


class SharedLoader(DataLoader):
    """One rank's share of a DataLoader; made by `Strategy.loader`."""

    seed: int
    rank: int
    global_batch_size: int
    training: bool
    lengths: list[int]  # samples of each batch

    def __iter__(self) -> Any:
        """Begin the batches of an epoch."""
        try:
            return super().__iter__()
        except Exception as error:
            start = getattr(self.multiprocessing_context, "_name", "fork")
            if start == "fork" or isinstance(error, OSError | RuntimeError):
                raise  # else it could not be pickled, which raises errors of many kinds
            raise UserError(
                f"num_workers {self.num_workers}: workers start anew beside NCCL, and the dataset, "
                f"collate_fn or worker_init_fn cannot be sent to them ({one_line(error)}): define "
                "functions and classes in a module, or use num_workers 0"
            ) from error

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, whose number decides the order and the seeds of workers."""
        if isinstance(self.sampler, DistributedSampler):
            self.sampler.set_epoch(epoch)
        assert self.generator is not None
        self.generator.manual_seed(epoch_seed(self.seed, epoch, self.rank))


def epoch_seed(seed: int, epoch: int, rank: int) -> int:
    """Return a seed for what a rank draws in an epoch."""
    return int(np.random.SeedSequence([seed, epoch, rank]).generate_state(1, np.uint64)[0]) >> 1


def shared_loader(
    loader: DataLoader, world: World, *, training: bool, seed: int = 0
) -> SharedLoader:
    """Return this rank's share of `loader`; see `Strategy.loader`."""
    check_loader_type(loader)
    _refuse_foreign(loader)
    batch_size, num_samples = int(loader.batch_size or 0), len(loader.dataset)  # type: ignore[arg-type]
    options: dict[str, Any]
    if training:
        own_size = _train_batch_size(batch_size, num_samples, world.size)
        shuffle = isinstance(loader.sampler, RandomSampler)
        ranks: dict[str, Any] = {"num_replicas": world.size, "rank": world.rank}
        sampler: DistributedSampler = DistributedSampler(
            loader.dataset, **ranks, shuffle=shuffle, seed=seed, drop_last=True
        )
        options = {"batch_size": own_size, "sampler": sampler, "drop_last": True}
        lengths = [own_size] * (len(sampler) // own_size)
    else:
        batches = evaluation_batches(num_samples, batch_size, world.rank, world.size)
        options = {"batch_sampler": batches}
        lengths = [len(batch) for batch in batches]
    workers = loader.num_workers > 0
    for name in ("num_workers", "collate_fn", "timeout", "worker_init_fn"):
        options[name] = getattr(loader, name)
    # NCCL's threads do not survive a fork: https://docs.pytorch.org/docs/stable/distributed.html
    start = "forkserver" if workers and world.backend == "nccl" else None
    shared: SharedLoader = SharedLoader(
        loader.dataset,
        pin_memory=loader.pin_memory or world.device.type == "cuda",
        multiprocessing_context=loader.multiprocessing_context or start,
        prefetch_factor=loader.prefetch_factor if workers else None,
        persistent_workers=workers,
        # its own: loading draws nothing from the generators of the module
        generator=torch.Generator(),
        **options,
    )
    shared.seed = seed
    shared.rank = world.rank
    shared.global_batch_size = batch_size
    shared.training = training
    shared.lengths = lengths
    shared.set_epoch(0)
    return shared


def check_loader_type(loader: Any) -> None:
    """Refuse batches from anything but a DataLoader."""
    if not isinstance(loader, DataLoader):
        raise UserError(f"batches come from a torch DataLoader, got a {type(loader).__name__}")


def evaluation_batches(num_samples: int, batch_size: int, rank: int, num_ranks: int) -> list[range]:
    """Return a rank's batches of sample numbers: over all ranks each sample once.

    Every rank gets the same number of batches, none of them empty: a module that communicates in
    its forward pass would wait for ever otherwise. Shares, and batches, differ by one sample.
    """
    if num_samples < num_ranks:
        raise UserError(f"{num_samples} samples are too few to evaluate on {num_ranks} rank(s)")
    largest = math.ceil(num_samples / num_ranks)
    count = min(math.ceil(largest / max(1, batch_size // num_ranks)), num_samples // num_ranks)
    return _cut(_cut(range(num_samples), num_ranks)[rank], count)


def _cut(numbers: range, parts: int) -> list[range]:
    """Cut into consecutive parts of nearly the same length."""
    bounds = [len(numbers) * part // parts for part in range(parts + 1)]
    return [numbers[first:last] for first, last in pairwise(bounds)]


def _refuse_foreign(loader: DataLoader) -> None:
    """Refuse loaders whose batches are not known before they are drawn."""
    if isinstance(loader.dataset, IterableDataset) or not hasattr(loader.dataset, "__len__"):
        raise UserError("a dataset without a length cannot be shared out: give it __len__")
    if loader.batch_size is None:
        raise UserError(
            "a loader with a batch_sampler of its own cannot be shared out: use batch_size, shuffle"
        )
    sampler = loader.sampler
    plain = type(sampler) is SequentialSampler
    if isinstance(sampler, RandomSampler):
        plain = not sampler.replacement and sampler.num_samples == len(loader.dataset)
    if not plain:
        raise UserError(
            f"a loader with a {type(sampler).__name__} of its own cannot be shared out: use shuffle"
        )


def _train_batch_size(batch_size: int, num_samples: int, num_ranks: int) -> int:
    """Return a rank's share of the batch; raises UserError if there is none."""
    if batch_size % num_ranks:
        below = batch_size // num_ranks * num_ranks
        raise UserError(
            f"batch_size {batch_size}, a total, does not divide over {num_ranks} ranks: "
            f"try {f'{below} or ' if below else ''}{below + num_ranks}"
        )
    if num_samples < batch_size:
        raise UserError(f"batch_size {batch_size} is more than the {num_samples} samples")
    return batch_size // num_ranks


def pair_of(batch: Any) -> Any:
    """Return a batch, if it is a pair of inputs and targets; else raise a UserError."""
    if isinstance(batch, list | tuple) and len(batch) == 2:
        return batch
    size = f" of {len(batch)}" if isinstance(batch, list | tuple) else ""
    raise UserError(
        f"a batch must be a pair (inputs, targets), got a {type(batch).__name__}{size}: give the "
        "DataLoader a collate_fn that makes one; inputs and targets may be dicts or tuples"
    )


def to_device(batch: Any, device: torch.device) -> Any:
    """Return a batch with all its tensors on a device, whatever they are nested in."""
    if isinstance(batch, torch.Tensor | PackedSequence):  # of which a part stays on the CPU
        return batch.to(device, non_blocking=True)  # type: ignore[arg-type]
    if isinstance(batch, Mapping):
        return {name: to_device(value, device) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device) for value in batch)
    return batch
