"""Training over several hosts: the same result, and what happens when one fails.

The hosts are network namespaces of this machine.
"""

import json
import shutil
import sys
import time
from pathlib import Path

import pytest
import torch
from simulated_hosts import connected_or_skip, torchrun
from train_runs import RECALL, REPO, records, start_training

from rl_dist.checkpoint.store import iteration_in_name, latest_checkpoint, load_checkpoint

ITERATIONS = 40
SHORT = [*RECALL, "--total_steps", 5 * 64]
LONG = [*RECALL, "--total_steps", ITERATIONS * 64, "--checkpoint_every", "2"]
# sizes that divide over two and three ranks
BY_THREE = [word.replace("4", "6") for word in RECALL]
BY_THREE += ["--total_steps", ITERATIONS * 6 * 16, "--checkpoint_every", "2"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def network(tmp_path, request):
    names = getattr(request, "param", ["first", "second"])
    with connected_or_skip(tmp_path, *names) as found:
        yield found


def result(run_dir):
    summary = json.loads(Path(run_dir, "summary.json").read_text())
    return summary["iteration"], summary["parameter_sha256"]


def on_one_host(run_dir, *flags):
    """The result of an uninterrupted training."""
    job = start_training(*flags, "--run_dir", run_dir)
    _, err = job.communicate(timeout=300)
    assert job.returncode == 0, err
    return result(run_dir)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("one_host") / "run"
    return on_one_host(run_dir, *LONG, "--num_gpus", "2")


def saved(run_dir):
    newest = latest_checkpoint(run_dir)
    return iteration_in_name(newest) if newest else 0


def wait_for(true, job):
    while not true():
        assert job.process.poll() is None, job.text
        time.sleep(0.05)


def on_both(network, *flags, **options):
    return [torchrun(network.hosts[name], *flags, **options) for name in network.names]


def test_two_hosts_train_as_one_host_with_two_ranks_does(network, tmp_path):
    options = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "0"}  # which a run does without, if it can
    for job in on_both(network, *SHORT, "--run_dir", tmp_path / "run", **options):
        job.succeed()
    state = json.loads((tmp_path / "run/state.json").read_text())
    assert [rank["host"] for rank in state["ranks"]] == ["first", "second"]
    alone = on_one_host(tmp_path / "alone", *SHORT, "--num_gpus", "2")
    assert result(tmp_path / "run") == alone


def test_a_host_that_never_joins_is_named_within_the_timeout(network, tmp_path):
    """By torchrun, which waits for its agents; by us, where another launcher set the variables."""
    flags = [*SHORT, "--run_dir", tmp_path / "run"]
    first = network.hosts["first"]
    agent = torchrun(first, *flags, conf="join_timeout=5")
    variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    variables |= {"MASTER_ADDR": "first", "MASTER_PORT": "29501"}
    command = [sys.executable, "train_distributed.py", *flags, "--startup_timeout", "5"]
    rank = first.start(*command, **variables)
    assert agent.wait() == 1 and "RendezvousTimeoutError" in agent.text.splitlines()[-1]
    assert rank.wait() == 2
    line = rank.text.splitlines()[-1]
    assert "rank 0 did not meet all 2 ranks at MASTER_ADDR first" in line and "within 5 s" in line
    assert not (tmp_path / "run/checkpoints").exists()


@pytest.mark.parametrize("by_torchrun", [True, False])
def test_a_host_with_other_code_is_refused_by_name(by_torchrun, network, tmp_path):
    copy = tmp_path / "copy"
    ignored = shutil.ignore_patterns(".*", "runs", "shared", "tests", "site", "__pycache__")
    shutil.copytree(REPO, copy, ignore=ignored)
    with (copy / "agents/advantages.py").open("a") as code:
        code.write("# another version")
    flags = [*SHORT, "--run_dir", tmp_path / "run"]
    first, second = (network.hosts[name] for name in network.names)
    if by_torchrun:  # once, although torchrun starts the ranks again
        jobs = [torchrun(first, *flags)]
        jobs.append(torchrun(second, *flags, code=copy, PYTHONPATH=copy))
    else:  # another launcher says less
        variables = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "first"}
        variables |= {"MASTER_PORT": "29502"}
        command = [sys.executable, "train_distributed.py", *flags]
        jobs = [first.start(*command, RANK="0", **variables)]
        variables |= {"RANK": "1", "PYTHONPATH": copy}
        jobs.append(second.start(*command, cwd=copy, **variables))
    code = 1 if by_torchrun else 2
    assert [job.wait() for job in jobs] == [code, code]
    line = "error: rank 1 on host second has this project's code, version"
    assert [job.text.count(line) for job in jobs] == [1, 1]


