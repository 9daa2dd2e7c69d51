"""Trading episodes: start, end, seeds, snapshots."""

import pytest
import torch
from trading_markets import (
    FIRST,
    NUM_DAYS,
    account,
    day,
    make_env,
    random_actions,
    random_market,
    same,
    scaled,
    whole_pass,
)

MARKETS = [random_market(1), random_market(2)]


def test_an_ended_episode_is_followed_by_a_new_one_in_the_same_step():
    env = make_env(32, MARKETS)
    num_ended = 0
    for actions in random_actions(45, env):
        row = env.row
        obs, _, terminated, truncated, info = env.step(actions)
        ended = terminated | truncated
        num_ended += int(ended.sum())
        assert torch.equal(info["final_obs"][~ended], obs[~ended])
        assert (info["final_obs"][ended] != obs[ended]).any(1).all()
        assert (obs[ended, 0] == 1).all() and (env.weights[ended] == 0).all()
        assert (account(env)[0][ended] == 1e6).all() and (env.portfolio_value[ended] == 1e6).all()
        assert torch.equal(env.row[~ended], row[~ended] + 1)
    assert num_ended >= 2 * 32
    assert (env.row // env.num_days).unique().tolist() == [0, 1]  # both markets occur


def test_first_episodes_have_ages_and_days_by_the_seed_and_later_ones_full_length():
    def starts(seed):
        state = make_env(64, seed=[seed + 1000 * i for i in range(64)]).get_state()
        return state["row"], state["end_row"] - state["row"]

    rows, lengths = starts(7)
    assert same((rows, lengths), starts(7)) and len(set(rows.tolist())) > 40
    assert lengths.min() >= 1 and lengths.max() <= 20 and len(set(lengths.tolist())) > 12
    for other in (8, 2**63 - 70_000):
        assert (starts(other)[0] != rows).sum() > 48
    env = make_env(64)
    truncated = torch.stack([env.step(torch.zeros(64, 4))[3] for _ in range(61)])
    assert {int(n) for column in truncated.T for n in column.nonzero().flatten().diff()} == {20}


def test_a_batch_equals_its_environments_one_by_one():
    seeds = [5, 2**62 + 3, 17, 4]
    batch = make_env(4, MARKETS, seed=seeds)
    actions = random_actions(70, batch)
    together = whole_pass(batch, actions)
    for i, seed in enumerate(seeds):
        alone = whole_pass(make_env(1, MARKETS, seed=[seed]), actions[:, i : i + 1])
        for step, (*columns, info) in zip(alone, together, strict=True):
            rows = {name: column[i : i + 1] for name, column in info.items()}
            assert same((*(column[i : i + 1] for column in columns), rows), step)


@pytest.mark.parametrize("steps_before", [0, 7])
def test_a_restored_environment_continues_bit_for_bit(steps_before):
    env = make_env(6, MARKETS, episode_days=3)
    actions = random_actions(steps_before + 140, env)
    whole_pass(env, actions[:steps_before])
    state = env.get_state()
    assert all(len(tensor) == 6 for tensor in state.values())
    copies = {name: tensor.clone() for name, tensor in state.items()}
    expected = whole_pass(env, actions[steps_before:])
    assert same(state, copies), "a snapshot must not change when its environment steps"
    restored = make_env(6, MARKETS, episode_days=3, seed=None)
    restored.set_state(state)
    assert same(expected, whole_pass(restored, actions[steps_before:]))
    assert same(env.get_state(), restored.get_state())


def test_evaluation_passes_the_whole_span_once():
    env = make_env(2, MARKETS, evaluation=True)
    for step, actions in enumerate(random_actions(NUM_DAYS - 1 - FIRST, env)):
        assert env.row.tolist() == [step, env.num_days + step]
        _, _, terminated, truncated, info = env.step(actions)
        assert truncated.tolist() == [step == NUM_DAYS - 2 - FIRST] * 2 and not terminated.any()
    assert (info["portfolio_value"] != 1e6).all() and day(env).tolist() == [FIRST, FIRST]


def test_ruin_terminates():
    market = scaled(random_market(num_stocks=2), FIRST + 5, 0.05)
    env = make_env(1, [market], evaluation=True, max_order=1.0)
    ends = [env.step(torch.tensor([[0.5, 0.49]]))[2].item() for _ in range(5)]
    assert ends == [False, False, False, False, True]
    assert day(env).item() == FIRST and env.portfolio_value.item() == 1e6


def test_returned_tensors_are_the_callers_and_carry_no_graph():
    env, untouched = make_env(4), make_env(4)
    for action in random_actions(30, env):
        expected = untouched.step(action)
        result = env.step(action.clone().requires_grad_())
        assert same(result, expected)
        assert not result[0].requires_grad and not result[1].requires_grad
        # autograd may save observations for the backward pass
        (torch.ones(33, requires_grad=True) * result[0]).sum().backward()
        for tensor in (*result[:4], result[4]["final_obs"], env.portfolio_value, env.weights):
            tensor.zero_()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_gpu_trades_the_same_days_and_shares_as_the_cpu():
    on_cpu = make_env(16, MARKETS)
    on_gpu = make_env(16, MARKETS, device="cuda")
    torch.cuda.set_sync_debug_mode("error")  # a step must not wait for the GPU
    try:
        for actions in random_actions(70, on_cpu):
            on_cpu.step(actions)
            on_gpu.step(actions.to("cuda", non_blocking=True))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    left, right = on_cpu.get_state(), on_gpu.get_state()
    assert all(torch.equal(left[name], right[name].cpu()) for name in left)
