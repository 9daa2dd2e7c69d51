"""A task of the user's, with its own score and table, needs no change in agents/."""

import shutil

import numpy as np
import pytest
import torch
from agents_ranks import Brief
from gymnasium import spaces
from toy_task import CoinEnv, CoinTask
from train_runs import RECALL, evaluate_here, records, run_here, train_here

from agents import export
from agents.config import probe
from envs.task import TASKS, TaskConfig, TaskSettings, make_task
from rl_dist.checkpoint.store import load_checkpoint
from rl_dist.errors import UserError
from rl_dist.files import read_object

COINS = [*RECALL, "--env=toy_task:Coins-v0", "--eval_episodes=6", "--validate_every=1"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return the folder of the run `whole`."""
    folder = tmp_path_factory.mktemp("coins")
    flags = [*COINS, "--total_steps=256", "--checkpoint_every=1", "--keep_checkpoints=9"]
    assert train_here(*flags, "--run_dir", folder / "whole") == 0
    return folder


def test_the_score_of_the_task_chooses_the_best_checkpoint(trained):
    best = load_checkpoint(trained / "whole" / "checkpoints" / "best.pt")
    hits = [record["valid/hits"] for record in records(trained / "whole")]
    assert len(hits) == 4 and best["measured"] == {"valid/hits": max(hits)}


def test_a_killed_run_resumes_bit_for_bit(trained):
    whole = trained / "whole"
    killed = shutil.copytree(whole, trained / "killed")
    (killed / "summary.json").unlink()
    for number in (3, 4):
        (killed / "checkpoints" / f"iteration_{number:08}.pt").unlink()
    assert train_here("--resume", killed) == 0
    assert read_object(killed / "summary.json") == read_object(whole / "summary.json")


def test_two_ranks_have_the_same_final_score(trained):
    flags = [*COINS, "--total_steps=256", "--precision=fp64"]
    for name, ranks in (("one", 1), ("two", 2)):
        assert train_here(*flags, f"--num_gpus={ranks}", "--run_dir", trained / name) == 0
    one, two = (read_object(trained / name / "summary.json") for name in ("one", "two"))
    assert one["test"] == two["test"]


def test_the_command_prints_the_table_of_the_task(trained, capsys):
    assert evaluate_here(trained / "whole") == 0
    assert "of coins" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize("low, high", [(-np.inf, np.inf), (0.0, np.inf), (-5.0, 2.0)])
def test_gymnasium_actions_may_have_any_bounds(low, high, monkeypatch):
    monkeypatch.setattr(Brief, "action_space", spaces.Box(low, high, (2,), np.float64))
    task = make_task(TaskSettings(task=TaskConfig(env="agents_ranks:Brief-v0")))
    assert probe(task).single_action_space.shape == (2,)


@pytest.mark.usefixtures("untraced")
def test_the_policy_is_exported(trained):
    assert run_here(export.main, trained / "whole") == 0
    assert (trained / "whole" / export.FOLDER / export.CONTRACT).exists()


def test_a_metric_of_another_task_is_refused(tmp_path):
    flags = ["--keep_best=valid/return", "--run_dir", tmp_path]
    assert train_here(*COINS, *flags) == 2


def test_without_evaluation_episodes_nothing_is_tested(tmp_path):
    flags = ["--eval_episodes=0", "--total_steps=64", "--run_dir", tmp_path]
    assert train_here(*COINS, *flags) == 0
    assert "test" not in read_object(tmp_path / "summary.json")


@pytest.mark.parametrize(
    "entry, named",
    [("toy_task:Missing", "Missing"), ("no_such_module:Task", "no_such"), ("toy_task", "toy_task")],
)
def test_a_table_entry_that_names_no_task_is_named(entry, named, monkeypatch):
    monkeypatch.setitem(TASKS, "Odd-v0", entry)
    with pytest.raises(ValueError, match=named):
        make_task(TaskSettings(task=TaskConfig(env="Odd-v0")))


def test_a_score_that_validation_does_not_report_is_refused(monkeypatch):
    monkeypatch.setattr(CoinTask, "scored_by", "luck")
    with pytest.raises(ValueError, match="luck"):
        make_task(TaskSettings(task=TaskConfig(env="toy_task:Coins-v0")))


def test_bounds_of_actions_other_than_1_are_refused(monkeypatch):
    monkeypatch.setattr(CoinEnv, "single_action_space", spaces.Box(-5.0, 5.0, (1,)))
    with pytest.raises(UserError, match=r"Box\(-1, 1\)"):
        probe(make_task(TaskSettings(task=TaskConfig(env="toy_task:Coins-v0"))))


def test_the_environment_restores_its_state():
    env, other = CoinEnv(3), CoinEnv(3)
    env.reset(seed=[1, 2, 3])
    env.step(torch.zeros(3))
    other.set_state(env.get_state())
    assert torch.equal(env.step(torch.ones(3))[0], other.step(torch.ones(3))[0])
