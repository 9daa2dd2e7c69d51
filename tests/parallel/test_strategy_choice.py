"""auto measures and fallback steps down; what they come to is kept, and changes nothing else."""

import dataclasses
import json
import re

import pytest
import torch
from agents_ranks import world_of_one
from strategy_ranks import nothing, sleeping
from train_runs import SIZES, only_error, records, start_training, train_here

import agents.dry_run.strategy
from agents.dry_run.strategy import StrategyTrial, settle_strategy
from agents.policy import Policy, PolicyConfig
from agents.run.config import SECTIONS, RunConfig, save_config
from agents.run.resumed import resumed_config
from agents.sizes import TrainConfig
from envs.task import TaskConfig
from rl_dist.config import parse_flags
from rl_dist.errors import UserError
from rl_dist.launch.all_reduce_bench import BenchFailed
from rl_dist.launch.fallback import settle_launch, try_ranks
from rl_dist.launch.launcher import LaunchConfig, resolve
from rl_dist.parallel.choice import Trying, candidates, fastest, first_working, steps_down
from rl_dist.resume_check.comparison import differences, result_of

RECALL = ["--env", "Recall-v0", *SIZES, "--device", "cpu"]


@pytest.fixture
def world():
    with world_of_one() as opened:
        yield opened


# ---- choosing


def test_the_fastest_is_kept_and_the_line_says_why(world):
    choice = fastest(["ddp", "hybrid"], sleeping({"ddp": 0.05, "hybrid": 0.001}), world)
    assert choice.mode == "hybrid"
    assert re.fullmatch(
        r"strategy auto takes hybrid [\d.]+ ms a gradient step "
        r"\(ddp [\d.]+ ms a gradient step\), the better of 2 turns of 6 steps each",
        choice.reason,
    )
    assert fastest(["ddp", "hybrid"], sleeping({"ddp": 0.001, "hybrid": 0.05}), world).mode == "ddp"


def test_the_simpler_one_is_kept_where_the_other_gains_next_to_nothing(world):
    assert fastest(["ddp", "hybrid"], sleeping({"ddp": 0.1, "hybrid": 0.0999}), world).mode == "ddp"


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), RuntimeError("not enough memory"), UserError("no")],
)
def test_what_does_not_fit_or_start_is_left_out_even_if_it_would_be_faster(world, error):
    def start(mode):
        def fail():
            raise error

        return Trying(nothing, nothing, fail) if mode == "hybrid" else sleeping({"ddp": 0.01})(mode)

    choice = fastest(["hybrid", "ddp"], start, world)
    assert choice.mode == "ddp"
    assert f"hybrid does not work here ({str(error) or 'MemoryError'})" in choice.reason


def test_an_error_in_the_program_is_not_taken_for_a_mode_that_does_not_work(world):
    def start(mode):
        raise TypeError("a bug")

    with pytest.raises(TypeError, match="a bug"):
        fastest(["ddp", "hybrid"], start, world)


def test_random_numbers_go_on_as_if_nothing_had_been_tried(world):
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    for choose in (fastest, first_working):
        choose(["ddp", "hybrid"], lambda mode: Trying(nothing, nothing, lambda: torch.rand(9)), world)
    assert torch.equal(torch.rand(4), expected)


def test_candidates_and_steps_down_are_those_that_the_ranks_can_train_with():
    assert candidates(1, 0) == candidates(1, 1) == ["none"]
    assert candidates(1, 4) == ["none", "dp"]
    assert candidates(2, 0)[0] == "ddp" and not {"none", "dp"} & set(candidates(2, 4))
    assert steps_down("dp", 1, 4) == ["dp", "none"]
    assert steps_down("ddp", 2, 0) == ["ddp"]  # one process would need other ranks: rl_dist.launch.fallback
    assert steps_down("none", 1, 0) == ["none"] and steps_down("default", 2, 0) == ["default"]


def test_two_ranks_choose_alike_when_a_mode_fails_on_one_of_them(ranks_folder):
    one, other = (json.loads((ranks_folder / f"{rank}.json").read_text()) for rank in range(2))
    assert one == other
    assert one["fitting"]["mode"] == one["stepped down"]["mode"] == "ddp"
    assert "full does not work here (rank 1: CUDA out of memory" in one["fitting"]["reason"]
    assert "broken does not work here (rank 0: shard_size 3 does not" in one["stepped down"]["reason"]
    assert one["stepped down"]["reason"].endswith(": fallback to ddp")
    assert one["slowest rank"]["mode"] == "ddp"
    assert one["none"]["exit_code"] == 1 and "no strategy works: broken" in one["none"]["reason"]


# ---- the job's own gradient steps


