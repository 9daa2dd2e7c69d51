"""Skip tests if there are too few GPUs; describe the machine in the test report."""

import platform
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


@pytest.fixture(autouse=True, scope="session")
def machine(record_testsuite_property):
    """Add the state of the GPUs and the software versions to the report."""
    record_testsuite_property("gpus", get_multi_gpu_status())
    record_testsuite_property("software", f"torch {torch.__version__}, {platform.platform()}")


@pytest.fixture
def world():
    """Open a world of one rank on the first GPU, over NCCL."""
    with world_on(DEVICE) as opened:
        yield opened
    torch.cuda.empty_cache()
