"""--precision and --compile: what is computed in fewer bits, what is not, and what that changes."""

from unittest import mock

import pytest
import torch
from agents_ranks import Recording, world_of_one
from policies import BOX, DISCRETE, FORMS, make_inputs, make_policy
from speed_ranks import SINGLE, job_of, trained
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from agents.policy import Policy
from agents.ppo import PPO, NonFiniteGradient, PPOConfig
from agents.trainer import train
from rl_dist.errors import UserError
from rl_dist.launch.launcher import LaunchConfig, resolve
from rl_dist.parallel import precision
from rl_dist.parallel.config import StrategyConfig
from rl_dist.parallel.precision import autocast, check_precision, loss_scaler
from rl_dist.parallel.speed import SpeedConfig
from rl_dist.parallel.strategy import Strategy
from rl_dist.process_group.world import StopFlag
from rl_dist.telemetry import events
from rl_dist.telemetry.metrics import NullWriter

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}
ROUNDING = {"bf16": 2**-8, "fp16": 2**-11}  # of one number


@pytest.fixture(scope="module")
def world():
    with world_of_one() as opened:
        yield opened


def last(training):
    return training.parameters[-1]


class Types(TorchDispatchMode):
    """Remembers the types that products and pointwise functions have returned."""

    def __init__(self):
        super().__init__()
        self.of: dict[str, set[torch.dtype]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        found = {leaf.dtype for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)}
        self.of.setdefault(name, set()).update(found)
        return out


# ---- the policy


