"""Compare advantages, losses and updates with values computed by hand."""

import math
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from agents_ranks import Recording, changed_losses, finish, make_job, parameters_of
from torch import nn

from agents.learner.advantages import explained_variance, gae, normalize_advantages, rollout_sums
from agents.learner.policy import Evaluation
from agents.learner.ppo import PPO, Minibatch, ppo_loss, refreshed_states
from agents.learner.settings import PPOConfig
from rl_dist.errors import UserError
from rl_dist.telemetry import events

# ---- advantages for rewards 1, 2, 3 and values 0.5, 1, 1.5


@pytest.fixture(
    params=[
        # TD errors: 1 + 0.9 - 0.5 = 1.4; 2 + 1.35 - 1 = 2.35; 3 + 1.8 - 1.5 = 3.3. Going back one
        # step multiplies an error by 0.9 * 0.8 = 0.72.
        ([1.0, 1.5, 2.0], [0, 0, 0], [4.80272, 4.726, 3.3]),
        # An episode ends in the second step: truncated (next value 5) or terminated (next value 0).
        ([1.0, 5.0, 2.0], [0, 1, 0], [1.4 + 0.72 * 5.5, 5.5, 3.3]),
        ([1.0, 0.0, 2.0], [0, 1, 0], [1.4 + 0.72 * 1.0, 1.0, 3.3]),
    ]
)
def opposites(request):
    """Return values, advantages and returns of two environments of opposite sign.

    Also return the advantages of the first one, computed by hand.
    """
    next_values, ends, expected = request.param
    rows = torch.tensor([[1.0, 2.0, 3.0], [0.5, 1.0, 1.5], next_values], dtype=torch.float64)
    columns = torch.stack([rows, -rows], dim=-1)
    episode_end = torch.tensor(ends).bool()[:, None].expand(-1, 2)
    return columns[1], *gae(*columns, episode_end, gamma=0.9, gae_lambda=0.8), expected


def test_advantages_equal_those_computed_by_hand(opposites):
    _, advantages, _, expected = opposites
    assert advantages[:, 0].tolist() == pytest.approx(expected, abs=1e-12)


def test_advantages_of_environments_do_not_mix(opposites):
    _, advantages, _, _ = opposites
    assert torch.equal(advantages[:, 1], -advantages[:, 0])


def test_returns_are_advantages_plus_values(opposites):
    values, advantages, returns, _ = opposites
    assert torch.equal(returns, advantages + values)


def test_advantages_of_long_rollouts_equal_those_of_a_loop_over_the_steps():
    rewards, values, next_values = torch.randn(3, 100, 4)
    ends = torch.rand(100, 4) < 0.1
    advantages, expected = torch.zeros(4), []
    for t in reversed(range(100)):
        delta = rewards[t] + 0.99 * next_values[t] - values[t]
        advantages = delta + 0.99 * 0.95 * advantages * ~ends[t]
        expected.insert(0, advantages)
    found, _ = gae(rewards, values, next_values, ends, gamma=0.99, gae_lambda=0.95)
    torch.testing.assert_close(found, torch.stack(expected))


@pytest.mark.parametrize("least, deviation", [(0.0, 3.5**0.5), (7.0, 7.0)])
def test_advantages_are_normalised_by_their_deviation_or_its_lower_bound(least, deviation):
    advantages, zeros = torch.tensor([[1.0, 2.0], [3.0, 6.0]]), torch.zeros(2, 2)
    # The deviation uses the population variance: (4 + 1 + 0 + 9) / 4.
    found = normalize_advantages(advantages, rollout_sums(advantages, zeros, zeros), least)
    torch.testing.assert_close(found, (advantages - 3.0) / deviation)


def test_equal_advantages_are_normalised_to_0():
    equal, zeros = torch.full((2, 2), 5.0), torch.zeros(2, 2)
    assert normalize_advantages(equal, rollout_sums(equal, zeros, zeros), 0.0).abs().max() == 0


def test_values_with_a_constant_error_explain_all_variance():
    returns = torch.tensor([1.0, 2.0, 3.0, 6.0])
    assert float(explained_variance(rollout_sums(returns, returns - 5, returns))) == 1.0


# ---- the loss


def loss_of(ratios=(1.0,), values=0, entropy=0, advantages=0, returns=0, **ppo):
    """Return the loss of one row of steps with these probability ratios."""

    def row(numbers):
        return torch.tensor([numbers or [0.0] * len(ratios)], dtype=torch.float64)

    before = row([-1.5] * len(ratios))
    evaluation = Evaluation(before + row(ratios).log(), row(entropy), row(values))
    minibatch = Minibatch(
        obs=before,
        actions=before,
        logprobs=before,
        values=row(0),
        advantages=row(advantages),
        returns=row(returns),
        episode_start=before > 0,
        lstm_state=before,
    )
    return ppo_loss(evaluation, minibatch, PPOConfig(**ppo))


