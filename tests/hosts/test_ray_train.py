"""examples/ray_train.py on a Ray cluster of two nodes, started on this machine.

The other tests do not need Ray. To run this one, install 'ray[train]' in a separate environment.
"""

import os
import signal

import pytest
from train_runs import RECALL, REPO, end_of, start, start_training, wait_until

from rl_dist.files import read_object
from rl_dist.resume_check import differences, result_of

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
FLAGS = [*RECALL, "--total_steps", 40 * 64, "--checkpoint_every", "2"]


@pytest.fixture
def address(monkeypatch):
    from ray.cluster_utils import Cluster

    cores = os.sched_getaffinity(0)
    # With a single core, each rank uses one thread.
    os.sched_setaffinity(0, {min(cores)})
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


def test_ray_restarts_the_ranks_and_the_result_is_the_same(address, tmp_path):
    run_dir, alone = tmp_path / "run", tmp_path / "alone"
    options = ["--address", address, "--workers", "2", "--max_failures", "1"]
    job = start(REPO / "examples/ray_train.py", *options, *FLAGS, "--run_dir", run_dir)
    wait_until(lambda: list(run_dir.glob("checkpoints/iteration_*.pt")), job, 300)
    ranks = read_object(run_dir / "state.json")["ranks"]
    os.kill(ranks[1]["pid"], signal.SIGKILL)
    out, err = job.communicate(timeout=400)
    assert job.returncode == 0 and (out + err).count("continuing from") == 1, out + err
    end_of(start_training(*FLAGS, "--num_gpus", "2", "--run_dir", alone))
    assert differences(result_of(run_dir), result_of(alone)) == []
