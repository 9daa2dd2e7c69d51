"""The setup checker: its verdicts on a machine and a short run, and its command."""

import json
from dataclasses import replace

import jsonschema
import pytest
import torch
from fake_gpus import pretend_gpus
from train_runs import RECALL, REPO, only_error, output_in, python_path, run_here

import check_gpu_setup
from rl_dist import setup_check
from rl_dist.files import read_object
from rl_dist.launch.child import ChildError, unsteady
from rl_dist.launch.config import ResolvedLaunch
from rl_dist.setup_check import check_facts, check_run, read_facts

SCHEMA = read_object(REPO / "docs/check_gpu_setup.schema.json")
CPU = ResolvedLaunch(num_ranks=2, device_type="cpu", message="")
CUDA = replace(CPU, device_type="cuda", backend="nccl")
ONE, SECOND = replace(CUDA, num_ranks=1), replace(CUDA, num_ranks=1, gpu_ids=(1,))
BUDGET = (2000, "episodes")
GOOD = {"cores": 8, "load": 0.1, "memory_total_gib": 64, "shm_free_gib": 1,
        "disk_free_gib": 100}  # fmt: skip


@pytest.fixture
def facts_with(monkeypatch, tmp_path):
    """Return a function that reads the facts of a machine with two fake, idle GPUs.

    Each of its arguments replaces one fact. Without arguments, all checks pass.
    """

    def facts(**changes):
        answers = {name: changes.pop(name) for name in list(changes) if hasattr(torch.cuda, name)}
        pretend_gpus(monkeypatch, **{"utilization": 0} | answers)
        found = read_facts(tmp_path / "not" / "there")
        assert found.folder == str(tmp_path) and list(tmp_path.iterdir()) == []
        return replace(found, **GOOD | changes)

    return facts


def complaints(checks):
    """Return {name: verdict} of the checks that are not ok.

    Assert that these checks suggest a fix and all others do not.
    """
    checks = list(checks)
    assert all(bool(check.fix) == (check.verdict != "ok") for check in checks)
    return {check.name: check.verdict for check in checks if check.verdict != "ok"}


@pytest.mark.parametrize(
    "plan, changes, expected",
    [
        (CUDA, {}, {}),
        (CPU, {"cores": 1}, {"cores": "warning"}),
        (CPU, {"load": 7.0}, {"cores": "warning"}),
        (CPU, {"disk_error": "Read-only file system"}, {"disk": "problem"}),
        (CPU, {"disk_free_gib": 0.5}, {"disk": "warning"}),
        (CUDA, {"shm_free_gib": 0.1}, {"/dev/shm": "warning"}),  # too little memory for two ranks
        (ONE, {"shm_free_gib": 0.1}, {}),
        (CUDA, {"utilization": [RuntimeError("NVML is silent"), 0]}, {"GPU 0": "warning"}),
        (CUDA, {"utilization": [0, 60]}, {"GPU 1": "warning"}),
        (ONE, {"utilization": [0, 60]}, {}),  # a single rank uses only GPU 0
        (SECOND, {"utilization": [60, 60]}, {"GPU 1": "warning"}),
    ],
)
def test_every_fact_has_its_verdict(facts_with, plan, changes, expected):
    assert complaints(check_facts(facts_with(**changes), plan)) == expected


@pytest.mark.parametrize(
    "plan, changes, says",
    [
        (CUDA, {"driver": "550.54.15"}, ["550.54.15", "NCCL 2.29.3"]),
        (CPU, {"init": RuntimeError("no GPU here")}, ["gloo", "no GPU here"]),
        (replace(CUDA, backend="gloo"), {}, ["over gloo, because these flags choose it"]),
    ],
)
def test_the_report_names_torch_driver_and_backend(facts_with, plan, changes, says):
    first = next(check_facts(facts_with(**changes), plan))
    assert first.name == "torch"
    assert all(text in first.measured for text in [torch.__version__, *says])


# ---- figures measured in a short run


def record(number, **changes):
    """Return the metrics of iteration `number` on two ranks: 1,000 steps in 1 s."""
    return {
        "iteration": number, "global_step": 1000 * number, "time/sps": 1000.0, "episode/count": 20,
        "ranks": [{"ram/used_gib": 2.0, "ram/free_gib": 40.0},
                  {"ram/used_gib": None, "ram/free_gib": None}],
    } | changes  # fmt: skip


FULL = {"ram/used_gib": 9.0, "ram/free_gib": 1.0}
FULL_GPU = {"gpu/memory_peak_gib": 70.0, "gpu/memory_free_gib": 5.0}


