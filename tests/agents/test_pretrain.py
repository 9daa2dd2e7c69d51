"""Pre-training of the feature LSTM: its targets, what it may see, and PPO after it."""

import json
import re
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensorboard_readers import seen
from train_runs import SIZES, SPANS, WORLDS, only_error, run_here, start, train_here

import train_distributed
from agents.config import TrainConfig
from agents.policy import Policy, PolicyConfig
from agents.ppo import PPOConfig
from agents.pretrain import command as pretrain
from agents.pretrain.weights import load_pretrained
from agents.pretrain.windows import SMALLEST_MOVE, VOLATILITY_DAYS, MarketWindows
from agents.trainer import Job, Training
from envs.trading.config import DataConfig, SimulatedMarketConfig, TradingConfig
from envs.trading.market_data import Span
from envs.trading.simulated_market import simulate_markets, world_seeds
from envs.trading.task import prepare_task
from rl_dist.checkpoint.store import load_checkpoint
from rl_dist.process_group.world import close_world, open_world

TINY = [
    *("--num_worlds", "2", "--num_stocks", "2", *SPANS, "--hidden_size", "8", "--window", "20"),
    *("--batch_size", "16", "--no-progress"),
]
PPO = [*SIZES, *SPANS, *WORLDS, "--num_stocks", "2", "--num_gpus", "1"]
SPAN = Span(100, 160)


def make_markets():
    config = SimulatedMarketConfig(num_stocks=2)
    return simulate_markets(config, world_seeds(config, "train", 2))


def make_windows(markets, observation="relative", **options):
    sizes = {"days": 20, "stride": 10, "seed": 1} | options
    return MarketWindows(markets, SPAN, TradingConfig(observation=observation), **sizes)


