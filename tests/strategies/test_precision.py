"""--precision: matrix products are rounded, and training stays close to fp32."""

import math

import pytest
import torch
from agents_ranks import Recording
from policies import BOX, DISCRETE, FORMS, act_stepwise, make_inputs, make_policy, plans_of
from speed_ranks import SINGLE, changed_losses, job_of, trained

from agents.ppo import PPOConfig
from agents.trainer import train
from rl_dist.errors import UserError
from rl_dist.process_group.world import StopFlag
from rl_dist.strategies.precision import autocast, check_precision, set_tf32
from rl_dist.telemetry.metrics import NullWriter

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}
ROUNDING = {"bf16": 2**-8, "fp16": 2**-11}  # relative rounding error of one number


# ---- the policy


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", LOW)
def test_acting_and_evaluating_agree_to_the_rounding_of_the_precision(name, form):
    """The ratio of probabilities is then 1 before the first gradient step."""
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
    # low precision does change the values
    assert 0 < (evaluation.values - full.values).abs().max() < 16 * ROUNDING[name]


@pytest.mark.parametrize("dtype", LOW.values())
def test_an_lstm_trains_under_autocast_on_any_cpu_and_nothing_stays_switched(dtype):
    enabled = torch.backends.mkldnn.enabled
    lstm, inputs = torch.nn.LSTM(6, 8), torch.randn(4, 3, 6)
    wanted = lstm(inputs)[0]
    with autocast(dtype, torch.device("cpu")):
        got = lstm(inputs)[0].float()
    got.square().sum().backward()
    assert 0 < (got - wanted).abs().max() < 0.01 and torch.isfinite(lstm.weight_hh_l0.grad).all()
    assert torch.backends.mkldnn.enabled == enabled and not torch.is_autocast_enabled("cpu")


# ---- training


@pytest.mark.parametrize("name", LOW)
def test_training_follows_fp32(name, world):
    full = trained(world, dtype=SINGLE)
    assert trained(world, dtype=SINGLE, precision="auto").hashes == full.hashes
    low = trained(world, dtype=SINGLE, precision=name)
    assert low.hashes[0] != full.hashes[0]
    # 8 Adam steps change each parameter by about 0.003 each
    torch.testing.assert_close(low.parameters[-1], full.parameters[-1], rtol=0, atol=0.02)
    for metric in (
        "loss/value",
        "loss/entropy",
        "optim/grad_norm",
    ):  # none of these metrics includes the loss scale
        assert low.losses[0][metric] == pytest.approx(full.losses[0][metric], rel=0.02)
    kept = {tensor.dtype for tensor in low.replicated().values()}
    assert kept <= {torch.float32, torch.float64, torch.int64}


# ---- the loss scale of fp16


def scaled(world, **options):
    return Recording(job_of("recall, clstm", dtype=SINGLE, precision="fp16", **options), world)


def overflowing(calls):
    return changed_losses(lambda number: math.nan if number in calls else 1.0)


def test_overflows_that_persist_without_any_scale_are_bad_steps(world):
    training = scaled(world, iterations=3, ppo=PPOConfig(update_epochs=10, max_bad_steps=2))
    with overflowing(range(100)), pytest.raises(UserError, match="4 steps in a row"):
        train(training, NullWriter(), StopFlag())
    assert training.ppo.strategy.scaler.get_scale() <= 1.0


def test_a_resumed_run_has_the_scale_it_was_saved_with(world):
    straight, halved, resumed = (scaled(world, iterations=count) for count in (2, 1, 2))
    for training in (straight, halved):
        with overflowing({1, 2}):
            train(training, NullWriter(), StopFlag())
    resumed.restore(halved.state())
    train(resumed, NullWriter(), StopFlag())
    assert resumed.hashes == straight.hashes[-len(resumed.hashes) :]
    assert [each.losses[-1]["optim/loss_scale"] for each in (resumed, straight)] == [2**14] * 2


# ---- GPUs without support, and TF32


def test_a_gpu_that_would_emulate_the_precision_is_refused(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Old Card")
    check_precision("fp16", "cuda")
    for name in ("tf32", "bf16"):
        with pytest.raises(UserError, match=f"{name} needs .* Old Card has 7.5: use fp16"):
            check_precision(name, "cuda")


@pytest.mark.parametrize(("name", "tf32"), [("fp32", False), ("tf32", True), ("bf16", False)])
def test_fp32_on_a_gpu_is_not_rounded_to_tf32_unless_asked(name, tf32):
    """The switches can be set without a GPU; tests/gpu checks their effect."""
    cudnn = torch.backends.cudnn
    kept = torch.get_float32_matmul_precision(), cudnn.allow_tf32
    try:
        set_tf32(name)
        assert torch.backends.cuda.matmul.allow_tf32 == cudnn.allow_tf32 == tf32
        assert cudnn.rnn.fp32_precision == ("tf32" if tf32 else "none")
    finally:
        torch.set_float32_matmul_precision(kept[0])
        cudnn.allow_tf32 = kept[1]
