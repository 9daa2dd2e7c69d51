"""Test evaluation on hand-made cases: each market and each episode counts once.

Also test performance figures and their confidence intervals.
"""

import functools
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from policies import make_policy, small
from scripted_env import TERMINATED, TRUNCATED, ScriptedEnv

from agents.evaluate import trials
from agents.evaluate.trials import run_trial
from agents.learner.controller import PolicyController
from agents.learner.network.inputs import Normalizer
from agents.learner.network.seeds import EVALUATION_STREAM, stream_seeds
from envs.gym_task import run_episodes
from envs.task import Trial
from envs.trading.evaluation import (
    ACCOUNTS,
    EQUAL_WEIGHT,
    concentration,
    difference,
    performance,
    run_markets,
    summarize,
)
from rl_dist.process_group.world import World


class Paths:
    """Market environments with given paths of portfolio values, [markets, days].

    All other account figures equal the day number. A value below 10 terminates the episode; the
    next value of the path belongs to a new episode.
    """

    def __init__(self, paths):
        self.paths = torch.tensor(paths, dtype=torch.float64)
        self.num_envs, self.num_days = self.paths.shape
        self.device = torch.device("cpu")
        self.value = self.paths[:, :1]

    def reset(self, *, seed):
        self.day = 0
        return torch.zeros(len(seed), 1), {}

    def step(self, actions):
        self.day += 1
        value = self.paths[:, self.day]
        info = dict.fromkeys(ACCOUNTS, torch.full_like(value, self.day)) | {
            "portfolio_value": value,
            "weights": torch.full((self.num_envs, 1), float(self.day)),
        }
        return actions, value, value < 10.0, value == self.paths[:, -1], info


def idle(env, obs, episode_start):
    return torch.zeros(env.num_envs, 1)


def run_on_ranks(call, size, monkeypatch):
    """Run `call(world)` for `size` ranks, each in a thread; return all results."""
    worlds = [World(rank, rank, size, torch.device("cpu"), "gloo", size) for rank in range(size)]
    sent, meeting = {}, threading.Barrier(size)

    def gather(values, world):
        sent[world.rank] = values
        meeting.wait(10)
        gathered = [sent[rank] for rank in range(size)]
        meeting.wait(10)
        return gathered

    monkeypatch.setattr(trials, "all_gather_json", gather)
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(call, worlds))


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_every_market_counts_once_on_any_number_of_ranks_and_ruin_ends_trading(size, monkeypatch):
    paths = [[100, 5, 100, 200], *([100, 90 + m, 80 - m, 70] for m in range(1, 5))]
    trial = Trial(
        agents={"one": idle, "two": idle},
        count=len(paths),
        run=lambda agent, rows: run_markets(
            Paths(paths[rows.start : rows.stop]), agent, lambda: None
        ),
    )
    call = functools.partial(run_trial, trial)
    for records in run_on_ranks(call, size, monkeypatch):
        assert list(records) == ["one", "two"]
        for record in records.values():
            assert record["values"].tolist() == [[100, 5, 5, 5], *paths[1:]]
            for account in ACCOUNTS[:-1]:  # the day of ruin still counts
                assert record[account].tolist() == [[1, 0, 0], *[[1, 2, 3]] * 4]
            assert record["effective_stocks"].tolist() == [[1, 0, 0], *[[1, 1, 1]] * 4]


class Numbered(ScriptedEnv):
    """Environments whose unnormalised reward is their global number.

    Environment 1 is restarted in step 2, in the middle of its episode; environment 3 is restarted
    in step 5, after the end of its episode.
    """

    restarts = ()

    def __init__(self, count, first):
        ends = [(3, TERMINATED), (5, TRUNCATED), (1, TERMINATED), (4, TERMINATED), (2, TRUNCATED)]
        super().__init__([[end] for end in ends[first : first + count]])
        self.numbers, self.num_steps = first + torch.arange(count), 0

    def reset(self, *, seed):
        assert seed == stream_seeds(1, EVALUATION_STREAM, int(self.numbers[0]), len(seed))
        self.restarts = [0] * len(seed)
        return super().reset()

    def step(self, actions):
        obs, rewards, terminated, truncated, info = super().step(actions)
        self.num_steps += 1
        for row, number in enumerate(self.numbers.tolist()):
            if (number, self.num_steps) in ((1, 2), (3, 5)):
                self.restarts[row], truncated[row] = 1, True
        return obs, rewards, terminated, truncated, info | {"raw_rewards": self.numbers.double()}


@pytest.mark.parametrize("size", [1, 2, 8])
def test_every_episode_counts_once_and_is_repeated_after_a_restart(size, monkeypatch):
    # Each row is (return, length, restarts, cut) of an episode. The length in row 1 is 3 instead of
    # 5, because the restart discards the first 2 steps.
    expected = [[0, 3, 0, 0], [3, 3, 1, 0], [2, 1, 0, 0], [12, 4, 0, 0], [8, 2, 0, 0]]
    task = SimpleNamespace(
        evaluation_env=Numbered,
        release=lambda env: None,
        settings=SimpleNamespace(heartbeat=lambda: None),
    )
    seeds = functools.partial(stream_seeds, 1, EVALUATION_STREAM)
    run = functools.partial(run_episodes, task, seeds, 1000)
    call = functools.partial(run_trial, Trial(agents={"idle": idle}, count=5, run=run))
    names = ("return", "length", "repeats", "cut")
    for results in run_on_ranks(call, size, monkeypatch):
        rows = np.stack([results["idle"][name] for name in names], axis=1)
        assert rows.tolist() == expected