@pytest.mark.parametrize("space", [BOX, DISCRETE], ids=["box", "discrete"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", LOW)
def test_acting_and_evaluating_agree_to_the_rounding_of_the_precision(name, form, space):
    """So the ratio before the first gradient step is 1 to within a few roundings (actor weights of 1 here)."""
    policy = make_policy(FORMS[form], space).float()
    obs, state, starts, noise = (x.float() if x.is_floating_point() else x for x in make_inputs(policy))

    def both():
        now, steps = state, []
        for step_obs, step_starts, step_noise in zip(obs, starts, noise, strict=True):
            actions, logprobs, values, now = policy.act(step_obs, now, step_starts, step_noise)
            steps.append((actions, logprobs, values))
        assert now.dtype == torch.float32
        actions, logprobs, values = (torch.stack(column) for column in zip(*steps, strict=True))
        return policy(obs, actions, state, starts), logprobs, values

    full, *_ = both()
    policy.low_precision = LOW[name]
    evaluation, logprobs, values = both()
    assert {part.dtype for part in evaluation} == {torch.float32}
    tolerance = 8 * ROUNDING[name]
    ratio = (evaluation.logprobs - logprobs).exp()
    torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=0, atol=tolerance)
    torch.testing.assert_close(evaluation.values, values, rtol=tolerance, atol=tolerance)
    assert 0 < (evaluation.values - full.values).abs().max() < 16 * ROUNDING[name]  # it did compute in fewer bits


@pytest.mark.parametrize("name", LOW)
def test_only_lstms_and_layers_compute_in_fewer_bits(name):
    policy = make_policy(FORMS["clstm"]).float()
    policy.low_precision = LOW[name]
    obs, state, _, actions = (x.float() if x.is_floating_point() else x for x in make_inputs(policy))
    with Types() as seen:
        evaluation = policy(obs, actions, state, torch.zeros(obs.shape[:2], dtype=torch.bool))
        (evaluation.logprobs.mean() + evaluation.values.mean()).backward()
    products = set().union(*(seen.of.get(op, set()) for op in ("mm", "addmm", "bmm", "mkldnn_rnn_layer")))
    assert LOW[name] in products and torch.float32 in products  # the heads
    assert seen.of["log"] == {torch.float32}  # of the distribution
    gradients = {parameter.grad.dtype for parameter in policy.parameters() if parameter.grad is not None}
    assert gradients == {p.dtype for p in policy.parameters()} == {torch.float32}


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


@pytest.mark.parametrize("form", ["trading, clstm", "recall, mlp, KL stop"])
def test_auto_is_fp32_bit_for_bit(form, world):
    hashes = [trained(world, form, dtype=SINGLE, iterations=1, precision=name).hashes for name in ("auto", "fp32")]
    assert hashes[0] == hashes[1]


@pytest.mark.parametrize("name", LOW)
def test_training_in_fewer_bits_follows_fp32(name, world):
    full, low = trained(world, dtype=SINGLE), trained(world, dtype=SINGLE, precision=name)
    assert low.hashes[0] != full.hashes[0]
    torch.testing.assert_close(last(low), last(full), rtol=0, atol=0.02)  # eight Adam steps of 0.003 each
    for metric in ("loss/value", "loss/entropy", "optim/grad_norm"):
        assert low.losses[0][metric] == pytest.approx(full.losses[0][metric], rel=0.02)
    assert {tensor.dtype for tensor in low.replicated().values()} <= {torch.float32, torch.float64, torch.int64}


@pytest.mark.parametrize("name", LOW)
def test_the_ratio_is_1_to_the_rounding_before_the_first_gradient_step(name, world):
    training = Recording(job_of("recall, clstm", dtype=SINGLE, precision=name, iterations=2), world)
    step, first = training.ppo.step, {}

    def probe(minibatch):
        with torch.no_grad():
            parts = minibatch.obs, minibatch.actions, minibatch.lstm_state, minibatch.episode_start
            ratio = (training.policy(*parts).logprobs - minibatch.logprobs).exp()
        first.setdefault(training.iteration, (ratio - 1).abs().max().item())
        return step(minibatch)

    with mock.patch.object(training.ppo, "step", probe):
        train(training, NullWriter(), StopFlag())
    assert sorted(first) == [1, 2] and max(first.values()) < ROUNDING[name]


# ---- the loss scale of fp16


def scaled(world, **options):
    return Recording(job_of("recall, clstm", dtype=SINGLE, precision="fp16", **options), world)


def overflowing(calls_that_do):
    calls = [0]

    def loss(*args):
        calls[0] += 1
        parts = original(*args)
        return parts._replace(total=parts.total * torch.nan) if calls[0] in calls_that_do else parts

    from agents.ppo import ppo_loss as original

    return mock.patch("agents.ppo.ppo_loss", loss)


def test_the_gradient_is_clipped_without_the_scale(world):
    options = {"dtype": SINGLE, "iterations": 1, "ppo": PPOConfig(update_epochs=1, max_grad_norm=1e6)}
    full, low = (trained(world, precision=name, **options) for name in ("fp32", "fp16"))
    assert low.losses[0]["optim/grad_norm"] == pytest.approx(full.losses[0]["optim/grad_norm"], rel=0.01)
    assert low.losses[0]["optim/loss_scale"] == 2**16 and "optim/loss_scale" not in full.losses[0]


def test_an_overflow_halves_the_scale_and_is_no_bad_step(world):
    training = scaled(world, iterations=1, ppo=PPOConfig(update_epochs=4, max_bad_steps=0))
    with overflowing({2, 3, 5}), mock.patch.object(events, "notify") as notify:
        train(training, NullWriter(), StopFlag())
    losses = training.losses[0]
    assert (losses["optim/steps"], losses["optim/skipped_steps"], losses["optim/loss_scale"]) == (5, 3, 2**13)
    assert training.ppo.bad_in_a_row == 0 and not notify.called


def test_overflows_that_persist_without_any_scale_are_bad_steps(world):
    training = scaled(world, iterations=3, ppo=PPOConfig(update_epochs=10, max_bad_steps=2))
    with overflowing(range(100)), pytest.raises(NonFiniteGradient, match="in 3 steps in a row"):
        train(training, NullWriter(), StopFlag())
    assert training.ppo.strategy.scaler.get_scale() == 2.0**-3  # 16 halvings to 1, then three bad steps
    assert training.ppo.strategy.skipped == 19 and not training.hashes


def test_a_resumed_run_has_the_scale_it_was_saved_with(world):
    straight = scaled(world, iterations=2)
    halved, resumed = scaled(world, iterations=1), scaled(world, iterations=2)
    with overflowing({1, 2}):
        train(straight, NullWriter(), StopFlag())
    with overflowing({1, 2}):
        train(halved, NullWriter(), StopFlag())
    state = halved.state()
    resumed.restore(state)
    train(resumed, NullWriter(), StopFlag())
    assert resumed.hashes == straight.hashes[-len(resumed.hashes) :]
    assert resumed.losses[-1]["optim/loss_scale"] == straight.losses[-1]["optim/loss_scale"] == 2**14
    del state["strategy"]  # as older versions wrote it
    older = scaled(world, iterations=2)
    older.restore(state)
    assert older.ppo.strategy.scaler.get_scale() == 2**16


def test_gradients_that_fp16_would_lose_survive_by_the_scale():
    """A gradient of 1e-8 is below the least fp16 number, 6e-8."""
    weight = torch.ones(4, 4, requires_grad=True)

    def gradient(scaler):
        weight.grad = None
        with torch.autocast("cpu", dtype=torch.float16):
            loss = (torch.ones(1, 4) @ weight).float().mean() * 4e-8
        (scaler.scale(loss) if scaler else loss).backward()
        return weight.grad / (scaler.get_scale() if scaler else 1.0)

    assert not gradient(None).any()
    torch.testing.assert_close(gradient(loss_scaler("fp16", "cpu")), torch.full((4, 4), 1e-8), rtol=1e-3, atol=0)


# ---- what is refused


@pytest.mark.parametrize(("name", "capability", "fine"), [
    ("tf32", (7, 5), False), ("bf16", (7, 5), False), ("fp16", (7, 5), True), ("tf32", (8, 0), True),
    ("bf16", (9, 0), True), ("fp32", (7, 0), True),
])  # fmt: skip
def test_a_gpu_that_would_emulate_the_precision_is_refused(name, capability, fine, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Old Card")
    if fine:
        check_precision(name, "cuda")
        return
    with pytest.raises(UserError, match=f"precision {name} needs compute capability 8.0, Old Card has 7.5: use fp16"):
        check_precision(name, "cuda")


@pytest.mark.parametrize(("name", "tf32"), [("fp32", False), ("tf32", True), ("bf16", False)])
def test_fp32_on_a_gpu_is_not_rounded_to_tf32_unless_asked(name, tf32, monkeypatch):
    """The switches are there without a GPU; a real one must show what they do."""
    kept = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark
    try:
        precision.set_cuda_math(name, cudnn_autotune=tf32)
        assert torch.backends.cuda.matmul.allow_tf32 == torch.backends.cudnn.allow_tf32 == tf32
        assert torch.backends.cudnn.rnn.fp32_precision == ("tf32" if tf32 else "none")
        assert torch.backends.cudnn.benchmark == tf32
    finally:
        torch.set_float32_matmul_precision(kept[0])
        torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = kept[1:]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cudnn_autotune": True}, "cudnn_autotune does nothing without a GPU"),
        ({"mode": "none", "backend": "gloo"}, "backend gloo reduces gradients of strategy ddp, not of none"),
        ({"mode": "ddp", "backend": "nccl"}, "backend nccl (reduces on cuda, not on cpu|is not part of this torch)"),
        ({"mode": "ddp", "backend": "mpi"}, "backend mpi is not part of this torch: leave it empty"),
        ({"precision": "tf32"}, "precision tf32"),
        ({"gradient_compression": "bf16"}, "gradient_compression bf16 works with strategy ddp, not none"),
        ({"mode": "auto", "gradient_compression": "bf16"}, "works with strategy ddp, not auto on one rank: use"),
        ({"mode": "auto", "shard_size": 2}, "shard_size 2 does nothing on one rank: use --shard_size 0"),
    ],
)
def test_a_strategy_refuses_what_has_no_effect(options, words, world):
    with pytest.raises(UserError, match=words):
        Strategy(StrategyConfig(**options), world)


