"""Hooks and fixtures for all tests."""

import faulthandler
import gc
import os
import resource
import signal
import subprocess
import sys

# Set this before NumPy is imported. On a busy machine, NumPy is 10 times slower with 2 threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

# The tensors in tests are tiny: a second thread would only add waiting. Training processes that
# tests start inherit OMP_NUM_THREADS.
torch.set_num_threads(1)
# Let processes share compiled modules (.pyc files), which saves each process 0.2 s.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Shells start background jobs with SIGINT ignored. Training in tests must not ignore SIGINT.
signal.signal(signal.SIGINT, signal.default_int_handler)


# The slowest files run first, so that the processes of pytest-xdist end at about the same time.
LONGEST = (
    *("batch_choice", "world_size", "rl_dist_launch", "train_command", "setup_check"),
    *("restarts", "rl_dist_launch_environment", "evaluate", "python_api", "resume_check"),
    *("short_run", "supervisor", "export", "docs_run", "faults", "imports", "workers", "watchdog"),
    *("hostile", "supervised", "validation", "names"),
)


def pytest_collection_modifyitems(items):
    """Run the slowest files first; extend the timeout of tests that launch two ranks."""
    order = {f"test_{name}": number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(LONGEST)))
    for item in items:
        if "ranks_folder" in item.fixturenames:
            item.add_marker(pytest.mark.timeout(900), append=False)


def pytest_collection_finish():
    """Freeze all existing objects, so that garbage collection skips them in tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def all_of_two_ranks(request, tmp_path_factory):
    """Run the exercises of all collected test files on two ranks, in a single launch.

    If an exercise fails, the next launch continues with the exercise after it.
    """
    from filelock import FileLock
    from two_ranks import EXERCISES, exercise_in_turn, is_done

    from rl_dist.launch.ranks import run_ranks

    asking = {
        item.path.stem for item in request.session.items if "ranks_folder" in item.fixturenames
    }
    shared = tmp_path_factory.getbasetemp()
    # under pytest-xdist each process has its own folder inside the shared folder
    if hasattr(request.config, "workerinput"):
        shared = shared.parent
    folder = shared / "two_ranks"
    names = [name for name in EXERCISES if name in asking]
    with FileLock(shared / "two_ranks.lock"), pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        if folder.exists():
            return folder
        for name in names:
            (folder / name).mkdir(parents=True)
        while names:
            report = run_ranks(exercise_in_turn, (str(folder), names), num_ranks=2)
            while names and is_done(folder / names[0]):
                del names[0]
            if names:
                (folder / names.pop(0) / "launch.error").write_text(report.summary)
    return folder


@pytest.fixture(scope="module")
def ranks_folder(all_of_two_ranks, request):
    """Return the folder where two ranks have saved their results for this test file."""
    from two_ranks import is_done

    folder = all_of_two_ranks / request.path.stem
    failures = [path.read_text() for path in sorted(folder.glob("*.error"))]
    assert is_done(folder), "\n".join([f"the exercise of {request.path.name} failed:", *failures])
    return folder


@pytest.fixture(scope="module")
def ranks(ranks_folder):
    """Return the results that rank 0 and rank 1 saved for this test file."""
    return [torch.load(ranks_folder / f"rank_{rank}.pt", weights_only=True) for rank in (0, 1)]


@pytest.fixture(scope="module")
def world():
    """Open a process group of size 1 in this process."""
    from agents_ranks import world_of_one

    with world_of_one() as opened:
        yield opened


@pytest.fixture
def untraced(monkeypatch):
    """Make export write a placeholder file, because tracing a model takes seconds."""
    from agents import export

    monkeypatch.setattr(export, "write_onnx", lambda step, path, contract: path.write_text("model"))
    monkeypatch.setattr(export, "run_onnx", lambda path: None)
    monkeypatch.setattr(export, "largest_difference", lambda *_: 0.0)


@pytest.fixture
def limits():
    """Return a function that limits the size of written files; None lifts the limit.

    This imitates a full disk without root privileges.
    """
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]

    def limit(num_bytes):
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard if num_bytes is None else num_bytes, hard))
        faulthandler.cancel_dump_traceback_later()
        if num_bytes is not None:
            # Under this limit pytest-timeout cannot write its report, so it would not end the test.
            faulthandler.dump_traceback_later(100, exit=True, file=sys.__stderr__)

    yield limit
    limit(None)


@pytest.fixture
def small_disk(tmp_path):
    """Return a function that mounts a file system of a given size, such as 64k."""
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
