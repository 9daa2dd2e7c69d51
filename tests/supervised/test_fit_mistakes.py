"""What users of `fit` and `evaluate` do wrong is refused in one line, or works."""

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, TensorDataset

from rl_dist.errors import UserError
from rl_dist.parallel.config import StrategyConfig
from rl_dist.parallel.strategy import Strategy
from rl_dist.process_group.world import close_world, open_world
from rl_dist.supervised.fit import FitConfig, evaluate, fit

CRITERION = nn.CrossEntropyLoss()
QUIET = FitConfig(epochs=2, progress=False)


@pytest.fixture(scope="module")
def world():
    opened = open_world("cpu")
    yield opened
    close_world(opened)


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


def with_targets(make):
    return lambda rows: (torch.stack([row[0] for row in rows]), make(rows))


def as_dict(rows):
    images, labels = (torch.stack(column) for column in zip(*rows, strict=True))
    return {"image": images, "label": labels}


@pytest.mark.parametrize(
    ("batches", "got"),
    [
        (loader(collate=as_dict), "a dict"),
        (loader(TensorDataset(*samples().tensors, torch.ones(20))), "a list of 3"),
    ],
)
def test_a_batch_that_is_no_pair_is_refused_by_what_it_is(world, batches, got):
    with pytest.raises(UserError, match=rf"pair \(inputs, targets\), got {got}: .*collate_fn"):
        fitted(world, batches)


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
    batches = loader(collate=with_targets(make))
    criterion = lambda outputs, targets: outputs.square().mean()  # noqa: E731
    record = fitted(world, batches, criterion, validation=batches).history[-1]
    assert record["train/samples"] == 18 and record["valid/samples"] == 20


@pytest.mark.parametrize(
    ("criterion", "got"),
    [
        (nn.CrossEntropyLoss(reduction="none"), r"shape \[[65]\]"),
        (lambda outputs, targets: 0.5, "a float"),
        (lambda outputs, targets: (CRITERION(outputs, targets), outputs), "a tuple"),
    ],
)
def test_a_criterion_must_return_one_number(world, criterion, got):
    strategy, module, _ = parts(world)
    for call in (
        lambda: fitted(world, loader(), criterion),
        lambda: evaluate(module, loader(), criterion, strategy),
    ):
        with pytest.raises(UserError, match=f"mean loss of a batch as one number, got {got}"):
            call()


def test_a_metric_that_is_a_mean_already_is_refused(world):
    for mean in (lambda o, t: 1.0, lambda o, t: (o.argmax(-1) == t).float().mean()):
        with pytest.raises(UserError, match="metric right must return a tensor"):
            fitted(world, loader(), metrics={"right": mean})


def test_a_scheduler_that_waits_for_a_plateau_sees_the_validation_loss(world):
    strategy, module, optimizer = parts(world)
    scheduler = ReduceLROnPlateau(optimizer, patience=0, threshold=10.0, threshold_mode="abs")
    given = module, loader(), optimizer, CRITERION, strategy
    result = fit(*given, validation=loader(), scheduler=scheduler, config=QUIET)
    assert scheduler.best == result.history[0]["valid/loss"]
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
    with pytest.raises(UserError, match="ReduceLROnPlateau looks at the validation loss"):
        fit(*given, scheduler=scheduler, config=QUIET)


def test_a_loader_for_the_other_purpose_and_an_empty_one_are_refused(world):
    strategy, module, _ = parts(world)
    with pytest.raises(UserError, match="made with training=True is given"):
        evaluate(module, strategy.loader(loader()), CRITERION, strategy)
    with pytest.raises(UserError, match="made with training=False is given"):
        fitted(world, strategy.loader(loader(), training=False))
    with pytest.raises(UserError, match="0 samples are too few"):
        evaluate(module, DataLoader(samples(0), batch_size=6), CRITERION, strategy)


def test_an_optimizer_of_another_module_is_refused(world):
    def other(parameters, lr):
        return torch.optim.SGD(nn.Linear(6, 3).parameters(), lr=lr)

    with pytest.raises(UserError, match="the optimizer holds no parameter of the module"):
        fitted(world, loader(), optimizer=other)


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
