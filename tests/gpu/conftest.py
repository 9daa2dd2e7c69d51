"""Skip GPU tests without a GPU, and write a report that a user can send back."""

import os
import platform
import time
from pathlib import Path

import pytest
import torch
from gpu_jobs import DEVICE, world_on

from rl_dist.machine import get_multi_gpu_status


def pytest_collection_modifyitems(items):
    """Skip tests that need more GPUs than this machine has."""
    count = torch.cuda.device_count()
    for item in items:
        if item.path.parent != Path(__file__).parent:
            continue
        needed = 2 if "two_gpus" in item.path.stem else 1
        item.add_marker(pytest.mark.gpu)
        if count < needed:
            missing = f"needs {needed} CUDA GPU(s), torch sees {count}"
            item.add_marker(pytest.mark.skip(reason=missing))


@pytest.fixture(autouse=True)
def gpus():
    """Free unused GPU memory after each test."""
    yield
    torch.cuda.empty_cache()


@pytest.fixture
def world(gpus):
    """Open a world of one rank on the first GPU, over NCCL."""
    with world_on(DEVICE) as opened:
        yield opened


def pytest_terminal_summary(terminalreporter):
    """Write a table of the results and the machine to the file named by GPU_REPORT."""
    path = os.environ.get("GPU_REPORT")
    if not path:
        return
    lines = [f"# GPU tests, {time.strftime('%Y-%m-%d %H:%M')}", ""]
    lines += [f"- {gpu}" for gpu in get_multi_gpu_status()]
    lines += [f"- torch {torch.__version__}, {platform.platform()}", ""]
    lines += ["| test | result | seconds | figures |", "|---|---|---|---|"]
    for result in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(result, []):
            figures = ", ".join(f"{name} {value}" for name, value in report.user_properties)
            name = report.nodeid.rpartition("/")[2]
            why = report.longrepr[2] if result == "skipped" else figures
            lines.append(f"| {name} | {result} | {report.duration:.1f} | {why} |")
            if result in ("failed", "error"):
                lines.append(f"| | | | {' '.join(report.longreprtext.split())[-600:]} |")
    Path(path).write_text("\n".join(lines) + "\n")
    terminalreporter.write_line(f"wrote {path}: please send it back, with or without failures")
