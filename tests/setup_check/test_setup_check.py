"""The setup checker: its rules on facts and figures, and the command as a user runs it."""

import dataclasses
import json
import os
import signal
import socket
import time
from types import SimpleNamespace

import jsonschema
import psutil
import pytest
from fake_gpus import CARD, pretend_gpus
from train_runs import (
    PATIENCE_S,
    RECALL,
    REPO,
    lives,
    only_error,
    output_in,
    run_here,
    start,
    wait_until,
)

import check_gpu_setup
from rl_dist import setup_check
from rl_dist.launch.child import ChildError, is_steady
from rl_dist.launch.config import ResolvedLaunch
from rl_dist.machine import Facts, GpuInfo, duration, get_gpu_info, read_facts
from rl_dist.setup_check import check_facts, check_figures, figures_of

SCHEMA = json.loads((REPO / "docs/check_gpu_setup.schema.json").read_text())
CPU = ResolvedLaunch(num_ranks=2, device_type="cpu", message="")
CUDA = ResolvedLaunch(num_ranks=2, device_type="cuda", message="")
NO_GPU = GpuInfo((), "no driver")
FACTS = Facts(
    software={"torch": "2.13.0+cpu"}, gpu=NO_GPU, nvidia_gpus=0, cores=8, load=0.1,
    memory_total_gib=64, shm_free_gib=1, folder="/data", disk_free_gib=100,
    disk_error="", environment={},
)  # fmt: skip


def verdicts(checks):
    """Verdicts by name; every complaint has its fix, nothing else has one."""
    checks = list(checks)
    assert all(bool(check.fix) == (check.verdict != "ok") for check in checks)
    return {check.name: check.verdict for check in checks}


@pytest.mark.parametrize(
    ("name", "verdict", "changes"),
    [
        ("versions", "problem", {"software": {"torch": "2.9rc1"}}),
        ("GPUs", "warning", {"nvidia_gpus": 2}),
        ("cores", "warning", {"cores": 1}),
        ("cores", "warning", {"load": 7.0}),
        ("disk", "problem", {"disk_error": "Read-only file system"}),
        ("disk", "warning", {"disk_free_gib": 0.5}),
        ("NCCL_P2P_DISABLE", "warning", {"environment": {"NCCL_P2P_DISABLE": "1"}}),
        ("disk", "ok", {"environment": {"NCCL_P2P_DISABLE": "0"}}),
    ],
)
def test_every_fact_has_its_verdict(name, verdict, changes):
    assert set(verdicts(check_facts(FACTS, CPU)).values()) == {"ok"}
    found = verdicts(check_facts(dataclasses.replace(FACTS, **changes), CPU))
    assert found.pop(name) == verdict and set(found.values()) == {"ok"}


ONE = dataclasses.replace(CUDA, num_ranks=1)
SECOND = dataclasses.replace(ONE, gpu_ids=(1,))
OTHER = SimpleNamespace(**vars(CARD) | {"name": "Old 1"})


@pytest.mark.parametrize(
    ("name", "plan", "answers"),
    [
        ("", CUDA, {}),
        ("GPU 0", CUDA, {"temperature": [90, 40]}),
        ("GPU 0", CUDA, {"utilization": [60, 0]}),
        ("GPU 0", CUDA, {"utilization": [RuntimeError("NVML is silent"), 0]}),
        ("GPU 1", CUDA, {"utilization": [0, 60]}),
        ("", ONE, {"utilization": [0, 60]}),  # not needed
        ("GPU 1", SECOND, {"utilization": [60, 60]}),
        ("", CPU, {"utilization": [60, 60]}),
        ("models", CUDA, {"get_device_properties": [CARD, OTHER]}),
    ],
)
def test_every_gpu_that_is_needed_has_its_verdict(monkeypatch, name, plan, answers):
    pretend_gpus(monkeypatch, **{"utilization": 0} | answers)
    facts = dataclasses.replace(FACTS, gpu=get_gpu_info())
    found = verdicts(check_facts(facts, plan))
    assert [name for name, verdict in found.items() if verdict != "ok"] == [name] * bool(name)
    facts = dataclasses.replace(facts, shm_free_gib=0.1)  # enough for one rank
    assert verdicts(check_facts(facts, CUDA))["/dev/shm"] == "warning"


def test_facts_are_read_where_the_run_would_be(tmp_path):
    facts = read_facts(tmp_path / "not" / "there")
    assert facts.folder == str(tmp_path) and not facts.disk_error
    assert facts.disk_free_gib > 0 and list(tmp_path.iterdir()) == []
    assert facts.memory_total_gib > 0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(2e-6, "2 us"), (0.0251, "25.1 ms"), (59, "59 s"), (600, "10 min"), (864_000, "10 days")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


# ---- figures of a short run


def record(number, **changes):
    """The metrics of an iteration of 1000 steps on two ranks, which takes a second."""
    return {
        "iteration": number, "global_step": 1000 * number, "time/sps": 1000.0, "episode/count": 20,
        "time/collect_s": 0.3, "time/idle_share": 0.1,
        "ranks": [{"ram/used_gib": 2.0, "ram/free_gib": 40.0},
                  {"ram/used_gib": None, "ram/free_gib": None}],
    } | changes  # fmt: skip


