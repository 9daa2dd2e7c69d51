"""Batches of a DataLoader, shared out over the ranks."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from rl_dist.errors import UserError, one_line
from rl_dist.process_group.world import World


class BatchError(RuntimeError):
    """A batch could not be loaded or used; names epoch, batch and rank."""


class SharedLoader:
    """This rank's share of a DataLoader whose batch size is a total over ranks.

    In training, batch k of an epoch holds the same samples on any number of ranks, and the
    incomplete last batch is omitted. In evaluation, one rank sees each sample exactly once, and
    all ranks have the same number of batches.

    Raises:
        UserError: another sampler than torch's plain ones, or a batch size that does not divide.
    """

    def __init__(self, loader: DataLoader, world: World, *, training: bool, seed: int = 0) -> None:
        sampler, size = getattr(loader, "sampler", loader), getattr(loader, "batch_size", None)
        self.shuffles = type(sampler) is RandomSampler and not sampler.replacement
        if size is None or not (self.shuffles or type(sampler) is SequentialSampler):
            raise UserError(
                "batches come from a DataLoader(dataset, batch_size=N, shuffle=True or False) of a "
                f"dataset with a length, got a {type(sampler).__name__} or a batch_sampler"
            )
        self.world, self.training, self.seed, self.batch_size = world, training, seed, size
        self.num_samples = len(sampler)
        if self.num_samples < world.size:
            raise UserError(f"{self.num_samples} samples are too few for {world.size} ranks")
        if training and (size % world.size or size > self.num_samples):
            nearest = max(1, min(size, self.num_samples) // world.size) * world.size
            raise UserError(
                f"batch_size {size}, a total, must divide over {world.size} ranks and be at most "
                f"the {self.num_samples} samples: use {nearest}"
            )
        # sample numbers of each batch of this rank; `start` replaces the content of the list
        self.batches: list[list[int]] = []
        self.generator = torch.Generator()  # keeps torch's global generator as it is
        workers = loader.num_workers > 0
        # NCCL's threads do not survive a fork: docs.pytorch.org/docs/stable/distributed.html
        start = "forkserver" if workers and world.backend == "nccl" else None
        self.loader: DataLoader = DataLoader(
            loader.dataset,
            batch_sampler=self.batches,
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

    def start(self, epoch: int) -> None:
        """Begin an epoch; its number decides the order of samples and all seeds."""
        rank, ranks = self.world.rank, self.world.size
        self.generator.manual_seed(epoch_seed(self.seed, epoch, rank))
        if self.training:
            order = torch.arange(self.num_samples)
            if self.shuffles:
                generator = torch.Generator().manual_seed(self.seed + epoch)
                order = torch.randperm(self.num_samples, generator=generator)
            whole = order[: self.num_samples // self.batch_size * self.batch_size]
            self.batches[:] = whole.view(-1, self.batch_size)[:, rank::ranks].tolist()
        else:
            largest_share = math.ceil(self.num_samples / ranks)
            count = math.ceil(largest_share / max(1, self.batch_size // ranks))
            share = _cut(range(self.num_samples), ranks)[rank]
            self.batches[:] = _cut(share, min(count, self.num_samples // ranks))


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


@contextmanager
def batch_named(where: str, number: int, world: World) -> Iterator[None]:
    """Name the batch in which an error was raised; a UserError passes."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        problem = one_line(error)
        if "in DataLoader worker process" in problem:  # the last line of its traceback says more
            problem = str(error).strip().splitlines()[-1]
        raise BatchError(f"{where}, batch {number}, rank {world.rank}: {problem}") from error


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

    A wait of more than 5 % of the time is worth more num_workers or a cheaper __getitem__.

    Args:
        step: trains a copy of the model on a batch on `device`: forward, backward, optimizer.
        seconds: length of the measurement after the first batch, for which workers start.
    """
    moments: list[float] = []
    with torch.random.fork_rng(devices=[]):
        for batch in loader:
            moments.append(time.perf_counter())
            step(to_device(batch, torch.device(device)))
            if torch.device(device).type == "cuda":
                torch.cuda.synchronize(device)
            moments.append(time.perf_counter())
            if len(moments) > 2 and moments[-1] - moments[1] > seconds:
                break
    if len(moments) < 4:
        raise UserError("the loader has fewer than two batches: give a smaller batch_size")
    spans = [end - start for start, end in itertools.pairwise(moments[1:])]
    return {"wait_s": fmean(spans[::2]), "step_s": fmean(spans[1::2])}
