"""Batches of a DataLoader, shared out over the ranks."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from rl_dist.errors import UserError
from rl_dist.process_group.world import World


class SharedLoader:
    """This rank's share of a DataLoader whose batch size is a total over ranks.

    In training, batch k of an epoch holds the same samples on any number of ranks, and the
    incomplete last batch is omitted. In evaluation, one rank sees each sample exactly once, and
    all ranks have the same number of batches.

    Raises:
        UserError: the sampler is not a plain one of torch, or a batch size does not divide.
    """

    def __init__(self, loader: DataLoader, world: World, *, training: bool, seed: int = 0) -> None:
        self.world = world
        self.training = training
        self.seed = seed
        sampler: Any = loader.sampler
        size = loader.batch_size
        self.shuffles = type(sampler) is RandomSampler and not sampler.replacement
        if size is None or not (self.shuffles or type(sampler) is SequentialSampler):
            raise UserError(
                f"a {type(sampler).__name__} or batch_sampler cannot be shared out over ranks: use "
                "DataLoader(dataset, batch_size=N, shuffle=True or False)"
            )
        self.num_samples = len(sampler)
        self.batch_size = size
        if self.num_samples < world.size:
            raise UserError(f"{self.num_samples} samples are too few for {world.size} ranks")
        if training and (size % world.size or size > self.num_samples):
            nearest = max(1, min(size, self.num_samples) // world.size) * world.size
            raise UserError(
                f"batch_size {size}, a total, must divide over {world.size} ranks and be at most "
                f"the {self.num_samples} samples: use {nearest}"
            )
        if training:
            self.num_batches = self.num_samples // size
        else:
            largest_share = math.ceil(self.num_samples / world.size)
            full_batches = math.ceil(largest_share / max(1, size // world.size))
            self.num_batches = min(full_batches, self.num_samples // world.size)
        # sample numbers of each batch of this rank; every epoch fills the list again
        self.numbers: list[list[int]] = []
        self.generator = torch.Generator()  # keeps the global generator untouched
        workers = loader.num_workers > 0
        # NCCL's threads do not survive a fork: docs.pytorch.org/docs/stable/distributed.html
        start = "forkserver" if workers and world.backend == "nccl" else None
        self.loader: DataLoader = DataLoader(
            loader.dataset,
            batch_sampler=self.numbers,
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            prefetch_factor=loader.prefetch_factor,
            pin_memory=world.device.type == "cuda",
            multiprocessing_context=loader.multiprocessing_context or start,
            persistent_workers=workers,
            generator=self.generator,
        )

    def batches(self, epoch: int = 0) -> Iterator[tuple[int, Any, Any]]:
        """Yield the number of samples, the inputs and the targets of every batch.

        Tensors are on the device. The epoch decides the order of samples and all seeds.
        """
        self.generator.manual_seed(epoch_seed(self.seed, epoch, self.world.rank))
        self.numbers[:] = self._numbers(epoch)
        for numbers, batch in zip(self.numbers, self.loader, strict=True):
            inputs, targets = to_device(batch, self.world.device)
            yield len(numbers), inputs, targets
            self.world.heartbeat()

    def _numbers(self, epoch: int) -> list[Any]:
        """Return the sample numbers of each batch of this rank in an epoch."""
        rank, ranks = self.world.rank, self.world.size
        if not self.training:
            share = _cut(range(self.num_samples), ranks)[rank]
            return _cut(share, self.num_batches)
        order = torch.arange(self.num_samples)
        if self.shuffles:
            generator = torch.Generator().manual_seed(self.seed + epoch)
            order = torch.randperm(self.num_samples, generator=generator)
        whole = order[: self.num_batches * self.batch_size].view(-1, self.batch_size)
        return whole[:, rank::ranks].tolist()


def _cut(numbers: Any, parts: int) -> list[Any]:
    """Cut a sequence into consecutive parts of nearly the same length."""
    bounds = [len(numbers) * part // parts for part in range(parts + 1)]
    return [numbers[first:last] for first, last in itertools.pairwise(bounds)]


def epoch_seed(seed: int, epoch: int, rank: int) -> int:
    """Return the seed of the random numbers of one rank in one epoch."""
    return int(np.random.SeedSequence([seed, epoch, rank]).generate_state(1, np.uint64)[0]) >> 1


def to_device(batch: Any, device: torch.device) -> Any:
    """Return a batch, however nested, with all its tensors on a device."""

    def can_move(value: Any) -> bool:
        return hasattr(value, "to")  # a PackedSequence moves as a whole

    def move(value: Any) -> Any:
        return value.to(device, non_blocking=True) if can_move(value) else value

    return tree_map(move, batch, is_leaf=can_move)


def check_loader(
    loader: DataLoader[Any],
    step: Callable[[Any], object],
    device: torch.device | str = "cpu",
    *,
    seconds: float = 2.0,
) -> dict[str, float]:
    """Measure how long a training step takes, and how long it waits for a batch.

        >>> check_loader(DataLoader(dataset, num_workers=2), step)
        {'wait_s': 0.0001, 'step_s': 0.02}

    If waiting takes more than 5 % of the time, raise num_workers or make __getitem__ faster.

    Args:
        step: trains a copy of the model on a batch on `device`: forward, backward, optimizer.
        seconds: length of the measurement after the first batch, for which workers start.
    """
    device = torch.device(device)
    moments: list[float] = []  # alternately when a batch was loaded and when its step ended
    with torch.random.fork_rng(devices=[]):
        for batch in loader:
            moments.append(time.perf_counter())
            step(to_device(batch, device))
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            moments.append(time.perf_counter())
            if len(moments) > 2 and moments[-1] - moments[1] > seconds:
                break
    if len(moments) < 4:
        raise UserError("the loader has fewer than two batches: give a smaller batch_size")
    spans = [end - start for start, end in itertools.pairwise(moments[1:])]
    return {"wait_s": fmean(spans[::2]), "step_s": fmean(spans[1::2])}
