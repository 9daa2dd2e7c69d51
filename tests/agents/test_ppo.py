"""Advantages, the loss and the update, against numbers by hand."""

import itertools
import json
import math
from unittest import mock

import pytest
import torch
from agents_ranks import JOBS, Recording, make_job
from torch import nn

from agents.advantages import explained_variance, gae, normalize_advantages, rollout_sums
from agents.network.minibatches import Minibatch
from agents.network.noise import sequence_orders
from agents.policy import Evaluation, PolicyConfig
from agents.ppo import (
    PPO,
    Batch,
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

# ---- advantages: rewards 1 2 3, values 0.5 1 1.5


@pytest.mark.parametrize(
    ("next_values", "ends", "gamma", "gae_lambda", "advantages"),
    [
        # deltas: 1 + 0.9 - 0.5 = 1.4; 2 + 1.35 - 1 = 2.35; 3 + 1.8 - 1.5 = 3.3; decay 0.72
        ([1.0, 1.5, 2.0], [0, 0, 0], 0.9, 0.8, [4.80272, 4.726, 3.3]),
        # truncated, terminated: the last step looks at its own successor alone
        ([1.0, 5.0, 2.0], [0, 1, 0], 0.9, 0.8, [1.4 + 0.72 * 5.5, 5.5, 3.3]),
        ([1.0, 0.0, 2.0], [0, 1, 0], 0.9, 0.8, [1.4 + 0.72 * 1.0, 1.0, 3.3]),
        # lambda 1: discounted rewards and the bootstrap, less the value
        ([1.0, 1.5, 2.0], [0, 0, 0], 0.5, 1.0, [3.0 - 0.5, 4.0 - 1.0, 4.0 - 1.5]),
    ],
)
def test_advantages_are_those_computed_by_hand_and_environments_do_not_mix(
    next_values, ends, gamma, gae_lambda, advantages
):
    rows = torch.tensor([[1.0, 2.0, 3.0], [0.5, 1.0, 1.5], next_values], dtype=torch.float64)
    columns = torch.stack([torch.zeros_like(rows), rows, -rows], dim=-1)
    episode_end = torch.tensor(ends).bool()[:, None].expand(-1, 3)
    found, returns = gae(*columns, episode_end, gamma, gae_lambda)
    assert torch.equal(returns, found + columns[1])
    for column, factor in enumerate((0.0, 1.0, -1.0)):
        expected = [factor * advantage for advantage in advantages]
        assert found[:, column].tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("least", "deviation"), [(0.0, 3.5**0.5), (1.8, 3.5**0.5), (7.0, 7.0)])
def test_advantages_are_normalised_by_their_deviation_or_by_the_least(least, deviation):
    advantages, zeros = torch.tensor([[1.0, 2.0], [3.0, 6.0]]), torch.zeros(2, 2)
    # population variance: squares (4 + 1 + 0 + 9) / 4
    found = normalize_advantages(advantages, rollout_sums(advantages, zeros, zeros), least)
    torch.testing.assert_close(found, (advantages - 3.0) / deviation)
    equal = torch.full((2, 2), 5.0)
    assert normalize_advantages(equal, rollout_sums(equal, zeros, zeros)).abs().max() == 0


@pytest.mark.parametrize(
    ("values", "returns", "explained"),
    [
        ([1.0, 2.0, 3.0, 6.0], [1.0, 2.0, 3.0, 6.0], 1.0),
        ([-4.0, -3.0, -2.0, 1.0], [1.0, 2.0, 3.0, 6.0], 1.0),  # an offset is no variance
        ([9.0] * 4, [1.0, 2.0, 3.0, 6.0], 0.0),
        ([-1.0, -2.0, -3.0, -6.0], [1.0, 2.0, 3.0, 6.0], -3.0),
        ([1.0, 2.0, 3.0, 6.0], [1.0] * 4, 0.0),
    ],
)
def test_explained_variance_is_1_for_a_perfect_critic(values, returns, explained):
    values, returns = torch.tensor(values), torch.tensor(returns)
    found = explained_variance(rollout_sums(returns, values, returns))
    assert float(found) == pytest.approx(explained)


# ---- the loss


def loss_of(ratios=(1.0,), values=0, entropy=0, old_values=0, advantages=0, returns=0, **ppo):
    """The loss of one row of steps whose probabilities changed by these ratios."""

    def row(numbers):
        return torch.tensor([numbers or [0.0] * len(ratios)], dtype=torch.float64)

    before = row([-1.5] * len(ratios))
    evaluation = Evaluation(before + row(ratios).log(), row(entropy), row(values))
    minibatch = Minibatch(
        obs=before,
        actions=before,
        logprobs=before,
        values=row(old_values),
        advantages=row(advantages),
        returns=row(returns),
        episode_start=before > 0,
        lstm_state=before,
    )
    return ppo_loss(evaluation, minibatch, PPOConfig(**ppo))


MOVED = {"values": (1.0,), "old_values": (0.0,), "returns": (2.0,)}  # towards the return
AWAY = {"values": (-1.0,), "old_values": (0.0,), "returns": (2.0,)}
MANY = (1.0, 1.5, 0.7, 1.1)


