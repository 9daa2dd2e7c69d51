"""The files in deploy/ match the published API models, and their commands work."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from simulated_hosts import REPO, connected_or_skip
from train_runs import RECALL, wait_until

from rl_dist.files import read_object

yaml = pytest.importorskip("yaml")
models = pytest.importorskip("kubeflow_trainer_api.models")
FILES = REPO / "deploy/kubernetes"
MODELS = {
    "TrainJob": "TrainerV1alpha1TrainJob",
    "Job": "IoK8sApiBatchV1Job",
    "Service": "IoK8sApiCoreV1Service",
}


def documents(name):
    return {entry["kind"]: entry for entry in yaml.safe_load_all((FILES / name).read_text())}


@pytest.mark.parametrize("name", sorted(path.name for path in FILES.glob("*.yaml")))
def test_every_field_is_known_and_has_its_type(name):
    """`from_dict` raises an error for a wrong type but silently drops unknown fields."""
    for kind, document in documents(name).items():
        assert getattr(models, MODELS[kind]).from_dict(document).to_dict() == document


def trainjob():
    """Return the command of the TrainJob, its env entries, and additional variables.

    On a cluster, the controller of Kubeflow sets the additional variables.
    """
    trainer = documents("trainjob.yaml")["TrainJob"]["spec"]["trainer"]
    added = {"PET_NNODES": str(trainer["numNodes"]), "PET_MASTER_PORT": "29400"}
    added["PET_MASTER_ADDR"] = "clstm-ppo-node-0-0.clstm-ppo"
    return trainer["command"], trainer["env"], added


def indexed_job():
    """Return the command of the Job, its env entries, and no additional variables.

    On a cluster, PET_RDZV_ID is read from a label of the pod.
    """
    spec = documents("indexed-job.yaml")["Job"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    nodes = str(spec["completions"])
    assert {"name": "PET_NNODES", "value": nodes} in container["env"]
    return container["command"], container["env"], {}


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "job, names",
    [
        (trainjob, ["clstm-ppo-node-0-0", "clstm-ppo-node-0-1"]),
        (indexed_job, ["clstm-ppo-0", "clstm-ppo-1"]),
    ],
)
def test_the_command_trains_on_two_pods_and_continues_after_one_is_replaced(job, names, tmp_path):
    """Each pod has one CPU rank, and a temporary folder replaces /runs."""
    command, entries, environment = job()
    environment |= {entry["name"]: entry.get("value", "from a label") for entry in entries}
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = [word.replace("/runs/", f"{tmp_path}/") for word in command]
    command += [*RECALL, "--total_steps", 64 * 30, "--checkpoint_every", 2]
    # If the first pod only waits for data when the second one is lost, TCP reports no error.
    command += ["--collective_timeout", 30]
    run_dir = tmp_path / "clstm-ppo"
    # On a cluster, the service gives these DNS names to the pods.
    pods = [f"{name}.clstm-ppo {name}" for name in names]
    with connected_or_skip(tmp_path, *pods) as network:

        def start(number):
            variables = environment | {"PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": str(number)}
            return network.hosts[pods[number]].start(*command, **variables)

        first, _ = start(0), start(1)
        wait_until((run_dir / "checkpoints/iteration_00000006.pt").exists, first.process, 300)
        network.hosts[pods[1]].kill()
        network.start(pods[1])
        second = start(1)
        assert "continuing from" in first.succeed()
        second.succeed()
    assert read_object(run_dir / "summary.json")["iteration"] == 30
    state = read_object(run_dir / "state.json")
    assert [rank["host"] for rank in state["ranks"]] == names


@pytest.mark.parametrize(
    "leaves, code, expected, says",
    [
        ("true", 1, 1, "ended with code 1 and saved nothing new: not queued again"),
        ("rm summary.json; touch summary.json", 143, 0, "finished"),
        ("touch checkpoints/iteration_00000002.pt", 1, 0, "queued again\nscontrol requeue 7"),
    ],
)
def test_a_slurm_job_is_requeued_only_if_it_saved_something_new(
    leaves, code, expected, says, tmp_path
):
    """A fake srun runs the command `leaves`; a fake scontrol prints its arguments."""
    (tmp_path / "checkpoints").mkdir()
    for name in ("summary.json", "checkpoints/iteration_00000001.pt"):
        (tmp_path / name).touch()
    for name, text in (
        ("srun", f"cd {tmp_path} && {leaves}; exit {code}"),
        ("scontrol", 'if [ "$1" = show ]; then echo node1; else echo scontrol "$@"; fi'),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RUN_DIR": str(tmp_path)}
    variables |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node1", "SLURM_JOB_NUM_NODES": "1"}
    command = ["bash", REPO / "deploy/slurm.sbatch"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert done.returncode == expected and (done.stdout + done.stderr).endswith(f"{says}\n")
