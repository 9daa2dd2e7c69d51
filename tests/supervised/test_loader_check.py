"""Loaders whose limits are known, because they or the step sleep."""

import time
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, Dataset

from rl_dist import check_loader
from rl_dist.errors import UserError
from rl_dist.strategies.loaders import to_device


class Slow(Dataset):
    """Samples that take so long."""

    def __init__(self, seconds, size=64):
        self.seconds, self.size = seconds, size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return torch.tensor([float(index)])


class Pair(NamedTuple):
    inputs: torch.Tensor
    label: str


def test_loading_and_stepping_are_measured_apart():
    loader = DataLoader(Slow(0.01), batch_size=4)
    check = check_loader(loader, lambda batch: time.sleep(0.02), seconds=0.2)
    assert check.wait_s >= 0.04 and check.step_s >= 0.02
    assert "more num_workers" in check.describe()
    assert "fast enough" in replace(check, wait_s=0.0).describe()


def test_the_step_gets_whole_batches_and_later_random_numbers_are_the_same():
    shapes = []
    torch.manual_seed(5)
    check_loader(DataLoader(Slow(0.0), 8, shuffle=True), lambda batch: shapes.append(batch.shape))
    assert shapes == [(8, 1)] * 8
    assert torch.equal(torch.rand(2), torch.rand(2, generator=torch.Generator().manual_seed(5)))


def test_what_cannot_be_measured_is_refused():
    with pytest.raises(UserError, match="fewer than two batches"):
        check_loader(DataLoader(Slow(0.0, 3), batch_size=4), lambda batch: None)
    with pytest.raises(UserError, match="torch DataLoader, got a list"):
        check_loader([torch.zeros(2)], lambda batch: None)


def test_batches_of_any_nesting_are_moved():
    nested = [torch.ones(5), (torch.ones(5),)]
    batch = {"meta": "x", "pair": Pair(torch.zeros(5, 2), "y"), "list": nested}
    moved = to_device(batch, torch.device("meta"))
    assert moved["pair"].inputs.device.type == moved["list"][1][0].device.type == "meta"
    assert moved["meta"] == "x" and moved["pair"].label == "y"
    assert isinstance(moved["list"][1], tuple)
    packed = to_device(pack_sequence([torch.ones(3, 2), torch.ones(1, 2)]), torch.device("meta"))
    # torch wants these on a CPU
    assert packed.data.device.type == "meta" and packed.batch_sizes.tolist() == [2, 1, 1]
