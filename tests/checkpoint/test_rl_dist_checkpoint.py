"""Checkpoints are whole or absent, and any changed byte is refused."""

import hashlib
import io
import os
import pickle
import random
import subprocess

import damaged_files
import numpy as np
import pytest
import torch

from rl_dist.checkpoint.store import (
    FORMAT_VERSION,
    CheckpointError,
    OtherFormatError,
    find_latest_run,
    latest_checkpoint,
    load_checkpoint,
    read_checkpoint,
    save_checkpoint,
    seal,
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


def names(folder):
    return sorted(path.name for path in folder.iterdir())


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


@pytest.mark.parametrize(
    ("damage", "cause"),
    [
        (lambda data: b"", "is empty"),
        (lambda data: data[:-1], "truncated"),
        (lambda data: data[:10], "truncated"),
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


def test_values_that_could_not_be_loaded_again_are_refused_by_name(tmp_path):
    for value in (np.zeros(2), np.float64(1.0), tmp_path):
        with pytest.raises(CheckpointError, match=r"state\['env'\]\[0\] is a "):
            save_checkpoint(tmp_path, {"env": [value]}, iteration=1, keep=1)
    assert not list(tmp_path.iterdir())


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    for iteration in (20, 40, 60, 80):
        save(tmp_path, iteration, keep=2)
    assert names(tmp_path) == ["iteration_00000060.pt", "iteration_00000080.pt"]


def test_the_newest_intact_checkpoint_is_found_and_leftovers_are_removed(tmp_path, caplog):
    assert latest_checkpoint(tmp_path) is None
    folder = tmp_path / "checkpoints"
    paths = [save(folder, iteration) for iteration in (20, 40, 60)]
    assert latest_checkpoint(tmp_path) == latest_checkpoint(folder) == paths[2]
    (folder / "unfinished.part").write_bytes(b"of a killed writer")
    paths[2].write_bytes(paths[2].read_bytes()[:-5])
    paths[1].write_bytes(b"")
    assert latest_checkpoint(tmp_path) == paths[0]
    assert "iteration_00000060.pt is truncated" in caplog.text
    assert "iteration_00000040.pt is empty" in caplog.text
    new = save(folder, 100)
    assert names(folder) == [path.name for path in (*paths, new)]


def test_later_checkpoints_are_removed_once_the_resumed_run_has_saved(tmp_path):
    for iteration in (20, 40, 60):
        save(tmp_path, iteration)
    assert save(tmp_path, 30) == latest_checkpoint(tmp_path)
    assert names(tmp_path) == ["iteration_00000020.pt", "iteration_00000030.pt"]


def test_the_latest_run_is_the_one_with_the_newest_intact_checkpoint(tmp_path):
    assert find_latest_run(tmp_path) is None
    for age, name in enumerate(("broken", "new", "old")):
        path = save(tmp_path / name / "checkpoints", 20)
        os.utime(path, (1e9 - age, 1e9 - age))
    (tmp_path / "broken/checkpoints/iteration_00000020.pt").write_bytes(b"PK")
    (tmp_path / "empty").mkdir()
    assert find_latest_run(tmp_path) == tmp_path / "new"
    only_best = tmp_path / "only_best" / "checkpoints"
    save(only_best, 1).rename(only_best / "best.pt")
    assert find_latest_run(tmp_path) == tmp_path / "only_best"


def test_a_file_that_the_system_refuses_leaves_the_old_checkpoints_and_no_half_file(
    tmp_path, limits
):
    path = save(tmp_path / "kept", 1)
    limits(1000)
    with pytest.raises(CheckpointError, match=r"00002.pt \(1,\d+ bytes\): File too large"):
        save(tmp_path / "kept", 2)
    limits(None)
    assert names(path.parent) == [path.name] and load_checkpoint(path) == {"iteration": 1}


def test_a_full_and_a_read_only_disk_leave_what_is_there_and_say_why(small_disk):
    disk = small_disk("64k")
    state = {"weights": torch.rand(9000)}
    path = save_checkpoint(disk, state, iteration=1, keep=1)
    full = r"best.pt \(3\d,\d+ bytes\): No space left on device$"
    for _ in range(2):  # nothing of the first failure stands in the way of the next
        with pytest.raises(CheckpointError, match=full):
            save_checkpoint(disk, state, iteration=2, keep=1, best=True)
        assert names(disk) == [path.name]
        assert_same(load_checkpoint(path), state)
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    with pytest.raises(CheckpointError, match="00002.pt .*Read-only file system"):
        save(disk, 2)
    assert_same(load_checkpoint(path), state)


# ---- the format


def test_the_file_says_its_format_and_what_wrote_it_and_the_first_format_is_refused(tmp_path):
    path = save(tmp_path, 1)
    _, facts = read_checkpoint(path)
    data = path.read_bytes()
    digest = hashlib.sha256(data[:-71]).hexdigest()
    assert facts == {
        "format_version": FORMAT_VERSION,
        "torch_version": torch.__version__,
        "bytes": len(data),
        "sha256": digest,
    }
    assert data.endswith(b"sha256:" + digest.encode())
    data = archive_of({"iteration": 3})[:-2] + (71).to_bytes(2, "little")
    path.write_bytes(data + b"sha256:" + hashlib.sha256(data).hexdigest().encode())
    with pytest.raises(CheckpointError, match="names no format"):
        read_checkpoint(path)


def archive_of(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(("version", "reader"), [(3, "version 0.5.0"), (5, "a newer version")])
def test_another_format_is_one_clear_line_and_no_reason_to_fall_back(tmp_path, version, reader):
    directory = tmp_path / "checkpoints"
    save(directory, 1)
    other = directory / "iteration_00000002.pt"
    other.write_bytes(seal(archive_of({"iteration": 2}), format_version=version))
    for read, path in ((load_checkpoint, other), (latest_checkpoint, tmp_path)):
        with pytest.raises(OtherFormatError, match=f"{other} .* {version}, .*{reader}"):
            read(path)


# ---- code in a file whose checksum is right


def test_a_pickle_that_runs_a_program_is_refused_and_runs_nothing(tmp_path, monkeypatch):
    # torch's own switch must not open the door
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    path = save(tmp_path, 1)
    marker = tmp_path / "marker"
    good = path.read_bytes()
    pickle.loads(damaged_files.calling("posix", "system", f"touch {marker}"))
    assert marker.exists()  # so it does harm where it is trusted
    marker.unlink()
    for what, harm in damaged_files.hostile(marker).items():
        path.write_bytes(damaged_files.with_pickle(good, lambda _, harm=harm: harm))
        name = what.split(".")[-1]
        expected = f"{path} .* it wants to run .*{name}; nothing was run"
        with pytest.raises(CheckpointError, match=expected) as error:
            load_checkpoint(path)
        assert str(error.value).isprintable() and not marker.exists()
    path.write_bytes(damaged_files.with_pickle(good, lambda content: content))
    # rebuilding the archive is not what was refused
    assert load_checkpoint(path) == {"iteration": 1}


def test_a_torchscript_archive_is_refused_without_a_warning(tmp_path, recwarn):
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), buffer)
    recwarn.clear()
    (tmp_path / "script.pt").write_bytes(seal(buffer.getvalue()))
    with pytest.raises(CheckpointError, match="script.pt is refused: it is no plain data"):
        load_checkpoint(tmp_path / "script.pt")
    assert not recwarn.list


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (torch.zeros(2), "it holds a Tensor, not a state"),
        ({"env": {1, 2}}, r"state\['env'\] is a set"),
        # a dict that holds itself
        (b"\x80\x02}q\x00X\x01\x00\x00\x00ah\x00s.", "it is no plain data"),
        (b"\x80\x02]", "it is no plain data"),
        (b"", "it is no plain data"),
    ],
    ids=["tensor", "set", "cycle", "torn", "empty"],
)
def test_other_contents_with_a_right_checksum_are_one_clear_line(tmp_path, content, cause):
    path = save(tmp_path, 1)
    if isinstance(content, bytes):
        path.write_bytes(damaged_files.with_pickle(path.read_bytes(), lambda _: content))
    else:
        path.write_bytes(seal(archive_of(content)))
    with pytest.raises(CheckpointError, match=cause) as error:
        load_checkpoint(path)
    assert f"checkpoint {path} is refused: " in str(error.value) and str(error.value).isprintable()


def test_damage_of_all_kinds_is_refused_runs_nothing_and_the_older_checkpoint_is_found(tmp_path):
    folder = tmp_path / "checkpoints"
    older, newest = (
        save_checkpoint(folder, trained_state(), iteration=iteration, keep=2)
        for iteration in (1, 2)
    )
    data = newest.read_bytes()
    damaged = [content for _, content in damaged_files.random_damage(data, 60, seed=0)]
    # a bit of bytes all over the file, and of each of its end
    for at in [*range(0, len(data) - 200, 50), *range(len(data) - 200, len(data))]:
        changed = bytearray(data)
        changed[at] ^= 1 << at % 8
        damaged.append(bytes(changed))
    for content in damaged:
        newest.write_bytes(content)
        with pytest.raises(CheckpointError) as error:
            load_checkpoint(newest)
        assert str(newest) in str(error.value) and str(error.value).isprintable()
    assert len(damaged) > 300 and latest_checkpoint(tmp_path) == older
