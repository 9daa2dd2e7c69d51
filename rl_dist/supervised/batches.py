"""Batches of a DataLoader, shared out over ranks; how long training waits."""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler
from tqdm import tqdm

from rl_dist.errors import UserError, one_line
from rl_dist.process_group.world import World

NOTICEABLE = 0.05  # share of the time that a step may wait for its batch


class BatchError(RuntimeError):
    """A batch could not be loaded or used; names epoch, batch and rank."""


class SharedLoader:
    """This rank's share of a DataLoader whose batch size is a total over ranks.

    While training, batch k of an epoch holds the same samples on any number of ranks, and the
    incomplete last batch is omitted. While evaluating, one rank sees each sample exactly once, and
    all ranks have the same number of batches.

    Raises:
        UserError: another sampler than torch's plain ones, or a batch size that does not divide.
    """

    def __init__(self, loader: DataLoader, world: World, *, training: bool, seed: int = 0) -> None:
        sampler, size = getattr(loader, "sampler", loader), getattr(loader, "batch_size", None)
        ranks = world.size
        self.shuffles = type(sampler) is RandomSampler and not sampler.replacement
        if size is None or not (self.shuffles or type(sampler) is SequentialSampler):
            raise UserError(
                "batches come from a DataLoader(dataset, batch_size=N, shuffle=True or False) of a "
                f"dataset with a length, got a {type(sampler).__name__} or a batch_sampler"
            )
        self.world = world
        self.training = training
        self.seed = seed
        self.batch_size = size
        self.num_samples = len(sampler)
        if self.num_samples < ranks:
            raise UserError(f"{self.num_samples} samples are too few for {ranks} ranks")
        if training and (size % ranks or size > self.num_samples):
            nearest = max(1, min(size, self.num_samples) // ranks) * ranks
            raise UserError(
                f"batch_size {size}, a total, must divide over {ranks} ranks and be at most the "
                f"{self.num_samples} samples: use {nearest}"
            )
        # sample numbers of each batch of this rank; `start` replaces the content of the list
        self.batches: list[list[int]] = []
        kept = ("num_workers", "collate_fn", "timeout", "worker_init_fn", "prefetch_factor")
        workers = loader.num_workers > 0
        # NCCL's threads do not survive a fork: docs.pytorch.org/docs/stable/distributed.html
        start = "forkserver" if workers and world.backend == "nccl" else None
        options: dict[str, Any] = {name: getattr(loader, name) for name in kept}
        self.generator = torch.Generator()  # loading draws nothing from those of the module
        self.loader: DataLoader = DataLoader(
            loader.dataset,
            batch_sampler=self.batches,
            pin_memory=world.device.type == "cuda",
            multiprocessing_context=loader.multiprocessing_context or start,
            persistent_workers=workers,
            generator=self.generator,
            **options,
        )

    def start(self, epoch: int) -> None:
        """Begin an epoch, whose number decides samples' order and workers' seeds."""
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
            largest = math.ceil(self.num_samples / ranks)
            count = math.ceil(largest / max(1, self.batch_size // ranks))
            share = _cut(range(self.num_samples), ranks)[rank]
            self.batches[:] = _cut(share, min(count, self.num_samples // ranks))


def _cut(numbers: Any, parts: int) -> list[Any]:
    """Cut a sequence into consecutive parts of nearly the same length."""
    bounds = [len(numbers) * part // parts for part in range(parts + 1)]
    return [numbers[first:last] for first, last in itertools.pairwise(bounds)]


def epoch_seed(seed: int, epoch: int, rank: int) -> int:
    """Return a seed for what a rank draws in an epoch."""
    return int(np.random.SeedSequence([seed, epoch, rank]).generate_state(1, np.uint64)[0]) >> 1


def to_device(batch: Any, device: torch.device) -> Any:
    """Return a batch, however nested, with all its tensors on a device."""

    def move(value: Any) -> Any:
        return value.to(device, non_blocking=True) if hasattr(value, "to") else value

    # a part of a PackedSequence stays on the CPU
    return tree_map(move, batch, is_leaf=lambda value: isinstance(value, PackedSequence))


def iterate(
    shared: SharedLoader, where: str, epoch: int, progress: bool
) -> Iterator[tuple[int, int, Any, Any]]:
    """Yield number, samples, inputs and targets of each batch; shows a bar."""
    world = shared.world
    shared.start(epoch)
    hidden = not (progress and world.is_main_process and sys.stderr.isatty())
    with named(where, 0, world):
        loaded = iter(shared.loader)
    bar = tqdm(shared.batches, desc=where, unit=" batches", leave=False, disable=hidden)
    for number, samples in enumerate(bar):
        with named(where, number, world):
            inputs, targets = to_device(next(loaded), world.device)
        yield number, len(samples), inputs, targets
        world.heartbeat()


@contextmanager
def named(where: str, number: int, world: World) -> Iterator[None]:
    """Name the batch that raised; errors for the user pass."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        problem = one_line(error)
        if "in DataLoader worker process" in problem:  # a traceback, whose last line is the error
            problem = str(error).strip().splitlines()[-1]
        raise BatchError(f"{where}, batch {number}, rank {world.rank}: {problem}") from error


# ---- whether training waits for its batches


@dataclass(frozen=True)
class LoaderCheck:
    """Seconds of a training step, and how long it waits for its batch before."""

    wait_s: float
    step_s: float

    def describe(self) -> str:
        """Return a sentence that says whether the loader is fast enough."""
        share = self.wait_s / (self.wait_s + self.step_s)
        fix = "try more num_workers, or make __getitem__ of the dataset cheaper"
        verdict = fix if share > NOTICEABLE else "the loader is fast enough"
        times = f"{1e3 * self.step_s:.3g} ms and waits {1e3 * self.wait_s:.3g} ms for its batch"
        return f"a step takes {times}, {share:.0%} of the time: {verdict}"


def check_loader(
    loader: DataLoader[Any],
    step: Callable[[Any], object],
    device: torch.device | str = "cpu",
    *,
    seconds: float = 2.0,
) -> LoaderCheck:
    """Measure how long a training step waits for its batch, over one epoch at most.

        >>> print(check_loader(DataLoader(dataset, num_workers=2), step).describe())

    torch's random state is as before afterwards.

    Args:
        step: trains a copy of the model on a batch on `device`: forward, backward, optimizer.
        seconds: of the measurement, without the first batch, for which workers start.
    """
    device = torch.device(device)
    moments = [time.perf_counter()]
    with torch.random.fork_rng(devices=[]):
        for batch in loader:
            moments.append(time.perf_counter())
            step(to_device(batch, device))
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            moments.append(time.perf_counter())
            if len(moments) > 3 and moments[-1] - moments[2] > seconds:
                break
    if len(moments) < 5:
        raise UserError("the loader has fewer than two batches: give a smaller batch_size")
    spans = [end - start for start, end in itertools.pairwise(moments[2:])]
    return LoaderCheck(wait_s=fmean(spans[::2]), step_s=fmean(spans[1::2]))
