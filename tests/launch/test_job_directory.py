"""The folder in which ranks meet: on a full disk too, and gone once its launcher is."""

import os
import tempfile
from pathlib import Path

from rl_dist.launch.rank_group import LOCK, PREFIX, job_directory, store_in_memory
from rl_dist.process_group.rendezvous import open_store


def test_the_folder_of_a_killed_launcher_goes_and_all_others_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed = tmp_path / f"{PREFIX}killed"
    killed.mkdir()
    (killed / LOCK).touch()
    # what is not ours
    (tmp_path / f"{PREFIX}results").mkdir()
    (tmp_path / f"{PREFIX}file").touch()
    (tmp_path / f"{PREFIX}pipe").mkdir()
    os.mkfifo(tmp_path / f"{PREFIX}pipe" / LOCK)
    others = set(tmp_path.iterdir()) - {killed}
    with job_directory() as living:
        assert not killed.exists() and Path(living).stat().st_mode & 0o777 == 0o700
        with job_directory() as own:
            assert set(tmp_path.iterdir()) == others | {Path(living), Path(own)}
    assert set(tmp_path.iterdir()) == others


def test_ranks_meet_though_the_disk_of_their_folder_is_full(small_disk, monkeypatch):
    monkeypatch.delenv("MASTER_PORT", raising=False)
    folder = small_disk("4k")
    with store_in_memory(f"{folder}/store_0"):
        first, second = (open_store(rank, 2, str(folder), 20.0) for rank in range(2))
        first.set("key", "x" * 20_000)
        assert second.get("key") == b"x" * 20_000
        assert not any(path.is_file() and not path.is_symlink() for path in folder.iterdir())
