import json
import math
from unittest import mock

import pytest
import torch
from agents_ranks import JOBS, Recording, make_job
from torch import nn

from agents.advantages import normalize_advantages, rollout_sums
from agents.network.minibatches import Minibatch
from agents.network.noise import sequence_orders
from agents.policy import Evaluation, PolicyConfig
from agents.ppo import (
    PPO,
    Batch,
    LossParts,
    NonFiniteGradientError,
    PPOConfig,
    learning_rate,
    ppo_loss,
    refreshed_states,
)
from agents.trainer import train
from rl_dist.process_group.world import StopFlag
from rl_dist.strategies.config import StrategyConfig
from rl_dist.strategies.strategy import Strategy
from rl_dist.telemetry import events
from rl_dist.telemetry.metrics import NullWriter


def row(*values):
    return torch.tensor([values], dtype=torch.float64)


def loss_of(ratios=(1.0,), values=0, entropy=0, old_values=0, advantages=0, returns=0, **ppo):
    """The loss of one row of steps whose probabilities changed by these ratios."""
    before = row(*[-1.5] * len(ratios))
    given = (entropy, values, old_values, advantages, returns)
    entropy, values, old_values, advantages, returns = (
        row(*each) if each else before * 0 for each in given
    )
    evaluation = Evaluation(before + row(*ratios).log(), entropy, values)
    minibatch = Minibatch(
        obs=before,
        actions=before,
        logprobs=before,
        values=old_values,
        advantages=advantages,
        returns=returns,
        episode_start=before > 0,
        lstm_state=before,
    )
    return ppo_loss(evaluation, minibatch, PPOConfig(**ppo))


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss"),
    [
        (1.0, 2.0, -2.0),
        (1.1, 2.0, -2.2),
        (1.5, 2.0, -2.4),  # no more to gain beyond 1.2
        (0.5, 2.0, -1.0),  # a good action made less likely is not forgiven
        (0.5, -2.0, 1.6),  # no more to gain below 0.8
        (1.5, -2.0, 3.0),  # a bad action made more likely is not forgiven
    ],
)
def test_the_policy_loss_is_clipped_where_it_would_gain_only(ratio, advantage, loss):
    found = loss_of((ratio,), advantages=(advantage,), clip_coef=0.2)
    assert found.policy.item() == pytest.approx(loss)


def test_losses_are_means_over_steps_and_add_up_with_their_weights():
    parts = loss_of(
        (1.0, 1.5),
        values=(1.0, 3.0),
        entropy=(0.4, 0.8),
        advantages=(2.0, 2.0),
        returns=(2.0, 1.0),
        ent_coef=0.1,
        vf_coef=0.25,
    )
    assert parts.policy.item() == pytest.approx(-(2.0 + 2.4) / 2)
    assert parts.value.item() == pytest.approx(0.5 * (1.0 + 4.0) / 2)
    assert parts.entropy.item() == pytest.approx(0.6)
    assert parts.total.item() == pytest.approx(-2.2 + 0.25 * 1.25 - 0.1 * 0.6)


def test_the_value_loss_is_clipped_only_if_asked_and_only_where_it_would_gain():
    # the value moved from 0 to 1, towards the return 2; at most 0.2 counts
    moved = {"values": (1.0,), "old_values": (0.0,), "returns": (2.0,)}
    assert loss_of(**moved).value.item() == pytest.approx(0.5 * 1.0)
    assert loss_of(**moved, clip_vloss=True).value.item() == pytest.approx(0.5 * 1.8**2)
    # moved away from the return: the full error counts
    away = {"values": (-1.0,), "old_values": (0.0,), "returns": (2.0,)}
    assert loss_of(**away, clip_vloss=True).value.item() == pytest.approx(0.5 * 9.0)