@pytest.mark.parametrize(
    ("name", "total_s", "changes"),
    [
        ("", 100.0, {}),  # 2,000 episodes of 50 steps
        ("training", None, {"episode/count": 0}),
        ("memory", 100.0, {"ranks": [{"ram/used_gib": 9.0, "ram/free_gib": 1.0}]}),
        ("GPU memory", 100.0,
         {"ranks": [{"gpu/memory_peak_gib": 70.0, "gpu/memory_free_gib": 5.0}]}),
        ("spent on", 100.0, {"time/idle_share": 0.5}),
        ("spent on", 100.0, {"time/collect_s": 0.9}),
    ],
)  # fmt: skip
def test_every_figure_has_its_verdict_and_no_time_is_guessed(monkeypatch, name, total_s, changes):
    pretend_gpus(monkeypatch)
    facts, budget = dataclasses.replace(FACTS, gpu=get_gpu_info()), (2000, "episodes")
    figures = figures_of([record(number, **changes) for number in (3, 4, 5)], budget)
    found = verdicts(check_figures(figures, facts, budget, on_gpu=True))
    assert [name for name, verdict in found.items() if verdict != "ok"] == [name] * bool(name)
    assert figures["total_s"] == total_s


def test_a_rate_that_differs_between_rounds_gives_no_time_and_no_memory_is_quoted_unseen():
    slow = {"time/sps": 300.0, "ranks": [{"ram/used_gib": None}]}
    figures = figures_of([record(3, ranks=[]), record(4, **slow), record(5, **slow)], (1, "steps"))
    found = verdicts(check_figures(figures, FACTS, (1, "steps"), on_gpu=False))
    assert figures["total_s"] is None and found == {"pace": "warning", "spent on": "ok"}
    steady = figures_of([record(3), record(4)], (5000, "steps"))
    assert (steady["total_s"], steady["memory_gib"]) == (5.0, {"memory": (2.0, 40.0)})


# ---- the command


def check_here(monkeypatch, capfd, *argv):
    """Run the command in this process."""
    code = run_here(check_gpu_setup.main, argv, monkeypatch)
    return code, *capfd.readouterr()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    flags = ("--num_gpus", "2", "--total_steps", "128", "--env", "faulty_envs:Chatty-v0", "--json")
    folder = tmp_path_factory.mktemp("two_ranks")
    with pytest.MonkeyPatch.context() as patch, output_in(folder):
        patch.setattr(setup_check, "REDUCED_BYTES", (1024, 2**16))
        patch.setenv("PYTHONPATH", str(REPO / "tests"))
        code = run_here(check_gpu_setup.main, [*RECALL[2:], *flags], patch)
    return code, json.loads((folder / "out").read_text())


def test_what_it_measured_is_what_was_asked_and_as_documented(two_ranks):
    code, found = two_ranks
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(found, SCHEMA)
    assert code == found["exit_code"] == 0 and found["verdict"] in ("ok", "warning")
    assert set(found["reductions_s"]) == {"1024", "65536"}
    measured = found["measured"]
    used, free = measured["memory_gib"]["memory"]
    assert 0.05 < used < 50 and free > 0 and 0 < measured["rollout_share"] < 1
    # a busy machine has no time
    total_s = pytest.approx(128 / measured["steps_per_second"])
    assert measured["total_s"] == (total_s if is_steady(measured["rates"]) else None)


def test_ranks_that_cannot_be_are_a_problem_and_nothing_is_measured(monkeypatch, capfd):
    monkeypatch.setattr(setup_check, "measure_short_runs", None)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        for flags in (["--num_gpus", "2"], ["--device", "cuda"], ["--strategy", "dp"]):
            code, out, _ = check_here(monkeypatch, capfd, *RECALL, *flags, "--json")
            found = json.loads(out)
            jsonschema.validate(found, SCHEMA)
            problems = [check["name"] for check in found["checks"] if check["verdict"] == "problem"]
            assert code == 1 and problems == ["ranks"] and found["measured"] is None


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--num_env", "4"], "--num_envs"),
        (["--resume", "auto"], "--resume"),
        (["--interactive"], "--interactive"),
    ],
)
def test_bad_flags_are_one_line_and_exit_code_2(argv, words, monkeypatch, capfd):
    code, out, err = check_here(monkeypatch, capfd, *argv)
    assert code == 2 and out == "" and words in only_error(err)


def test_short_runs_and_reductions_that_fail_are_problems_and_strict_counts_warnings(
    monkeypatch, capfd
):
    def fail(*_, **__):
        raise ChildError("a rank hung")

    def train(*_, **__):
        raise ChildError("out of memory")

    monkeypatch.setattr(setup_check, "measure_short_runs", train)
    code, out, _ = check_here(monkeypatch, capfd, *RECALL)
    assert code == 1 and "problem  short run    out of memory" in out
    monkeypatch.setattr(setup_check, "time_reductions", fail)
    code, out, _ = check_here(monkeypatch, capfd, *RECALL, "--num_gpus", "2")
    assert code == 1 and "problem  reductions   a rank hung" in out and "short run" not in out
    warning = setup_check.check("disk", "slow", (True, "warning", "save less often"))
    monkeypatch.setattr(check_gpu_setup, "check_setup", lambda *_: [warning])
    assert check_here(monkeypatch, capfd, *RECALL)[0] == 0
    assert check_here(monkeypatch, capfd, *RECALL, "--strict")[0] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signum", "moment"), [(signal.SIGINT, "all_reduce_"), (signal.SIGTERM, "short_run_")]
)
def test_a_signal_ends_it_in_one_line_and_leaves_nothing(signum, moment, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    job = start(REPO / "check_gpu_setup.py", *RECALL, "--num_gpus", "2")
    process = psutil.Process(job.pid)
    wait_until(lambda: list(tmp_path.glob(moment + "*")) and process.children(), job)
    time.sleep(0.5)
    family = process.children(recursive=True)
    os.kill(job.pid, signum)
    _, err = job.communicate(timeout=PATIENCE_S)
    assert job.returncode == 128 + signum and "Traceback" not in err
    # torch's cache
    assert [path for path in tmp_path.iterdir() if not path.name.startswith("torchinductor_")] == []
    wait_until(lambda: not any(lives(process.pid) for process in family))
