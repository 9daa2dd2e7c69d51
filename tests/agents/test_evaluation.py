"""Evaluation by hand: every market and episode once, on any number of ranks; figures, intervals."""

import functools
import math
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gymnasium import spaces
from scripted_env import TERMINATED, TRUNCATED, ScriptedEnv

from agents.evaluate import episodes, markets
from agents.evaluate.episodes import PolicyController, evaluate_episodes
from agents.evaluate.markets import (
    ACCOUNTS,
    difference,
    evaluate_markets,
    performance,
)
from agents.network.inputs import Normalizer
from agents.network.seeds import EVALUATION_STREAM, stream_seeds
from agents.policy import Policy, PolicyConfig
from envs.vector.layout import Layout
from rl_dist.process_group.world import World

YEARS = np.geomspace(100.0, 400.0, 2 * 252 + 1)  # fourfold in two years


class Paths:
    """Markets whose portfolio values follow given paths.

    A value below 10 terminates the episode; the next value of the path starts a new one.
    """

    def __init__(self, paths):
        self.paths = torch.tensor(paths, dtype=torch.float64)
        self.num_envs, self.num_days = self.paths.shape
        self.device = torch.device("cpu")
        self.portfolio_value = self.paths[:, 0].clone()

    def reset(self, *, seed):
        assert len(seed) == self.num_envs
        self.day = 0
        return torch.zeros(self.num_envs, 1), {}

    def step(self, actions):
        self.day += 1
        value = self.paths[:, self.day].clone()
        day = torch.full((self.num_envs,), float(self.day), dtype=torch.float64)
        info = dict.fromkeys(ACCOUNTS, day) | {"portfolio_value": value}
        truncated = torch.full((self.num_envs,), self.day == self.num_days - 1)
        return actions, value, value < 10.0, truncated, info


def idle(env, obs, episode_start):
    return torch.zeros(env.num_envs, 1)


def over_ranks(call, size, monkeypatch):
    """Return the results of `call(world)` on `size` ranks, all in this process."""
    worlds = [World(rank, rank, size, torch.device("cpu"), "gloo") for rank in range(size)]
    sent = []

    def remember(values, world):
        sent.append(values)
        raise InterruptedError

    def gather_by(gather):
        for module in (episodes, markets):
            monkeypatch.setattr(module, "all_gather_json", gather)

    gather_by(remember)
    for world in worlds:
        with suppress(InterruptedError):
            call(world)
    gather_by(lambda values, world: sent)
    return [call(world) for world in worlds]


def run_paths(paths, world, traders=("one",)):
    """Records of idle traders on markets with these portfolio values."""
    task = SimpleNamespace(evaluation_env=lambda paths, span, **options: Paths(paths))
    return evaluate_markets(task, paths, None, dict.fromkeys(traders, idle), world)


def test_ruin_freezes_the_value_and_ends_trading(world):
    record = run_paths([[100, 5, 100, 200], [100, 90, 80, 70]], world)["one"]
    assert record["values"].tolist() == [[100, 5, 5, 5], [100, 90, 80, 70]]
    assert record["fees_usd"].tolist() == [[1, 0, 0], [1, 2, 3]]  # the ruinous day still counts
    assert record["exposure"].tolist() == [[1, 0, 0], [1, 2, 3]]


@pytest.mark.parametrize(("count", "size"), [(5, 2), (1, 2), (2, 3)])
def test_markets_spread_over_ranks_give_what_one_rank_gives(count, size, world, monkeypatch):
    paths = [[100.0, 100.0 + m, 100.0 + 7 * m] for m in range(count)]
    together = functools.partial(run_paths, paths, traders=("one", "two"))
    alone = together(world)
    assert alone["one"]["values"].tolist() == paths
    for records in over_ranks(together, size, monkeypatch):
        assert list(records) == ["one", "two"]
        for name, record in records.items():
            for key, value in record.items():
                assert np.array_equal(value, alone[name][key])


