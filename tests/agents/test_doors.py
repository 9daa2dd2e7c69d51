"""Runs on environments and batches that a user's class or function makes, from start to end."""

import shutil

import numpy as np
import pytest
from train_runs import RECALL, evaluate_here, only_error, records, run_here, train_here

from agents import export
from agents.api import load_policy
from rl_dist.files import read_object

WALK = [*RECALL, "--env=fake_batches:Walk", "--eval_episodes=6"]
NAMES = ("OneWalk", "make_walk", "Walk", "RslWalk", "arrays")


@pytest.fixture(scope="module", params=NAMES)
def finished(request, tmp_path_factory):
    """Return the directory of a finished run."""
    path = tmp_path_factory.mktemp(request.param) / "run"
    flags = [*WALK, f"--env=fake_batches:{request.param}", "--total_steps=256"]
    assert train_here(*flags, "--checkpoint_every=1", "--run_dir", path) == 0
    return path


def test_the_run_is_tested(finished):
    assert np.isfinite(read_object(finished / "summary.json")["test"]["return"])


def test_the_run_continues(finished, tmp_path):
    run = shutil.copytree(finished, tmp_path / "run")
    assert train_here("--resume", run, "--total_steps=320") == 0
    assert records(run)[-1]["iteration"] == 5


def test_a_command_evaluates_the_policy(finished, capsys):
    assert evaluate_here(finished, "--episodes=3") == 0
    assert "3 episodes" in capsys.readouterr().out


@pytest.mark.usefixtures("untraced")
def test_the_policy_is_exported(finished):
    assert run_here(export.main, finished) == 0


def test_the_policy_acts_in_python(finished):
    policy = load_policy(finished)
    obs = policy.observation_space.sample()
    action, _ = policy.predict(obs)
    assert policy.action_space.contains(action)


def test_a_killed_run_of_a_batch_resumes_bit_for_bit(tmp_path):
    whole = tmp_path / "whole"
    keep = ["--checkpoint_every=1", "--keep_checkpoints=9"]
    assert train_here(*WALK, "--total_steps=256", *keep, "--run_dir", whole) == 0
    killed = shutil.copytree(whole, tmp_path / "killed")
    (killed / "summary.json").unlink()
    for number in (3, 4):
        (killed / "checkpoints" / f"iteration_{number:08}.pt").unlink()
    assert train_here("--resume", killed) == 0
    assert read_object(killed / "summary.json") == read_object(whole / "summary.json")


def test_two_ranks_have_the_same_final_score(tmp_path):
    flags = [*WALK, "--total_steps=256", "--precision=fp64"]
    for name, ranks in (("one", 1), ("two", 2)):
        assert train_here(*flags, f"--num_gpus={ranks}", "--run_dir", tmp_path / name) == 0
    one, two = (read_object(tmp_path / name / "summary.json") for name in ("one", "two"))
    assert one["test"] == two["test"]


def test_a_fault_of_the_batch_ends_the_run_and_names_the_environment(tmp_path, capsys):
    faulty = ["--env_kwargs", '{"nan_at": 70}', "--run_dir", tmp_path / "run"]
    assert train_here(*WALK, "--total_steps=960", *faulty) == 1
    assert "fake_batches:Walk number 2 " in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    "flags, named",
    [
        (
            ["--env=fake_batches:with_state", '--env_kwargs={"shape": [5056]}'],
            "part has shape [5056]",
        ),
        (["--env=fake_batches:with_state", '--env_kwargs={"shape": []}'], "part has shape []"),
        (["--batch_size=auto"], "batch_size"),
        (["--stop_at", "valid/return", "1"], "valid/return"),
        (["--env_workers=2"], "env_workers"),
        (["--policy=own", "--core=own_cores:Missing"], "Missing"),
        (["--init_from=no_such_run"], "no_such_run"),
    ],
)
def test_what_does_not_fit_a_batch_is_refused_by_name(flags, named, tmp_path, capsys):
    assert train_here(*WALK, *flags, "--run_dir", tmp_path / "run") in (1, 2)
    assert named in only_error(capsys.readouterr().err) and not (tmp_path / "run").exists()
