"""--precision rounds matrix products; training stays close to training in fp32."""

import pytest
import torch
from agents_ranks import Recording, bad_losses, finish
from policies import BOX, DISCRETE, FORMS, act_stepwise, make_inputs, make_policy, plans_of
from speed_ranks import SINGLE, job_of, trained

from agents.learner.settings import PPOConfig
from rl_dist.checkpoint.content import tensors_in
from rl_dist.errors import UserError
from rl_dist.strategies.precision import set_tf32

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}
ROUNDING = {"bf16": 2**-8, "fp16": 2**-11}  # relative rounding error of one number


# ---- the policy


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", LOW)
def test_acting_and_evaluating_agree_to_the_rounding_of_the_precision(name, form):
    """Before the first gradient step, the probability ratio must be about 1."""
    policy = make_policy(FORMS[form], BOX if name == "bf16" else DISCRETE).float()
    obs, state, starts, noise = (
        x.float() if x.is_floating_point() else x for x in make_inputs(policy)
    )

    def both():
        actions, logprobs, values, now = act_stepwise(policy, obs, state, starts, noise)
        assert now.dtype == torch.float32
        return policy(obs, actions, state, starts, plans_of(policy, starts)[-1]), logprobs, values

    full, *_ = both()
    policy.low_precision = LOW[name]
    evaluation, logprobs, values = both()
    assert {part.dtype for part in evaluation} == {torch.float32}
    tolerance = 8 * ROUNDING[name]
    ratio = (evaluation.logprobs - logprobs).exp()
    torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=0, atol=tolerance)
    torch.testing.assert_close(evaluation.values, values, rtol=tolerance, atol=tolerance)
    # Low precision changes the values, but only a little.
    assert 0 < (evaluation.values - full.values).abs().max() < 16 * ROUNDING[name]


# ---- training


@pytest.mark.parametrize("name", LOW)
def test_training_stays_close_to_fp32(name, world):
    full = trained(world, dtype=SINGLE)
    low = trained(world, dtype=SINGLE, precision=name)
    assert low.hashes[0] != full.hashes[0]
    # Each of the 8 Adam steps changes a parameter by about 0.003.
    torch.testing.assert_close(low.parameters[-1], full.parameters[-1], rtol=0, atol=0.02)
    for metric in ("loss/value", "optim/grad_norm"):  # reported without the loss scale
        assert low.losses[0][metric] == pytest.approx(full.losses[0][metric], rel=0.02)
    kept = {tensor.dtype for tensor in tensors_in(low.checked_state()).values()}
    assert kept <= {torch.float32, torch.float64, torch.int64}


# ---- the loss scale of fp16


def scaled(world, **options):
    return Recording(job_of("recall, clstm", dtype=SINGLE, precision="fp16", **options), world)


def test_overflows_at_the_smallest_scale_are_bad_steps(world):
    training = scaled(world, iterations=3, ppo=PPOConfig(update_epochs=10, max_bad_steps=2))
    with bad_losses(range(100)), pytest.raises(UserError, match="3 steps in a row"):
        finish(training)
    assert training.ppo.strategy.scaler.get_scale() <= 1.0


def test_a_resumed_run_keeps_its_loss_scale(world):
    straight, halved, resumed = (scaled(world, iterations=count) for count in (2, 1, 2))
    for training in (straight, halved):
        with bad_losses({1, 2}):
            finish(training)
    resumed.restore(halved.state())
    finish(resumed)
    assert resumed.hashes == straight.hashes[-len(resumed.hashes) :]
    assert [each.losses[-1]["optim/loss_scale"] for each in (resumed, straight)] == [2**14] * 2


# ---- TF32


@pytest.mark.parametrize("name, tf32", [("fp32", False), ("tf32", True)])
def test_fp32_on_a_gpu_is_rounded_to_tf32_only_on_request(name, tf32):
    """The TF32 switches can be set without a GPU; tests/gpu checks their effect."""
    set_tf32(name)
    assert torch.backends.cudnn.rnn.fp32_precision == ("tf32" if tf32 else "none")
    assert torch.backends.cuda.matmul.allow_tf32 == tf32
    set_tf32("fp32")