class Numbered(ScriptedEnv):
    """Plain rewards are global numbers; environment 1 is restarted in step 2, 3 after its end."""

    made: list = []
    restarts = ()

    def __init__(self, count, first, device, faulty=False):
        ends = [(3, TERMINATED), (5, TRUNCATED), (1, TERMINATED), (4, TERMINATED), (2, TRUNCATED)]
        super().__init__([[end] for end in ends[first : first + count]])
        self.first, self.closed, self.num_steps = first, False, 0
        self.restarts = [0] * count
        self.faults = ((1, 2), (3, 5)) if faulty else ()
        Numbered.made.append(self)

    def reset(self, *, seed=None, options=None):
        self.seeds = list(seed)
        return super().reset()

    def step(self, actions):
        obs, rewards, terminated, truncated, info = super().step(actions)
        self.num_steps += 1
        for number, at_step in self.faults:
            row = number - self.first
            if self.num_steps == at_step and 0 <= row < self.num_envs:
                self.restarts[row], truncated[row] = 1, True
        numbers = self.first + torch.arange(self.num_envs).double()
        return obs, rewards, terminated, truncated, info | {"raw_rewards": numbers}

    def close(self):
        self.closed = True


# columns: return, length, restarts; the second episode ends in step 5: two steps of its first try,
# three of its second
WHOLE = [[0, 3, 0], [5, 5, 0], [2, 1, 0], [12, 4, 0], [8, 2, 0]]
REPEATED = [[0, 3, 0], [3, 3, 1], [2, 1, 0], [12, 4, 0], [8, 2, 0]]


@pytest.mark.parametrize(("faulty", "expected"), [(False, WHOLE), (True, REPEATED)])
def test_every_episode_counts_once_and_is_repeated_after_a_restart(
    faulty, expected, world, monkeypatch
):
    seeds = stream_seeds(1, EVALUATION_STREAM, 0, 5)
    task = SimpleNamespace(evaluation_env=functools.partial(Numbered, faulty=faulty))
    call = functools.partial(evaluate_episodes, task, idle, 5, 1)
    for size in (1, 2, 8):
        Numbered.made.clear()
        results = [call(world)] if size == 1 else over_ranks(call, size, monkeypatch)
        assert [rows.tolist() for rows in results] == [expected] * size
        envs = Numbered.made[: min(size, 5)]
        assert [seed for env in envs for seed in env.seeds] == seeds
        assert all(env.closed for env in envs)


def answers(observations, starts, **options):
    """Actions of one policy for rows of observations, over several steps."""
    torch.manual_seed(0)
    config = PolicyConfig(hidden_size=8, feature_window=options.pop("window"))
    policy = Policy(config, 4, spaces.Box(-1.0, 1.0, (2,), np.float32))
    controller = PolicyController(policy, Normalizer(4, enabled=False), **options)
    env = SimpleNamespace(layout=Layout.vector(4))
    return torch.stack(
        [controller(env, obs, start) for obs, start in zip(observations, starts, strict=True)]
    )


@pytest.mark.parametrize("window", [0, 3])
def test_a_controller_forgets_where_an_episode_starts_and_with_zeroed_state_always(window):
    observations = torch.randn(6, 2, 4, generator=torch.Generator().manual_seed(1))
    starts = torch.zeros(6, 2, dtype=torch.bool)
    starts[0] = True
    whole = answers(observations, starts, window=window)
    starts[3, 0] = True
    cut = answers(observations, starts, window=window)
    second = answers(observations[3:], starts[3:], window=window)
    torch.testing.assert_close(cut[3:, 0], second[:, 0])
    torch.testing.assert_close(cut[:, 1], whole[:, 1])
    assert not torch.allclose(cut[3:, 0], whole[3:, 0], atol=1e-6)
    zeroed = answers(observations, starts, window=window, zero_state=True)
    always = answers(observations, torch.ones_like(starts), window=window)
    assert torch.equal(zeroed, always) and not torch.equal(zeroed[4], cut[4])


