"""The setup checker as a user runs it: report, JSON schema, exit codes, the command to copy."""

import dataclasses
import json
import os
import shlex
import signal
import socket
import time
from pathlib import Path

import jsonschema
import psutil
import pytest
import torch
from train_runs import (
    PATIENCE_S,
    REPO,
    lives,
    only_error,
    output_in,
    records,
    run_here,
    start,
    wait_until,
)

import check_gpu_setup
from agents.dry_run import measure as dry_run
from agents.dry_run.measure import PlannedTraining
from agents.dry_run.setup_report import decide_ranks, recommend
from agents.run.config import SECTIONS, RunConfig
from agents.sizes import TrainConfig, shard_sizes
from rl_dist.flags import parse_flags
from rl_dist.hardware.report import read_facts
from rl_dist.launch.bench import BenchError
from rl_dist.launch.config import LaunchConfig
from rl_dist.launch.short_run import is_steady
from rl_dist.strategies.choice import Hardware, check_strategy

TINY = [
    *("--env", "Recall-v0", "--num_envs", "4", "--num_steps", "16", "--bptt_steps", "8"),
    *("--batch_size", "4", "--hidden_size", "8"),
]
SCHEMA = json.loads((REPO / "docs/check_gpu_setup.schema.json").read_text())


def check(*argv, **options):
    job = start(REPO / "check_gpu_setup.py", *argv, **{"cwd": REPO} | options)
    try:
        out, err = job.communicate(timeout=170)
    finally:
        job.kill()
    return job.returncode, out, err


def check_here(monkeypatch, capfd, *argv):
    """The same in this process, of what ends before anything is measured."""
    code = run_here(check_gpu_setup.main, argv, monkeypatch)
    return code, *capfd.readouterr()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    flags = ("--num_gpus", "2", "--device", "cpu", "--total_steps", "128", "--json")
    folder = tmp_path_factory.mktemp("two_ranks")
    with pytest.MonkeyPatch.context() as patch, output_in(folder):
        patch.setattr(dry_run, "BENCH_SIZES", (1024, 2**16))
        code = run_here(check_gpu_setup.main, [*TINY, *flags], patch)
    assert not (folder / "err").read_text()
    return code, json.loads((folder / "out").read_text())


def test_what_it_measured_is_what_was_asked_and_as_documented(two_ranks):
    code, found = two_ranks
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(found, SCHEMA)
    assert code == found["exit_code"] == 0 and found["verdict"] in ("ok", "warning")
    assert found["plan"]["num_ranks"] == 2 and found["plan"]["device_type"] == "cpu"
    (gloo,) = found["communication"]
    parameters = found["memory"]["computed"]["parameters"]
    sizes = {int(size) for size in gloo["gradients_s"]}
    assert gloo["backend"] == "gloo" and {1024, 2**16, parameters} == sizes
    memory, time = found["memory"], found["time"]
    assert memory["measured_peak"] > 3 * parameters
    assert memory["needed"] == memory["process"] + memory["measured_peak"]
    assert memory["largest_num_envs"] > 4 and memory["largest_batch_size"] > 4
    assert time["steps_per_iteration"] == 64 and time["reduction_s"] > 0
    assert time["iteration_s"] == pytest.approx(time["own_s"] + time["reduction_s"])
    # a busy machine has no time
    steady = is_steady(time["rates"])
    assert time["total_s"] == (pytest.approx(128 / time["steps_per_second"]) if steady else None)


@pytest.mark.parametrize(
    ("ranks", "asked", "as_asked"),
    [
        (1, {}, True),
        (2, {"device": "cpu", "num_gpus": 2}, True),
        (1, {"device": "cpu", "num_gpus": 0}, True),
        (1, {"device": "cuda"}, False),
        (2, {"num_gpus": 8}, False),
    ],
)
def test_hardware_that_is_not_here_is_not_what_was_asked_for(ranks, asked, as_asked):
    assert planned(ranks, LaunchConfig(**asked)).as_asked == as_asked