@pytest.mark.parametrize("env", ["Recall-v0", "StockTrading-v0"])
def test_the_jobs_gradient_steps_are_tried_with_its_shapes(world, env):
    train = TrainConfig(num_envs=8, batch_size=8, num_steps=16, bptt_steps=8, grad_accumulation=2)
    policy, here = PolicyConfig(hidden_size=8), LaunchConfig(device="cpu")
    config = RunConfig(train=train, policy=policy, task=TaskConfig(env=env), launch=here)
    trial = StrategyTrial(config, resolve(config.launch), config.prepare_task(), world)
    shapes = trial._minibatch(Policy(config.policy, trial.num_obs, trial.action_space))
    assert shapes.obs.shape == (8, 16, trial.num_obs) and shapes.lstm_state.shape[0] == 16
    choice = fastest(["none", "ddp"], trial.start, world)
    assert choice.mode in ("none", "ddp") and "does not work" not in choice.reason


def test_a_job_whose_rollouts_do_not_fit_beside_the_steps_is_refused_with_the_reason(world):
    train = TrainConfig(num_envs=800_000, batch_size=8, num_steps=1_000_000, bptt_steps=8)  # hundreds of TB
    here = LaunchConfig(device="cpu")
    config = RunConfig(train=train, policy=PolicyConfig(hidden_size=8), task=TaskConfig(env="Recall-v0"), launch=here)
    trial = StrategyTrial(config, resolve(here), config.prepare_task(), world)
    with pytest.raises(UserError, match="none that works: none does not work here .*allocate") as caught:
        fastest(["none", "ddp"], trial.start, world)
    assert caught.value.exit_code == 1


