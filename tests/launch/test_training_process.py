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
from agents.sizes import TrainConfig
from rl_dist.launch import child_process
from rl_dist.launch.training_process import as_flags, launch_distributed_training
from rl_dist.resume_check.comparison import differences, metrics_of, result_of
from rl_dist.status.run_state import read_run

SHORT = [*RECALL, "--eval_episodes", "4"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run of one rank, sampled as often as can be."""
    folder = tmp_path_factory.mktemp("trained")
    return launch_distributed_training(
        SHORT, echo=False, total_steps=512, run_dir=folder / "run", monitor_every=0.01, anneal_lr=False, num_gpus=1
    )


@pytest.mark.slow
def test_a_training_that_succeeds_tells_what_came_of_it(trained):
    assert trained.success and trained.exit_code == 0 and trained.error == ""
    assert trained.run_dir.is_absolute() and trained.iterations == 8 and 0 < trained.seconds < 600
    last = records(trained.run_dir)[-1]
    assert trained.final_losses == {name: last[name] for name in ("loss/policy", "loss/value", "loss/entropy")}
    found = read_run(trained.run_dir)
    assert (found.state, found.iteration, found.num_ranks, found.strategy) == ("finished", 8, 1, "none")
    assert found.checkpoint_checked and found.done == found.total == 512


@pytest.mark.slow
def test_use_is_in_the_metrics_and_changes_nothing_else(trained, tmp_path, monkeypatch):
    sampled = [line["ranks"][0] for line in records(trained.run_dir)]
    assert any(one["cpu/percent"] is not None for one in sampled)
    flags = [*SHORT, "--total_steps", 512, "--no-anneal_lr", "--num_gpus", 1]
    assert train_here(monkeypatch, *flags, "--monitor_every", 0, "--run_dir", tmp_path / "run") == 0
    without = [line["ranks"][0] for line in records(tmp_path / "run")]
    assert not any(name.startswith(("cpu/", "ram/", "gpu/")) for one in without for name in one)
    assert differences(result_of(trained.run_dir), result_of(tmp_path / "run")) == []
    kept = " ".join(metrics_of(trained.run_dir, with_ranks=True))
    assert "loss/policy" in kept and "cpu/" not in kept and "ram/" not in kept and "idle_share" not in kept


def test_bad_flags_are_told_in_the_scripts_own_words(tmp_path, capsys):
    result = launch_distributed_training(SHORT, run_dir=tmp_path / "run", num_stepz=3)
    assert (result.success, result.exit_code, result.run_dir, result.iterations) == (False, 2, None, 0)
    assert result.error == "unknown flag --num_stepz (did you mean --num_steps?)"
    assert capsys.readouterr().err == f"error: {result.error}\n"  # passed on as well
    assert result.final_losses == {} and not (tmp_path / "run").exists()


@pytest.mark.slow
def test_ctrl_c_lets_the_training_save_and_is_raised_here(tmp_path):
    def interrupt():
        path = tmp_path / "run" / "metrics.jsonl"
        while not (path.exists() and path.stat().st_size):
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a training in this process has let it end us at once
    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        launch_distributed_training(SHORT, echo=False, total_steps=10**8, run_dir=tmp_path / "run")
    found = read_run(tmp_path / "run")
    assert found.state == "stopped" and found.checkpoint == f"iteration_{found.iteration:08d}.pt"


def test_keywords_become_flags():
    named = {"num_gpus": 2, "quick": True, "anneal_lr": False, "env_kwargs": {"a": 1}, "device": None, "max_order": -1}
    assert as_flags(named) == ["--num_gpus=2", "--quick", "--no-anneal_lr", '--env_kwargs={"a": 1}', "--max_order=-1"]


@pytest.mark.parametrize("value", [-1.0, 0.001, 1e9])
def test_an_interval_out_of_range_is_refused(value):
    with pytest.raises(ValueError, match=f"monitor_every must be .*{value}"):
        TrainConfig(monitor_every=value)


@pytest.mark.parametrize("name", rl_dist.__all__)
def test_every_function_the_package_offers_is_there_with_an_example(name):
    home = f"rl_dist.{rl_dist._HOMES[name]}"
    function = getattr(rl_dist, name)
    assert function is getattr(importlib.import_module(home), name) and callable(function)
    assert f"{name}(" in function.__doc__  # an example


def test_what_the_package_does_not_offer_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'rl_dist' has no attribute 'train'"):
        rl_dist.train  # noqa: B018


def test_a_child_loads_no_library_before_it_becomes_a_program_of_its_own(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", None)  # between fork and exec it can deadlock, where there are threads
    assert child_process.start(["-c", ""]).wait(60) == 0