def test_diagnostics_are_the_share_of_clipped_ratios_and_the_k3_estimate():
    parts = loss_of((1.0, 1.5, 0.7, 1.1), clip_coef=0.2)
    assert parts.clip_fraction.item() == pytest.approx(0.5)
    k3 = sum(r - 1.0 - math.log(r) for r in (1.0, 1.5, 0.7, 1.1)) / 4
    assert parts.approx_kl.item() == pytest.approx(k3)
    assert loss_of((1.0,)).approx_kl.item() == 0.0


def test_advantages_are_normalised_to_mean_0_and_deviation_1(world):
    advantages = torch.tensor([[1.0, 2.0], [3.0, 6.0]])
    deviation = math.sqrt(3.5)  # of the whole population: squares 4 + 1 + 0 + 9 over 4
    zeros = torch.zeros(2, 2)
    normalised = normalize_advantages(advantages, rollout_sums(advantages, zeros, zeros))
    torch.testing.assert_close(normalised, (advantages - 3.0) / deviation)
    assert normalised.dtype == torch.float32
    alike = torch.full((2, 2), 5.0)
    assert normalize_advantages(alike, rollout_sums(alike, zeros, zeros)).abs().max() == 0


def test_advantages_are_divided_by_a_least_deviation(world):
    advantages, zeros = torch.tensor([[1.0, 2.0], [3.0, 6.0]]), torch.zeros(2, 2)
    sums = rollout_sums(advantages, zeros, zeros)
    assert torch.equal(
        normalize_advantages(advantages, sums, 1.8), normalize_advantages(advantages, sums)
    )
    torch.testing.assert_close(
        normalize_advantages(advantages, sums, 7.0), (advantages - 3.0) / 7.0
    )


class Line(nn.Module):
    """A policy of one parameter: value = parameter, log-probability = 0."""

    config = PolicyConfig(policy="mlp")
    discrete = resets_inside = False

    def __init__(self, value=0.0):
        super().__init__()
        self.value = nn.Parameter(torch.tensor(value, dtype=torch.float64))

    def forward(self, obs, actions, state, episode_start):
        values = self.value.expand(obs.shape[:2])
        return Evaluation(values * 0.0, values.detach() * 0.0, values)


def gradient(line):
    assert line.value.grad is not None
    return line.value.grad.item()


def sequences(number=8, length=2, returns=1.0):
    flat = torch.zeros(length, number, dtype=torch.float64)
    return Minibatch(
        obs=flat[..., None],
        actions=flat[..., None],
        logprobs=flat,
        values=flat,
        advantages=flat,
        returns=flat + returns,
        episode_start=flat > 0,
        lstm_state=torch.zeros(number, 0, 1, dtype=torch.float64),
    )


def alone(world):
    return Strategy(StrategyConfig(), world)


def batch_of(some, ppo, num_minibatches, num_envs=4):
    share = (0, num_envs, some.obs.shape[1] // num_envs, num_minibatches)
    return Batch(
        sequences=some,
        starts=some.episode_start.numpy(),
        order=sequence_orders((1, 1), ppo.config.update_epochs, *share),
        num_envs=num_envs,
        explained_variance=torch.zeros(()),
        statistics={},
    )


def update(ppo, some, num_minibatches=2):
    return ppo.update(batch_of(some, ppo, num_minibatches))


def test_every_epoch_uses_every_sequence_once_in_an_order_of_its_own(world):
    marked = sequences(32)
    marked.obs = torch.arange(32.0).double().expand(2, 32)[..., None]
    line, seen = Line(), []
    line.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0][0, :, 0]))
    metrics = update(PPO(line, PPOConfig(update_epochs=4), alone(world)), marked)
    assert metrics["optim/steps"] == 8 == len(seen)
    epochs = torch.stack(seen).view(4, 32)
    assert epochs.sort(dim=1).values.unique(dim=0).tolist() == [list(range(32))]
    assert len(epochs.unique(dim=0)) == 4


