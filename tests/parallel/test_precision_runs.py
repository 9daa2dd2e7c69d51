"""--precision and --compile given to the commands."""

import math

import torch
from train_runs import SMALL, evaluate_here, only_error, records, train_here

from agents.run.config import SECTIONS, RunConfig, load_agent
from agents.run.resumed import resumed_config
from rl_dist.config import parse_flags
from rl_dist.launch.launcher import LaunchConfig

RECALL = [
    *("--env", "Recall-v0", "--eval_episodes", "4", "--num_envs", "4", "--batch_size", "8"),
    *("--num_steps", "32", "--bptt_steps", "8", "--hidden_size", "8"),
]


def test_tf32_is_refused_without_a_gpu_before_anything_is_written(monkeypatch, capsys, tmp_path):
    assert train_here(monkeypatch, *SMALL, "--precision", "tf32", "--run_dir", tmp_path / "run") == 2
    assert "precision tf32 is a mode of NVIDIA GPUs" in only_error(capsys.readouterr().err)
    assert not (tmp_path / "run").exists()


def test_the_autotuner_is_refused_without_a_gpu_and_passed_on_with_one(monkeypatch, capsys, tmp_path):
    assert train_here(monkeypatch, *SMALL, "--cudnn_autotune", "--run_dir", tmp_path / "run") == 2
    assert "use --no-cudnn_autotune" in only_error(capsys.readouterr().err)
    assert not (tmp_path / "run").exists()
    assert LaunchConfig(cudnn_autotune=True).strategy_config.cudnn_autotune
    saved = RunConfig(launch=LaunchConfig(cudnn_autotune=True))  # by a machine with a GPU
    flags = parse_flags(SECTIONS, ["--no-cudnn_autotune"], description="")
    assert not resumed_config(saved, flags).launch.cudnn_autotune


def test_compile_without_a_compiler_is_refused(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("CXX", "/nowhere/g++")
    assert train_here(monkeypatch, *SMALL, "--compile", "--run_dir", tmp_path / "run") == 2
    assert "compile needs a C++ compiler, found none of /nowhere/g++" in only_error(capsys.readouterr().err)


def test_a_run_in_bf16_trains_is_judged_and_goes_on_in_bf16(monkeypatch, capsys, tmp_path):
    run_dir = tmp_path / "run"
    assert train_here(monkeypatch, *RECALL, "--total_steps", "256", "--precision", "bf16", "--run_dir", run_dir) == 0
    assert train_here(monkeypatch, "--resume", run_dir, "--total_steps", "512", "--fused_adam", "on") == 0
    assert all(math.isfinite(record["loss/value"]) for record in records(run_dir))
    agent = load_agent(run_dir)
    assert agent.policy.low_precision == torch.bfloat16 and agent.config.speed.fused_adam == "on"
    assert evaluate_here(monkeypatch, run_dir) == 0
    capsys.readouterr()
    assert train_here(monkeypatch, "--resume", run_dir, "--precision", "fp32") == 2
    assert "--precision fp32 (it has bf16)" in only_error(capsys.readouterr().err)