def test_sizes_that_auto_could_not_try_are_refused():
    with pytest.raises(UserError, match="shard_size 3 does not divide 2 ranks; use --shard_size 2"):
        StrategyConfig(mode="auto", shard_size=3).resolve(2)


def test_a_module_in_a_wrapper_of_its_own_is_refused(world):
    with pytest.raises(UserError, match="wrap takes the bare module, got one in DataParallel"):
        Strategy(StrategyConfig(), world).wrap(torch.nn.DataParallel(torch.nn.Linear(1, 1)))


@pytest.mark.parametrize("option", [{"precision": "fp8"}, {"gradient_compression": "fp16"}])
def test_unknown_values_are_refused_by_name(option):
    for config in (LaunchConfig, StrategyConfig):
        with pytest.raises(ValueError, match=f"^{next(iter(option))} must be one of .*, got"):
            config(**option)
    assert resolve(LaunchConfig(num_gpus=2, device="cpu", gradient_compression="bf16")).num_ranks == 2
    with pytest.raises(UserError, match="^backend must be one of gloo, nccl, .*, or empty, got 'fake'$"):
        StrategyConfig(backend="fake")


# ---- compiled


def test_replicas_of_a_compiled_policy_evaluate_with_parameters_of_their_own(world, monkeypatch):
    monkeypatch.setattr("agents.ppo.compiled", lambda function: lambda *args: function(*args))  # takes no seconds
    policy = make_policy(FORMS["clstm"], BOX)
    PPO(policy, PPOConfig(), Strategy(StrategyConfig(), world), speed=SpeedConfig(compile=True))
    assert policy.evaluation is not Policy.evaluation
    replica = policy._replicate_for_data_parallel()  # as DataParallel makes one for each GPU
    replica.log_std = policy.log_std.detach() + 1.0
    actor = actions = torch.zeros(1, policy.num_actions, dtype=torch.float64)
    entropies = [each.evaluate(actor, actor[:, 0], actions).entropy for each in (replica, policy)]
    torch.testing.assert_close(entropies[0] - entropies[1], torch.full((1,), float(policy.num_actions)).double())


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("form", ["trading, clstm", "recall, clstm"])
def test_compiled_training_equals_eager_training_within_rounding_and_resumes_bit_for_bit(form, world):
    eager, whole = trained(world, form), trained(world, form, compile=True)
    torch.testing.assert_close(last(whole), last(eager), rtol=1e-9, atol=1e-9)
    half = trained(world, form, compile=True, iterations=1)
    torch._dynamo.reset()  # as a new process would
    resumed = Recording(job_of(form, compile=True), world)
    resumed.restore(half.state())
    train(resumed, NullWriter(), StopFlag())
    assert resumed.hashes == whole.hashes[-len(resumed.hashes) :]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_loss_and_distribution_are_really_compiled(world):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    trained(world, "recall, clstm", iterations=1)
    assert not torch._dynamo.utils.counters["stats"]
    trained(world, "recall, clstm", iterations=1, compile=True)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 2
    assert not torch._dynamo.utils.counters["graph_break"]