def test_the_reported_norm_is_of_the_gradient_before_it_is_clipped(world):
    """Gradient of vf_coef * 0.5 * (value - 1000)^2 at 0 is -500."""
    line = Line()
    ppo = PPO(line, PPOConfig(update_epochs=1, max_grad_norm=0.25), alone(world))
    metrics = update(ppo, sequences(returns=1000.0), num_minibatches=1)
    assert metrics["optim/grad_norm"] == pytest.approx(500.0)
    assert gradient(line) == pytest.approx(-0.25, rel=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_skipped_and_counted_until_there_are_too_many(
    world, bad, tmp_path
):
    line = Line(2.0)
    ppo = PPO(line, PPOConfig(max_bad_steps=10), alone(world))
    events.configure(f"cat > {tmp_path}/event", tmp_path)
    metrics = update(ppo, sequences(returns=bad), num_minibatches=1)
    events.close()
    event = json.loads((tmp_path / "event").read_text())
    assert (event["event"], event["skipped"]) == ("bad_steps", 4)
    assert metrics["optim/skipped_steps"] == ppo.bad_in_a_row == 4 and metrics["optim/steps"] == 0
    assert line.value.item() == 2.0 and not ppo.optimizer.state
    assert (
        update(ppo, sequences(), num_minibatches=1)["optim/skipped_steps"] == ppo.bad_in_a_row == 0
    )
    assert line.value.item() != 2.0
    kept = [line.value.item(), str(ppo.optimizer.state_dict())]
    for _ in range(2):
        update(ppo, sequences(returns=bad), num_minibatches=1)
    with pytest.raises(NonFiniteGradientError, match="in 11 steps .* --max_bad_steps 10"):
        update(ppo, sequences(returns=bad), num_minibatches=1)
    assert [line.value.item(), str(ppo.optimizer.state_dict())] == kept


def test_a_loss_that_is_not_finite_is_bad_even_if_its_gradient_is_finite(world):
    ppo = PPO(Line(2.0), PPOConfig(vf_coef=0.0, update_epochs=1), alone(world))

    def infinite(*args):
        parts = ppo_loss(*args)
        return parts._replace(total=parts.total + math.inf)

    with mock.patch("agents.ppo.ppo_loss", infinite):
        assert update(ppo, sequences(), num_minibatches=1)["optim/skipped_steps"] == 1


RATES = [  # anneal_lr, warmup, iteration, remaining, factor, rate of 0.1 by hand
    (True, 0, 7, 0.5, 1.0, 0.05),
    (True, 0, 9, -0.1, 1.0, 0.0),
    (False, 0, 7, 0.0, 2.0, 0.2),
    (False, 4, 3, 0.5, 1.0, 0.075),
    (False, 4, 5, 0.5, 1.0, 0.1),
    (True, 4, 4, 0.6, 3.0, 0.18),
]


@pytest.mark.parametrize(("anneal_lr", "warmup", "iteration", "remaining", "factor", "rate"), RATES)
def test_the_learning_rate_rises_falls_and_scales(
    anneal_lr, warmup, iteration, remaining, factor, rate
):
    config = PPOConfig(learning_rate=0.1, anneal_lr=anneal_lr, warmup=warmup)
    assert learning_rate(config, iteration, remaining, factor) == pytest.approx(rate, rel=1e-12)


@pytest.mark.parametrize(
    ("bad", "steps"),
    [((), 2), ((2,), 1), ((1, 2, 4), 1), ((1, 2, 3, 4, 5, 6), 0)],
    ids=["none", "one", "more", "all"],
)
def test_the_kl_estimate_is_that_of_the_steps_taken_and_an_epoch_without_any_does_not_stop(
    world, bad, steps
):
    calls = [0]

    def loss(*args):
        calls[0] += 1
        parts = ppo_loss(*args)
        nan = torch.nan if calls[0] in bad else 1.0
        kl = torch.full_like(parts.approx_kl, 0.03)
        return parts._replace(total=parts.total * nan, approx_kl=kl)

    with mock.patch("agents.ppo.ppo_loss", loss):
        ppo = PPOConfig(update_epochs=3, target_kl=0.02)
        training = Recording(make_job("recall, clstm", iterations=1, ppo=ppo), world)
        train(training, NullWriter(), StopFlag())
    assert [losses["optim/steps"] for losses in training.losses] == [steps]
    assert calls[0] == {(): 2, (2,): 2, (1, 2, 4): 4}.get(bad, 6)


def test_bad_steps_in_a_row_are_counted_on_after_a_resume(world):
    def bad_from(first):
        calls = [0]

        def loss(*args):
            calls[0] += 1
            parts = ppo_loss(*args)
            return parts._replace(total=parts.total * torch.nan) if calls[0] >= first else parts

        return mock.patch("agents.ppo.ppo_loss", loss)

    def fresh(iterations):
        ppo = PPOConfig(update_epochs=2, max_bad_steps=3)
        return Recording(make_job("recall, clstm", iterations=iterations, ppo=ppo), world)

    training, resumed = fresh(1), fresh(2)
    with bad_from(2):  # three of the four steps
        train(training, NullWriter(), StopFlag())
    state = training.state()
    resumed.restore(state)
    with bad_from(1), pytest.raises(NonFiniteGradientError, match="in 4 steps in a row"):
        train(resumed, NullWriter(), StopFlag())


def test_from_the_second_epoch_on_sequences_begin_at_states_of_the_network_of_now(world):
    ppo = PPOConfig(update_epochs=3, learning_rate=1e-2, refresh_states=True)
    training = Recording(make_job("recall, clstm", iterations=1, ppo=ppo), world)
    update, step = training.ppo.update, training.ppo.step
    rollout, used, expected = [], [], []

    def keep(batch):
        rollout.append(batch)
        return update(batch)

    def probe(minibatch, plans):
        if len(used) % training.sizes.num_minibatches == 0:  # an epoch begins
            expected.append(refreshed_states(training.policy, rollout[-1]))
        used.append(minibatch.lstm_state)
        return step(minibatch, plans)

    with mock.patch.multiple(training.ppo, update=keep, step=probe):
        train(training, NullWriter(), StopFlag())
    stored = rollout[0].sequences.lstm_state
    torch.testing.assert_close(expected[0], stored, rtol=0, atol=1e-12)  # nothing learned yet
    assert len(expected) == 3 and (expected[2] - stored).abs().max() > 1e-3
    for epoch, states in enumerate(torch.cat(used).chunk(3)):
        found, wanted = (each.flatten(1).sum(1).sort().values for each in (states, expected[epoch]))
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def test_a_resumed_run_that_allows_fewer_bad_steps_stops_at_the_next_one_only(world):
    ppo = PPO(Line(2.0), PPOConfig(max_bad_steps=2), alone(world))
    ppo.bad_in_a_row = 5  # of the run before
    update(ppo, sequences(), num_minibatches=1)
    assert ppo.bad_in_a_row == 0
    ppo.bad_in_a_row = 5
    with pytest.raises(NonFiniteGradientError, match="in 6 steps in a row"):
        update(ppo, sequences(returns=math.nan), num_minibatches=1)


@pytest.mark.parametrize("name", JOBS)
def test_the_ratio_is_1_before_the_first_gradient_step_of_every_iteration(name, world):
    """So the normaliser is frozen, and states and inputs are the stored ones."""
    training = Recording(make_job(name, iterations=3), world)
    step = training.ppo.step
    first_of_iteration: dict[int, LossParts] = {}
    counts: dict[int, set[float]] = {}

    def probe(minibatch, plans):
        count = float(training.normalizers.obs.moments.count)
        counts.setdefault(training.iteration, set()).add(count)
        result = step(minibatch, plans)
        first_of_iteration.setdefault(training.iteration, result[0])
        return result

    with mock.patch.object(training.ppo, "step", probe):
        train(training, NullWriter(), StopFlag())
    assert sorted(first_of_iteration) == [1, 2, 3]
    for parts in first_of_iteration.values():
        assert abs(parts.approx_kl.item()) < 1e-14 and parts.clip_fraction.item() == 0.0
    # merged once per iteration, after its update; the warm-up's 128 samples came before the first
    assert counts == {1: {128.0}, 2: {256.0}, 3: {384.0}}
