"""--precision, and flags that are gone, given to the commands."""

import json
import math

import torch
from train_runs import SMALL, evaluate_here, only_error, records, train_here

from agents.run.config import RunConfig
from agents.run.saved import load_agent
from rl_dist.checkpoint.folder import load_latest, save_checkpoint
from rl_dist.config import removed_flags
from rl_dist.speedup.job_of_run import flags_of

RECALL = [
    *("--env", "Recall-v0", "--eval_episodes", "4", "--num_envs", "4", "--batch_size", "8"),
    *("--num_steps", "32", "--bptt_steps", "8", "--hidden_size", "8"),
]


def test_tf32_is_refused_without_a_gpu_before_anything_is_written(monkeypatch, capsys, tmp_path):
    flags = [*SMALL, "--precision", "tf32", "--run_dir", tmp_path / "run"]
    assert train_here(monkeypatch, *flags) == 2
    assert "precision tf32 is a mode of NVIDIA GPUs" in only_error(capsys.readouterr().err)
    assert not (tmp_path / "run").exists()


def test_flags_that_are_gone_are_ignored_in_older_runs_and_named_if_they_were_set(
    monkeypatch, capsys, tmp_path
):
    older = RunConfig().to_dict()
    older["launch"]["cudnn_autotune"] = older["speed"]["compile"] = False
    older["speed"]["fused_adam"] = "auto"  # it was a word once
    assert RunConfig.from_dict(older) == RunConfig() and not removed_flags(older)
    older["speed"]["compile"] = True
    assert RunConfig.from_dict(older) == RunConfig() and removed_flags(older) == {"compile"}
    assert not [flag for flag in flags_of(older) if "compile" in flag or "cudnn" in flag]
    run_dir = tmp_path / "run"
    assert train_here(monkeypatch, *RECALL, "--total_steps", "128", "--run_dir", run_dir) == 0
    found = load_latest(run_dir)
    config = json.loads(found.state["config"]) | {"speed": {"compile": True}}
    found.state["config"] = json.dumps(config)
    save_checkpoint(found.path.parent, found.state, iteration=1, keep=3)
    capsys.readouterr()
    assert train_here(monkeypatch, "--resume", run_dir, "--total_steps", "256") == 0
    assert capsys.readouterr().out.count("this run had --compile") == 1


def test_a_run_in_bf16_is_evaluated_and_goes_on_in_bf16(monkeypatch, capsys, tmp_path):
    run_dir = tmp_path / "run"
    begun = ["--total_steps", "256", "--precision", "bf16", "--run_dir", run_dir]
    assert train_here(monkeypatch, *RECALL, *begun) == 0
    resumed = ["--resume", run_dir, "--total_steps", "512", "--no-fused_adam"]
    assert train_here(monkeypatch, *resumed) == 0
    assert all(math.isfinite(record["loss/value"]) for record in records(run_dir))
    agent = load_agent(run_dir)
    assert agent.policy.low_precision == torch.bfloat16 and not agent.config.speed.fused_adam
    assert evaluate_here(monkeypatch, run_dir) == 0
    capsys.readouterr()
    assert train_here(monkeypatch, "--resume", run_dir, "--precision", "fp32") == 2
    assert "--precision fp32 (it has bf16)" in only_error(capsys.readouterr().err)
