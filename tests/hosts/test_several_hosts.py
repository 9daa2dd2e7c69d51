"""Training over several hosts gives the same result, even if a host fails.

The hosts are simulated with namespaces on this machine.
"""

import json
import time

import pytest
import torch
from simulated_hosts import connected_or_skip, torchrun
from train_runs import RECALL, end_of, iterations, records, start_training, wait_until

from rl_dist.checkpoint.store import iteration_in_name, latest_checkpoint, load_checkpoint
from rl_dist.resume_check import differences, result_of

ITERATIONS = 80
FLAGS = [*RECALL, "--total_steps", ITERATIONS * 64, "--checkpoint_every=2"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def network(tmp_path):
    with connected_or_skip(tmp_path, "first", "second") as connected:
        yield connected


def on_one_host(run_dir, *flags):
    end_of(start_training(*FLAGS, *flags, "--run_dir", run_dir))
    return run_dir


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return on_one_host(tmp_path_factory.mktemp("one_host") / "run", "--num_gpus=2")


def saved(run_dir):
    return max(map(iteration_in_name, run_dir.glob("checkpoints/iteration_*.pt")), default=0)


def on_both(network, run_dir, *flags, **options):
    words = [*FLAGS, "--run_dir", run_dir, *flags]
    return [torchrun(network.hosts[name], *words, **options) for name in network.names]


@pytest.mark.parametrize("shared_disk", [True, False])
def test_a_killed_host_is_replaced_and_the_run_continues_from_its_checkpoint(
    shared_disk, network, tmp_path, uninterrupted
):
    """Test a disk that both hosts share, and separate disks mounted at the same path.

    Before the second host is killed, it loses its network for 20 s; the run pauses meanwhile.
    """
    (tmp_path / "disk").mkdir()

    def start_host(name):
        (tmp_path / name).mkdir(exist_ok=True)
        mount = f"mount --bind {tmp_path / name} {tmp_path / 'disk'}"
        return network.start(name, "true" if shared_disk else mount)

    for name in network.names:
        network.hosts[name].kill()
        start_host(name)
    jobs = on_both(network, tmp_path / "disk/run", cwd=tmp_path / "disk")
    run_dir = tmp_path / ("disk/run" if shared_disk else "first/run")
    wait_until(lambda: saved(run_dir) >= 4, jobs[0].process)
    network.hosts["second"].link("down")
    time.sleep(20)
    network.hosts["second"].link("up")
    wait_until(lambda: saved(run_dir) >= 8, jobs[0].process)
    assert "continuing from" not in jobs[0].text
    network.hosts["second"].kill()
    flags = [*FLAGS, "--run_dir", tmp_path / "disk/run"]
    jobs[1] = torchrun(start_host("second"), *flags, cwd=tmp_path)
    logs = [job.succeed() for job in jobs]
    assert logs[0].count("continuing from") == 1
    assert differences(result_of(run_dir), result_of(uninterrupted)) == []
    assert iterations(run_dir) == list(range(1, ITERATIONS + 1))
    assert shared_disk or saved(tmp_path / "second/run") >= 8
    state = json.loads((run_dir / "state.json").read_text())
    assert [rank["host"] for rank in state["ranks"]] == ["first", "second"]


def test_a_second_host_may_join_and_leave_and_the_curve_equals_that_of_one_host(network, tmp_path):
    run_dir = tmp_path / "run"
    more = ["--precision=fp64", "--resume=auto"]
    flags = [*FLAGS, *more, "--run_dir", run_dir, "--collective_timeout=20"]
    options = {"nodes": "1:2", "conf": "last_call_timeout=2"}
    job = torchrun(network.hosts["first"], *flags, **options)
    wait_until(lambda: saved(run_dir) >= 4, job.process)
    torchrun(network.hosts["second"], *flags, **options)

    def both_have_saved():
        shared = [line["iteration"] for line in records(run_dir) if len(line["ranks"]) == 2]
        return shared and saved(run_dir) > shared[0]

    wait_until(both_have_saved, job.process)
    network.hosts["second"].kill()
    job.succeed()
    counts = [len(line["ranks"]) for line in records(run_dir)]
    assert counts[0] == counts[-1] == 1 and 2 in counts and len(counts) == ITERATIONS
    runs = run_dir, on_one_host(tmp_path / "alone", *more)
    one, two = (load_checkpoint(latest_checkpoint(run))["policy"] for run in runs)
    torch.testing.assert_close(one, two, rtol=0, atol=1e-9)


def test_a_lost_first_host_ends_the_ranks_and_a_new_start_continues(
    network, tmp_path, uninterrupted
):
    """On every host, torchrun uses a store that runs on the first host.

    When that store is lost, torchrun on the second host may hang for minutes.
    """
    run_dir, flags = tmp_path / "run", ["--collective_timeout=20"]
    first, second = on_both(network, run_dir, *flags)
    wait_until(lambda: saved(run_dir) >= 6, first.process)
    network.hosts["first"].kill()
    wait_until(lambda: "may be lost" in second.text, within_s=60)
    # Restart both hosts, as a scheduler would do.
    for name in network.names:
        network.hosts[name].kill()
        network.start(name)
    for job in on_both(network, run_dir, *flags):
        job.succeed()
    assert differences(result_of(run_dir), result_of(uninterrupted)) == []
