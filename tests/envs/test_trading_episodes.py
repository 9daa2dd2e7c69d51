"""Episodes of the trading environment: starts, ends, seeds, snapshots, Gymnasium's faces."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from trading_markets import (
    FIRST,
    NUM_DAYS,
    make_env,
    random_actions,
    random_market,
    same,
    scaled,
    whole_pass,
)

import envs  # noqa: F401  (registers StockTrading-v0)
from envs.trading.task import StockTradingEnv, make_trading_vector_env


def test_an_ended_episode_is_followed_by_a_new_one_in_the_same_step():
    env = make_env(32, [random_market(1), random_market(2)])
    num_ended = 0
    for actions in random_actions(45, env):
        day, market_index = env.day, env.market_index
        obs, _, terminated, truncated, info = env.step(actions)
        ended = terminated | truncated
        num_ended += int(ended.sum())
        assert torch.equal(info["final_obs"][~ended], obs[~ended])
        assert (info["final_obs"][ended] != obs[ended]).any(1).all()
        assert (obs[ended, 0] == 1).all() and (obs[ended][:, env._gap] == 0).all()
        assert (env.cash[ended] == 1e6).all() and (env.portfolio_value[ended] == 1e6).all()
        assert torch.equal(env.day[~ended], day[~ended] + 1)
        assert torch.equal(env.market_index[~ended], market_index[~ended])
        expected = env._features[env._row[ended]]
        assert torch.equal(obs[ended], expected)
    assert num_ended >= 2 * 32 and env.market_index.unique().numel() == 2


def test_first_episodes_have_random_ages_and_later_ones_full_length():
    env = make_env(64)
    lengths: list[list[int]] = [[] for _ in range(64)]
    age = torch.zeros(64, dtype=torch.int64)
    for _ in range(61):
        truncated = env.step(torch.zeros(64, 4))[3]
        age += 1
        for i in truncated.nonzero().flatten().tolist():
            lengths[i].append(int(age[i]))
            age[i] = 0
    firsts = [own[0] for own in lengths]
    assert min(firsts) >= 1 and max(firsts) <= 20 and len(set(firsts)) > 12
    assert {length for own in lengths for length in own[1:]} == {20}


def test_different_seeds_start_on_different_days_and_the_same_seed_on_the_same():
    steps = [1000 * i for i in range(16)]
    runs = {}
    for name, seed in {"a": 7, "again": 7, "b": 8, "big": 2**63 - 20_000}.items():
        env = make_env(16, seed=[seed + step for step in steps])
        runs[name] = [torch.stack([env.day, env._end_row])]
        for _ in range(40):
            env.step(torch.zeros(16, 4))
        runs[name].append(env.day)
    assert all(torch.equal(x, y) for x, y in zip(runs["a"], runs["again"], strict=True))
    for other in ("b", "big"):
        assert (runs["a"][0] != runs[other][0]).any(0).sum() > 12
        assert (runs["a"][1] != runs[other][1]).sum() > 12
    assert runs["a"][0][0].unique().numel() > 10


def test_a_batch_equals_its_environments_one_by_one():
    markets = [random_market(1), random_market(2)]
    seeds = [5, 2**62 + 3, 17, 4]
    batch = make_env(4, markets, seed=seeds)
    actions = random_actions(70, batch)
    together = whole_pass(batch, actions)
    for i, seed in enumerate(seeds):
        alone = whole_pass(make_env(1, markets, seed=[seed]), actions[:, i : i + 1])
        for (obs, *rest, info), (own_obs, *own_rest, own_info) in zip(together, alone, strict=True):
            assert torch.equal(obs[i], own_obs[0])
            assert all(torch.equal(x[i], y[0]) for x, y in zip(rest, own_rest, strict=True))
            assert all(torch.equal(info[name][i], own_info[name][0]) for name in own_info)


@pytest.mark.parametrize("steps_before", [0, 7])
def test_a_restored_environment_goes_on_bit_for_bit(steps_before):
    env = make_env(6, [random_market(1), random_market(2)], episode_days=3)
    actions = random_actions(steps_before + 140, env)
    whole_pass(env, actions[:steps_before])
    state = env.get_state()
    assert all(tensor.shape[0] == 6 for tensor in state.values())
    copies = {name: tensor.clone() for name, tensor in state.items()}
    expected = whole_pass(env, actions[steps_before:])
    assert same(state, copies), "a snapshot must not change when its environment goes on"
    restored = make_env(6, [random_market(1), random_market(2)], episode_days=3, seed=None)
    restored.set_state(state)
    assert same(tuple(expected), tuple(whole_pass(restored, actions[steps_before:])))
    assert same(env.get_state(), restored.get_state())


def test_evaluation_passes_the_whole_span_once():
    env = make_env(2, [random_market(1), random_market(2)], evaluation=True)
    assert env.market_index.tolist() == [0, 1]
    for step, actions in enumerate(random_actions(NUM_DAYS - 1 - FIRST, env)):
        assert env.day.tolist() == [FIRST + step] * 2
        _, _, terminated, truncated, info = env.step(actions)
        assert not terminated.any()
        assert truncated.tolist() == [step == NUM_DAYS - 2 - FIRST] * 2
    assert (info["portfolio_value"] != 1e6).all() and env.day.tolist() == [FIRST, FIRST]
    assert env.market_index.tolist() == [0, 1]


def test_ruin_terminates():
    market = scaled(random_market(num_stocks=2), FIRST + 5, 0.05)
    env = make_env(1, [market], evaluation=True, max_order=1.0)
    ends = [env.step(torch.tensor([[0.5, 0.49]]))[2].item() for _ in range(5)]
    assert ends == [False, False, False, False, True]
    assert env.day.item() == FIRST and env.portfolio_value.item() == 1e6


@pytest.mark.parametrize(
    "options", [{}, {"observation": "paper", "order_unit": "shares", "max_order": 100}]
)
@pytest.mark.filterwarnings("ignore:.*A Box observation space")
def test_single_environment_passes_gymnasiums_checker(options):
    env = StockTradingEnv(num_worlds=1, num_stocks=4, episode_days=15, **options)
    check_env(env, skip_render_check=True)


def test_single_environment_runs_full_episodes_and_tells_the_last_observation():
    env = StockTradingEnv(num_worlds=1, num_stocks=4, episode_days=15)
    for seed in range(3):
        env.reset(seed=seed)
        ends = [env.step(np.ones(4, dtype=np.float32)) for _ in range(15)]
        assert [end[3] for end in ends] == [False] * 14 + [True]
        assert ends[-1][0][0] < 0.1, "the last observation still shows the ended portfolio"


def test_gymnasium_makes_both_faces_of_simulated_markets_and_of_files():
    kwargs = {"num_worlds": 2, "num_stocks": 3}
    single = gymnasium.make("StockTrading-v0", **kwargs)
    assert single.reset(seed=1)[0].shape == (25,)
    batch = gymnasium.make_vec("StockTrading-v0", num_envs=5, observation="paper", **kwargs)
    assert batch.reset(seed=1)[0].shape == (5, 19)
    with pytest.raises(ValueError, match="no such file"):
        make_trading_vector_env(2, data="nowhere.csv")


def test_returned_tensors_are_the_callers_to_keep_and_change():
    env, untouched = make_env(4), make_env(4)
    actions = random_actions(30, env)
    for action in actions:
        expected = untouched.step(action)
        result = env.step(action)
        assert same(result, expected)
        for tensor in (*result[:4], result[4]["final_obs"], env.cash, env.weights):
            tensor.zero_()


def test_actions_that_carry_gradients_leave_no_graph_behind():
    env = make_env(4)
    for actions in random_actions(3, env):
        obs, rewards, *_ = env.step(actions.requires_grad_())
    assert not obs.requires_grad and not rewards.requires_grad
    # observations may be saved for backward
    (torch.ones(33, requires_grad=True) * obs).sum().backward()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_gpu_trades_the_same_days_and_shares_as_the_cpu():
    markets = [random_market(1), random_market(2)]
    seeds = list(range(16))
    on_cpu = make_env(16, markets, seed=seeds)
    on_gpu = make_env(16, markets, seed=seeds, device="cuda")
    torch.cuda.set_sync_debug_mode("error")  # a step must not wait for the device
    try:
        for actions in random_actions(70, on_cpu):
            on_cpu.step(actions)
            on_gpu.step(actions.to("cuda", non_blocking=True))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    left, right = on_cpu.get_state(), on_gpu.get_state()
    assert all(torch.equal(left[name], right[name].cpu()) for name in left)
