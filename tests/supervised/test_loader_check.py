"""Loaders whose limits are known, because they or the step sleep."""

import time
from typing import NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset

from rl_dist import check_loader
from rl_dist.errors import UserError
from rl_dist.parallel.loaders import to_device
from rl_dist.supervised.loader_check import LoaderCheck, num_samples, with_workers


class Slow(Dataset):
    """Samples that take so long."""

    def __init__(self, seconds, size=64):
        self.seconds, self.size = seconds, size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return torch.tensor([float(index)])


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(10.0))


class Pair(NamedTuple):
    inputs: torch.Tensor
    label: str


def test_a_slow_dataset_is_named_and_workers_are_its_fix():
    loader = DataLoader(Slow(0.01), batch_size=4)
    check = check_loader(loader, lambda batch: None, num_workers=(0, 4), seconds=0.4)
    assert check.bottleneck == "loader" and check.loader[0] <= 100.0 < check.loader[4]
    assert check.best_num_workers == 4 and "num_workers=4 makes" in check.fix
    assert "<- now" in check.describe() and "bottleneck: the loader" in check.describe()


def test_a_slow_step_is_named():
    loader = DataLoader(Slow(0.0), batch_size=4)
    check = check_loader(loader, lambda batch: time.sleep(0.02), num_workers=(0,), seconds=0.2)
    assert check.bottleneck == "step" and check.step <= 200.0
    assert "a faster step" in check.fix and check.transfer is None


def test_the_step_gets_whole_batches_and_the_random_order_is_as_if_nothing_had_been_measured():
    def order(measured):
        torch.manual_seed(5)
        generator = torch.Generator().manual_seed(7)
        loader = DataLoader(Slow(0.0), batch_size=8, shuffle=True, generator=generator)
        seen = []
        if measured:
            check_loader(
                loader, lambda batch: seen.append(batch.shape), num_workers=(0,), seconds=0.01
            )
            assert set(seen) == {(8, 1)}
        return torch.cat(list(loader)).flatten().tolist(), torch.rand(2).tolist()

    assert order(measured=True) == order(measured=False)


def test_streams_and_unbatched_loaders_keep_their_batches():
    stream = with_workers(DataLoader(Stream(), batch_size=4, drop_last=True), 0)
    assert [len(batch) for batch in stream] == [4, 4]
    unbatched = with_workers(DataLoader(Slow(0.0, 2), batch_size=None), 0)
    assert [tuple(one.shape) for one in unbatched] == [(1,), (1,)]


def test_what_cannot_be_measured_is_refused():
    with pytest.raises(UserError, match="the loader has no batch"):
        check_loader(DataLoader(Slow(0.0, 3), batch_size=4, drop_last=True), lambda batch: None)
    with pytest.raises(UserError, match="num_workers must be at least 0"):
        check_loader(DataLoader(Slow(0.0)), lambda batch: None, num_workers=(-1,))
    with pytest.raises(UserError, match="torch DataLoader, got a list"):
        check_loader([torch.zeros(2)], lambda batch: None)


def test_batches_of_any_nesting_are_moved_and_counted():
    nested = [torch.ones(5), (torch.ones(5),)]
    batch = {"meta": "x", "pair": Pair(torch.zeros(5, 2), "y"), "list": nested}
    moved = to_device(batch, torch.device("meta"))
    assert moved["pair"].inputs.device.type == moved["list"][1][0].device.type == "meta"
    assert moved["meta"] == "x" and moved["pair"].label == "y"
    assert isinstance(moved["list"][1], tuple)
    packed = to_device(pack_sequence([torch.ones(3, 2), torch.ones(1, 2)]), torch.device("meta"))
    # torch wants these on a CPU
    assert packed.data.device.type == "meta" and packed.batch_sizes.tolist() == [2, 1, 1]
    assert num_samples(batch) == 5 and num_samples("nothing") == 1


def rates(**changed):
    given = {"loader": {0: 900.0}, "together": {0: 200.0}, "transfer": 300.0, "step": 700.0}
    return LoaderCheck(num_workers=0, **(given | changed))


def test_the_slowest_part_is_the_bottleneck_and_more_workers_must_be_worth_it():
    assert rates().bottleneck == "transfer" and "pin_memory=True" in rates().fix
    turns = rates(transfer=None, together={0: 350.0})
    assert turns.bottleneck == "step" and "waits 50% of the time" in turns.describe()
    some = {"loader": {0: 100.0, 1: 101.0, 2: 102.0}}
    flat = rates(**some, together={0: 90.0, 1: 93.0, 2: 94.0})
    assert flat.best_num_workers == 0 and "make __getitem__" in flat.fix
    better = rates(**some, together={0: 90.0, 1: 120.0, 2: 122.0})
    assert better.best_num_workers == 1 and better.fix == "num_workers=1 makes 33% more samples/s"
