"""Hooks and fixtures for all tests."""

import faulthandler
import gc
import os
import resource
import signal
import subprocess
import sys

# numpy reads it when it is imported: on a busy machine its second thread costs ten times the work
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from filelock import FileLock

# The tests' tensors are tiny: a second thread only waits, many times longer on a machine that is
# busy. The trainings that tests start see the variable.
torch.set_num_threads(1)
# What one process has compiled serves the next ones: 0.2 s of each.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# A shell starts background jobs with SIGINT ignored, and every training of a test would inherit
# that.
signal.signal(signal.SIGINT, signal.default_int_handler)


# The longest first: so both processes of pytest-xdist, which take a file at a time, end together.
LONGEST = (
    *("batch_size", "world_size", "rl_dist_launch", "train_command", "setup_check"),
    *("restarts", "rl_dist_launch_environment", "evaluate", "python_api", "resume_check"),
    *("short_run", "supervisor", "export", "docs_run", "faults", "imports", "workers", "watchdog"),
    *("hostile", "all_reduce_bench", "supervised", "memory"),
)


def pytest_collection_modifyitems(items):
    """Put long files first; the first test of what two ranks did waits for all that they do."""
    order = {f"test_{name}": number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(LONGEST)))
    for item in items:
        if "ranks_folder" in item.fixturenames:
            item.add_marker(pytest.mark.timeout(900), append=False)


def pytest_collection_finish():
    """Freeze the objects of all modules.

    The garbage collector then walks only over the objects of a test.
    """
    gc.collect()
    gc.freeze()


def on_two_ranks(folder, names):
    """Launch the exercises of test files."""
    from two_ranks import exercise_in_turn

    from rl_dist.launch.ranks import launch

    for name in names:
        (folder / name).mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        return launch(exercise_in_turn, (str(folder), names), num_ranks=2)


@pytest.fixture(scope="session")
def all_of_two_ranks(request, tmp_path_factory):
    """Run the exercises of all tested files on two ranks, in one launch."""
    from two_ranks import EXERCISES

    asking = {
        item.path.stem for item in request.session.items if "ranks_folder" in item.fixturenames
    }
    shared = tmp_path_factory.getbasetemp()
    # one of pytest-xdist's processes, each of which has a folder in it
    if hasattr(request.config, "workerinput"):
        shared = shared.parent
    folder = shared / "two_ranks"
    with FileLock(shared / "two_ranks.lock"):
        if not folder.exists():
            on_two_ranks(folder, [name for name in EXERCISES if name in asking])
    return folder


@pytest.fixture(scope="module")
def ranks_folder(all_of_two_ranks, request, tmp_path_factory):
    """The folder in which two ranks have left what they found for this file."""
    name = request.path.stem
    if len(list((all_of_two_ranks / name).glob("done_*"))) == 2:
        return all_of_two_ranks / name
    alone = tmp_path_factory.mktemp("alone")  # another file's exercise has failed, or this one
    assert on_two_ranks(alone, [name]) == 0
    return alone / name


@pytest.fixture(scope="module")
def world():
    """A process group of size 1 in this process."""
    from agents_ranks import world_of_one

    with world_of_one() as opened:
        yield opened


@pytest.fixture
def untraced(monkeypatch):
    """Let a word stand for every exported model, whose tracing takes seconds."""
    from agents.export import command

    monkeypatch.setattr(
        command, "write_onnx", lambda step, path, contract: path.write_text("model")
    )
    monkeypatch.setattr(command, "run_onnx", lambda path: None)
    monkeypatch.setattr(command, "largest_difference", lambda *_: 0.0)


@pytest.fixture
def limits():
    """Lets the system refuse this process's longer files (None: no more): a real error, no root."""
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]

    def limit(num_bytes):
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard if num_bytes is None else num_bytes, hard))
        faulthandler.cancel_dump_traceback_later()
        if num_bytes is not None:
            # pytest-timeout would fail to write what it knows, and then end nothing
            faulthandler.dump_traceback_later(100, exit=True, file=sys.__stderr__)

    yield limit
    limit(None)


@pytest.fixture
def small_disk(tmp_path):
    """Mounts a file system of a size such as 64k."""
    folder = tmp_path / "disk"

    def mount(size):
        folder.mkdir()
        made = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True
        )
        if made.returncode:
            pytest.skip("needs root, to mount a small file system")
        return folder

    yield mount
    subprocess.run(["umount", folder], capture_output=True)
