"""Training started from Python, and the functions that the package offers."""

import ctypes
import importlib
import os
import signal
import threading
import time

import pytest
from train_runs import RECALL, records, train_here

import rl_dist
from rl_dist.launch.child import Child, as_flags, launch_distributed_training
from rl_dist.resume_check import differences, result_of
from rl_dist.run_dir import RunDir
from rl_dist.status import read_status

SHORT = [*RECALL, "--eval_episodes", "4"]


@pytest.mark.slow
def test_a_training_that_succeeds_has_its_result_and_monitoring_changes_no_number(
    tmp_path, monkeypatch
):
    named = {"total_steps": 512, "monitor_every": 0.01, "anneal_lr": False, "num_gpus": 1}
    run_dir = tmp_path / "run"
    result = launch_distributed_training(SHORT, echo=False, run_dir=run_dir, **named)
    assert result.success and result.exit_code == 0 and result.error == ""
    assert result.run_dir.is_absolute() and result.iterations == 8 and 0 < result.seconds < 600
    last = records(result.run_dir)[-1]
    assert {"loss/policy", "loss/value", "loss/entropy"} <= result.final_losses.keys()
    assert result.final_losses.items() <= last.items()
    found = read_status(result.run_dir)
    assert [found[name] for name in ("state", "iteration", "num_ranks")] == ["finished", 8, 1]
    sampled = [line["ranks"][0] for line in records(result.run_dir)]
    assert any(rank["cpu/percent"] is not None for rank in sampled)
    flags = [*SHORT, *as_flags(named), "--monitor_every", 0, "--run_dir", tmp_path / "plain"]
    assert train_here(monkeypatch, *flags) == 0
    plain = [line["ranks"][0] for line in records(tmp_path / "plain")]
    assert not any(name.startswith(("cpu/", "ram/", "gpu/")) for rank in plain for name in rank)
    assert differences(result_of(run_dir), result_of(tmp_path / "plain")) == []


def test_bad_flags_are_refused_in_the_scripts_own_words(tmp_path, capfd):
    result = launch_distributed_training(SHORT, run_dir=tmp_path / "run", num_stepz=3)
    assert (result.success, result.exit_code, result.run_dir) == (False, 2, None)
    assert "--num_stepz" in result.error and "--num_steps" in result.error
    assert capfd.readouterr().err == f"error: {result.error}\n"  # passed on as well
    assert (result.iterations, result.final_losses) == (0, {}) and not (tmp_path / "run").exists()


def when(true, act):
    """Do something in a thread once a condition holds."""

    def wait():
        while not true():
            time.sleep(0.1)
        act()

    threading.Thread(target=wait, daemon=True).start()


@pytest.mark.slow
def test_a_training_that_dies_has_its_error(tmp_path):
    run = RunDir(tmp_path / "run")
    when(
        lambda: any(run.path.glob("checkpoints/*.pt")),
        lambda: os.kill(run.state().ranks[1].pid, signal.SIGKILL),
    )
    named = {"total_steps": 10**8, "num_gpus": 2, "checkpoint_every": 1}
    result = launch_distributed_training(SHORT, echo=False, run_dir=run.path, **named)
    assert (result.success, result.exit_code) == (False, 1) and result.iterations > 0
    assert "rank 1" in result.error and "SIGKILL" in result.error


@pytest.mark.slow
def test_ctrl_c_lets_the_training_save_and_is_raised_here(tmp_path):
    run = RunDir(tmp_path / "run")
    # a training in this process has let it end us immediately
    signal.signal(signal.SIGINT, signal.default_int_handler)
    when(lambda: run.path.exists() and run.records(), lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        launch_distributed_training(SHORT, echo=False, total_steps=10**8, run_dir=run.path)
    found = read_status(run.path)
    assert found["state"] == "stopped"
    assert found["checkpoint"] == f"iteration_{found['iteration']:08d}.pt"


def test_keywords_become_flags():
    named = {"num_gpus": 2, "quick": True, "anneal_lr": False, "env_kwargs": {"a": 1}}
    flags = ["--num_gpus=2", "--quick", "--no-anneal_lr", '--env_kwargs={"a": 1}', "--max_order=-1"]
    assert as_flags(named | {"device": None, "max_order": -1}) == flags


@pytest.mark.parametrize("name", rl_dist.__all__)
def test_every_function_the_package_offers_is_there_with_an_example(name):
    home = f"rl_dist.{rl_dist._HOMES[name]}"
    function = getattr(rl_dist, name)
    assert function is getattr(importlib.import_module(home), name) and callable(function)
    assert f"{name}(" in function.__doc__  # an example


def test_a_child_loads_no_library_before_it_becomes_a_program_of_its_own(tmp_path, monkeypatch):
    # between fork and exec it can deadlock, where there are threads
    monkeypatch.setattr(ctypes, "CDLL", None)
    assert Child(["-c", ""], tmp_path).job.wait(60) == 0