@pytest.mark.parametrize("shared_disk", [True, False])
def test_a_killed_host_is_replaced_and_the_run_goes_on_from_its_checkpoint(
    shared_disk, network, tmp_path, uninterrupted
):
    """Test one shared disk, and one disk per host under the same path."""
    (tmp_path / "disk").mkdir()

    def host(name):
        (tmp_path / name).mkdir(exist_ok=True)
        mount = f"mount --bind {tmp_path / name} {tmp_path / 'disk'}"
        return network.start(name, "true" if shared_disk else mount)

    for name in network.names:
        network.hosts[name].kill()
        host(name)
    flags = [*LONG, "--run_dir", tmp_path / "disk/run"]
    jobs = on_both(network, *flags, cwd=tmp_path / "disk")
    run_dir = tmp_path / ("disk/run" if shared_disk else "first/run")
    wait_for(lambda: saved(run_dir) >= 6, jobs[0])
    network.hosts["second"].kill()
    jobs[1] = torchrun(host("second"), *flags, cwd=tmp_path)
    logs = [job.succeed() for job in jobs]
    assert logs[0].count("continuing from") == 1
    assert result(run_dir) == uninterrupted
    assert [line["iteration"] for line in records(run_dir)] == list(range(1, ITERATIONS + 1))
    assert shared_disk or saved(tmp_path / "second/run") >= 6


def test_a_link_that_is_cut_for_20_s_costs_20_s(network, tmp_path, uninterrupted):
    run_dir = tmp_path / "run"
    jobs = on_both(network, *LONG, "--run_dir", run_dir)
    wait_for(lambda: saved(run_dir) >= 6, jobs[0])
    network.hosts["second"].link("down")
    time.sleep(20)
    network.hosts["second"].link("up")
    for job in jobs:
        assert "continuing from" not in job.succeed()
    assert result(run_dir) == uninterrupted


def test_of_one_to_two_hosts_one_may_come_and_leave_and_the_curve_is_that_of_one(network, tmp_path):
    runs = run_dir, alone = tmp_path / "run", tmp_path / "alone"
    flags = [*LONG, "--precision", "fp64", "--resume", "auto"]
    options = {"nodes": "1:2", "conf": "last_call_timeout=2"}
    first, second = (network.hosts[name] for name in network.names)
    elastic = [*flags, "--run_dir", run_dir, "--collective_timeout", "20"]
    job = torchrun(first, *elastic, **options)
    wait_for(lambda: saved(run_dir) >= 4, job)
    torchrun(second, *elastic, **options)

    def both_have_saved():
        shared = [line["iteration"] for line in records(run_dir) if len(line["ranks"]) == 2]
        return shared and saved(run_dir) > shared[0]

    wait_for(both_have_saved, job)
    second.kill()
    job.succeed(300)
    counts = [len(line["ranks"]) for line in records(run_dir)]
    assert counts[0] == counts[-1] == 1 and 2 in counts and len(counts) == ITERATIONS
    on_one_host(alone, *flags)
    for name in ("episode/return", "loss/policy", "loss/value", "optim/grad_norm"):
        one, two = ([line[name] or 0.0 for line in records(run)] for run in runs)
        assert one == pytest.approx(two, abs=1e-9), name
    one, two = (load_checkpoint(latest_checkpoint(run))["policy"] for run in runs)
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=0, atol=1e-9, msg=name)


@pytest.mark.parametrize("network", [["first", "second", "third"]], indirect=True)
def test_a_host_may_join_without_a_restart_that_counts(network, tmp_path):
    """The first host's torchrun ends its rank immediately, the second one's seconds later."""
    flags = [*BY_THREE, "--run_dir", tmp_path / "run", "--resume", "auto"]
    flags += ["--on_event", f'echo "$RL_EVENT" >> {tmp_path}/events']
    options = {"nodes": "2:3", "restarts": 0, "conf": "last_call_timeout=2"}
    first, second, third = (network.hosts[name] for name in network.names)
    jobs = [torchrun(first, *flags, **options)]
    jobs.append(torchrun(second, *flags, **options, interval=5))
    wait_for(lambda: saved(tmp_path / "run") >= 6, jobs[0])
    jobs.append(torchrun(third, *flags, **options))
    phases = set()
    while jobs[0].process.poll() is None:  # not stopped, as by a user
        phases.add(json.loads((tmp_path / "run/state.json").read_text())["phase"])
        time.sleep(0.05)
    for job in jobs:
        assert "stopped by" not in job.succeed()
    assert "restarting" in phases and not {"stopped", "failed"} & phases
    assert (tmp_path / "events").read_text().split() == ["restarted", "finished"]
    counts = [len(line["ranks"]) for line in records(tmp_path / "run")]
    assert set(counts) == {2, 3} and counts == sorted(counts) and len(counts) == ITERATIONS


def test_a_lost_first_host_ends_the_ranks_and_a_new_start_goes_on(network, tmp_path, uninterrupted):
    """It holds the store of all torchruns; theirs may then hang for minutes."""
    flags = [*LONG, "--run_dir", tmp_path / "run", "--collective_timeout", "20"]
    first, second = on_both(network, *flags)
    wait_for(lambda: saved(tmp_path / "run") >= 6, first)
    network.hosts["first"].kill()
    lost_s = time.monotonic()
    while "it may be lost" not in second.text:
        assert time.monotonic() - lost_s < 60, second.text
        time.sleep(0.2)
    for name in network.names:  # as a scheduler does
        network.hosts[name].kill()
        network.start(name)
    for job in on_both(network, *flags):
        job.succeed()
    assert result(tmp_path / "run") == uninterrupted
