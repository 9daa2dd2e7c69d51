"""Test pre-training of the feature LSTM: targets, inputs, and PPO afterwards."""

from copy import deepcopy
from unittest import mock

import numpy as np
import pytest
import torch
from train_runs import SIZES, SPANS, WORLDS, only_error, printed_error, run_here, train_here

import train_distributed
from agents import pretrain
from agents.learner.trainer import Training
from agents.pretrain import SMALLEST_MOVE, VOLATILITY_DAYS, make_windows
from envs.trading.config import SimulatedMarketConfig, TradingConfig
from envs.trading.market_data import Span
from envs.trading.simulated_market import simulate_markets, world_seeds
from rl_dist.checkpoint.store import load_checkpoint
from rl_dist.files import read_object

TINY = [
    *("--num_worlds=2", "--num_stocks=2", *SPANS, "--hidden_size=8", "--window=20"),
    *("--batch_size=16", "--no-progress"),
]
PPO = [*SIZES, *SPANS, *WORLDS, "--num_stocks=2", "--num_gpus=1"]
SPAN = Span(100, 160)
MARKET = SimulatedMarketConfig(num_worlds=2, num_stocks=2)
MARKETS = simulate_markets(MARKET, world_seeds(MARKET, "train", 2))


def windows(markets=MARKETS, observation="relative", **options):
    config = TradingConfig(observation=observation)
    sizes = {"days": 20, "stride": 10, "seed": 1} | options
    return make_windows(markets, SPAN, config, **sizes)[0].tensors


def checkpoint(run_dir, epoch):
    return load_checkpoint(run_dir / "checkpoints" / f"iteration_{epoch:08d}.pt")


def run(run_dir, *flags):
    return run_here(pretrain.main, *TINY, "--run_dir", run_dir, *flags)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Pre-train for two epochs; return the run directory."""
    run_dir = tmp_path_factory.mktemp("pretrain") / "run"
    assert run(run_dir, "--epochs=2") == 0
    return run_dir


def test_targets_describe_the_days_after_each_day():
    inputs, targets = windows(scale=(0.0, 1.0))
    assert inputs.shape == (8, 20, 17) and targets.shape == (8, 20, 2, 2)
    # Row k is the log return from day k to day k + 1.
    returns = np.diff(np.log(MARKETS[1].close), axis=0)
    for day in (0, 7, 19):
        # Of the 8 windows, 4 to 7 belong to MARKETS[1]; window 5 starts on day SPAN.first + 10.
        today = SPAN.first + 10 + day
        coming = returns[today : today + VOLATILITY_DAYS]
        volatility = np.log(np.sqrt((coming**2).mean(0)) + SMALLEST_MOVE)
        assert targets[5, day, 0].tolist() == (coming[0] > 0).tolist()
        assert targets[5, day, 1].numpy() == pytest.approx(volatility, abs=1e-5)
        assert inputs[5, day, 1:3].numpy() == pytest.approx(returns[today - 1], abs=1e-6)


@pytest.mark.parametrize("observation", ["relative", "paper"])
def test_windows_contain_no_later_bars_and_only_complete_portfolios(observation):
    changed = deepcopy(MARKETS)
    for market in changed:
        for name in ("open", "high", "low", "close", "volume"):
            getattr(market, name)[SPAN.last + 1 :] = 1e9
    expected = windows(observation=observation)
    assert all(map(torch.equal, windows(changed, observation), expected))

    obs = expected[0]
    cash, held = obs[:, 0, 0], obs[:, 0, 5:7]
    if observation == "paper":
        cash, held = cash / 1e6, obs[:, 0, 3:5] * obs[:, 0, 1:3] / 1e6
    assert len(cash.unique()) == 8 and bool((held >= 0).all())
    torch.testing.assert_close(cash + held.sum(-1), torch.ones(8), rtol=0, atol=1e-3)


def test_validation_has_the_scale_of_training_and_the_test_span_is_unused(monkeypatch):
    calls = mock.Mock(wraps=make_windows)
    monkeypatch.setattr(pretrain, "make_windows", calls)
    config = pretrain.PretrainRunConfig(market=MARKET)
    task = config.prepare_task()
    train, _ = pretrain.windows_of(config, task)
    spans = task.spans
    assert [call.args[1] for call in calls.call_args_list] == [spans["train"], spans["valid"]]
    assert max(spans["train"].last, spans["valid"].last) < spans["test"].first
    mean, std = calls.call_args.kwargs["scale"]
    volatility = train.tensors[1][:, :, 1]
    assert abs(float(volatility.mean())) < 0.05 and mean < -std < 0


def test_a_resumed_pre_training_ends_bit_for_bit_as_one_that_did_not_stop(
    trained, tmp_path, monkeypatch
):
    parts = tmp_path / "parts"
    assert run(parts, "--epochs=1") == 0
    assert run_here(pretrain.main, "--resume", parts, "--epochs=2") == 0
    whole, resumed = checkpoint(trained, 2), checkpoint(parts, 2)
    assert whole["history"] == resumed["history"]
    assert all(torch.equal(value, resumed["module"][k]) for k, value in whole["module"].items())
    assert (parts / "summary.json").read_text() == (trained / "summary.json").read_text()


def test_ppo_starts_with_the_features_and_the_statistics_of_observations(
    trained, tmp_path, monkeypatch
):
    update, states = Training.update, []

    def noting(training, rollout):
        moments = training.normalizers.obs.state_dict(prefix="normalizer.")
        states.append(deepcopy(training.policy.state_dict() | moments))
        return update(training, rollout)

    monkeypatch.setattr(Training, "update", noting)
    flags = ["--pretrained", trained, "--run_dir", tmp_path]
    assert train_here(*PPO, *flags) == 0
    best_epoch = read_object(trained / "summary.json")["best_epoch"]
    module = checkpoint(trained, best_epoch)["module"]
    names = [name for name in states[0] if name.startswith("feature")]
    assert names
    for name in (*names, "normalizer.moments.mean", "normalizer.moments.variance"):
        assert torch.equal(states[0][name], module[name]), name


def test_a_pre_training_whose_validation_is_never_finite_fails(tmp_path, monkeypatch, capsys):
    figures = dict.fromkeys(("loss", "sign_accuracy"), np.nan)
    monkeypatch.setattr("rl_dist.supervised.fit.evaluate", lambda *_: figures)
    assert run(tmp_path, "--epochs=1") == 1
    assert "--learning_rate" in printed_error(capsys)


@pytest.mark.parametrize(
    "command, flags, problem",
    [
        (train_distributed, "--pretrained {} --hidden_size 16", "--hidden_size"),
        (train_distributed, "--pretrained {} --policy mlp", "feature_core"),
        (train_distributed, "--pretrained {} --no-normalize_obs", "normalize_obs"),
        (train_distributed, "--pretrained no_such_run", "no_such_run"),
        (pretrain, "--resume {} --window 30", "window is 30, but 20"),
        (pretrain, "--run_dir {}", "--resume"),
        (pretrain, "--strategy auto --device cpu", "auto"),
        (pretrain, "--window 100000", "--window"),
    ],
)
def test_flags_that_do_not_fit_are_refused_and_leave_no_files(
    command, flags, problem, trained, tmp_path, capfd
):
    new = [*(TINY if command is pretrain else PPO), "--run_dir", tmp_path / "run"]
    given = flags.format(trained).split()
    argv = given if "--resume" in flags else [*new, *given]
    assert run_here(command.main, *argv) == 2
    assert problem in only_error(capfd.readouterr().err)
    assert not (tmp_path / "run").exists()