@pytest.mark.slow
def test_the_command_it_ends_with_runs(two_ranks, tmp_path):
    words = shlex.split(two_ranks[1]["command"])
    assert words[:2] == ["python", "train_distributed.py"] and "--json" not in words
    job = start(REPO / words[1], *words[2:], "--run_dir", tmp_path / "run", "--eval_episodes", "2")
    _, err = job.communicate(timeout=170)
    assert job.returncode == 0, err
    assert records(tmp_path / "run")[-1]["global_step"] == 128


@pytest.mark.slow
def test_what_cannot_be_is_a_problem_each(monkeypatch, tmp_path):
    """Too little memory, a taken port, a wrong interface and no CUDA, all at once."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no_such_interface")
        many = ("--batch_size", "10000000", "--num_envs", "10000000")
        flags = ["--num_gpus", "2", "--device", "cuda", *many]
        code, out, _ = check(*TINY, *flags)
    assert code == 1
    for name in ("CUDA build", "meeting point", "GLOO_SOCKET_IFNAME", "fits"):
        assert f"problem  {name}" in out
    assert "not measured: it does not fit" in out and "cannot train like this" in out
    command = out.splitlines()[-1]
    assert command.startswith("env -u GLOO_SOCKET_IFNAME -u MASTER_PORT python train_dist")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--num_env", "4"], "did you mean --num_envs?"),
        (["--num_envs", "3", "--batch_size", "64"], "try --num_envs"),
        (["--resume", "auto"], "give the flags"),
        (["--interactive"], "asks nothing here"),
    ],
)
def test_bad_flags_are_one_line_and_exit_code_2(argv, words, monkeypatch, capfd):
    code, out, err = check_here(monkeypatch, capfd, *argv)
    assert code == 2 and out == "" and words in only_error(err)


def test_under_torchrun_it_refuses_to_start(monkeypatch, capfd):
    monkeypatch.setenv("RANK", "2")
    code, out, err = check_here(monkeypatch, capfd, *TINY)
    assert code == 2 and out == "" and "without torchrun" in only_error(err)


# ---- the plan and the command, from facts of this machine


@pytest.fixture
def facts(tmp_path):
    found = read_facts(tmp_path)
    return dataclasses.replace(found, host=dataclasses.replace(found.host, cores=8))


def planned(num_ranks, launch=None):
    train = TrainConfig(num_envs=8, batch_size=8)
    config = RunConfig(launch=launch or LaunchConfig(), train=train)
    return PlannedTraining(config, num_ranks, "cpu", shard_sizes(train, 0, num_ranks), 4096)


def command(launch, num_ranks, facts, *given):
    return recommend(planned(num_ranks, launch), given, facts, [])


PIPELINE = {"strategy": "hybrid", "hybrid_form": "pipeline"}


@pytest.mark.parametrize(
    ("ranks", "asked", "words", "fix"),
    [
        (2, {"strategy": "none"}, "strategy none", "--strategy default"),
        (2, {"strategy": "hybrid", "shard_size": 3}, "does not divide 2 ranks",
         "--strategy default --shard_size 0"),
        (1, PIPELINE, "pairs of ranks, got 1", "--strategy default --hybrid_form shard"),
        (1, {"gradient_compression": "bf16"}, "", "--gradient_compression none"),
    ],
)  # fmt: skip
def test_a_strategy_that_cannot_be_is_reported_and_replaced(ranks, asked, words, fix, facts):
    launch = LaunchConfig(num_gpus=ranks, device="cpu", **asked)
    found, device_type, (check,) = decide_ranks(launch, facts)
    assert (found, device_type, check.verdict, check.fix) == (ranks, "cpu", "problem", fix)
    assert words in check.measured
    given = [str(word) for name, value in asked.items() for word in (f"--{name}", value)]
    assert " ".join(shlex.split(command(launch, ranks, facts, *given))).endswith(fix)


def test_short_runs_are_of_one_rank_each_whatever_the_strategy_of_several(monkeypatch):
    monkeypatch.setattr(dry_run, "SideBySide", lambda flags, *_, **__: flags)
    launch = LaunchConfig(num_gpus=2, device="cpu", strategy="ddp", gradient_compression="bf16")
    flags = dry_run.short_runs(planned(2, launch))
    parsed = parse_flags(SECTIONS, flags, description="")
    assert check_strategy(parsed.configs["launch"].strategy_config, Hardware(1)) == "none"


def test_the_command_works_from_other_directories(facts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = shlex.split(command(LaunchConfig(device="cpu"), 1, facts))[1]
    assert Path(script) == REPO.resolve() / "train_distributed.py"


def test_a_gpu_that_does_not_start_is_a_problem_and_no_traceback(facts, monkeypatch):
    def fail(index):
        raise RuntimeError("CUDA error:\nunknown error")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", fail)
    facts = dataclasses.replace(facts, gpu=dataclasses.replace(facts.gpu, gpus=()))
    ranks, device_type, (check,) = decide_ranks(LaunchConfig(), facts)
    assert (ranks, device_type, check.verdict) == (1, "cpu", "problem")
    assert check.measured == "CUDA error: unknown error"
    assert "--device cpu" in check.fix


# ---- beside the report


def test_one_cpu_rank_only_tries_reductions_and_several_time_all_sizes(monkeypatch):
    asked = []

    def measure(ranks, sizes, device_type, **options):
        asked.append((ranks, sizes))
        raise BenchError("not here")

    monkeypatch.setattr(dry_run, "time_reductions", measure)
    for ranks in (1, 2):
        plan = planned(ranks)
        assert dry_run.measure_reductions(plan, "gloo", lambda: None) == (None, "not here")
    few, many = asked
    assert few == (2, [1024, 4096, 2**20])
    assert many == (2, [1024, 4096, 2**16, 2**20, 2**24, 2**26])


@pytest.mark.slow
def test_what_an_environment_prints_does_not_spoil_the_json():
    flags = ["--env", "faulty_envs:Chatty-v0", "--total_steps", "128", "--json"]
    code, out, err = check(*TINY[2:], *flags)
    jsonschema.validate(json.loads(out), SCHEMA)
    assert code == 0 and "hello from an environment" in err and "and from its library" in err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signum", "moment"), [(signal.SIGINT, "all_reduce_"), (signal.SIGTERM, "short_run_")]
)
def test_a_signal_ends_it_in_one_line_and_leaves_nothing(signum, moment, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    job = start(REPO / "check_gpu_setup.py", *TINY, "--num_gpus", "2", "--device", "cpu")
    process = psutil.Process(job.pid)
    wait_until(lambda: list(tmp_path.glob(moment + "*")) and process.children(), job)
    time.sleep(0.5)
    family = process.children(recursive=True)
    os.kill(job.pid, signum)
    _, err = job.communicate(timeout=PATIENCE_S)
    assert (job.returncode, err) == (128 + signum, f"stopped by {signum.name}\n")
    # torch's cache
    assert [path for path in tmp_path.iterdir() if not path.name.startswith("torchinductor_")] == []
    wait_until(lambda: not any(lives(process.pid) for process in family))


@pytest.mark.slow
def test_strict_makes_warnings_failures(monkeypatch):
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    code, out, err = check(*TINY, "--strict")
    assert code == 1, (out, err)
    assert "warning  TORCH_DISTRIBUTED_DEBUG" in out and "can train: 0 problem(s)" in out


def test_help_names_the_training_flags_and_its_own(monkeypatch, capfd):
    code, out, _ = check_here(monkeypatch, capfd, "--help")
    assert code == 0
    assert all(flag in out for flag in ("--num_envs", "--strict", "--json", "exit codes"))
