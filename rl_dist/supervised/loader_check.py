"""Which of loading, transfer and step limits a training from a DataLoader.

    from rl_dist import check_loader
    check = check_loader(loader, step, device)  # step(batch): forward, backward, optimizer, on a copy of the model
    print(check.describe())

Everything is measured with the loader's own dataset, sampler and collate function, by numbers of workers.
"""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from rl_dist.errors import UserError
from rl_dist.hardware.host_memory import available_cores
from rl_dist.parallel.loaders import to_device

LEAST_BATCHES = 3  # of a measurement, however long they take
WORTHWHILE = 1.05  # as much faster must another number of workers be
NOTICEABLE = 0.2  # share of the time: a loader that the step waits for longer does not keep up


@dataclass(frozen=True, kw_only=True)
class LoaderCheck:
    """Samples per second, each part alone and all together."""

    num_workers: int  # of the loader that was given
    loader: Mapping[int, float]  # alone, by number of workers
    together: Mapping[int, float]  # loading, transfer and step, by number of workers
    transfer: float | None  # alone; None: the step works on the CPU
    step: float  # alone, on a batch that is there already
    pinned: bool = False
    cores: int = 1

    @property
    def bottleneck(self) -> str:
        """The slowest part with the present number of workers: loader, transfer or step."""
        rates = {"loader": self.loader[self.num_workers], "transfer": self.transfer, "step": self.step}
        return min((name for name, rate in rates.items() if rate), key=lambda name: rates[name] or 0.0)

    @property
    def best_num_workers(self) -> int:
        """The present number, or the smallest that is worth changing it for."""
        best = max(self.together.values())
        if best < WORTHWHILE * self.together[self.num_workers]:
            return self.num_workers
        return min(count for count, rate in self.together.items() if rate * WORTHWHILE >= best)

    @property
    def waits(self) -> float:
        """Share of the time without a batch to step on, with the present workers."""
        return max(0.0, 1.0 - self.together[self.num_workers] / self.step)

    @property
    def cure(self) -> str:
        """What makes it faster."""
        count, now = self.best_num_workers, self.together[self.num_workers]
        if count != self.num_workers:
            return f"num_workers={count} makes {self.together[count] / now - 1.0:.0%} more samples/s"
        if self.bottleneck == "transfer":
            return "smaller types in the batch, converted on the GPU" + ("" if self.pinned else ", and pin_memory=True")
        if self.bottleneck == "step":
            faster = "a faster step helps: precision, batch size, ranks"
            if self.waits < NOTICEABLE:
                return f"the loader keeps up; only {faster}"
            return f"workers do not help ({self.cores} CPU cores); {faster}; so does a cheaper __getitem__"
        return f"workers do not help ({self.cores} CPU cores): make __getitem__ of the dataset cheaper"

    def describe(self) -> str:
        """A table, then the bottleneck and its cure in a sentence."""
        lines = [f"  {'samples/s':<14}{'loader alone':>14}{'together':>12}"]
        for count in sorted(self.loader):
            mark = "  <- now" if count == self.num_workers else ""
            lines.append(f"  {count:>3} workers   {self.loader[count]:>14,.0f}{self.together[count]:>12,.0f}{mark}")
        alone = [f"step alone {self.step:,.0f}"]
        alone += [f"transfer alone {self.transfer:,.0f}"] if self.transfer else []
        lines.append(f"  {', '.join(alone)}")
        lines.append(f"bottleneck: the {self.bottleneck} (the step waits {self.waits:.0%} of the time); {self.cure}")
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

    Torch's random state, and that of the loader's generators, is afterwards as before. The dataset and the step are
    used for real: give a step that trains a copy of the model.

    Args:
        step: what is done with a batch on `device`.
        num_workers: to be tried beside the loader's own.
        seconds: of each measurement; there are two for every number of workers.

    Raises:
        UserError: no DataLoader, one without a batch, or sizes that cannot be.
    """
    if not isinstance(loader, DataLoader):
        raise UserError(f"batches come from a torch DataLoader, got a {type(loader).__name__}: make one of it")
    counts = sorted({loader.num_workers, *num_workers})
    if counts[0] < 0 or not 0.0 < seconds <= 3600.0:
        raise UserError(f"num_workers must be at least 0 and seconds 0..3600, got {counts[0]} and {seconds:g}")
    device = torch.device(device)
    alone: dict[int, float] = {}
    together: dict[int, float] = {}
    with _random_state_kept(loader):
        batch = next(iter(with_workers(loader, 0)), None)
        if batch is None:
            raise UserError("the loader has no batch: its dataset is smaller than batch_size, or empty")
        here, size = to_device(batch, device), num_samples(batch)

        def transferred() -> int:
            to_device(batch, device)
            return size

        def stepped() -> int:
            step(here)
            return size

        transfer = _rate(transferred, device, seconds) if device.type != "cpu" else None
        step_rate = _rate(stepped, device, seconds)
        for count in counts:
            with warnings.catch_warnings(), closing(_endless(with_workers(loader, count))) as batches:
                warnings.filterwarnings("ignore", message="This DataLoader will create")  # more than cores: as asked
                alone[count], together[count] = _rates_of(batches, _queued(loader, count), step, device, seconds)
    return LoaderCheck(
        num_workers=loader.num_workers,
        loader=alone,
        together=together,
        transfer=transfer,
        step=step_rate,
        pinned=loader.pin_memory,
        cores=available_cores(),
    )


def _rates_of(
    batches: Iterator[Any], queued: int, step: Callable[[Any], object], device: torch.device, seconds: float
) -> tuple[float, float]:
    """Samples/s of the loader alone, and of loading, transfer and step."""
    for _ in itertools.islice(batches, queued + 1):  # what workers had loaded ahead would count as nothing
        pass

    def loaded() -> int:
        return num_samples(next(batches))

    def all_of_it() -> int:
        batch = next(batches)
        step(to_device(batch, device))
        return num_samples(batch)

    return _rate(loaded, torch.device("cpu"), seconds), _rate(all_of_it, device, seconds)


def _rate(work: Callable[[], int], device: torch.device, seconds: float) -> float:
    """Samples/s of `work`, which returns how many it dealt with; the first time does not count."""
    work()
    _synchronize(device)
    samples, started = 0, time.perf_counter()
    for number in itertools.count(1):
        samples += work()
        _synchronize(device)
        elapsed = time.perf_counter() - started
        if elapsed >= seconds and number >= LEAST_BATCHES:
            break
    return samples / elapsed


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def with_workers(loader: DataLoader[Any], count: int) -> DataLoader[Any]:
    """The same loader with another number of workers, which live as long as it does."""
    options: dict[str, Any] = {
        name: getattr(loader, name) for name in ("collate_fn", "pin_memory", "worker_init_fn", "generator")
    }
    if count:
        options |= {"persistent_workers": True}
        options |= {name: getattr(loader, name) for name in ("prefetch_factor", "timeout", "multiprocessing_context")}
    if isinstance(loader.dataset, IterableDataset):
        options |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    elif loader.batch_sampler is not None:
        options["batch_sampler"] = loader.batch_sampler
    else:
        options |= {"batch_size": None, "sampler": loader.sampler}
    return DataLoader(loader.dataset, num_workers=count, **options)


def _queued(loader: DataLoader[Any], count: int) -> int:
    """Batches that so many workers load ahead."""
    return count * (loader.prefetch_factor or 2)


def _endless(loader: DataLoader[Any]) -> Generator[Any, None, None]:
    """Epoch after epoch; ended by `close`, and its workers with it."""
    while True:
        yield from loader


@contextmanager
def _random_state_kept(loader: DataLoader[Any]) -> Iterator[None]:
    """Give torch's generator and the loader's own back as they were."""
    owners = (loader, loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    generators = [g for owner in owners if isinstance(g := getattr(owner, "generator", None), torch.Generator)]
    states = [generator.get_state() for generator in generators]
    with torch.random.fork_rng(devices=[]):
        yield
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)


def num_samples(batch: Any) -> int:
    """Length of a batch's first tensor; 1 where there is none."""
    found = next(_tensors(batch), None)
    return len(found) if found is not None and found.ndim else 1


def _tensors(batch: Any) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from _tensors(value)
