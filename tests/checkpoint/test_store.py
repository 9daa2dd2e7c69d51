"""Checkpoints are written atomically; damaged files and pickled code are refused."""

import io
import json
import os
import pickle
import subprocess
import zipfile

import numpy as np
import pytest
import torch
from hostile import ODD_FILES, damage

from rl_dist.checkpoint import store
from rl_dist.checkpoint.__main__ import main
from rl_dist.checkpoint.content import CheckpointError
from rl_dist.checkpoint.store import (
    OtherFormatError,
    find_latest_run,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
    seal,
)
from rl_dist.files import log_once
from rl_dist.resume_check import differences

pytestmark = pytest.mark.timeout(60)  # a reader that opens a pipe would block forever


@pytest.fixture(autouse=True)
def nothing_printed_before():
    log_once.cache_clear()


def some_state():
    tensors = {"weight": torch.rand(3, 2), "step": torch.tensor(7.0)}
    return {"policy": tensors, "sizes": (1, 2), "best": None, "name": "x", "on": True}


def save(directory, iteration, keep=10, **options):
    state = {"iteration": iteration}
    return save_checkpoint(directory, state, iteration=iteration, keep=keep, **options)


def name_of(iteration):
    return f"iteration_{iteration:08d}.pt"


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def archive_of(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def with_pickle(content):
    """Return a torch archive whose pickle is replaced by `content`."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive_of({}))) as old, zipfile.ZipFile(buffer, "w") as new:
        for info in old.infolist():
            is_pickle = info.filename.endswith("data.pkl")
            new.writestr(info.filename, content if is_pickle else old.read(info))
    return buffer.getvalue()


def calling(function, argument):
    """Return a protocol 2 pickle that calls `function(argument)` when it is loaded."""
    text = argument.encode()
    head = b"\x80\x02c" + function.replace(" ", "\n").encode() + b"\nX"
    return head + len(text).to_bytes(4, "little") + text + b"\x85R."


# ---- a single file


def test_a_checkpoint_is_loaded_bit_for_bit_also_by_plain_torch(tmp_path):
    state = some_state()
    path = save_checkpoint(tmp_path / "made/on/demand", state, iteration=120, keep=1)
    assert path.name == name_of(120)
    for loaded in (load_checkpoint(path), torch.load(path, weights_only=True)):
        assert differences(loaded, state) == []


# Archives that have a correct checksum although this package did not write them.
FOREIGN = {
    "of a tensor": lambda marker: archive_of(torch.zeros(2)),
    "with a set": lambda marker: archive_of({"env": {1, 2}}),
    "that holds itself": lambda marker: with_pickle(b"\x80\x02}q\x00X\x01\x00\x00\x00ah\x00s."),
    "that runs touch": lambda marker: with_pickle(calling("posix system", f"touch {marker}")),
}


@pytest.mark.parametrize("archive", FOREIGN)
def test_a_foreign_archive_is_refused_and_executes_no_code(archive, tmp_path, monkeypatch, recwarn):
    # This variable tells torch to ignore weights_only; it must have no effect on our loads.
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    path, marker = tmp_path / name_of(1), tmp_path / "marker"
    path.write_bytes(seal(FOREIGN[archive](marker)))
    recwarn.clear()
    with pytest.raises(CheckpointError, match=f"^.*{path}.*$"):
        load_checkpoint(path)
    assert not marker.exists() and not recwarn.list
    # Check that the pickle works: pickle.loads executes its command.
    if "touch" in archive:
        pickle.loads(calling("posix system", f"touch {marker}"))
        assert marker.exists()


def test_any_changed_or_missing_byte_is_refused_and_the_older_checkpoint_is_found(tmp_path):
    folder = tmp_path / "checkpoints"
    older, newest = (
        save_checkpoint(folder, some_state(), iteration=number, keep=2) for number in (1, 2)
    )
    data = newest.read_bytes()
    # flip one bit in every 50th byte of the file, and in each of its last 200 bytes
    for at in [*range(0, len(data) - 200, 50), *range(len(data) - 200, len(data))]:
        changed = bytearray(data)
        changed[at] ^= 1 << at % 8
        for content in (bytes(changed), data[:at]):
            newest.write_bytes(content)
            with pytest.raises(CheckpointError):
                load_checkpoint(newest)
    assert latest_checkpoint(tmp_path) == older


def test_values_that_could_not_be_loaded_are_refused_by_name_when_saved(tmp_path):
    for value in (np.zeros(2), np.float64(1.0), tmp_path):
        with pytest.raises(CheckpointError, match="env/0 is a "):
            save_checkpoint(tmp_path, {"env": [value]}, iteration=1, keep=1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("version, reader", [(4, "version 0.5.0"), (6, "a newer version")])
def test_a_newer_or_older_format_is_an_error_and_no_reason_to_fall_back(
    version, reader, tmp_path, monkeypatch
):
    directory = tmp_path / "checkpoints"
    save(directory, 1)
    other = directory / name_of(2)
    with monkeypatch.context() as patch:
        patch.setattr(store, "FORMAT_VERSION", version)
        save(directory, 2)
    with pytest.raises(OtherFormatError, match=f"{other} .* {version}, .*{reader}"):
        latest_checkpoint(tmp_path)


# ---- the files of a run


@pytest.fixture
def folder(tmp_path):
    """Return a folder with checkpoints of iterations 20, 40 and 60; only 20 is valid."""
    folder = tmp_path / "run" / "checkpoints"
    _, second, third = (save(folder, iteration) for iteration in (20, 40, 60))
    second.write_bytes(b"")
    third.write_bytes(third.read_bytes()[:-5])
    return folder


def test_the_newest_checkpoints_are_kept_and_the_newest_is_found(tmp_path):
    folder = tmp_path / "checkpoints"
    *_, newest = (save(folder, iteration, keep=3) for iteration in (10, 20, 40, 60))
    assert names(folder) == [name_of(number) for number in (20, 40, 60)]
    assert latest_checkpoint(tmp_path) == latest_checkpoint(folder) == newest


def test_the_newest_valid_checkpoint_is_found_and_others_are_named(folder, caplog):
    assert latest_checkpoint(folder) == folder / name_of(20)
    assert all(name_of(number) in caplog.text for number in (40, 60))


def test_a_save_removes_newer_checkpoints_and_leftovers(folder):
    (folder / "unfinished.part").write_bytes(b"of a killed writer")
    # A run that resumes from iteration 20 and saves iteration 30 deletes the files of 40 and 60.
    assert save(folder, 30, keep=1) == latest_checkpoint(folder)
    assert names(folder) == [name_of(30)]


def test_an_empty_folder_has_neither_a_run_nor_a_checkpoint(tmp_path):
    assert find_latest_run(tmp_path) is latest_checkpoint(tmp_path) is None


def test_the_run_with_the_newest_valid_checkpoint_is_found(folder, tmp_path):
    assert find_latest_run(tmp_path) == tmp_path / "run"
    os.utime(folder / name_of(20), (1e9, 1e9))
    only_best = tmp_path / "only_best" / "checkpoints"
    save(only_best, 1).rename(only_best / "best.pt")
    assert find_latest_run(tmp_path) == tmp_path / "only_best"


@pytest.fixture(params=[name_of(2), name_of(9), "unfinished.part"])
def special(request, odd, tmp_path):
    """Return a special file in a folder with a checkpoint, and whether it counts as damaged."""
    path = tmp_path / "run" / "checkpoints" / request.param
    save(path.parent, 1)
    ODD_FILES[odd](path)
    # only regular files count as checkpoints
    return path, odd == "sparse giant" and path.suffix == ".pt"


EACH_ODD = pytest.mark.parametrize("odd", ODD_FILES)


@EACH_ODD
def test_a_special_file_blocks_no_reader(special):
    path, is_damaged = special
    folder = path.parent
    assert latest_checkpoint(folder).name == name_of(1)
    assert main(["verify", str(folder)]) == int(is_damaged) and main(["inspect", str(folder)]) == 0
    with pytest.raises(CheckpointError):
        load_checkpoint(path)


@EACH_ODD
def test_a_special_file_blocks_no_save(special, odd):
    path, is_damaged = special
    folder, stays = path.parent, not is_damaged and path.name == name_of(9)
    if odd == "directory" and not stays:
        with pytest.raises(CheckpointError, match="cannot write"):
            save(folder, 2, best=True)
        assert (path / "of a user").exists()
        return
    for iteration in (2, 3, 4):
        save(folder, iteration, keep=3, best=True)
    assert {*names(folder)} == {*map(name_of, (2, 3, 4)), "best.pt", *[path.name] * stays}
    assert load_checkpoint(folder / "best.pt") == load_checkpoint(folder / name_of(4))


def test_a_save_on_a_full_or_read_only_disk_fails_and_changes_no_file(small_disk):
    disk = small_disk("64k")
    state = {"weights": torch.rand(9000)}
    path = save_checkpoint(disk, state, iteration=1, keep=1)
    full = "best.pt: No space left on device$"
    for _ in range(2):  # the first failed save must not leave a partial file
        with pytest.raises(CheckpointError, match=full):
            save_checkpoint(disk, state, iteration=2, keep=1, best=True)
        assert names(disk) == [path.name]
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    with pytest.raises(CheckpointError, match="00002.pt: Read-only file system"):
        save(disk, 2)
    assert differences(load_checkpoint(path), state) == []


# ---- the command line: list, verify, inspect


@pytest.fixture(params=[True, False])
def newest(request, copy):
    """Return the newest checkpoint of a run, and whether it is whole or damaged."""
    path = copy / "checkpoints" / name_of(3)
    if not request.param:
        damage(path)
    return path, request.param


def test_verify_and_inspect_fail_for_a_damaged_checkpoint(newest, copy):
    path, is_whole = newest
    assert main(["verify", str(copy)]) == main(["inspect", str(path)]) == (not is_whole)


def test_list_shows_every_checkpoint_and_the_damaged_one(newest, copy, capsys):
    assert main(["list", str(copy)]) == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    assert all(name_of(number) in row for number, row in zip((3, 2, 1), rows, strict=False))
    assert ["damaged" in row for row in rows] == [not newest[1], False, False, False]


def test_inspect_shows_the_newest_valid_checkpoint(newest, copy, capsys):
    expected = json.loads(load_checkpoint(copy / "checkpoints" / name_of(2))["config"])
    assert main(["inspect", str(copy), "--json"]) == 0
    about = json.loads(capsys.readouterr().out)
    assert about["path"].endswith(name_of(3 if newest[1] else 2)) and about["config"] == expected
