"""Folders of killed launchers go at the next start, and no others."""

import multiprocessing
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rl_dist.launch.rank_group import LOCK, job_directory

HOLDS = (
    "from rl_dist.launch.rank_group import job_directory\n"
    "with job_directory() as d: print(d, flush=True); input()"
)


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def start_holder():
    job = subprocess.Popen(
        [sys.executable, "-c", HOLDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    return job, Path(job.stdout.readline().strip())


def test_the_folder_of_a_killed_launcher_goes_and_that_of_a_living_one_stays(temporary):
    (living, kept) = start_holder()
    (killed, left) = start_holder()
    killed.kill()
    killed.wait()
    assert left.is_dir()
    with job_directory() as own:
        assert not left.exists() and kept.is_dir() and Path(own).is_dir()
    assert list(temporary.iterdir()) == [kept]
    living.communicate("\n")
    assert living.returncode == 0 and not list(temporary.iterdir())


def test_what_is_not_ours_stays(temporary):
    (temporary / "rl_dist_results").mkdir()
    (temporary / "rl_dist_file").touch()
    (temporary / "rl_dist_pipe").mkdir()
    os.mkfifo(temporary / "rl_dist_pipe" / LOCK)
    mine = temporary / "mine"
    mine.mkdir()
    (mine / LOCK).touch()
    (temporary / "rl_dist_link").symlink_to(mine)
    before = set(temporary.rglob("*"))
    with job_directory():
        pass
    assert set(temporary.rglob("*")) == before


def _make_and_leave(number, told):
    for _ in range(number):
        with job_directory() as folder:
            told.put(Path(folder, LOCK).exists())


def test_launchers_that_start_together_leave_each_other_their_folders(temporary):
    fork = multiprocessing.get_context("fork")
    told = fork.Queue()
    jobs = [fork.Process(target=_make_and_leave, args=(50, told)) for _ in range(4)]
    for job in jobs:
        job.start()
    assert [told.get(timeout=30) for _ in range(4 * 50)] == [True] * 4 * 50
    for job in jobs:
        job.join()
    assert [job.exitcode for job in jobs] == [0] * 4 and not list(temporary.iterdir())