def test_a_run_with_auto_is_bit_for_bit_the_one_with_the_strategy_it_chose(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(agents.dry_run.strategy, "candidates", lambda *_: ["none", "ddp"])  # both can be on one rank
    common = [*RECALL, "--checkpoint_every", "1"]
    assert train_here(monkeypatch, *common, "--strategy", "auto", "--run_dir", tmp_path / "auto") == 0
    out = capfd.readouterr().out
    assert out.count("strategy auto takes") == 1 and "ms a gradient step" in out
    kept = json.loads((tmp_path / "auto/config.json").read_text())["launch"]
    assert kept["strategy"] == "auto" and kept["chosen_on"] == "1 rank on cpu"
    assert f"strategy auto takes {kept['chosen_strategy']} " in out
    named = ["--strategy", kept["chosen_strategy"], "--run_dir", tmp_path / "named"]
    assert train_here(monkeypatch, *common, *named) == 0
    assert differences(result_of(tmp_path / "named"), result_of(tmp_path / "auto")) == []
    capfd.readouterr()
    more = [*("--resume", tmp_path / "auto"), "--num_episodes", "12"]
    assert train_here(monkeypatch, *more) == 0
    assert "strategy auto takes" not in capfd.readouterr().out  # it stands
    assert json.loads((tmp_path / "auto/config.json").read_text())["launch"] == kept


@pytest.mark.slow
def test_two_ranks_with_auto_train_as_with_the_strategy_they_chose(tmp_path):
    ranks = [*RECALL, "--num_gpus", "2", "--checkpoint_every", "1"]
    auto = start_training(*ranks, "--strategy", "auto", "--run_dir", tmp_path / "auto")
    out, err = auto.communicate(timeout=180)
    assert auto.returncode == 0, err
    chosen = json.loads((tmp_path / "auto/config.json").read_text())["launch"]["chosen_strategy"]
    assert f"strategy auto takes {chosen}" in out
    named = start_training(*ranks, "--strategy", chosen, "--run_dir", tmp_path / "named")
    assert named.communicate(timeout=180) and named.returncode == 0
    assert differences(result_of(tmp_path / "named"), result_of(tmp_path / "auto")) == []


# ---- what is kept


def test_what_was_chosen_stands_on_the_same_ranks_only():
    chosen = LaunchConfig(device="cpu", num_gpus=2, strategy="auto", chosen_strategy="ddp", chosen_on="2 ranks on cpu")
    settled = settle_launch(chosen)
    assert settled.config.strategy_config.mode == "ddp" and settled.resolved.num_ranks == 2
    moved = settle_launch(dataclasses.replace(chosen, num_gpus=1))
    assert moved.config.strategy_config.mode == "auto" and moved.config.chosen_on == ""
    alone = LaunchConfig(device="cpu", num_gpus=2, strategy="ddp", chosen_strategy="none", chosen_on="1 rank on cpu")
    assert settle_launch(alone).resolved.num_ranks == 1  # fallback had gone down to one


@pytest.mark.parametrize("flags", [["--shard_size", "2"], ["--gradient_compression", "bf16"]], ids=" ".join)
def test_a_resumed_run_with_other_flags_of_strategies_chooses_again(flags):
    chosen = LaunchConfig(device="cpu", num_gpus=2, strategy="auto", chosen_strategy="ddp", chosen_on="2 ranks on cpu")

    def resumed(*given):
        return resumed_config(RunConfig(launch=chosen), parse_flags(SECTIONS, given, description="")).launch

    assert settle_launch(resumed("--strategy", "auto")).config.strategy_config.mode == "ddp"
    assert settle_launch(resumed(*flags)).config.strategy_config.mode == "auto"
    with pytest.raises(ValueError, match="hybrid_form pipeline needs strategy hybrid, got auto"):
        settle_launch(resumed("--hybrid_form", "pipeline"))


def test_ranks_that_start_again_find_their_choice_in_the_configuration(world, tmp_path, monkeypatch):
    monkeypatch.setattr(agents.dry_run.strategy, "_choose", lambda *_: pytest.fail("measured again"))
    config = RunConfig(launch=LaunchConfig(device="cpu", strategy="auto"))
    launch_config = dataclasses.replace(config.launch, chosen_strategy="ddp", chosen_on="1 rank on cpu")
    save_config(dataclasses.replace(config, launch=launch_config), tmp_path)
    found = settle_strategy(config, resolve(config.launch), None, world, tmp_path)
    assert found.launch == launch_config


def test_auto_of_an_older_run_is_what_it_was_then():
    older = RunConfig().to_dict()
    older["launch"] = {"strategy": "auto", "num_gpus": 2}
    assert RunConfig.from_dict(older).launch.strategy == "default"
    newer = RunConfig(launch=LaunchConfig(strategy="auto"))
    assert RunConfig.from_dict(newer.to_dict()) == newer


# ---- stepping down


def cannot(resolved):
    raise BenchFailed(f"{resolved.num_ranks} ranks failed: NCCL error")


@pytest.mark.parametrize("strategy", ["default", "ddp", "auto"])
def test_ranks_that_cannot_work_together_step_down_to_one(strategy):
    config = LaunchConfig(device="cpu", num_gpus=2, strategy=strategy, fallback=True)
    settled = settle_launch(config, probe=cannot)
    assert (settled.resolved.num_ranks, settled.config.chosen_strategy) == (1, "none")
    assert settled.note.startswith("fallback to strategy none, 1 rank on cpu: 2 ranks failed: NCCL error; strategy dp")
    assert settled.config.num_gpus == 2  # what was asked for is kept beside it
    assert settle_launch(settled.config, probe=cannot).config == settled.config


@pytest.mark.slow
def test_ranks_that_work_stay_as_asked():
    config = LaunchConfig(device="cpu", num_gpus=2, strategy="ddp", fallback=True)
    settled = settle_launch(config, probe=try_ranks)  # for real
    assert (settled.config, settled.note, settled.resolved.num_ranks) == (config, "", 2)


def test_a_mistake_in_other_flags_is_no_reason_to_step_down():
    with pytest.raises(ValueError, match="torch sees no CUDA GPU|has "):
        settle_launch(LaunchConfig(device="cuda", num_gpus=1000, fallback=True), probe=cannot)
    with pytest.raises(ValueError, match="none works with one rank only"):
        settle_launch(LaunchConfig(device="cpu", num_gpus=2, strategy="none", fallback=True), probe=cannot)
    with pytest.raises(ValueError, match="cudnn_autotune does nothing without a GPU"):
        settle_launch(LaunchConfig(device="cpu", strategy="dp", cudnn_autotune=True, fallback=True), probe=cannot)


def test_dp_on_ranks_of_torchrun_is_refused_as_what_was_asked_for(monkeypatch):
    variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "::1", "MASTER_PORT": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="strategy dp works in one process, got 2 ranks; use --strategy ddp"):
        settle_launch(LaunchConfig(device="cpu", strategy="dp", fallback=True))


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="dp works here")
def test_a_strategy_that_cannot_be_ends_the_run_unless_fallback_is_asked_for(tmp_path, monkeypatch, capfd):
    asked = [*RECALL, "--strategy", "dp", "--run_dir", tmp_path / "run"]
    assert train_here(monkeypatch, *asked) == 2
    assert "strategy dp" in only_error(capfd.readouterr().err)
    assert train_here(monkeypatch, *asked, "--fallback") == 0
    out = capfd.readouterr().out
    assert out.count("fallback to strategy none, 1 rank on cpu: strategy dp shares a batch out over CUDA GPUs") == 1
    kept = json.loads((tmp_path / "run/config.json").read_text())["launch"]
    assert (kept["strategy"], kept["chosen_strategy"]) == ("dp", "none")
    assert records(tmp_path / "run")
