"""Small supervised jobs, and a function in which two ranks run them."""

import itertools
import math

import torch
from on_ranks import saves_results
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

from rl_dist.errors import UserError
from rl_dist.process_group.collectives import parameter_hash
from rl_dist.strategies.config import StrategyConfig
from rl_dist.strategies.strategy import Strategy
from rl_dist.supervised.fit import FitConfig, accuracy, evaluate, fit

FEATURES, CLASSES = 6, 3
METRICS = {"accuracy": accuracy}
CRITERION = nn.CrossEntropyLoss()


def blobs(count, seed=0, flipped=False):
    """Return float64 points around one centre per class; `flipped`: wrong labels."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    points = torch.randn(count, FEATURES, generator=generator, dtype=torch.float64)
    points[torch.arange(count), labels] += 1.5
    return TensorDataset(points, (labels + flipped) % CLASSES)


def make_net(dropout=0.0, batch_norm=False):
    torch.manual_seed(3)
    norm = [nn.BatchNorm1d(8)] if batch_norm else []
    return nn.Sequential(
        nn.Linear(FEATURES, 8), *norm, nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, CLASSES)
    ).double()


def nan_once(world, call):
    """Return a loss that is NaN on the last rank in its `call`-th training batch only."""
    calls = itertools.count(1 if world.rank == world.size - 1 else call + 1)
    return lambda outputs, targets: (
        CRITERION(outputs, targets)
        * (math.nan if outputs.requires_grad and next(calls) == call else 1.0)
    )


def partly_ignored(count, *ignored):
    """Return blobs in which the given samples have the target -100."""
    points, labels = blobs(count).tensors
    labels[list(ignored)] = -100
    return TensorDataset(points, labels)


UNEQUAL = {
    "ignored target": {"train": DataLoader(partly_ignored(36, 30), batch_size=12)},
    "class weights": {"criterion": nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 5.0]).double())},
    "sum of one sample per rank": {
        "criterion": nn.CrossEntropyLoss(reduction="sum"),
        "batch_size": 2,
    },
}


def refusal(function, *args, **options):
    """Return the message of a UserError, or "" if there is none."""
    try:
        function(*args, **options)
    except UserError as error:
        return str(error)
    return ""


class Fitted:
    """Run a fit with Adam, a learning-rate scheduler and metrics; keep its results."""

    def __init__(self, world, run_dir=None, *, epochs=3, batch_size=12, net=None, train=None,
                 criterion=CRITERION, config=None, strategy=None, optimizer=torch.optim.Adam,
                 **options):  # fmt: skip
        self.net = net or make_net()
        self.strategy = Strategy(StrategyConfig(**(strategy or {})), world)
        self.module = self.strategy.wrap(self.net)
        self.optimizer = optimizer(self.strategy.parameters, lr=0.05)
        given = {
            "validation": DataLoader(blobs(31, 1), batch_size=batch_size),
            "scheduler": torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.7),
            "metrics": METRICS,
        }
        settings = {"epochs": epochs, "grad_accumulation": 2, "progress": False} | (config or {})
        self.result = fit(
            self.module,
            train or DataLoader(blobs(67), batch_size=batch_size, shuffle=True),
            self.optimizer,
            criterion,
            self.strategy,
            config=FitConfig(**settings),
            run_dir=run_dir,
            **given | options,
        )
        self.history = self.result.history
        self.weights = {name: v.clone() for name, v in self.strategy.module_state().items()}


@saves_results
def exercise(world, out_dir):
    """Fit, resume and evaluate on this rank; return the results."""
    plain = Fitted(world)
    test = DataLoader(blobs(41, 2), batch_size=8)
    results = {
        "history": plain.history,
        "weights": plain.weights,
        "hash": parameter_hash(plain.net),
        "test": evaluate(plain.module, test, CRITERION, plain.strategy, METRICS),
    }

    # Fit without a stop; then fit again, stop after one epoch, and resume. A save fails if
    # BatchNorm statistics differ between the ranks.
    for name, lengths in (("whole", [3]), ("resumed", [1, 3])):
        for epochs in lengths:
            net = make_net(dropout=0.3, batch_norm=True)
            job = Fitted(world, out_dir / name, net=net, epochs=epochs, resume=True)
        results[name] = {"weights": job.weights, "history": job.history}

    # Resume with other strategies. Then use loader workers and a lambda, which cannot be pickled.
    sharded = {"mode": "hybrid" if world.size > 1 else "none"}
    for strategy, epochs in (({}, 1), (sharded, 2), ({}, 3)):
        job = Fitted(world, out_dir / "across", epochs=epochs, strategy=strategy, resume=True)
    results["across strategies"] = job.weights
    workers = {"num_workers": 1, "collate_fn": lambda batch: default_collate(batch)}
    loader = DataLoader(blobs(67), batch_size=12, shuffle=True, **workers)
    results["workers"] = Fitted(world, train=loader).weights

    bad = Fitted(world, criterion=nan_once(world, 3), config={"grad_accumulation": 1})
    results["bad"] = {"weights": bad.weights, "history": bad.history}

    options = {"epochs": 1, "validation": None, "config": {"grad_accumulation": 1}}
    results["unequal"] = {
        name: refusal(Fitted, world, **options | unequal) for name, unequal in UNEQUAL.items()
    }
    ignored = DataLoader(partly_ignored(31, 0, 2, 4, 17), batch_size=12)
    results["unequal"]["evaluation"] = refusal(
        evaluate, plain.module, ignored, CRITERION, plain.strategy
    )
    options["criterion"] = nn.CrossEntropyLoss(reduction="none")
    for name, parts in (("per sample", 1), ("per sample, accumulated", 2)):
        train = DataLoader(partly_ignored(48, 0, 2, 4, 17), batch_size=24 // parts)
        options["config"] = {"grad_accumulation": parts}
        results[name] = Fitted(world, train=train, **options).weights
    net = make_net()
    net.spare = nn.Parameter(torch.ones(1))
    results["unused"] = refusal(Fitted, world, net=net, **options)
    return results