@pytest.mark.parametrize(
    ("given", "part", "expected"),
    [
        ({"ratios": (1.0,), "advantages": (2.0,)}, "policy", -2.0),
        ({"ratios": (1.1,), "advantages": (2.0,)}, "policy", -2.2),
        ({"ratios": (1.5,), "advantages": (2.0,)}, "policy", -2.4),  # no more to gain beyond 1.2
        ({"ratios": (0.5,), "advantages": (2.0,)}, "policy", -1.0),  # less likely: not forgiven
        ({"ratios": (0.5,), "advantages": (-2.0,)}, "policy", 1.6),  # no more to gain below 0.8
        ({"ratios": (1.5,), "advantages": (-2.0,)}, "policy", 3.0),
        ({"ratios": (1.0, 1.5), "advantages": (2.0, 2.0)}, "policy", -(2.0 + 2.4) / 2),
        (MOVED, "value", 0.5 * 1.0),
        (MOVED | {"clip_vloss": True}, "value", 0.5 * 1.8**2),  # at most 0.2 counts
        (AWAY | {"clip_vloss": True}, "value", 0.5 * 9.0),  # the full error counts
        ({"ratios": MANY}, "clip_fraction", 0.5),
        ({"ratios": MANY}, "approx_kl", sum(r - 1.0 - math.log(r) for r in MANY) / 4),
        ({"ratios": (1.0,)}, "approx_kl", 0.0),
        (
            {"ratios": (1.0, 1.5), "values": (1.0, 3.0), "entropy": (0.4, 0.8)}
            | {"advantages": (2.0, 2.0), "returns": (2.0, 1.0), "ent_coef": 0.1, "vf_coef": 0.25},
            "total",
            -2.2 + 0.25 * 0.5 * (1.0 + 4.0) / 2 - 0.1 * 0.6,
        ),
    ],
)
def test_losses_are_those_computed_by_hand(given, part, expected):
    assert getattr(loss_of(**given), part).item() == pytest.approx(expected)


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


# ---- the update of a policy of one parameter


class Line(nn.Module):
    """Value = parameter, log-probability = 0."""

    config = PolicyConfig(policy="mlp")
    discrete = resets_inside = False

    def __init__(self, value=2.0):
        super().__init__()
        self.value = nn.Parameter(torch.tensor(value, dtype=torch.float64))

    def forward(self, obs, actions, state, episode_start):
        values = self.value.expand(obs.shape[:2])
        return Evaluation(values * 0.0, values.detach() * 0.0, values)


def updating(world, policy, num_minibatches=1, number=8, **config):
    """A PPO, and its update with sequences of 4 environments that have these returns."""
    ppo = PPO(policy, PPOConfig(**config), Strategy(StrategyConfig(), world))

    def update(returns=1.0):
        zeros = torch.zeros(2, number, dtype=torch.float64)
        marks = torch.arange(number).double().expand(2, number)
        sequences = Minibatch(
            obs=marks[..., None],
            actions=zeros[..., None],
            logprobs=zeros,
            values=zeros,
            advantages=zeros,
            returns=zeros + returns,
            episode_start=zeros > 0,
            lstm_state=torch.zeros(number, 0, 1, dtype=torch.float64),
        )
        epochs = ppo.config.update_epochs
        batch = Batch(
            sequences=sequences,
            starts=sequences.episode_start.numpy(),
            order=sequence_orders((1, 1), epochs, 0, 4, number // 4, num_minibatches),
            num_envs=4,
            explained_variance=torch.zeros(()),
            statistics={},
        )
        return ppo.update(batch)

    return ppo, update


def test_every_epoch_uses_every_sequence_once_in_another_order(world):
    line, seen = Line(), []
    line.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0][0, :, 0]))
    _, update = updating(world, line, num_minibatches=2, number=32, update_epochs=4)
    assert update()["optim/steps"] == 8 == len(seen)
    epochs = torch.stack(seen).view(4, 32)
    assert epochs.sort(dim=1).values.unique(dim=0).tolist() == [list(range(32))]
    assert len(epochs.unique(dim=0)) == 4