MANY = (1.0, 1.5, 0.7, 1.1)


@pytest.mark.parametrize(
    "ratio, advantage, loss",
    [
        (1.1, 2.0, -2.2),
        (1.5, 2.0, -2.4),  # a gain is clipped at ratio 1.2
        (0.5, 2.0, -1.0),  # a loss is not clipped
        (0.5, -2.0, 1.6),  # a gain is clipped at ratio 0.8
        (1.5, -2.0, 3.0),
    ],
)
def test_gains_are_clipped_and_losses_are_not(ratio, advantage, loss):
    parts = loss_of(ratios=(ratio,), advantages=(advantage,))
    assert parts.policy.item() == pytest.approx(loss)


@pytest.mark.parametrize(
    "given, part, expected",
    [
        # A value change towards the return is clipped to 0.2; a change away from it is not.
        ({"values": (1.0,), "returns": (2.0,), "clip_vloss": True}, "value", 0.5 * 1.8**2),
        ({"values": (-1.0,), "returns": (2.0,), "clip_vloss": True}, "value", 0.5 * 9.0),
        ({"ratios": MANY}, "clip_fraction", 0.5),
        ({"ratios": MANY}, "approx_kl", sum(r - 1.0 - math.log(r) for r in MANY) / 4),
        (
            {"ratios": (1.0, 1.5), "values": (1.0, 3.0), "entropy": (0.4, 0.8)}
            | {"advantages": (2.0, 2.0), "returns": (2.0, 1.0), "ent_coef": 0.1, "vf_coef": 0.25},
            "total",
            -2.2 + 0.25 * 0.5 * (1.0 + 4.0) / 2 - 0.1 * 0.6,
        ),
    ],
)
def test_losses_equal_those_computed_by_hand(given, part, expected):
    assert getattr(loss_of(**given), part).item() == pytest.approx(expected)


@pytest.mark.parametrize(
    "config, iteration, remaining, factor, rate",
    [
        ({}, 9, 0.0, 1.0, 0.0),
        ({"anneal_lr": False, "warmup": 4}, 3, 0.5, 1.0, 0.075),
        ({"warmup": 4}, 4, 0.6, 3.0, 0.18),
    ],
)
def test_the_learning_rate_warms_up_decays_and_scales(
    config, iteration, remaining, factor, rate, world
):
    training = training_of(world, learning_rate=0.1, **config)
    settings, strategy = training.ppo.config, training.ppo.strategy
    ppo = PPO(training.policy, settings, strategy, 1, factor)
    ppo.set_learning_rate(iteration, remaining)
    assert ppo.optimizer.param_groups[0]["lr"] == pytest.approx(rate, rel=1e-12)


# ---- updates in whole training runs


@pytest.mark.parametrize(
    "rate, desired, after",
    [
        (3e-3, 0.0, 3e-3),
        (3e-3, 0.014, 3e-3 / 1.5**2),  # the KL divergence is 0.03
        (3e-3, 0.016, 3e-3),
        (3e-3, 0.059, 3e-3),
        (3e-3, 0.061, 3e-3 * 1.5**2),
        (8e-3, 0.061, 1e-2),
        (2e-5, 0.014, 1e-5),
    ],
)
def test_the_learning_rate_follows_the_kl_divergence_of_each_epoch(rate, desired, after, world):
    options = {"learning_rate": rate, "desired_kl": desired, "anneal_lr": False}
    training = training_of(world, update_epochs=2, **options)
    with bad_at(()):
        (losses,) = trained(training)
    assert losses["optim/learning_rate"] == pytest.approx(after)


def test_an_epoch_without_a_step_leaves_the_learning_rate_unchanged(world):
    training = training_of(world, update_epochs=1, learning_rate=1e-3, desired_kl=9.0)
    with bad_at((1, 2)):
        (losses,) = trained(training)
    assert losses["optim/learning_rate"] == 1e-3


def test_an_adapted_learning_rate_is_annealed_and_continues_after_a_resume(world):
    options = {"update_epochs": 1, "learning_rate": 3e-3, "desired_kl": 1.0}
    training = training_of(world, **options)
    trained(training)
    resumed = training_of(world, iterations=2, **options)
    resumed.restore(training.state())
    resumed.ppo.set_learning_rate(2, 0.5)
    assert resumed.ppo.optimizer.param_groups[0]["lr"] == pytest.approx(0.5 * 1.5 * 3e-3)


def bad_at(calls):
    """Make the total loss NaN in these calls of `ppo_loss`; approx_kl is always 0.03."""

    def change(number, parts):
        total = parts.total * (math.nan if number in calls else 1.0)
        return parts._replace(total=total, approx_kl=torch.full_like(parts.approx_kl, 0.03))

    return changed_losses(change)


def training_of(world, iterations=1, batch_size=16, **ppo):
    """Return a Recording of a small job; by default an epoch has two minibatches."""
    sizes = {"iterations": iterations, "batch_size": batch_size}
    return Recording(make_job("recall, clstm", ppo=PPOConfig(**ppo), **sizes), world)