@pytest.mark.parametrize("window", [0, 3])
def test_a_controller_clears_its_state_at_episode_starts_or_if_zeroed_in_every_step(window):
    policy = make_policy(small(feature_window=window)).float()
    observations = torch.randn(6, 2, 4)
    no_starts = torch.zeros(6, 2, dtype=torch.bool)
    starts = no_starts.clone()
    starts[3, 0] = True

    def answers(observations, starts, **options):
        controller = PolicyController(policy, Normalizer(4, enabled=False), **options)
        return torch.stack([*map(functools.partial(controller, policy), observations, starts)])

    whole, cut = answers(observations, no_starts), answers(observations, starts)
    torch.testing.assert_close(cut[3:, 0], answers(observations[3:], no_starts[3:])[:, 0])
    torch.testing.assert_close(cut[:, 1], whole[:, 1])
    assert not torch.allclose(cut[3:, 0], whole[3:, 0], atol=1e-6)
    zeroed = answers(observations, no_starts, zero_state=True)
    assert torch.equal(zeroed, answers(observations, ~no_starts)) and not torch.equal(zeroed, cut)


def record_of(returns, account=0.0):
    """Return an evaluation record with these daily returns, an array [M, D].

    All account figures equal `account`.
    """
    values = 100.0 * np.cumprod(np.insert(1.0 + returns, 0, 1.0, axis=1), axis=1)
    return {"values": values} | dict.fromkeys(ACCOUNTS, np.full_like(returns, account))


@pytest.mark.parametrize("repeats, period", [(1, 3), (19, 57), (20, 252)])
def test_figures_are_annual_or_below_60_days_those_of_the_span(repeats, period):
    """The daily returns are 10 %, -10 % and 6 %, so their mean is 2 %."""
    returns = np.tile([0.1, -0.1, 0.06], repeats)
    deviation, days, growth = returns.std(ddof=1), 3 * repeats, 1.0494**repeats
    record = record_of(returns[None], account=0.5)
    expected = {
        "cumulative_return": growth - 1,
        "annual_return": growth ** (period / days) - 1,
        "annual_volatility": deviation * math.sqrt(period),
        "sharpe": 0.02 / deviation * math.sqrt(period),
        "max_drawdown": 0.1,
        "turnover": 0.5 * period / record["values"].mean(),
        "num_trades": 0.5 * days,
        "fees_usd": 0.5 * days,
        "exposure": 0.5,
        "largest_weight": 0.5,
        "effective_stocks": 0.5,
    }
    figures = {name: value.item() for name, value in performance(record).items()}
    assert figures == pytest.approx(expected)
    # Constant returns have a Sharpe ratio of 0, not infinity.
    assert performance(record_of(np.full((1, days), 2.0**-10)))["sharpe"] == 0.0


def test_concentration_counts_stocks_of_equal_weight():
    weights = torch.tensor([[0.25, 0.25, 0.25, 0.25], [0.5, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    found = {name: values.tolist() for name, values in concentration(weights).items()}
    assert found == {"largest_weight": [0.25, 0.5, 0.0], "effective_stocks": [4.0, 1.0, 0.0]}
    uneven = concentration(torch.tensor([[0.6, 0.2]]))["effective_stocks"]
    assert uneven.item() == pytest.approx(0.64 / 0.4)


def test_figures_are_annual_in_the_calendar_of_the_file():
    record = record_of(np.tile([0.1, -0.1, 0.06], (1, 30)))
    sharpes = []
    for days_between in (1, 7):
        dates = np.datetime64("2018-01-01") + days_between * np.arange(91)
        summary = summarize({EQUAL_WEIGHT: record, "policy": record}, dates)
        sharpes.append(summary["policies"]["policy"]["sharpe"])
    assert sharpes[0] / sharpes[1] == pytest.approx(math.sqrt(365 / 52))


@pytest.mark.parametrize("num_markets", [1, 9])
def test_intervals_contain_the_differences_and_are_reproducible(num_markets):
    rng = np.random.default_rng(1)
    baseline = 0.01 * rng.standard_normal((num_markets, 500))
    policy = baseline + 0.001 + 0.002 * rng.standard_normal(baseline.shape)
    records = record_of(policy), record_of(baseline)
    differences = np.subtract(*(performance(record)["sharpe"] for record in records))
    found = difference(*records, "sharpe")
    value, low, high = found["mean"], found["low"], found["high"]
    assert found == difference(*records, "sharpe")
    assert value == pytest.approx(differences.mean()) and low < value < high
    # The interval extends by about 1.96 standard errors to each side.
    if num_markets > 1:
        width = 2 * 1.96 * differences.std() / math.sqrt(num_markets)
        assert high - low == pytest.approx(width, rel=0.15)


def test_the_state_of_an_agent_stays_in_its_trial(monkeypatch):
    class Remembering:
        calls = 0

    def run(agent, rows):
        agent.calls += 1
        return {"calls": [agent.calls] * len(rows)}

    trial = Trial(agents={"one": Remembering()}, count=2, run=run)
    for _ in range(2):
        (results,) = run_on_ranks(functools.partial(run_trial, trial), 1, monkeypatch)
        assert results["one"]["calls"].tolist() == [1, 1]
