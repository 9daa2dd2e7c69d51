"""Find out if loading, transfer or step limits a training from a DataLoader.

    from rl_dist import check_loader
    # step(batch): forward, backward, optimizer, on a copy of the model
    check = check_loader(loader, step, device)
    print(check.describe())

Everything is measured with the loader's own dataset, sampler and collate function.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset

from rl_dist.errors import UserError
from rl_dist.parallel.loaders import check_loader_type, to_device

LEAST_BATCHES = 3  # of a measurement, however long they take
WORTHWHILE = 1.05  # as much faster must another number of workers be


@dataclass(frozen=True, kw_only=True)
class LoaderCheck:
    """Samples per second, each part alone and all together."""

    num_workers: int  # of the loader that was given
    loader: Mapping[int, float]  # alone, by number of workers
    together: Mapping[int, float]  # loading, transfer and step, by number of workers
    transfer: float | None  # alone; None: the step works on the CPU
    step: float  # alone, on a batch that is there already

    @property
    def bottleneck(self) -> str:
        """The slowest part with the present number of workers: loader, transfer or step."""
        rates = {"loader": self.loader[self.num_workers], "step": self.step}
        if self.transfer is not None:
            rates["transfer"] = self.transfer
        return min(rates, key=lambda name: rates[name])

    @property
    def best_num_workers(self) -> int:
        """The present number, or the smallest that is worth changing it for."""
        best = max(self.together.values())
        if best < WORTHWHILE * self.together[self.num_workers]:
            return self.num_workers
        return min(count for count, rate in self.together.items() if rate * WORTHWHILE >= best)

    @property
    def fix(self) -> str:
        """A change that makes it faster."""
        count = self.best_num_workers
        if count != self.num_workers:
            gain = self.together[count] / self.together[self.num_workers] - 1.0
            return f"num_workers={count} makes {gain:.0%} more samples/s"
        return {
            "loader": "workers do not help: make __getitem__ of the dataset cheaper",
            "transfer": "smaller types in the batch, converted on the GPU, and pin_memory=True",
            "step": "workers do not help: a faster step does (precision, batch size, ranks)",
        }[self.bottleneck]

    def describe(self) -> str:
        """Format a table, then the bottleneck and its fix in a sentence."""
        lines = [f"  {'samples/s':<14}{'loader alone':>14}{'together':>12}"]
        for count in sorted(self.loader):
            alone, together = self.loader[count], self.together[count]
            mark = "  <- now" if count == self.num_workers else ""
            lines.append(f"  {count:>3} workers   {alone:>14,.0f}{together:>12,.0f}{mark}")
        transfer = f", transfer alone {self.transfer:,.0f}" if self.transfer else ""
        lines.append(f"  step alone {self.step:,.0f}{transfer}")
        share = max(0.0, 1.0 - self.together[self.num_workers] / self.step)
        waits = f"the step waits {share:.0%} of the time"
        lines.append(f"bottleneck: the {self.bottleneck} ({waits}); {self.fix}")
        return "\n".join(lines)


def check_loader(
    loader: DataLoader[Any],
    step: Callable[[Any], object],
    device: torch.device | str = "cpu",
    *,
    num_workers: Sequence[int] = (0, 1, 2, 4),
    seconds: float = 1.0,
) -> LoaderCheck:
    """Measure a loader, a step and both together.

        print(check_loader(loader, step, "cuda").describe())

    Random states are afterwards as before. The step is real: let it train a copy of the model.

    Args:
        step: what is done with a batch on `device`.
        num_workers: to be tried beside the loader's own.
        seconds: of each measurement; there are two for every number of workers.

    Raises:
        UserError: no DataLoader, one without a batch, or sizes out of range.
    """
    check_loader_type(loader)
    counts = sorted({loader.num_workers, *num_workers})
    if counts[0] < 0 or not 0.0 < seconds <= 3600.0:
        got = f"got {counts[0]} and {seconds:g}"
        raise UserError(f"num_workers must be at least 0 and seconds 0..3600, {got}")
    device, cpu = torch.device(device), torch.device("cpu")

    def stepped(batch: Any) -> int:
        step(to_device(batch, device))
        return num_samples(batch)

    with _random_state_kept(loader), warnings.catch_warnings():
        # more workers than cores: as asked
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        batch = next(iter(with_workers(loader, 0)), None)
        if batch is None:
            raise UserError("the loader has no batch: its dataset is smaller than batch_size")
        here, transfer = to_device(batch, device), None
        if device.type != "cpu":
            transfer = _rate(lambda: num_samples(to_device(batch, device)), device, seconds)
        step_rate = _rate(lambda: stepped(here), device, seconds)
        alone: dict[int, float] = {}
        together: dict[int, float] = {}
        for count in counts:
            with closing(_endless(with_workers(loader, count))) as batches:
                # what workers load ahead would count as nothing
                for _ in range(count * (loader.prefetch_factor or 2) + 1):
                    next(batches)
                alone[count] = _rate(lambda: num_samples(next(batches)), cpu, seconds)
                together[count] = _rate(lambda: stepped(next(batches)), device, seconds)
    return LoaderCheck(
        num_workers=loader.num_workers,
        loader=alone,
        together=together,
        transfer=transfer,
        step=step_rate,
    )


def _rate(work: Callable[[], int], device: torch.device, seconds: float) -> float:
    """Measure the samples/s of `work`, which returns their number; the first time is left out."""
    samples, batches, started = 0, -1, 0.0
    while batches < LEAST_BATCHES or time.perf_counter() - started < seconds:
        samples += work()
        batches += 1
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if batches == 0:
            samples, started = 0, time.perf_counter()
    return samples / (time.perf_counter() - started)


def with_workers(loader: DataLoader[Any], count: int) -> DataLoader[Any]:
    """Return the loader with another number of workers, which live as long."""
    names = ["collate_fn", "pin_memory", "worker_init_fn", "generator"]
    if count:
        names += ["prefetch_factor", "timeout", "multiprocessing_context"]
    if isinstance(loader.dataset, IterableDataset):
        names += ["batch_size", "drop_last"]
    elif loader.batch_sampler is not None:
        names += ["batch_sampler"]
    else:
        names += ["batch_size", "sampler"]
    options = {name: getattr(loader, name) for name in names}
    return DataLoader(loader.dataset, num_workers=count, persistent_workers=count > 0, **options)


def _endless(loader: DataLoader[Any]) -> Generator[Any, None, None]:
    """Yield epoch after epoch; ended by `close`, and its workers with it."""
    while True:
        yield from loader


@contextmanager
def _random_state_kept(loader: DataLoader[Any]) -> Iterator[None]:
    """Give torch's generator and the loader's own back as they were."""
    owners = (loader, loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    found = [getattr(owner, "generator", None) for owner in owners]
    generators = [each for each in found if isinstance(each, torch.Generator)]
    states = [generator.get_state() for generator in generators]
    with torch.random.fork_rng(devices=[]):
        yield
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)


def num_samples(batch: Any) -> int:
    """Return the length of a batch's first tensor; 1 where there is none."""
    tensors = (leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor))
    first = next(tensors, None)
    return len(first) if first is not None and first.ndim else 1
