"""--batch_size auto in real runs, and runs that are out of memory."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from train_runs import only_error, records, start, train_here

import agents.trainer
import train_distributed
from agents.dry_run import memory_advice
from agents.dry_run.batch_size import allowed_batch_sizes
from agents.dry_run.memory_advice import fewer_environments, smaller_parts
from agents.evaluate import final
from agents.ppo import PPO
from agents.run.config import RunConfig
from agents.sizes import TrainConfig, share_out
from rl_dist.checkpoint.file import load_checkpoint
from rl_dist.checkpoint.folder import latest_checkpoint
from rl_dist.errors import UserError
from rl_dist.parallel import batch_size
from rl_dist.resume_check.comparison import parameter_sha256

SCRIPT = Path(__file__).parents[1] / "limited_memory.py"
TINY = [
    *("--env", "Recall-v0", "--num_steps", "16", "--bptt_steps", "8", "--hidden_size", "8", "--device", "cpu"),
    *("--eval_episodes", "2", "--validate_every", "0", "--update_epochs", "1", "--checkpoint_every", "1"),
]
SIZES = ["--num_envs", "16", "--total_steps", "768"]  # 32 slots; 3 iterations


def last_line(stderr):
    """The error, after lines of progress."""
    *progress, told = stderr.splitlines()
    assert told.startswith("error: ") and all(line.startswith("iteration ") for line in progress), stderr
    return told


def proposed(told):
    """The flags that an error proposes, and the rest of its words."""
    words = shlex.split(told.replace(";", " ;"))
    first = min(words.index(name) for name in ("--resume", "--batch_size", "--num_envs") if name in words)
    return words[first : words.index(";", first)]


@pytest.fixture
def briefly(monkeypatch):
    monkeypatch.setattr(batch_size, "MEASURE_S", 0.02)


# ---- auto


@pytest.mark.parametrize("scaling", ["strong", "weak"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("options", [{}, {"num_envs": 48}, {"num_steps": 96}, {"grad_accumulation": 3}], ids=str)
def test_every_size_that_auto_may_choose_shares_out_over_the_ranks(scaling, num_ranks, options):
    train = TrainConfig(scaling=scaling, batch_size=0, **options)
    allowed = allowed_batch_sizes(train, num_ranks)
    for size in allowed:
        share = share_out(replace(train, batch_size=size), 0, num_ranks)
        assert share.batch_size // share.num_parts >= 8
    gaps = [after / before for before, after in zip(allowed, allowed[1:], strict=False)]
    assert allowed == sorted(set(allowed)) and (options.get("num_envs") or (max(gaps) <= 2.0 and allowed[-1] > 10**5))


def test_what_no_batch_divides_is_refused_and_so_is_auto_where_nothing_is_measured():
    with pytest.raises(UserError, match="no size divides num_envs 7 over 2 ranks"):
        allowed_batch_sizes(TrainConfig(batch_size=0, num_envs=7), 2)
    with pytest.raises(UserError, match="measured when a training starts"):
        share_out(TrainConfig(batch_size=0), 0, 1)


def test_auto_trains_as_its_number_would_writes_it_down_and_resumes_with_it(tmp_path, monkeypatch, capsys, briefly):
    assert train_here(monkeypatch, *TINY, *SIZES, "--batch_size", "auto", "--run_dir", tmp_path / "auto") == 0
    told = capsys.readouterr().out
    chosen = json.loads((tmp_path / "auto/config.json").read_text())["train"]["batch_size"]
    assert chosen in (8, 16, 32) and f"batch_size auto: {chosen} slots, " in told
    assert f"minibatch, slots of 8 steps{chosen:>19}" in told and "--learning_rate" in told
    assert train_here(monkeypatch, *TINY, *SIZES, "--batch_size", chosen, "--run_dir", tmp_path / "number") == 0
    assert parameter_sha256(tmp_path / "auto") == parameter_sha256(tmp_path / "number")
    capsys.readouterr()
    flags = ["--resume", tmp_path / "auto", "--batch_size", "auto", "--total_steps", "1024"]  # the same command again
    assert train_here(monkeypatch, *flags) == 0
    assert "batch_size auto" not in capsys.readouterr().out and len(records(tmp_path / "auto")) == 4
    assert json.loads((tmp_path / "auto/config.json").read_text())["train"]["batch_size"] == chosen


def test_a_start_after_the_choice_takes_the_number_from_the_run_directory(tmp_path, monkeypatch, capsys, briefly):
    """As ranks do that start again before there is a checkpoint."""
    saved = train_distributed.save_config

    def chosen_before(config, run_dir):
        saved(replace(config, train=replace(config.train, batch_size=16)), run_dir)

    monkeypatch.setattr(train_distributed, "save_config", chosen_before)
    assert train_here(monkeypatch, *TINY, *SIZES, "--batch_size", "0", "--run_dir", tmp_path / "run") == 0
    state = load_checkpoint(latest_checkpoint(tmp_path / "run"))
    assert json.loads(state["config"])["train"]["batch_size"] == 16
    assert "batch_size auto:" not in capsys.readouterr().out


def test_auto_avoids_sizes_that_do_not_fit(tmp_path, monkeypatch, capsys, briefly):
    step = PPO.step

    def of_a_small_gpu(ppo, minibatch):
        if minibatch.obs.shape[1] > 10:
            fail()
        return step(ppo, minibatch)

    monkeypatch.setattr(PPO, "step", of_a_small_gpu)
    assert train_here(monkeypatch, *TINY, *SIZES, "--batch_size", "auto", "--run_dir", tmp_path / "run") == 0
    assert "batch_size auto: 8 slots, the fastest that fits with 10 % to spare" in capsys.readouterr().out
    monkeypatch.setattr(PPO, "step", lambda *_: fail())
    assert train_here(monkeypatch, *TINY, *SIZES, "--batch_size", "auto", "--run_dir", tmp_path / "none") == 1
    assert "not even a batch of 8 samples a rank fits in memory" in only_error(capsys.readouterr().err)
    assert not (tmp_path / "none").exists()


def fail():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")


@pytest.mark.slow
def test_auto_on_two_ranks_trains_as_its_number_would(tmp_path):
    flags = ["--num_gpus", "2", *TINY, *SIZES]
    run = start("train_distributed.py", *flags, "--batch_size", "auto", "--run_dir", tmp_path / "auto")
    stdout, stderr = run.communicate(timeout=300)
    assert run.returncode == 0, stderr
    chosen = json.loads((tmp_path / "auto/config.json").read_text())["train"]["batch_size"]
    assert f"batch_size auto: {chosen} slots" in stdout and "of each rank" in stdout
    run = start("train_distributed.py", *flags, "--batch_size", chosen, "--run_dir", tmp_path / "number")
    assert run.communicate(timeout=300) and run.returncode == 0
    assert parameter_sha256(tmp_path / "auto") == parameter_sha256(tmp_path / "number")


# ---- out of memory


@pytest.mark.slow  # a process of its own; tests/test_batch_size.py has a search under a real limit
def test_a_training_under_a_real_limit_of_memory_ends_with_one_line_that_names_what_to_change(tmp_path):
    flags = [*TINY[:2], "--total_steps", "100000", "--num_envs", "1024", "--num_steps", "32", "--batch_size", "1024"]
    flags += ["--hidden_size", "128", "--device", "cpu", "--run_dir", tmp_path / "run"]
    run = start(SCRIPT, "train", 64, *flags)  # MiB, of some 500 that its update takes
    told = last_line(run.communicate(timeout=300)[1])
    assert run.returncode == 1
    sizes = "num_envs 1024, batch_size 1024, bptt_steps 32, hidden_size 128, 1 rank"
    assert f"rank 0 ran out of memory in update, with {sizes}" in told
    assert " GiB free on cpu; the same gradient steps in less memory: --batch_size 512 --grad_accumulation 2" in told


def test_rollouts_that_cannot_fit_are_told_before_environments_are_made(tmp_path, monkeypatch, capsys):
    """And the sizes that are proposed instead would not be."""
    monkeypatch.setattr(memory_advice, "free_memory_bytes", lambda device, sharers=1: 3 * 2**25)
    monkeypatch.setattr(train_distributed, "Training", lambda *_: fail())
    flags = [*TINY, "--total_steps", "768", "--num_envs", "16", "--batch_size", "16", "--hidden_size", "64"]
    train_here(monkeypatch, *flags, "--num_envs", "4096", "--run_dir", tmp_path / "large")
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2
    assert told[0].startswith("warning: rollouts need at least 0.1 GiB on each rank and 0.1 GiB are free on cpu: ")
    fewer, smaller = told[0].replace("without --num_envs", "--num_envs 0").split("what may fit: ")[1].split(", or ")
    for name, sizes in (("fewer", fewer), ("smaller", smaller)):
        train_here(monkeypatch, *flags, *sizes.split(), "--run_dir", tmp_path / name)
        assert "warning" not in capsys.readouterr().err, sizes


def test_rollouts_of_more_than_twice_what_is_free_are_refused_before_ranks_start(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train_distributed, "launch", lambda *_, **__: fail())
    flags = ["--env", "CartPole-v1", "--num_envs", 10_000_000, "--run_dir", tmp_path / "run"]
    assert train_here(monkeypatch, *flags) == 2
    told = only_error(capsys.readouterr().err)
    assert re.search(r"need at least [\d.]+ GiB on each rank and [\d.]+ GiB are free .*--num_envs \d", told)
    assert not (tmp_path / "run").exists()


def test_cpu_ranks_share_the_memory_in_which_their_rollouts_must_fit(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(memory_advice, "free_memory_bytes", lambda device, sharers: 2**26 // sharers)
    for ranks, warning in ((1, ""), (4, "0.0 GiB are free on cpu for each: ")):
        train = TrainConfig(num_envs=512 * ranks, num_steps=128, batch_size=512 * ranks, total_steps=10**6)
        told = memory_advice.check_rollouts(RunConfig(train=train), torch.device("cpu"), ranks)
        assert warning in told and bool(warning) == bool(told)


def end_in(phase, monkeypatch):
    """Out of memory in the third iteration, or while judging."""
    if phase == "update":
        step, calls = PPO.step, []

        def exhausted(ppo, minibatch):
            calls.append(1)
            return fail() if len(calls) == 6 else step(ppo, minibatch)

        monkeypatch.setattr(PPO, "step", exhausted)
    elif phase == "collect":
        collect, calls = agents.trainer.collect, []

        def exhausted(*args, **options):
            calls.append(1)
            return fail() if len(calls) == 4 else collect(*args, **options)  # the first one is the normalisers'

        monkeypatch.setattr(agents.trainer, "collect", exhausted)
    elif phase == "start-up":
        monkeypatch.setattr(train_distributed, "Training", lambda *_: fail())
    else:
        monkeypatch.setattr(final, "judge_run", lambda *_: fail())


@pytest.mark.parametrize("phase", ["start-up", "collect", "update", "judging"])
def test_out_of_memory_names_the_phase_and_the_flags_it_proposes_work(phase, tmp_path, monkeypatch, capsys):
    run_dir, flags = tmp_path / "run", [*TINY, *SIZES, "--batch_size", "16"]
    with monkeypatch.context() as failing:
        end_in(phase, failing)
        assert train_here(failing, *flags, "--run_dir", run_dir) == 1
    told = last_line(capsys.readouterr().err)
    assert f"rank 0 ran out of memory in {phase}, with num_envs 16, batch_size 16, bptt_steps 8, hidden_size 8" in told
    assert "the error was OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB" in told
    if phase == "judging":
        assert f"training is saved: python -m agents.evaluate {run_dir}" in told
        assert latest_checkpoint(run_dir).name == "iteration_00000003.pt"
    elif phase == "update":
        assert proposed(told) == ["--resume", str(run_dir), "--batch_size", "8", "--grad_accumulation", "2"]
        assert train_here(monkeypatch, *proposed(told)) == 0
        assert train_here(monkeypatch, *flags, "--run_dir", tmp_path / "whole") == 0
        ended, whole = (load_checkpoint(latest_checkpoint(path)) for path in (run_dir, tmp_path / "whole"))
        for name, value in whole["policy"].items():
            torch.testing.assert_close(ended["policy"][name], value, rtol=1e-4, atol=1e-6)
    else:
        assert proposed(told)[:2] == ["--num_envs", "8"]
        assert train_here(monkeypatch, *flags, *proposed(told), "--run_dir", tmp_path / "fresh") == 0


def test_a_resumed_run_may_not_change_the_slots_of_a_gradient_step(tmp_path, monkeypatch, capsys):
    run_dir = tmp_path / "run"
    assert train_here(monkeypatch, *TINY, *SIZES, "--batch_size", "16", "--run_dir", run_dir) == 0
    capsys.readouterr()
    for flags in (["--batch_size", "8"], ["--batch_size", "8", "--grad_accumulation", "4"]):
        assert train_here(monkeypatch, "--resume", run_dir, *flags, "--total_steps", "1024") == 2
        assert "--batch_size 8 (it has 16)" in only_error(capsys.readouterr().err)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("options", [{}, {"num_envs": 12, "batch_size": 24}, {"scaling": "weak"}], ids=str)
def test_sizes_that_are_proposed_share_out_and_parts_keep_the_step(num_ranks, options):
    train = TrainConfig(**options)

    def with_flags(text):
        words = text.split()
        return replace(train, **{name[2:]: int(n) for name, n in zip(words[::2], words[1::2], strict=True)})

    parts = with_flags(smaller_parts(train, num_ranks))
    assert parts.slots_per_step == train.slots_per_step and parts.batch_size < train.batch_size
    share_out(parts, 0, num_ranks)
    fewer = share_out(with_flags(fewer_environments(train, num_ranks)), 0, num_ranks)
    assert fewer.global_num_envs <= share_out(train, 0, num_ranks).global_num_envs / 2


def test_what_cannot_be_cut_into_parts_is_not_proposed():
    assert smaller_parts(TrainConfig(batch_size=7, num_envs=28), 7) == ""
    assert fewer_environments(TrainConfig(num_envs=10), 3) == "--num_envs 5"  # it was begun on other ranks
