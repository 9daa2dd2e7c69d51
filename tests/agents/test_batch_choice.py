"""--batch_size auto in real runs, and runs that are out of memory."""

import itertools
import json
import re
import shlex
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from train_runs import only_error, start, train_here

import agents.trainer
from agents import rank
from agents.config import RunConfig, TrainConfig
from agents.evaluate import final
from agents.ppo import PPO
from agents.run import auto, limits
from agents.run.auto import allowed_batch_sizes
from agents.run.limits import smaller_parts
from agents.run.sizes import shard_sizes
from rl_dist.checkpoint.store import latest_checkpoint, load_checkpoint
from rl_dist.errors import UserError
from rl_dist.resume_check import differences, result_of
from rl_dist.strategies.measure import doublings

SCRIPT = Path(__file__).parents[1] / "limited_memory.py"
TINY = shlex.split(
    "--env Recall-v0 --num_steps 16 --bptt_steps 8 --hidden_size 8 --device cpu --eval_episodes 2 "
    "--validate_every 0 --update_epochs 1 --checkpoint_every 1"
)
SIZES = ["--num_envs", "16", "--total_steps", "768"]  # 32 slots; 3 iterations
SLOW = "--env benchmarks.slow_env:Waiting-v0"


def train(monkeypatch, run_dir, flags):
    """Train with small sizes; return the exit code."""
    return train_here(monkeypatch, *TINY, *SIZES, *flags.split(), "--run_dir", run_dir)


def proposed(error):
    """Return the flags that an error proposes."""
    words = re.search(r"((?:--resume|--batch_size|--num_envs) [^;]*);", error)[1]
    return shlex.split(words)


# ---- auto


@pytest.mark.parametrize("scaling", ["strong", "weak"])
@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("options", [{}, {"num_envs": 48}, {"grad_accumulation": 3}], ids=str)
def test_every_size_that_auto_may_choose_shares_out_over_the_ranks(scaling, num_ranks, options):
    train = TrainConfig(scaling=scaling, batch_size=0, **options)
    tried = list(itertools.islice(doublings(allowed_batch_sizes(train, num_ranks)), 8))
    for size in tried:
        share = shard_sizes(replace(train, batch_size=size), 0, num_ranks)
        assert share.batch_size // share.num_microbatches >= 8
    assert len(tried) == 8 or "num_envs" in options


def test_what_no_batch_divides_is_refused_and_so_is_auto_where_nothing_is_measured(
    tmp_path, monkeypatch, capsys
):
    flags = ["--env", "Recall-v0", "--device", "cpu", "--run_dir", tmp_path / "run"]
    flags += ["--num_steps", "16", "--bptt_steps", "16", "--num_envs", "7"]
    flags += ["--batch_size", "auto", "--grad_accumulation", "2"]
    assert train_here(monkeypatch, *flags) == 1
    assert "batch_size auto" in only_error(capsys.readouterr().err)
    with pytest.raises(UserError, match="measured when a training starts"):
        shard_sizes(TrainConfig(batch_size=0), 0, 1)