def trained(training, probe=None):
    """Train with `probe` instead of `PPO.step`; return the losses of each iteration."""
    with mock.patch.object(training.ppo, "step", probe or training.ppo.step):
        return finish(training).losses


@pytest.fixture(scope="module")
def epochs(world):
    """Return a number for each of the 32 sequences, in the order of each of 4 epochs."""
    training, seen = training_of(world, update_epochs=4), []
    step = training.ppo.step
    trained(training, lambda *args: seen.append(args[0].advantages.sum(0)) or step(*args))
    return torch.stack(seen).view(4, 32)


def test_every_epoch_uses_every_sequence_once(epochs):
    assert len(epochs.sort(dim=1).values.unique(dim=0)) == 1 and len(epochs[0].unique()) == 32


def test_every_epoch_has_another_order(epochs):
    assert len(epochs.unique(dim=0)) == 4


def test_the_reported_norm_is_of_the_gradient_before_it_is_clipped(world):
    training = training_of(world, max_grad_norm=1e-6, batch_size=32, update_epochs=1)
    assert trained(training)[0]["optim/grad_norm"] > 1e-3
    gradients = [p.grad for p in training.policy.parameters()]
    assert float(nn.utils.get_total_norm(gradients)) == pytest.approx(1e-6, rel=1e-4)


@pytest.fixture(scope="module")
def too_many_bad_steps(world, tmp_path_factory):
    """Train until there are too many bad steps.

    Return the training, its first parameters, and the events.
    """
    folder = tmp_path_factory.mktemp("events")
    training = training_of(world, iterations=4, update_epochs=2, max_bad_steps=5)
    start = parameters_of(training)
    events.configure(f"touch {folder}/$RL_EVENT-$RL_SKIPPED", folder)
    too_many = pytest.raises(UserError, match="6 steps .* --max_bad_steps 5")
    with bad_at({1, 2, 3, 4, *range(6, 13)}), too_many:
        trained(training)
    events.close()
    return training, start, {path.name for path in folder.iterdir()}


def test_bad_steps_are_counted(too_many_bad_steps):
    training, _, _ = too_many_bad_steps
    counts = [(loss["optim/steps"], loss["optim/skipped_steps"]) for loss in training.losses]
    assert counts == [(0, 4), (1, 3)]


def test_bad_steps_change_no_parameter(too_many_bad_steps):
    training, start, _ = too_many_bad_steps
    before, after = training.parameters
    assert torch.equal(before, start) and not torch.equal(after, start)


def test_bad_steps_are_an_event_of_their_iteration(too_many_bad_steps):
    _, _, names = too_many_bad_steps
    assert names == {"bad_steps-4", "bad_steps-3"}


def test_the_count_of_bad_steps_in_a_row_continues_after_a_resume(world):
    """A resumed run that already exceeds max_bad_steps ends at its next bad step."""
    training = training_of(world, update_epochs=2, max_bad_steps=3)
    with bad_at((2, 3, 4)):  # the last three of the four gradient steps
        trained(training)
    for calls, refused in (((1,), pytest.raises(UserError, match="4 steps")),
                           ((2,), nullcontext())):  # fmt: skip
        resumed = training_of(world, iterations=2, update_epochs=2, max_bad_steps=2)
        resumed.restore(training.state())
        with bad_at(calls), refused:
            trained(resumed)


def test_a_loss_that_is_not_finite_is_bad_even_if_its_gradient_is_finite(world):
    training = training_of(world, update_epochs=1)
    with changed_losses(lambda _, parts: parts._replace(total=parts.total + math.inf)):
        assert trained(training)[0]["optim/skipped_steps"] == 2


def test_skipped_steps_do_not_count_for_the_kl_stop(world):
    training = training_of(world, update_epochs=3, target_kl=0.02)
    with bad_at((1, 2, 4)):
        (losses,) = trained(training)
    assert (losses["optim/steps"], losses["optim/skipped_steps"]) == (1, 3)


def test_refreshed_states_are_used_from_the_second_epoch_on(world):
    training = training_of(world, update_epochs=3, learning_rate=1e-2, refresh_states=True)
    step, used, refreshed, stored = training.ppo.step, [], [], []

    def refresh(policy, batch):
        stored.append(batch.initial_states)
        refreshed.append(refreshed_states(policy, batch))
        return refreshed[-1]

    with mock.patch("agents.learner.ppo.refreshed_states", refresh):
        trained(training, lambda *args: used.append(args[0].lstm_state) or step(*args))
    assert (refreshed[-1] - stored[-1]).abs().max() > 1e-3
    last = torch.cat(used).chunk(3)[2]
    states = refreshed[-1].flatten(0, 1)
    sums, expected = (part.flatten(1).sum(1).sort().values for part in (last, states))
    assert torch.equal(sums, expected)