@pytest.mark.parametrize(
    "complaint, budget, total_s, last, changes",
    [
        (None, BUDGET, 100.0, 5, {}),  # 2,000 episodes of 50 steps at 1,000 steps/s
        (None, (5000, "steps"), 5.0, 5, {}),
        ("training", BUDGET, None, 5, {"episode/count": 0}),
        ("memory", BUDGET, 100.0, 5, {"ranks": [FULL]}),
        ("GPU memory", BUDGET, 100.0, 5, {"ranks": [FULL_GPU]}),
        # Only the last record is slow.
        ("pace", BUDGET, None, 3, {"time/sps": 300.0}),
    ],
)
def test_every_figure_has_its_verdict_and_uncertain_times_are_omitted(
    facts_with, complaint, budget, total_s, last, changes
):
    records = [record(number, **changes if number >= 8 - last else {}) for number in (3, 4, 5)]
    figures = {}
    found = complaints(check_run(records, facts_with(), budget, figures))
    assert found == ({complaint: "warning"} if complaint else {})
    assert figures["measured"]["total_s"] == total_s


def test_an_unsteady_speed_gives_a_range_of_hours(facts_with):
    records = [record(number, **{"time/sps": sps}) for number, sps in ((3, 900.0), (4, 300.0))]
    figures = {}
    (training,) = [
        check
        for check in check_run(records, facts_with(), (1_080_000, "steps"), figures)
        if check.name == "training"
    ]
    assert "0.333 to 1 h" in training.measured
    assert figures["measured"]["total_range_s"] == [1200.0, 3600.0]


# ---- the command


def check_here(capfd, *argv):
    """Run the command in this process; return exit code, stdout and stderr."""
    code = run_here(check_gpu_setup.main, *argv)
    return code, *capfd.readouterr()


def test_the_command_measures_the_requested_training_and_its_output_fits_the_schema(
    tmp_path, monkeypatch
):
    flags = ["--num_gpus=2", "--total_steps=128", "--env=misbehaving_envs:Speaks-v0", "--json"]
    monkeypatch.setattr(setup_check, "REDUCED_BYTES", (1024, 2**16))
    monkeypatch.setenv("PYTHONPATH", python_path(REPO / "tests"))
    with output_in(tmp_path):
        code = run_here(check_gpu_setup.main, *RECALL[2:], *flags)
    found = read_object(tmp_path / "out")
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(found, SCHEMA)
    assert code == found["exit_code"] == 0 and found["verdict"] in ("ok", "warning")
    assert set(found["reductions_s"]) == {"1024", "65536"}
    measured = found["measured"]
    used, free = measured["memory_gib"]["memory"]
    assert 0.05 < used < 50 and free > 0
    # On a busy machine the speed may vary; then the total time is not estimated.
    total_s = pytest.approx(128 / measured["steps_per_second"])
    assert measured["total_s"] == (None if unsteady(measured["rates"]) else total_s)


@pytest.mark.parametrize(
    "flags, name",
    [
        (["--device=cuda"], "ranks"),
        (["--strategy=dp"], "ranks"),
        (["--num_gpus=2"], "reductions"),
        ([], "short run"),
    ],
)
def test_a_setup_that_cannot_train_is_a_problem(monkeypatch, capfd, flags, name):
    def fail(*_, **__):
        raise ChildError("a rank hung")

    for measure in ("measure_short_runs", "time_reductions"):
        monkeypatch.setattr(setup_check, measure, fail)
    code, out, _ = check_here(capfd, *RECALL, *flags, "--json")
    found = json.loads(out)
    jsonschema.validate(found, SCHEMA)
    problems = [check["name"] for check in found["checks"] if check["verdict"] == "problem"]
    assert code == 1 and problems == [name] and found["measured"] is None


@pytest.mark.parametrize("flags", [["--num_env=4"], ["--resume=auto"]])
def test_bad_flags_are_a_one_line_error_with_exit_code_2(flags, capfd):
    code, out, err = check_here(capfd, *flags)
    assert code == 2 and out == "" and flags[0].partition("=")[0] in only_error(err)


def test_strict_counts_warnings(monkeypatch, capfd):
    warning = setup_check.check("disk", "slow", (True, "save less often"))
    monkeypatch.setattr(check_gpu_setup, "check_setup", lambda *_: [warning])
    assert check_here(capfd, *RECALL)[0] == 0
    assert check_here(capfd, *RECALL, "--strict")[0] == 1
