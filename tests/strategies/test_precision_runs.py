"""--precision, given to the commands."""

import math

import torch
from train_runs import SMALL, evaluate_here, only_error, records, train_here

from agents.run.saved import load_agent


def test_a_run_in_bf16_is_evaluated_and_goes_on_in_bf16(monkeypatch, capsys, tmp_path):
    run_dir = tmp_path / "run"
    sizes = "--env Recall-v0 --eval_episodes 4 --num_envs 4 --batch_size 8 --num_steps 32"
    begun = f"{sizes} --bptt_steps 8 --hidden_size 8 --total_steps 256 --precision bf16"
    assert train_here(monkeypatch, *begun.split(), "--run_dir", run_dir) == 0
    assert train_here(monkeypatch, "--resume", run_dir, "--total_steps", "512") == 0
    assert all(math.isfinite(record["loss/value"]) for record in records(run_dir))
    assert load_agent(run_dir).policy.low_precision == torch.bfloat16
    assert evaluate_here(monkeypatch, run_dir) == 0
    capsys.readouterr()
    assert train_here(monkeypatch, "--resume", run_dir, "--precision", "fp32") == 2
    assert "--precision fp32" in only_error(capsys.readouterr().err)


def test_tf32_is_refused_without_a_gpu_before_anything_is_written(monkeypatch, capsys, tmp_path):
    flags = [*SMALL, "--precision", "tf32", "--run_dir", tmp_path / "run"]
    assert train_here(monkeypatch, *flags) == 2
    assert "precision tf32" in only_error(capsys.readouterr().err)
    assert not (tmp_path / "run").exists()