def figures(values, traded=0.0, fees=0.0, trades=0.0, exposure=0.0):
    """The figures of a path of values with the same account every day."""
    account = dict(zip(ACCOUNTS, (traded, fees, trades, exposure), strict=True))
    record = {name: np.full((1, len(values) - 1), value) for name, value in account.items()}
    computed = performance(record | {"values": np.array([values], np.float64)})
    return {name: value.item() for name, value in computed.items()}


@pytest.mark.parametrize(
    ("values", "account", "expected"),
    [
        ([100, 90, 121], {}, {"cumulative_return": 0.21}),
        (YEARS, {}, {"annual_return": 1.0, "cumulative_return": 3.0}),
        ([100, 120, 90, 150, 120], {}, {"max_drawdown": 0.25}),
        ([100, 101, 102], {}, {"max_drawdown": 0.0}),
        (
            [100.0] * 127,  # half a year
            {"traded": 2.0, "fees": 0.5, "trades": 3.0, "exposure": 0.8},
            {"turnover": 252 * 0.02, "fees_usd": 63.0, "num_trades": 378.0, "exposure": 0.8}
            | {"sharpe": 0.0, "sortino": 0.0},
        ),
    ],
)
def test_figures_of_a_path(values, account, expected):
    computed = figures(values, **account)
    assert {name: computed[name] for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize(("repeats", "period"), [(1, 3), (19, 57), (20, 252)])
def test_figures_are_those_of_a_year_or_of_a_span_below_60_days(repeats, period):
    """Daily returns 10 %, -10 %, 6 %: mean 2 %, downside deviation sqrt(0.01 / 3)."""
    returns = np.tile([0.1, -0.1, 0.06], repeats)
    path = 100.0 * np.cumprod(np.append(1.0, 1.0 + returns))
    deviation = returns.std(ddof=1)
    expected = {
        "sharpe": 0.02 / deviation * math.sqrt(period),
        "annual_volatility": deviation * math.sqrt(period),
        "sortino": 0.02 * period / math.sqrt(0.01 / 3 * period),
        "annual_return": (path[-1] / path[0]) ** (period / len(returns)) - 1,
        "turnover": period / path.mean(),
    }
    computed = figures(path, traded=1.0)
    assert {name: computed[name] for name in expected} == pytest.approx(expected)


def record_of(returns):
    """The record of daily returns [M, D], with nothing traded."""
    values = 100.0 * np.cumprod(
        np.pad(1.0 + returns, ((0, 0), (1, 0)), constant_values=1.0), axis=1
    )
    return {"values": values} | dict.fromkeys(ACCOUNTS, np.zeros_like(returns))


@pytest.mark.parametrize("num_markets", [1, 4])
def test_intervals_hold_the_differences_and_repeat(num_markets):
    rng = np.random.default_rng(1)
    baseline = 0.01 * rng.standard_normal((num_markets, 500))
    policy = baseline + 0.001 + 0.002 * rng.standard_normal(baseline.shape)
    functions = {
        "annual_return": lambda x: np.prod(1 + x, axis=1) ** (252 / 500) - 1,
        "sharpe": lambda x: math.sqrt(252) * x.mean(1) / x.std(1, ddof=1),
    }
    for name, function in functions.items():
        interval = difference(record_of(policy), record_of(baseline), name)
        assert interval == difference(record_of(policy), record_of(baseline), name)
        expected, (value, low, high) = function(policy) - function(baseline), interval
        assert value == pytest.approx(expected.mean()) and low < value < high
        if num_markets > 1:  # 1.96 standard errors
            half = 1.96 * expected.std(ddof=1) / math.sqrt(num_markets)
            assert high - value == value - low == pytest.approx(half)