def test_the_reported_norm_is_of_the_gradient_before_it_is_clipped(world):
    """Gradient of vf_coef * 0.5 * (value - 1000)^2 at 0 is -500."""
    line = Line(0.0)
    _, update = updating(world, line, update_epochs=1, max_grad_norm=0.25)
    assert update(1000.0)["optim/grad_norm"] == pytest.approx(500.0)
    assert line.value.grad.item() == pytest.approx(-0.25, rel=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_gradients_are_skipped_and_counted_until_there_are_too_many(world, bad, tmp_path):
    line = Line()
    ppo, update = updating(world, line, max_bad_steps=10)
    events.configure(f"cat > {tmp_path}/event", tmp_path)
    metrics = update(bad)
    events.close()
    event = json.loads((tmp_path / "event").read_text())
    assert (event["event"], event["skipped"]) == ("bad_steps", 4)
    assert metrics["optim/skipped_steps"] == ppo.bad_in_a_row == 4 and metrics["optim/steps"] == 0
    assert line.value.item() == 2.0 and not ppo.optimizer.state
    assert update()["optim/skipped_steps"] == ppo.bad_in_a_row == 0
    assert line.value.item() != 2.0
    kept = [line.value.item(), str(ppo.optimizer.state_dict())]
    for _ in range(2):
        update(bad)
    with pytest.raises(NonFiniteGradientError, match="11 steps .* --max_bad_steps 10"):
        update(bad)
    assert [line.value.item(), str(ppo.optimizer.state_dict())] == kept


def test_a_resumed_run_that_allows_fewer_bad_steps_stops_at_the_next_one_only(world):
    ppo, update = updating(world, Line(), max_bad_steps=2)
    ppo.bad_in_a_row = 5  # of the run before
    update()
    assert ppo.bad_in_a_row == 0
    ppo.bad_in_a_row = 5
    with pytest.raises(NonFiniteGradientError, match="6 steps in a row"):
        update(math.nan)


def changed_losses(change):
    """Replace `ppo_loss` by one whose parts change with the number of the call, from 1."""
    numbers = itertools.count(1)
    return mock.patch("agents.ppo.ppo_loss", lambda *args: change(next(numbers), ppo_loss(*args)))


def bad_at(calls):
    return changed_losses(
        lambda number, parts: parts._replace(total=parts.total * math.nan ** (number in calls))
    )


def test_a_loss_that_is_not_finite_is_bad_even_if_its_gradient_is_finite(world):
    _, update = updating(world, Line(), vf_coef=0.0, update_epochs=1)
    with changed_losses(lambda _, parts: parts._replace(total=parts.total + math.inf)):
        assert update()["optim/skipped_steps"] == 1


# ---- whole trainings


@pytest.mark.parametrize(
    ("bad", "steps", "calls"),
    [((), 2, 2), ((2,), 1, 2), ((1, 2, 4), 1, 4), ((1, 2, 3, 4, 5, 6), 0, 6)],
    ids=["none", "one", "more", "all"],
)
def test_the_kl_estimate_is_that_of_the_steps_taken_and_an_epoch_without_any_does_not_stop(
    world, bad, steps, calls
):
    numbers = []

    def change(number, parts):
        numbers.append(number)
        total = parts.total * (math.nan if number in bad else 1.0)
        return parts._replace(total=total, approx_kl=torch.full_like(parts.approx_kl, 0.03))

    ppo = PPOConfig(update_epochs=3, target_kl=0.02)
    training = Recording(make_job("recall, clstm", iterations=1, ppo=ppo), world)
    with changed_losses(change):
        train(training, NullWriter(), StopFlag())
    assert [losses["optim/steps"] for losses in training.losses] == [steps]
    assert len(numbers) == calls


def test_bad_steps_in_a_row_are_counted_on_after_a_resume(world):
    ppo = PPOConfig(update_epochs=2, max_bad_steps=3)
    training, resumed = (
        Recording(make_job("recall, clstm", iterations=count, ppo=ppo), world) for count in (1, 2)
    )
    with bad_at((2, 3, 4)):  # three of the four steps
        train(training, NullWriter(), StopFlag())
    resumed.restore(training.state())
    with bad_at((1,)), pytest.raises(NonFiniteGradientError, match="4 steps in a row"):
        train(resumed, NullWriter(), StopFlag())


def test_from_the_second_epoch_on_sequences_begin_at_states_of_the_network_of_now(world):
    ppo = PPOConfig(update_epochs=3, learning_rate=1e-2, refresh_states=True)
    training = Recording(make_job("recall, clstm", iterations=1, ppo=ppo), world)
    update, step = training.ppo.update, training.ppo.step
    batches, used, expected = [], [], []

    def keep(batch):
        batches.append(batch)
        return update(batch)

    def probe(minibatch, plans):
        if len(used) % training.sizes.num_minibatches == 0:  # an epoch begins
            expected.append(refreshed_states(training.policy, batches[-1]))
        used.append(minibatch.lstm_state)
        return step(minibatch, plans)

    with mock.patch.multiple(training.ppo, update=keep, step=probe):
        train(training, NullWriter(), StopFlag())
    stored = batches[0].sequences.lstm_state
    torch.testing.assert_close(expected[0], stored, rtol=0, atol=1e-12)  # nothing learned yet
    assert len(expected) == 3 and (expected[2] - stored).abs().max() > 1e-3
    for epoch, states in enumerate(torch.cat(used).chunk(3)):
        found, wanted = (each.flatten(1).sum(1).sort().values for each in (states, expected[epoch]))
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", JOBS)
def test_the_ratio_is_1_before_the_first_gradient_step_of_every_iteration(name, world):
    """So the normaliser is frozen, and states and inputs are the stored ones."""
    training = Recording(make_job(name, iterations=3), world)
    step = training.ppo.step
    first_of_iteration, counts = {}, {}

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
