"""Test deploy/slurm.sbatch on a SLURM cluster of two simulated nodes.

The nodes are Linux namespaces on this machine. Debian's SLURM packages are unpacked into a
temporary folder; nothing is installed.
"""

import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from simulated_hosts import REPO, connected_or_skip
from train_runs import RECALL, end_of, start_training, wait_until

from rl_dist.checkpoint.store import iteration_in_name, latest_checkpoint
from rl_dist.files import read_object
from rl_dist.resume_check import differences, result_of

PACKAGES = ["slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins"]
PACKAGES += ["libhwloc15", "liblua5.1-0", "libmunge2"]
ITERATIONS = 100
FLAGS = [*RECALL, "--total_steps", 64 * ITERATIONS, "--checkpoint_every", "2"]
MULTIARCH = f"{platform.machine()}-linux-gnu"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def command(*argv, **options):
    return subprocess.run([*argv], check=True, capture_output=True, text=True, **options).stdout


@pytest.fixture
def packages(tmp_path):
    """Download Debian's SLURM packages; return the folder with their files."""
    folder = tmp_path / "packages"
    folder.mkdir()
    try:
        command("apt-get", "download", *PACKAGES, cwd=folder)
        for package in folder.glob("*.deb"):
            command("dpkg-deb", "--extract", package.name, ".", cwd=folder)
    except (OSError, subprocess.CalledProcessError) as error:
        why = getattr(error, "stderr", None) or error
        pytest.skip(f"needs Debian's SLURM packages (run apt-get update first): {why}")
    return folder


class Cluster:
    """Starts a SLURM controller and two nodes, and waits until both are idle."""

    def __init__(self, network, folder, packages):
        self.folder = folder
        for name in ("state", "spool-node1", "spool-node2"):
            (folder / name).mkdir()
        text = Path(__file__).with_name("slurm.conf").read_text()
        for word, value in {"FOLDER": folder, "PACKAGES": packages, "MULTIARCH": MULTIARCH}.items():
            text = text.replace(word, str(value))
        (folder / "slurm.conf").write_text(text)
        # Set the cgroup version: slurmd cannot detect it, since tools like `ip netns` hide cgroups.
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        libraries = f"{packages}/usr/lib/{MULTIARCH}"
        self.variables = {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": f"{packages}/usr/bin:{os.environ['PATH']}",
            "LD_LIBRARY_PATH": f"{libraries}:{libraries}/slurm-wlm",
        }
        programs = packages / "usr/sbin"
        self.control = network.hosts["control"]
        self.daemons = [self.control.start(programs / "slurmctld-wlm", "-D", **self.variables)]
        for name in ("node1", "node2"):
            argv = [programs / "slurmd-wlm", "-D", "-d", programs / "slurmstepd-wlm"]
            self.daemons.append(network.hosts[name].start(*argv, **self.variables))
        self.wait(lambda: "idle 2" in self.run("sinfo", "--noheader", "--format=%t %D"))

    def run(self, *argv, **variables):
        """Run a command on the controller's host; return its stdout and stderr."""
        argv, variables = self.control.command(*argv), os.environ | self.variables | variables
        done = subprocess.run(argv, env=variables, capture_output=True, text=True, timeout=60)
        return done.stdout.strip() + done.stderr.strip()

    def job(self, number):
        """Return the fields that `scontrol show job` prints."""
        text = self.run("scontrol", "show", "job", number)
        return dict(re.findall(r"(\S+?)=(\S*)", text))

    def wait(self, condition):
        wait_until(condition, self.daemons[0].process, within_s=300)


@pytest.fixture
def cluster(tmp_path, packages):
    with connected_or_skip(tmp_path, "control", "node1", "node2") as network:
        yield Cluster(network, tmp_path, packages)


def test_a_requeued_job_on_two_nodes_ends_like_an_uninterrupted_one(cluster, tmp_path):
    run_dir, alone, output = tmp_path / "run", tmp_path / "alone", tmp_path / "job.out"
    options = ["--gpus-per-node=0", "--cpus-per-task=1", f"--output={output}", "--parsable"]
    batch = ["sbatch", *options, REPO / "deploy/slurm.sbatch", *FLAGS]
    job = cluster.run(*batch, RUN_DIR=str(run_dir), PYTHON=sys.executable)

    def saved():
        newest = latest_checkpoint(run_dir)
        assert cluster.job(job)["JobState"] in ("PENDING", "RUNNING"), output.read_text()
        return iteration_in_name(newest) if newest else 0

    cluster.wait(lambda: saved() >= 10)
    ranks = read_object(run_dir / "state.json")["ranks"]
    assert [rank["host"] for rank in ranks] == ["node1", "node2"]

    # SLURM itself would send this signal two minutes before the time limit.
    cluster.run("scancel", "--signal=USR1", "--batch", job)
    cluster.wait(lambda: cluster.job(job)["Restarts"] == "1")
    assert cluster.job(job)["JobState"] == "PENDING"
    assert 10 <= saved() < ITERATIONS
    # SLURM would wait two minutes before it restarts the job, so set the start time of the job to
    # now. Sleep first: a node that has just ended the job would refuse to start it again ("Job
    # credential revoked").
    time.sleep(3)
    cluster.wait(lambda: not cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now"))
    cluster.wait(lambda: cluster.job(job)["JobState"] == "COMPLETED")

    text = output.read_text()
    assert text.count("continuing from") == 1 and "stopped by SIGUSR1, saved" in text
    end_of(start_training(*FLAGS, "--num_gpus", "2", "--run_dir", alone))
    assert differences(result_of(run_dir), result_of(alone)) == []
