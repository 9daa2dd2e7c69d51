"""Folders of killed launchers go at the next start, and no others."""

import os
import tempfile
from pathlib import Path

from rl_dist.launch.rank_group import LOCK, PREFIX, job_directory


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