@pytest.mark.parametrize(
    ("flag", "field", "allowed", "others"),
    [
        ("batch_size", "train.batch_size", (8, 16, 32), ""),
        ("batch_size", "train.batch_size", [8 << n for n in range(17)], "--num_envs 0"),
        ("precision", "launch.precision", ("fp32", "bf16"), "--batch_size 16"),
        ("strategy", "launch.chosen_strategy", ("none", "ddp"), "--batch_size 16"),
        ("env_workers", "task.env_workers", (0,), "--batch_size 16"),
        ("env_workers", "task.env_workers", (2, 8), "--batch_size 8 " + SLOW),
    ],
)
def test_auto_trains_as_its_value_would_writes_it_down_and_resumes_with_it(
    flag, field, allowed, others, tmp_path, monkeypatch, capsys
):
    section, name = field.split(".")
    monkeypatch.setattr(auto, "cpu_has_bf16", lambda: True)
    monkeypatch.setattr(auto, "available_cores", lambda: 2)
    monkeypatch.setattr(auto, "strategy_modes", lambda *_: ("none", "ddp"))  # on one rank
    run_dir = tmp_path / "auto"

    def chosen():
        return json.loads((run_dir / "config.json").read_text())[section][name]

    assert train(monkeypatch, run_dir, f"{others} --{flag} auto") == 0
    value = chosen()
    assert value in allowed and f"{flag} auto: {value} " in capsys.readouterr().out
    assert train(monkeypatch, tmp_path / "named", f"{others} --{flag} {value}") == 0
    assert differences(result_of(tmp_path / "named"), result_of(run_dir)) == []
    if flag == "precision":
        assert json.loads((run_dir / "state.json").read_text())["precision"] == value
    again = [] if flag == "env_workers" else [f"--{flag}", "auto"]  # workers may change
    capsys.readouterr()
    assert train_here(monkeypatch, "--resume", run_dir, *again, "--total_steps", "1024") == 0
    assert f"{flag} auto" not in capsys.readouterr().out and chosen() == value


@pytest.mark.parametrize(("units", "chosen"), [(True, "bf16"), (False, None)])
def test_bf16_is_tried_where_a_cpu_has_units_for_it(units, chosen, tmp_path, monkeypatch, capsys):
    def fp32_fails(precision):
        return torch.bfloat16 if precision == "bf16" else fail()

    monkeypatch.setattr(auto, "cpu_has_bf16", lambda: units)
    monkeypatch.setattr(auto, "autocast_dtype", fp32_fails)
    code = train(monkeypatch, tmp_path / "auto", "--batch_size 16 --precision auto")
    assert code == (0 if chosen else 1)
    assert (f"precision auto: {chosen} " in capsys.readouterr().out) == bool(chosen)


def test_auto_avoids_sizes_that_do_not_fit(tmp_path, monkeypatch, capsys):
    step = PPO.step

    def of_a_small_gpu(ppo, minibatch, *plans):
        return fail() if minibatch.obs.shape[1] > 10 else step(ppo, minibatch, *plans)

    monkeypatch.setattr(PPO, "step", of_a_small_gpu)
    assert train(monkeypatch, tmp_path / "run", "--batch_size auto") == 0
    assert "batch_size auto: 8 " in capsys.readouterr().out
    monkeypatch.setattr(PPO, "step", lambda *_: fail())
    assert train(monkeypatch, tmp_path / "none", "--batch_size auto") == 1
    assert "CUDA out of memory" in only_error(capsys.readouterr().err)
    assert [path.name for path in (tmp_path / "none").iterdir()] == ["logs"]