def checkpoint(run_dir, epoch):
    return load_checkpoint(run_dir / "checkpoints" / f"iteration_{epoch:08d}.pt")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A pre-training of two epochs."""
    run_dir = tmp_path_factory.mktemp("pretrain") / "run"
    with pytest.MonkeyPatch.context() as patch:
        assert run_here(pretrain.main, [*TINY, "--epochs", "2", "--run_dir", run_dir], patch) == 0
    return run_dir


def test_targets_are_what_the_days_after_each_day_bring():
    markets = make_markets()
    windows = make_windows(markets, volatility_scale=(0.0, 1.0))
    inputs, targets = windows[5]  # of 4 windows in each market: the second one of the second market
    first = SPAN.first + 10
    close = markets[1].close
    assert inputs.shape == (20, 17) and targets.shape == (20, 2, 2) and len(windows) == 8
    for day in (0, 7, 19):
        coming = np.diff(np.log(close[first + day : first + day + VOLATILITY_DAYS + 1]), axis=0)
        assert targets[day, 0].tolist() == (coming[0] > 0).tolist()
        expected = np.log(np.sqrt((coming**2).mean(0)) + SMALLEST_MOVE)
        assert targets[day, 1].numpy() == pytest.approx(expected, abs=1e-5)
        last_return = np.log(close[first + day] / close[first + day - 1])
        assert inputs[day, 1:3].numpy() == pytest.approx(last_return, abs=1e-6)


@pytest.mark.parametrize("observation", ["relative", "paper"])
def test_nothing_after_the_span_is_seen(observation):
    markets, changed = make_markets(), []
    for market in markets:
        names = ("open", "high", "low", "close", "volume")
        series = {name: getattr(market, name).copy() for name in names}
        for values in series.values():
            values[SPAN.last + 1 :] = 1e9
        changed.append(replace(market, **series))
    (left, expected), (right, found) = (
        make_windows(each, observation).__getitems__(range(8)) for each in (markets, changed)
    )
    assert torch.equal(left, right) and torch.equal(expected, found)


def test_the_span_of_the_test_is_neither_trained_nor_validated_on():
    config = pretrain.PretrainRunConfig(market=SimulatedMarketConfig(num_worlds=1, num_stocks=2))
    task = config.prepare_task()
    spans = task.spans
    for windows, span in zip(
        pretrain.make_windows(config, task), (spans.train, spans.valid), strict=True
    ):
        num_days = windows.features.shape[1]
        assert num_days == span.last - span.first + 1 and span.last < spans.test.first
        assert int(windows.places[:, 1].max()) + windows.days + VOLATILITY_DAYS <= num_days


@pytest.mark.parametrize("observation", ["relative", "paper"])
def test_portfolios_of_windows_are_whole_and_differ(observation):
    obs, _ = make_windows(make_markets(), observation).__getitems__(range(8))
    gap = slice(5, 7) if observation == "relative" else slice(3, 5)
    cash, held = obs[:, 0, 0], obs[:, 0, gap]
    assert len(cash.unique()) == 8 and bool((held >= 0).all())
    if observation == "paper":
        cash, held = cash / 1e6, held * obs[:, 0, 1:3] / 1e6
    torch.testing.assert_close(cash + held.sum(-1), torch.ones(8), rtol=0, atol=1e-3)


def test_a_resumed_pre_training_ends_bit_for_bit_as_one_that_did_not_stop(
    trained, tmp_path, monkeypatch
):
    run_dir = tmp_path / "parts"
    assert run_here(pretrain.main, [*TINY, "--epochs", "1", "--run_dir", run_dir], monkeypatch) == 0
    assert run_here(pretrain.main, ["--resume", run_dir, "--epochs", "2"], monkeypatch) == 0
    whole, resumed = checkpoint(trained, 2), checkpoint(run_dir, 2)
    assert whole["history"] == resumed["history"]
    for name, value in whole["module"].items():
        assert torch.equal(value, resumed["module"][name])
    texts = [(each / "summary.json").read_text() for each in (run_dir, trained)]
    assert texts[0] == texts[1]
    losses = [pytest.approx(record["valid/loss"]) for record in whole["history"]]
    assert seen(run_dir, "valid/loss") == list(enumerate(losses, 1))


def test_the_features_are_those_that_the_policy_will_have(trained):
    found, extra = load_pretrained(trained)
    policy = Policy(PolicyConfig(hidden_size=8), extra["num_obs"], spaces.Box(-1.0, 1.0, (2,)))
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    found.load_into(policy)
    best_epoch = json.loads((trained / "summary.json").read_text())["best_epoch"]
    module = checkpoint(trained, best_epoch)["module"]
    for name, value in policy.state_dict().items():
        expected = module[name] if name.startswith("feature") else before[name]
        assert torch.equal(value, expected), name
    assert not torch.equal(before["feature_core.weight_hh_l0"], module["feature_core.weight_hh_l0"])


def test_observations_mean_to_ppo_what_they_meant_in_pre_training(trained, tmp_path):
    (found, _), world = load_pretrained(trained), open_world("cpu")
    market = SimulatedMarketConfig(num_worlds=2, num_stocks=2)
    task = prepare_task(DataConfig(), market, TradingConfig(episode_days=60))
    job = Job(
        train=TrainConfig(num_envs=4, num_steps=32, bptt_steps=8, batch_size=8),
        policy=PolicyConfig(hidden_size=8),
        ppo=PPOConfig(),
        make_env=lambda count, first: task.training_env(count, first),
        run_dir=tmp_path,
        pretrained=found,
    )
    training = Training(job, world)
    plain = Training(replace(job, pretrained=None), world)
    for each in (training, plain):
        each.warm_up_normalizers()
    close_world(world)
    moments = training.normalizers.obs.moments
    assert torch.equal(moments.mean, found.obs["moments.mean"])
    assert torch.equal(moments.variance, found.obs["moments.variance"])
    assert float(moments.count) == float(plain.normalizers.obs.moments.count) == 4 * 32
    for name, value in plain.policy.state_dict().items():
        assert name.startswith("feature") or torch.equal(value, training.policy.state_dict()[name])


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--hidden_size", "16"], r"hidden_size 16 \(it has 8\)"),
        (["--num_stocks", "3"], r"num_obs 25 \(it has 17\)"),
        (["--observation", "paper"], r"observation paper \(it has relative\)"),
        (["--policy", "mlp"], "no use for it"),
        (["--no-normalize_obs"], "needs normalised observations"),
    ],
)
def test_a_run_that_the_features_do_not_fit_is_refused_in_one_line(
    flags, named, trained, tmp_path, monkeypatch, capfd
):
    argv = [*PPO, *flags, "--pretrained", trained, "--run_dir", tmp_path / "run"]
    assert train_here(monkeypatch, *argv) == 2
    line = only_error(capfd.readouterr().err)
    assert re.search(named, line), line
    assert not (tmp_path / "run").exists()


def test_what_is_no_pre_training_is_refused(trained, tmp_path, monkeypatch, capfd):
    recall = ["--env", "Recall-v0", "--total_steps", "99"]
    for main, argv, words in (
        (train_distributed.main, [*PPO, "--pretrained", tmp_path], "holds no valid checkpoint"),
        (train_distributed.main, [*recall, "--pretrained", trained], "does nothing with --env"),
        (train_distributed.main, ["--resume", tmp_path, "--pretrained", trained], str(tmp_path)),
        (pretrain.main, ["--resume", trained, "--window", "30"], "--window 30 (it has 20)"),
        (pretrain.main, [*TINY, "--run_dir", trained], f"go on with --resume {trained}"),
    ):
        assert run_here(main, argv, monkeypatch) == 2
        assert words in only_error(capfd.readouterr().err)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--strategy", "auto"], "--strategy auto is for train_distributed.py only"),
        (["--fallback"], "--fallback is for train_distributed.py only"),
        (["--strategy", "hybrid", "--hybrid_form", "pipeline"], "--hybrid_form pipeline is for"),
        (["--window", "100000"], "make --window smaller"),
        (["--batch_size", "10000"], "batch_size 10000"),
    ],
)
def test_what_pre_training_cannot_do_is_refused_and_leaves_nothing(
    flags, named, tmp_path, monkeypatch, capfd
):
    argv = [*TINY, "--device", "cpu", *flags, "--run_dir", tmp_path / "run"]
    assert run_here(pretrain.main, argv, monkeypatch) == 2
    assert named in only_error(capfd.readouterr().err) and not (tmp_path / "run").exists()


@pytest.mark.slow
def test_two_ranks_pre_train_as_one_does(trained, tmp_path, monkeypatch):
    run_dir = tmp_path / "two"
    argv = [*TINY, "--epochs", "2", "--num_gpus", "2", "--device", "cpu", "--run_dir", run_dir]
    assert run_here(pretrain.main, argv, monkeypatch) == 0
    one, two = checkpoint(trained, 2), checkpoint(run_dir, 2)
    for left, right in zip(one["history"], two["history"], strict=True):
        assert left == pytest.approx(right, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("module", ["evaluate", "export", "pretrain"])
def test_a_ctrl_c_while_modules_load_is_no_error(module):
    command = start("-X", "importtime", "-m", f"agents.{module}", "--help")
    for line in command.stderr:
        if line.split()[-1] == "torch._C":  # most modules come after it
            break
    command.send_signal(signal.SIGINT)
    out, err = command.communicate(timeout=120)
    assert command.returncode in (-signal.SIGINT, 130) and "Traceback" not in out + err


@pytest.mark.slow
def test_a_stop_before_the_first_epoch_ends_says_that_nothing_was_saved(tmp_path):
    run_dir = tmp_path / "run"
    command = start("-m", "agents.pretrain", "--run_dir", run_dir)
    for line in command.stdout:
        if line.startswith("run directory:"):
            break
    command.send_signal(signal.SIGINT)
    out, err = command.communicate(timeout=120)
    assert command.returncode == 130 and "SIGINT; no epoch had ended" in out, out + err
    assert not (run_dir / "config.json").exists()
