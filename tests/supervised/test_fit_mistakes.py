"""What users of `fit` and `evaluate` do wrong is refused in one line, or works."""

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, TensorDataset

from rl_dist.errors import UserError
from rl_dist.strategies.config import StrategyConfig
from rl_dist.strategies.strategy import Strategy
from rl_dist.supervised.fit import FitConfig, accuracy, evaluate, fit

CRITERION = nn.CrossEntropyLoss()
QUIET = FitConfig(epochs=2, progress=False)


def samples(count=20):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, 6, generator=generator)
    return TensorDataset(inputs, inputs[:, :3].argmax(-1))


def loader(dataset=None, collate=None, **options):
    return DataLoader(dataset or samples(), batch_size=6, collate_fn=collate, **options)


def parts(world, net=None, optimizer=torch.optim.SGD, **options):
    """A strategy, the module that it wrapped and the optimizer."""
    strategy = Strategy(StrategyConfig(**options), world)
    module = strategy.wrap(net or nn.Linear(6, 3))
    return strategy, module, optimizer(strategy.parameters, lr=0.1)


def fitted(world, batches, criterion=CRITERION, config=QUIET, optimizer=torch.optim.SGD, **options):
    strategy, module, stepping = parts(world, optimizer=optimizer)
    return fit(module, batches, stepping, criterion, strategy, config=config, **options)


def as_dict(rows):
    images, labels = (torch.stack(column) for column in zip(*rows, strict=True))
    return {"image": images, "label": labels}


def evaluated(world, batches, criterion=CRITERION, **metrics):
    strategy, module, _ = parts(world)
    return evaluate(module, batches, criterion, strategy, metrics)


def shared(world, training):
    return parts(world)[0].loader(loader(), training=training)


def of_another_module(parameters, lr):
    return torch.optim.SGD(nn.Linear(6, 3).parameters(), lr=lr)


def unwrapped(world):
    strategy, _, optimizer = parts(world)
    return fit(nn.Linear(6, 3), loader(), optimizer, CRITERION, strategy, config=QUIET)


def waits_for_a_plateau(world):
    strategy, module, optimizer = parts(world)
    scheduler = ReduceLROnPlateau(optimizer)
    return fit(module, loader(), optimizer, CRITERION, strategy, scheduler=scheduler, config=QUIET)


