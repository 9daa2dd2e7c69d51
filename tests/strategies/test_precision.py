"""--precision rounds matrix products; training stays close to training in fp32."""

from collections import Counter, defaultdict
from dataclasses import replace

import pytest
import torch
from agents_ranks import Recording, bad_losses, finish, tiny_markets
from policies import BOX, DISCRETE, FORMS, act_stepwise, make_inputs, make_policy, plans_of
from speed_ranks import SINGLE, job_of, trained
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from agents.learner.settings import PPOConfig
from agents.pretrain import FeatureTraining, PretrainConfig, PretrainRunConfig
from envs.trading.config import TradingConfig
from envs.trading.environment import TradingVectorEnv
from rl_dist.checkpoint.content import tensors_in
from rl_dist.errors import UserError
from rl_dist.strategies.config import StrategyConfig
from rl_dist.strategies.precision import set_tf32
from rl_dist.strategies.strategy import Strategy

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
    tolerance = 10 * ROUNDING[name]
    ratio = (evaluation.logprobs - logprobs).exp()
    torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=0, atol=tolerance)
    torch.testing.assert_close(evaluation.values, values, rtol=tolerance, atol=tolerance)
    # Low precision changes the values, but only a little; a user's modules stay in fp32.
    change = (evaluation.values - full.values).abs().max()
    assert change < 16 * ROUNDING[name]
    assert (change == 0) == ("two own cores" in form)


# ---- types of all matrix products

RECURRENT = {"lstm", "lstm_cell", "gru", "gru_cell"}
JOBS = {  # job -> its recurrent calls
    "recall, clstm": {"lstm", "lstm_cell"},
    "brief, lstm, pink noise, refreshed": {"lstm", "lstm_cell"},
    "orders, gru, masks of nested actions": {"gru", "gru_cell"},
    "patches, mingrus, last action and reward": set(),
    "recall, mlp, KL stop": set(),
    "recall, window, strata of 2": {"lstm", "lstm_cell"},
}


class Products(TorchFunctionMode):
    """Record the types of all tensors that LSTMs, GRUs, layers and convolutions get."""

    def __init__(self):
        super().__init__()
        self.types = defaultdict(set)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        if name in RECURRENT | {"linear", "conv2d"}:
            assert not torch.is_autocast_enabled("cpu")  # it would change the types
            # the output layers are the only ones with few outputs
            if name != "linear" or len(args[1]) >= 8:
                given = tensors_in(list(args)).values()
                self.types[name] |= {tensor.dtype for tensor in given}
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("name", ["fp32", *LOW])
def test_every_product_of_rollouts_and_gradient_steps_is_in_the_type_of_the_precision(
    name, job, world
):
    training = Recording(job_of(job, dtype=SINGLE, precision=name, iterations=1), world)
    with Products() as products:
        finish(training)
    assert products.types.keys() & RECURRENT == JOBS[job]
    assert set().union(*products.types.values()) == {LOW.get(name, torch.float32)}


class Casts(TorchDispatchMode):
    """Count how often each parameter is cast."""

    def __init__(self, policy):
        super().__init__()
        self.names = {value.data_ptr(): name for name, value in policy.named_parameters()}
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        casts = function is torch.ops.aten._to_copy.default and kwargs["dtype"] == torch.bfloat16
        if casts and (name := self.names.get(args[0].data_ptr())):
            self.counts[name] += 1
        return function(*args, **(kwargs or {}))


def test_weights_are_cast_once_per_rollout_and_once_per_gradient_step(world):
    training = Recording(job_of(dtype=SINGLE, precision="bf16", iterations=1), world)
    kept = {"log_std", "actor_head.weight", "actor_head.bias"}
    kept |= {"critic_head.weight", "critic_head.bias"}
    names = [name for name, _ in training.policy.named_parameters() if name not in kept]
    with Casts(training.policy) as casts:
        rollout = training.collect()
    assert casts.counts == Counter(names)
    with Casts(training.policy) as casts:
        training.update(rollout)
    num_steps = len(training.hashes)
    assert num_steps > 1 and casts.counts == Counter(names * num_steps)


# ---- gradients


def trading(num_envs, world):
    """Return a training of the trading task with 128 units and sequences of 32 steps."""
    sizes = {"num_envs": num_envs, "num_steps": 128, "bptt_steps": 32, "batch_size": 4 * num_envs}
    job = job_of(dtype=SINGLE, iterations=1, ppo=PPOConfig(update_epochs=1), **sizes)
    markets, span = tiny_markets()
    days = {"span": span, "train_span": span, "config": TradingConfig(episode_days=60)}

    def make_env(num_envs, env_offset):
        return TradingVectorEnv(num_envs, markets=markets, **days)

    config = job.config.changed({"hidden_size": 128})
    return Recording(replace(job, config=config, make_env=make_env), world)


@pytest.mark.parametrize(
    "num_sequences, onednn",
    [(128, True), (128, False), pytest.param(8192, True, marks=pytest.mark.slow)],
)
def test_gradients_in_bf16_differ_by_a_hundredth_from_those_in_fp32(num_sequences, onednn, world):
    training = trading(num_sequences // 4, world)
    given = []
    training.ppo.step = lambda *parts: given.extend(parts) or training.step(*parts)
    finish(training)

    def gradients(dtype):
        training.policy.low_precision = dtype
        training.policy.zero_grad()
        training.ppo.gradients(*given)
        return {name: value.grad for name, value in training.policy.named_parameters()}

    exact = gradients(None)
    with torch.backends.mkldnn.flags(enabled=onednn):
        rounded = gradients(torch.bfloat16)
    errors = {
        name: float((rounded[name] - gradient).norm() / gradient.norm())
        for name, gradient in exact.items()
    }
    print({name: f"{error:.4f}" for name, error in errors.items()})  # with pytest -s
    assert 0 < max(errors.values()) < 0.01


# ---- modules of others


@pytest.fixture
def strategy(world):
    return Strategy(StrategyConfig(precision="bf16"), world)


def test_a_module_of_another_program_runs_under_autocast(strategy):
    module = strategy.wrap(nn.Linear(2, 2))
    with strategy.autocast():
        assert module(torch.ones(1, 2)).dtype == torch.bfloat16


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_an_lstm_that_does_not_cast_itself_is_refused_on_a_cpu(precision, world):
    """Under torch's autocast, oneDNN's LSTM fails on some CPUs."""
    strategy = Strategy(StrategyConfig(precision=precision), world)
    strategy.wrap(nn.Sequential(nn.LSTM(2, 2)))
    with pytest.raises(UserError, match=precision):
        strategy.autocast()


def test_pre_training_casts_itself(strategy):
    config = PretrainRunConfig(pretrain=PretrainConfig(hidden_size=8))
    inputs = torch.randn(3, 5, 4)
    module = strategy.wrap(FeatureTraining(config, inputs, num_stocks=2))
    with Products() as products, strategy.autocast():
        assert module(inputs).dtype == torch.float32
    assert products.types == {"lstm": {torch.bfloat16}, "linear": {torch.bfloat16}}


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
