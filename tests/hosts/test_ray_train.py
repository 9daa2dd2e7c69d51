"""examples/ray_train.py on a Ray cluster of two nodes, started on this machine.

Ray is no dependency of the tests: pip install 'ray[train]' into an environment of your own.
"""

import json
import os
import signal
import time

import pytest
from train_runs import RECALL, REPO, start, start_training

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
FLAGS = [*RECALL, "--total_steps", 40 * 64, "--checkpoint_every", "2"]


@pytest.fixture
def address(monkeypatch):
    from ray.cluster_utils import Cluster

    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})  # one thread for each rank
    monkeypatch.setenv("RAY_DISABLE_DASHBOARD", "1")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        yield cluster.address
    finally:
        cluster.shutdown()
        os.sched_setaffinity(0, cores)


def result(run_dir):
    found = json.loads((run_dir / "summary.json").read_text())
    return found["iteration"], found["parameter_sha256"]


def test_ray_starts_the_ranks_again_and_the_end_is_the_same(address, tmp_path):
    run_dir = tmp_path / "run"
    options = ["--address", address, "--workers", "2", "--max_failures", "1"]
    job = start(REPO / "examples/ray_train.py", *options, *FLAGS, "--run_dir", run_dir)
    end_s = time.monotonic() + 300
    while not list(run_dir.glob("checkpoints/iteration_*.pt")):
        assert job.poll() is None and time.monotonic() < end_s, job.communicate()
        time.sleep(0.1)
    ranks = json.loads((run_dir / "state.json").read_text())["ranks"]
    os.kill(ranks[1]["pid"], signal.SIGKILL)
    out, err = job.communicate(timeout=400)
    assert job.returncode == 0, out + err
    assert (out + err).count("continuing from") == 1
    alone = start_training(*FLAGS, "--num_gpus", "2", "--run_dir", tmp_path / "alone")
    assert alone.communicate(timeout=300) and alone.returncode == 0
    assert result(run_dir) == result(tmp_path / "alone")
