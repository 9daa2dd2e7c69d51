"""Test training with flags set to auto, and training that needs too much memory."""

import itertools
import re
import shlex
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from train_runs import printed_error, train_here

from agents.config import RunConfig
from agents.learner.ppo import PPO
from agents.learner.settings import TrainConfig
from agents.learner.sizes import shard_sizes
from agents.run import auto
from rl_dist.errors import UserError
from rl_dist.files import read_object
from rl_dist.process_group.world import World
from rl_dist.resume_check import differences, result_of
from rl_dist.strategies.measure import doublings

TINY = shlex.split(
    "--env Recall-v0 --num_steps 16 --bptt_steps 8 --hidden_size 8 --device cpu --eval_episodes 2 "
    "--validate_every 0 --update_epochs 1 --checkpoint_every 1"
)
SIZES = ["--num_envs=16", "--total_steps=768"]  # 32 sequences per rollout, 3 iterations
SLOW = "--env benchmarks.slow_env:Waiting-v0"


def train(run_dir, flags):
    """Train with small sizes; return the exit code."""
    return train_here(*TINY, *SIZES, *flags.split(), "--run_dir", run_dir)


def fail():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")


# ---- flags set to auto


@pytest.mark.parametrize("scaling", ["strong", "weak"])
@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("options", [{}, {"num_envs": 48}, {"grad_accumulation": 3}], ids=str)
def test_every_size_that_auto_may_choose_divides_over_the_ranks(scaling, num_ranks, options):
    config = TrainConfig(scaling=scaling, batch_size=0, **options)
    with pytest.raises(UserError, match="batch_size auto"):
        shard_sizes(config, 0, num_ranks)
    tried = list(itertools.islice(doublings(auto.allowed_batch_sizes(config, num_ranks)), 8))
    for size in tried:
        share = shard_sizes(replace(config, batch_size=size), 0, num_ranks)
        assert share.batch_size // config.grad_accumulation >= 8
    assert len(tried) == 8 or "num_envs" in options


@pytest.mark.parametrize(
    "flag, field, allowed, others",
    [
        ("batch_size", "train.batch_size", (8, 16, 32), ""),
        ("precision", "launch.precision", ("fp32", "bf16"), "--batch_size 16"),
        ("strategy", "launch.chosen_strategy", ("none", "ddp"), "--batch_size 16"),
        ("env_workers", "task.env_workers", (2, 8), "--batch_size 8 " + SLOW),
    ],
)
def test_auto_trains_like_the_value_it_chooses_and_a_resume_keeps_that_value(
    flag, field, allowed, others, tmp_path, monkeypatch, capsys
):
    section, name = field.split(".")
    monkeypatch.setattr(auto, "available_cores", lambda: 2)
    # Let auto choose between two strategies that both work on one rank.
    monkeypatch.setattr(auto, "strategy_modes", lambda *_: ("none", "ddp"))
    run_dir = tmp_path / "auto"

    def chosen():
        return read_object(run_dir / "config.json")[section][name]

    assert train(run_dir, f"{others} --{flag} auto") == 0
    value = chosen()
    assert value in allowed and f"{flag} auto: {value} " in capsys.readouterr().out
    assert train(tmp_path / "named", f"{others} --{flag} {value}") == 0
    assert differences(result_of(tmp_path / "named"), result_of(run_dir)) == []
    if flag == "precision":
        assert read_object(run_dir / "state.json")["precision"] == value
    # Do not repeat --env_workers auto: with this flag, a resumed run would measure again.
    again = [] if flag == "env_workers" else [f"--{flag}", "auto"]
    capsys.readouterr()
    assert train_here("--resume", run_dir, *again, "--total_steps=1024") == 0
    assert f"{flag} auto" not in capsys.readouterr().out and chosen() == value


@pytest.mark.parametrize(
    "device_type, tried", [("cpu", ["fp32", "bf16"]), ("cuda", ["fp32", "tf32", "bf16"])]
)
def test_auto_tries_tf32_only_on_gpus(device_type, tried, tmp_path, monkeypatch, capsys):
    """The training itself runs on the CPU, where tf32 computes like fp32."""
    monkeypatch.setitem(auto.PRECISIONS, "cpu", auto.PRECISIONS[device_type])
    assert train(tmp_path / "run", "--batch_size 16 --precision auto") == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "precision auto" in line)
    assert re.findall(r"(\w+): \S+ ms", line) == tried


def test_auto_chooses_only_sizes_that_fit_and_fails_if_none_does(tmp_path, monkeypatch, capsys):
    def on_a_small_gpu(ppo, minibatch, *plans, step=PPO.step):
        return fail() if minibatch.obs.shape[1] > 10 else step(ppo, minibatch, *plans)

    monkeypatch.setattr(PPO, "step", on_a_small_gpu)
    assert train(tmp_path / "run", "--batch_size auto") == 0
    assert "batch_size auto: 8 " in capsys.readouterr().out
    for reason, owner, name, value in (
        ("CUDA out of memory", PPO, "step", lambda *_: fail()),
        ("GiB are free", auto, "free_memory_bytes", lambda *_: 20_000),
        ("no value divides", auto, "allowed_batch_sizes", lambda *_: []),
    ):
        monkeypatch.setattr(owner, name, value)
        assert train(tmp_path / "none", "--batch_size auto") == 1
        assert reason in printed_error(capsys)
        assert [path.name for path in (tmp_path / "none").iterdir()] == ["logs"]


# ---- out of memory


@pytest.mark.parametrize("ranks", [1, 4])
def test_cpu_ranks_share_the_memory_in_which_their_rollouts_must_fit(ranks, monkeypatch):
    monkeypatch.setattr(auto, "free_memory_bytes", lambda device, sharers: 2**23 // sharers)
    train = TrainConfig(
        num_steps=128, num_envs=512 * ranks, batch_size=512 * ranks, total_steps=10**6
    )
    world = World(0, 0, ranks, torch.device("cpu"), "gloo", ranks)
    with pytest.raises(UserError) if ranks > 1 else nullcontext():
        auto.check_rollouts(RunConfig(train=train), world)


def test_an_out_of_memory_error_names_the_phase_and_flags_that_a_resume_accepts(
    tmp_path, monkeypatch, capsys
):
    run_dir = tmp_path / "run"
    calls = itertools.count(1)

    def exhausted(*args, step=PPO.step):
        return fail() if next(calls) == 6 else step(*args)

    with monkeypatch.context() as failing:
        failing.setattr(PPO, "step", exhausted)
        assert train(run_dir, "--batch_size 16") == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert "rank 0 ran out of memory in update, " in error and "--grad_accumulation" in error
    assert "OutOfMemoryError: CUDA out of memory." in error
    smaller = ["--batch_size=8", "--grad_accumulation=2"]
    assert train_here("--resume", run_dir, *smaller) == 0
