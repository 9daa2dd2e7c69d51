"""Evaluation: records by hand; every market and episode once, on any number of ranks."""

import functools
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gymnasium import spaces
from scripted_env import TERMINATED, TRUNCATED, ScriptedEnv

from agents.evaluate import evaluation, markets
from agents.evaluate.evaluation import PolicyController, evaluate_episodes
from agents.evaluate.markets import ACCOUNTS, evaluate_markets, run_markets
from agents.network.normalize import Normalizer
from agents.network.seeds import EVALUATION_STREAM, stream_seeds
from agents.policy import Policy, PolicyConfig
from envs.vector.layout import Layout
from rl_dist.process_group.world import World


class Paths:
    """An evaluation-mode market per path of values; terminates below 10, then starts at 100."""

    def __init__(self, paths):
        self.paths = torch.tensor(paths, dtype=torch.float64)
        self.num_envs, self.num_days = self.paths.shape
        self.device = torch.device("cpu")
        self.seen_starts = []

    @property
    def portfolio_value(self):
        return self.paths[:, 0].clone()

    def reset(self, *, seed):
        assert len(seed) == self.num_envs
        self.day = 0
        return torch.zeros(self.num_envs, 1), {}

    def step(self, actions):
        self.day += 1
        value = self.paths[:, self.day].clone()
        info = {
            name: torch.full((self.num_envs,), float(self.day), dtype=torch.float64)
            for name in ACCOUNTS
        }
        truncated = torch.full((self.num_envs,), self.day == self.num_days - 1)
        return actions, value, value < 10.0, truncated, info | {"portfolio_value": value}


def idle(env, obs, episode_start):
    return torch.zeros(env.num_envs, 1)


def test_ruin_freezes_the_value_and_ends_trading():
    record = run_markets(Paths([[100, 5, 100, 200], [100, 90, 80, 70]]), idle)
    # ruined on day 1, for good
    assert record.values.tolist() == [[100, 5, 5, 5], [100, 90, 80, 70]]
    assert record.fees_usd.tolist() == [[1, 0, 0], [1, 2, 3]]  # the ruinous day still counts
    assert record.exposure.tolist() == [[1, 0, 0], [1, 2, 3]]


def over_ranks(call, size, monkeypatch):
    """What each of `size` ranks gets from `call(world)`, all in this process."""
    worlds = [World(rank, rank, size, torch.device("cpu"), "gloo") for rank in range(size)]
    sent = []

    def remember(own, world):
        sent.append(own)
        raise InterruptedError

    for module in (evaluation, markets):
        monkeypatch.setattr(module, "all_gather_json", remember)
    for one in worlds:
        with suppress(InterruptedError):
            call(one)
    for module in (evaluation, markets):
        monkeypatch.setattr(module, "all_gather_json", lambda own, world: sent)
    return [call(one) for one in worlds]


@pytest.mark.parametrize(("count", "size"), [(5, 2), (4, 2), (1, 2), (2, 3)])
def test_markets_spread_over_ranks_give_what_one_rank_gives(count, size, world, monkeypatch):
    markets = [[100.0, 100.0 + m, 100.0 + 7 * m] for m in range(count)]
    together = functools.partial(evaluate_markets, markets, Paths, {"one": idle, "two": idle})
    alone = together(world)
    assert alone["one"].values.tolist() == markets
    for found in over_ranks(together, size, monkeypatch):
        assert list(found) == ["one", "two"]
        for name, record in found.items():
            for key, value in vars(record).items():
                assert np.array_equal(value, getattr(alone[name], key))


class Seeded(ScriptedEnv):
    """Remembers its seeds; its plain reward is its first environment's global number."""

    made: list = []

    def __init__(self, count, first):
        ends = [(3, TERMINATED), (5, TRUNCATED), (1, TERMINATED), (4, TERMINATED), (2, TRUNCATED)]
        super().__init__([[end] for end in ends[first : first + count]])
        self.first, self.closed = first, False
        Seeded.made.append(self)

    def reset(self, *, seed=None, options=None):
        self.seeds = list(seed)
        return super().reset()

    def step(self, actions):
        obs, rewards, terminated, truncated, info = super().step(actions)
        numbers = self.first + torch.arange(self.num_envs).double()
        return obs, rewards, terminated, truncated, info | {"raw_rewards": numbers}

    def close(self):
        self.closed = True


