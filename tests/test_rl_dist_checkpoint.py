"""Checkpoints are whole or absent, and any changed byte is refused."""

import logging
import os
import random

import numpy as np
import pytest
import torch

from rl_dist.checkpoint import (
    CheckpointError,
    find_latest_run,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)


def trained_state():
    torch.manual_seed(1)
    module = torch.nn.LSTM(4, 8)
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.randn(3, 2, 4))[0].sum().backward()
    optimizer.step()
    return {
        "policy": module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "counts": {"iteration": 7, "best": None, "sizes": (1, 2), "name": "x", "on": True},
        "random": random.getstate(),
    }


def save(directory, iteration, keep=10):
    return save_checkpoint(directory, {"iteration": iteration}, iteration=iteration, keep=keep)


def assert_same(got, wanted):
    assert type(got) is type(wanted)
    if isinstance(wanted, dict):
        assert list(got) == list(wanted)
        for key in wanted:
            assert_same(got[key], wanted[key])
    elif isinstance(wanted, torch.Tensor):
        assert torch.equal(got, wanted) and got.dtype == wanted.dtype
    else:
        assert got == wanted


def test_a_checkpoint_comes_back_bit_for_bit_and_plain_torch_reads_it_too(tmp_path):
    state = trained_state()
    path = save_checkpoint(tmp_path / "made/on/demand", state, iteration=120, keep=1)
    assert path.name == "iteration_00000120.pt"
    assert_same(load_checkpoint(path), state)
    assert_same(torch.load(path, weights_only=True), state)


def test_any_flipped_byte_is_refused(tmp_path):
    path = save_checkpoint(tmp_path, trained_state(), iteration=1, keep=1)
    data = path.read_bytes()
    generator = random.Random(0)
    ends = [0, 1, len(data) - 1, len(data) - 65, len(data) - 72, len(data) - 73]
    for position in ends + [generator.randrange(len(data)) for _ in range(150)]:
        changed = bytearray(data)
        changed[position] ^= 1 << generator.randrange(8)
        path.write_bytes(changed)
        with pytest.raises(CheckpointError, match=path.name):
            load_checkpoint(path)
    path.write_bytes(data)
    load_checkpoint(path)


@pytest.mark.parametrize(
    ("damage", "cause"),
    [
        (lambda data: b"", "is empty"),
        (lambda data: data[:-1], "truncated"),
        (lambda data: data[: len(data) // 2], "truncated"),
        (lambda data: data[:10], "truncated"),
        (lambda data: data + b"x", "truncated or not ours"),
        (lambda data: b"not a checkpoint at all", "no checkpoint"),
        (lambda data: data[:200] + bytes(200) + data[400:], "do not match"),
    ],
)
def test_damaged_files_are_refused_with_path_and_cause(tmp_path, damage, cause):
    path = save_checkpoint(tmp_path, trained_state(), iteration=1, keep=1)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CheckpointError, match=cause) as error:
        load_checkpoint(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_missing_files_and_directories_are_refused_with_path_and_cause(tmp_path):
    with pytest.raises(CheckpointError, match=r"nowhere\.pt cannot be read: No such file"):
        load_checkpoint(tmp_path / "nowhere.pt")
    with pytest.raises(CheckpointError, match="Is a directory"):
        load_checkpoint(tmp_path)


def test_values_that_could_not_be_loaded_again_are_refused_by_name(tmp_path):
    for value in (np.zeros(2), np.float64(1.0), tmp_path):
        with pytest.raises(CheckpointError, match=r"state\['env'\]\[0\] is a "):
            save_checkpoint(tmp_path, {"env": [value]}, iteration=1, keep=1)
    assert not list(tmp_path.iterdir())


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    for iteration in (20, 40, 60, 80):
        save(tmp_path, iteration, keep=2)
    assert sorted(os.listdir(tmp_path)) == ["iteration_00000060.pt", "iteration_00000080.pt"]
    with pytest.raises(CheckpointError, match="keep_checkpoints"):
        save(tmp_path, 100, keep=0)


def test_leftovers_of_a_killed_writer_are_ignored_and_removed(tmp_path):
    directory = tmp_path / "checkpoints"
    save(directory, 20)
    (directory / "iteration_00000040.pt.part").write_bytes(b"half")
    assert latest_checkpoint(tmp_path) == directory / "iteration_00000020.pt"
    save(directory, 60)
    assert sorted(os.listdir(directory)) == ["iteration_00000020.pt", "iteration_00000060.pt"]


def test_the_newest_intact_checkpoint_is_found_and_the_skipped_are_reported(tmp_path, caplog):
    assert latest_checkpoint(tmp_path) is None
    paths = [save(tmp_path / "checkpoints", iteration) for iteration in (20, 40, 60)]
    assert latest_checkpoint(tmp_path) == paths[2]
    paths[2].write_bytes(paths[2].read_bytes()[:-5])
    paths[1].write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        assert latest_checkpoint(tmp_path) == paths[0]
    assert "iteration_00000060.pt is truncated" in caplog.text
    assert "iteration_00000040.pt is empty" in caplog.text


def test_a_run_resumed_from_an_earlier_iteration_supersedes_the_later_ones(tmp_path):
    for iteration in (20, 40, 60):
        save(tmp_path / "checkpoints", iteration)
    assert save(tmp_path / "checkpoints", 50) == latest_checkpoint(tmp_path)
    assert (tmp_path / "checkpoints/iteration_00000060.pt.superseded").exists()


def test_the_latest_run_is_the_one_with_the_newest_intact_checkpoint(tmp_path):
    assert find_latest_run(tmp_path) is None
    for age, name in enumerate(("broken", "new", "old")):
        path = save(tmp_path / name / "checkpoints", 20)
        os.utime(path, (1e9 - age, 1e9 - age))
    (tmp_path / "broken/checkpoints/iteration_00000020.pt").write_bytes(b"PK")
    (tmp_path / "empty").mkdir()
    assert find_latest_run(tmp_path) == tmp_path / "new"


def test_a_disk_that_cannot_be_written_is_one_clear_error_and_leaves_nothing(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(CheckpointError, match="cannot write .*iteration_00000001.pt .*MiB"):
        save(blocked / "checkpoints", 1)
    assert os.listdir(tmp_path) == ["file"]


def test_a_full_disk_leaves_the_old_checkpoints_and_no_half_file(tmp_path, monkeypatch):
    save(tmp_path, 1)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        save(tmp_path, 2)
    assert os.listdir(tmp_path) == ["iteration_00000001.pt"]
