"""What a newcomer meets: an environment of their own, other programs' flags, odd sizes."""

import subprocess
import sys

import pytest
from train_runs import REPO, only_error, records, run_here, start_training, train_here

import train_distributed
from agents.run.choice import OTHER_NAMES
from agents.run.config import OWNERS
from agents.sizes import TrainConfig, shard_sizes

TINY = "--num_envs 4 --num_steps 16 --bptt_steps 8 --batch_size 4 --hidden_size 8 --device cpu"
CUE = [*TINY.split(), "--env", "own_environment:Cue-v0", "--eval_episodes", "2"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_environment_in_the_current_directory_is_found_by_all_ranks(ranks, tmp_path):
    (tmp_path / "own_environment.py").write_text((REPO / "examples/own_environment.py").read_text())
    flags = [*CUE, "--total_steps", 64, "--num_gpus", ranks, "--run_dir", "run"]
    job = start_training(*flags, cwd=tmp_path)
    _, err = job.communicate(timeout=120)
    assert job.returncode == 0, err
    assert len(records(tmp_path / "run")[-1]["ranks"]) == ranks


def test_a_refused_run_announces_no_directory(tmp_path, monkeypatch, capsys):
    (tmp_path / "run").mkdir(mode=0o500)
    (tmp_path / "run" / "config.json").mkdir()
    flags = [*CUE, "--env", "CartPole-v1", "--run_dir", tmp_path / "run"]
    assert train_here(monkeypatch, *flags) != 0
    assert "run directory" not in capsys.readouterr().out


def test_what_other_programs_call_a_flag_leads_to_ours(monkeypatch, capsys):
    assert set(OTHER_NAMES.values()) <= OWNERS.keys() | {"run_dir", "resume"}
    assert not OTHER_NAMES.keys() & OWNERS.keys()
    for word, flag in [
        ("--lr", "learning_rate"),
        ("--n-envs", "num_envs"),
        ("--e_clip=1", "clip_coef"),
    ]:
        assert run_here(train_distributed.main, [word, "3"], monkeypatch) == 2
        assert f"(did you mean --{flag}?)" in only_error(capsys.readouterr().err)


def test_sizes_that_do_not_divide_propose_another_batch_for_the_same_environments():
    with pytest.raises(ValueError, match=r"try .*or --batch_size 10 or --batch_size 20$"):
        shard_sizes(TrainConfig(num_envs=10, batch_size=16, num_steps=64), 0, 1)


def test_an_iteration_beyond_the_whole_budget_is_a_warning(tmp_path, monkeypatch, capsys):
    flags = [*CUE, "--env", "CartPole-v1", "--total_steps", 1, "--run_dir", tmp_path / "run"]
    assert train_here(monkeypatch, *flags) == 0
    warning = capsys.readouterr().err.splitlines()[0]
    assert "one iteration is 64 steps, more than --total_steps 1" in warning
    assert "--batch_size 4 counts sequences of 8 steps" in warning


def test_packages_from_two_copies_are_refused_with_both_places(tmp_path):
    (tmp_path / "agents").mkdir()
    (tmp_path / "agents/__init__.py").write_text((REPO / "agents/__init__.py").read_text())
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(REPO)!r}]; import agents"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    last = done.stderr.splitlines()[-1]
    assert str(tmp_path / "agents") in last and str(REPO / "rl_dist") in last
