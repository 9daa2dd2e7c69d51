"""Find out whether a training waits for its DataLoader."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch.utils.data import DataLoader

from rl_dist.errors import UserError
from rl_dist.strategies.loaders import check_loader_type, to_device

NOTICEABLE = 0.05  # share of the time that a step waits


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
    check_loader_type(loader)
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