def test_on_a_cpu_sizes_are_refused_before_linux_ends_the_process(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(auto, "free_for_each_rank", lambda *_: 50_000)
    assert train(monkeypatch, tmp_path / "none", "--batch_size auto") == 1
    assert "GiB are free" in only_error(capsys.readouterr().err)


def fail():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")


# ---- out of memory


@pytest.mark.slow  # a process of its own
def test_a_training_under_a_real_limit_of_memory_ends_with_one_line_that_names_what_to_change(
    tmp_path,
):
    sizes = "--num_envs 1024 --num_steps 32 --batch_size 1024 --hidden_size 128"
    flags = [*TINY[:2], "--total_steps", "100000", *sizes.split(), "--device", "cpu"]
    # MiB, of some 500 that its update takes
    run = start(SCRIPT, "train", 64, *flags, "--run_dir", tmp_path / "run")
    error = run.communicate(timeout=300)[1].splitlines()[-1]
    assert run.returncode == 1
    assert "out of memory in update, with num_envs 1024, batch_size 1024, bptt_steps 32" in error
    assert proposed(error) == ["--batch_size", "512", "--grad_accumulation", "2"]


@pytest.mark.parametrize(("ranks", "refused"), [(1, False), (4, True)])
def test_cpu_ranks_share_the_memory_in_which_their_rollouts_must_fit(ranks, refused, monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(limits, "free_memory_bytes", lambda device, sharers: 2**26 // sharers)
    sizes = {"num_envs": 512 * ranks, "batch_size": 512 * ranks, "total_steps": 10**6}
    config = RunConfig(train=TrainConfig(num_steps=128, **sizes))
    with pytest.raises(UserError) if refused else nullcontext():
        limits.check_rollouts(config, torch.device("cpu"), ranks)


def end_in(phase, monkeypatch):
    """Run out of memory in the third iteration, or before or after training."""
    owner, name, fails_at = {
        "start-up": (rank, "Training", 1),
        "collect": (agents.trainer, "collect", 4),  # the first one is the normalisers'
        "update": (PPO, "step", 6),
        "final evaluation": (final, "evaluate_last_and_best", 1),
    }[phase]
    function, calls = getattr(owner, name), itertools.count(1)

    def exhausted(*args, **options):
        return fail() if next(calls) == fails_at else function(*args, **options)

    monkeypatch.setattr(owner, name, exhausted)


@pytest.mark.parametrize("phase", ["start-up", "collect", "update", "final evaluation"])
def test_out_of_memory_names_the_phase_and_the_flags_it_proposes_work(
    phase, tmp_path, monkeypatch, capsys
):
    run_dir = tmp_path / "run"
    with monkeypatch.context() as failing:
        end_in(phase, failing)
        assert train(failing, run_dir, "--batch_size 16") == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"rank 0 ran out of memory in {phase}, with num_envs 16, batch_size 16" in error
    assert "OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB" in error
    if phase == "final evaluation":
        assert f"training is saved: python -m agents.evaluate {run_dir}" in error
        assert latest_checkpoint(run_dir).name == "iteration_00000003.pt"
    elif phase == "update":
        parts = ["--batch_size", "8", "--grad_accumulation", "2"]
        assert proposed(error) == ["--resume", str(run_dir), *parts]
        assert train_here(monkeypatch, *proposed(error)) == 0
        assert train(monkeypatch, tmp_path / "whole", "--batch_size 16") == 0
        ended, whole = (
            load_checkpoint(latest_checkpoint(path)) for path in (run_dir, tmp_path / "whole")
        )
        torch.testing.assert_close(ended["policy"], whole["policy"], rtol=1e-4, atol=1e-6)
    else:
        assert "--num_envs" in error


def test_a_resumed_run_may_not_change_the_slots_of_a_gradient_step(tmp_path, monkeypatch, capsys):
    run_dir = tmp_path / "run"
    assert train(monkeypatch, run_dir, "--batch_size 16") == 0
    capsys.readouterr()
    for flags in (["--batch_size", "8"], ["--batch_size", "8", "--grad_accumulation", "4"]):
        assert train_here(monkeypatch, "--resume", run_dir, *flags, "--total_steps", "1024") == 2
        assert "--batch_size 8 (it has 16)" in only_error(capsys.readouterr().err)


@pytest.mark.parametrize("num_ranks", [1, 4])
@pytest.mark.parametrize(
    "options", [{}, {"num_envs": 12, "batch_size": 24}, {"scaling": "weak"}], ids=str
)
def test_sizes_that_are_proposed_share_out_and_parts_keep_the_step(num_ranks, options):
    train = TrainConfig(**options)

    def with_flags(text):
        pairs = re.findall(r"--(\w+) (\d+)", text)
        return replace(train, **{name: int(number) for name, number in pairs})

    parts = with_flags(smaller_parts(train, num_ranks))
    assert (
        parts.sequences_per_step == train.sequences_per_step and parts.batch_size < train.batch_size
    )
    shard_sizes(parts, 0, num_ranks)
    assert smaller_parts(TrainConfig(batch_size=7, num_envs=28), 7) == ""