NO_PAIR, ONE_NUMBER = (
    r"a pair \(inputs, targets\), got ",
    "mean loss of a batch as one number, got ",
)
EACH = nn.CrossEntropyLoss(reduction="none")
THREE = TensorDataset(*samples().tensors, torch.ones(20))
MISTAKES = {
    f"{NO_PAIR}a dict: .*collate_fn": lambda world: fitted(world, loader(collate=as_dict)),
    f"{NO_PAIR}a list of 3": lambda world: fitted(world, loader(THREE)),
    rf"{ONE_NUMBER}shape \[6\]": lambda world: fitted(world, loader(), EACH),
    rf"{ONE_NUMBER}shape \[[65]\]": lambda world: evaluated(world, loader(), EACH),
    f"{ONE_NUMBER}a float": lambda world: fitted(world, loader(), lambda o, t: 0.5),
    "metric right must return a tensor": lambda world: evaluated(
        world, loader(), right=lambda o, t: (o.argmax(-1) == t).float().mean()
    ),
    "no metric can be called loss": lambda world: evaluated(world, loader(), loss=accuracy),
    "ReduceLROnPlateau looks at the validation loss": waits_for_a_plateau,
    "made with training=True is given": lambda world: evaluated(world, shared(world, True)),
    "made with training=False is given": lambda world: fitted(world, shared(world, False)),
    "0 samples are too few": lambda world: evaluated(world, DataLoader(samples(0), batch_size=6)),
    "the optimizer holds no parameter of the module": lambda world: fitted(
        world, loader(), optimizer=of_another_module
    ),
    "wrap it first": unwrapped,
    "patience 2": lambda world: fitted(world, loader(), config=FitConfig(patience=2)),
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_in_a_call_is_refused_by_name(words, world):
    with pytest.raises(UserError, match=words):
        MISTAKES[words](world)


@pytest.mark.parametrize(
    "make",
    [
        lambda rows: ["cat"] * len(rows),
        lambda rows: torch.zeros(4, len(rows)),  # steps first
        lambda rows: [{"boxes": torch.zeros(3, 4)} for _ in rows],
    ],
    ids=["words", "time-major", "list of dicts"],
)
def test_samples_are_counted_whatever_the_targets_are(world, make):
    batches = loader(collate=lambda rows: (torch.stack([row[0] for row in rows]), make(rows)))
    criterion = lambda outputs, targets: outputs.square().mean()  # noqa: E731
    record = fitted(world, batches, criterion, validation=batches).history[-1]
    assert record["train/samples"] == 18 and record["valid/samples"] == 20


def test_a_scheduler_that_waits_for_a_plateau_sees_the_validation_loss(world):
    strategy, module, optimizer = parts(world)
    scheduler = ReduceLROnPlateau(optimizer, patience=0, threshold=10.0, threshold_mode="abs")
    given = module, loader(), optimizer, CRITERION, strategy
    result = fit(*given, validation=loader(), scheduler=scheduler, config=QUIET)
    assert scheduler.best == result.history[0]["valid/loss"]
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


def test_a_resumed_fit_has_the_optimizer_and_scheduler_of_the_run(world, tmp_path):
    fitted(world, loader(), run_dir=tmp_path)
    again = {"run_dir": tmp_path, "resume": True, "config": FitConfig(epochs=4, progress=False)}
    with pytest.raises(UserError, match=r"optimizer Adam \(it has SGD\)"):
        fitted(world, loader(), optimizer=torch.optim.Adam, **again)
    strategy, module, optimizer = parts(world)
    scheduler = StepLR(optimizer, 1)
    with pytest.raises(UserError, match=r"scheduler StepLR \(it has none\)"):
        fit(module, loader(), optimizer, CRITERION, strategy, scheduler=scheduler, **again)


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.used = nn.Linear(6, 3)
        self.idle = nn.Linear(6, 3)

    def forward(self, inputs):
        return self.used(inputs)


@pytest.mark.parametrize("options", [{"find_unused_parameters": True}, {"static_graph": True}, {}])
def test_a_parameter_without_part_in_a_step_is_named_unless_that_is_allowed(world, options):
    strategy, module, optimizer = parts(world, TwoHeads(), mode="ddp", **options)
    if options:
        fit(module, loader(), optimizer, CRITERION, strategy, config=QUIET)
        return
    with pytest.raises(UserError, match=r"2 parameter.*idle\.weight.*find_unused_parameters=True"):
        fit(module, loader(), optimizer, CRITERION, strategy, config=QUIET)


def test_a_parameter_whose_gradient_ddp_would_not_reduce_is_refused(world):
    net = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    net[0].requires_grad_(False)
    strategy, module, _ = parts(world, net, mode="ddp")
    net.requires_grad_(True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(UserError, match="its gradient is not reduced"):
        fit(module, loader(), optimizer, CRITERION, strategy, config=QUIET)


def test_a_best_epoch_whose_weights_are_gone_is_not_said_to_be_held(world, tmp_path):
    calls = iter([1.0, 2.0, 3.0, 4.0])  # the validation loss rises: epoch 1 is the best

    def rising(outputs, targets):
        return CRITERION(outputs, targets) if torch.is_grad_enabled() else torch.tensor(next(calls))

    valid = DataLoader(samples(6), batch_size=6)
    assert fitted(world, loader(), rising, validation=valid, run_dir=tmp_path).best_epoch == 1
    (tmp_path / "checkpoints" / "best.pt").unlink()
    with pytest.raises(UserError, match="best.pt no longer holds epoch 1"):
        fitted(world, loader(), rising, validation=valid, run_dir=tmp_path, resume=True)