def test_every_episode_counts_once_with_its_plain_rewards(world, monkeypatch):
    Seeded.made.clear()
    episodes = evaluate_episodes(Seeded, idle, 5, 1, world)
    # number x length
    assert episodes == {"return": [0, 5, 2, 12, 8], "length": [3, 5, 1, 4, 2], "restarts": [0] * 5}
    seeds = stream_seeds(1, EVALUATION_STREAM, 0, 5)
    assert Seeded.made[0].seeds == seeds and Seeded.made[0].closed
    for size in (2, 3, 8):
        Seeded.made.clear()
        call = functools.partial(evaluate_episodes, Seeded, idle, 5, 1)
        assert over_ranks(call, size, monkeypatch) == [episodes] * size
        assert [one for env in Seeded.made[: min(size, 5)] for one in env.seeds] == seeds


class Faulty(Seeded):
    """Environment 1 is restarted in step 2, 3 after its episode has ended; both are truncated."""

    restarts = ()

    def __init__(self, count, first):
        super().__init__(count, first)
        self.restarts, self.num_steps = [0] * count, 0

    def step(self, actions):
        obs, rewards, terminated, truncated, info = super().step(actions)
        self.num_steps += 1
        for number, at in ((1, 2), (3, 5)):
            row = number - self.first
            if self.num_steps == at and 0 <= row < self.num_envs:
                self.restarts[row], truncated[row] = 1, True
        return obs, rewards, terminated, truncated, info


def test_an_episode_whose_environment_was_restarted_is_run_again_and_counted(world, monkeypatch):
    starts = []

    def watching(env, obs, episode_start):
        starts.append(bool(episode_start[1]))
        return idle(env, obs, episode_start)

    episodes = evaluate_episodes(Faulty, watching, 5, 1, world)
    # the second episode ends in step 5: two steps of its first try, three of its second
    assert episodes == {
        "return": [0, 3, 2, 12, 8],
        "length": [3, 3, 1, 4, 2],
        "restarts": [0, 1, 0, 0, 0],
    }
    assert starts == [True, False, True, False, False]
    call = functools.partial(evaluate_episodes, Faulty, idle, 5, 1)
    assert over_ranks(call, 2, monkeypatch) == [episodes] * 2


def controller(zero_state=False, policy="clstm", window=0, seed=0):
    torch.manual_seed(seed)
    space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    config = PolicyConfig(policy=policy, hidden_size=8, feature_window=window)
    return PolicyController(
        Policy(config, 4, space), Normalizer(4, enabled=False), zero_state=zero_state
    )


def answers(one, observations, starts):
    env = SimpleNamespace(layout=Layout.vector(4))
    return torch.stack(
        [one(env, obs, start) for obs, start in zip(observations, starts, strict=True)]
    )


@pytest.mark.parametrize("window", [0, 3])
def test_a_controller_forgets_where_an_episode_starts_and_with_zeroed_state_always(window):
    observations = torch.randn(6, 2, 4, generator=torch.Generator().manual_seed(1))
    starts = torch.zeros(6, 2, dtype=torch.bool)
    starts[0] = True
    whole = answers(controller(window=window), observations, starts)
    starts[3, 0] = True
    found = answers(controller(window=window), observations, starts)
    again = answers(controller(window=window), observations[3:], starts[3:])
    torch.testing.assert_close(found[3:, 0], again[:, 0])
    torch.testing.assert_close(found[:, 1], whole[:, 1])
    assert not torch.allclose(found[3:, 0], whole[3:, 0], atol=1e-6)
    zeroed = answers(controller(zero_state=True, window=window), observations, starts)
    always = answers(controller(window=window), observations, torch.ones_like(starts))
    assert torch.equal(zeroed, always) and not torch.equal(zeroed[4], found[4])
