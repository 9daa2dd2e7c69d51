"""Small supervised jobs, and what two ranks of the tests do with them.

Spawned processes must be able to import it.
"""

import math
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from rl_dist.process_group.collectives import parameter_hash
from rl_dist.process_group.world import close_world, open_world
from rl_dist.strategies.config import StrategyConfig
from rl_dist.strategies.strategy import Strategy
from rl_dist.supervised.batches import BatchError
from rl_dist.supervised.config import FitConfig
from rl_dist.supervised.fit import accuracy, evaluate, fit

FEATURES, CLASSES = 6, 3
METRICS = {"accuracy": accuracy}
CRITERION = nn.CrossEntropyLoss()


def blobs(count, seed=0, flipped=False):
    """Points around one centre per class, in float64; `flipped`: labelled as another class."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    points = torch.randn(count, FEATURES, generator=generator, dtype=torch.float64)
    points[torch.arange(count), labels] += 1.5
    return TensorDataset(points, (labels + flipped) % CLASSES)


class Raising(Dataset):
    """Blobs of which some cannot be loaded."""

    def __init__(self, count, *bad):
        self.good, self.bad = blobs(count), bad

    def __len__(self):
        return len(self.good)

    def __getitem__(self, index):
        if index in self.bad:
            raise OSError(f"image {index} is torn")
        return self.good[index]


def make_net(dropout=0.0, batch_norm=False):
    torch.manual_seed(3)
    norm = [nn.BatchNorm1d(8)] if batch_norm else []
    return nn.Sequential(
        nn.Linear(FEATURES, 8), *norm, nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, CLASSES)
    ).double()


class Remembering(nn.Module):
    """Keeps what it saw last in a buffer."""

    def __init__(self):
        super().__init__()
        self.net = make_net(batch_norm=True)
        self.register_buffer("seen", torch.zeros(3, 2).double()[:, 0])  # gaps between its numbers

    def forward(self, inputs):
        outputs = self.net(inputs)
        if self.training:
            self.seen.copy_(outputs.detach().mean(0))
        return outputs


class NanOnce:
    """A criterion that is NaN at one call, on the last rank."""

    def __init__(self, world, call):
        self.left = call if world.rank == world.size - 1 else 0

    def __call__(self, outputs, targets):
        self.left -= 1
        return CRITERION(outputs, targets) * (math.nan if self.left == 0 else 1.0)


class Fitted:
    """One fit with everything that can be resumed: Adam, a scheduler, dropout, accumulation."""

    def __init__(self, world, run_dir=None, *, epochs=3, batch_size=12, net=None, mode="default",
                 train=None, criterion=CRITERION, config=None, **options):  # fmt: skip
        self.net = net or make_net()
        self.strategy = Strategy(StrategyConfig(mode=mode), world)
        self.module = self.strategy.wrap(self.net)
        self.optimizer = torch.optim.Adam(self.strategy.parameters, lr=0.05)
        settings = {"epochs": epochs, "grad_accumulation": 2, "progress": False} | (config or {})
        validation = DataLoader(blobs(31, 1), batch_size=batch_size)
        given = {"validation": validation, "metrics": METRICS, "run_dir": run_dir} | options
        self.result = fit(
            self.module,
            train or DataLoader(blobs(67), batch_size=batch_size, shuffle=True),
            self.optimizer,
            criterion,
            self.strategy,
            scheduler=torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.7),
            config=FitConfig(**settings),
            **given,
        )

    @property
    def weights(self):
        return {name: value.clone() for name, value in self.strategy.module_state().items()}


def exercise(out_dir):
    """Fit, resume, evaluate and fail on this rank.

    The results go to rank_N.pt.
    """
    world = open_world("cpu", timeout_s=30)
    out_dir = Path(out_dir)
    plain = Fitted(world)
    test = DataLoader(blobs(41, 2), batch_size=8)
    results = {
        "history": plain.result.history,
        "weights": plain.weights,
        "hash": parameter_hash(plain.net),
        "test": evaluate(plain.module, test, CRITERION, plain.strategy, METRICS),
    }
    whole = Fitted(world, out_dir / "whole", net=make_net(dropout=0.3))
    Fitted(world, out_dir / "parts", net=make_net(dropout=0.3), epochs=1)
    resumed = Fitted(world, out_dir / "parts", net=make_net(dropout=0.3), resume=True)
    for name, fitted in (("whole", whole), ("resumed", resumed)):
        results[name] = {"weights": fitted.weights, "history": fitted.result.history}
    shared = "hybrid" if world.size > 1 else "none"
    for mode, epochs in (("default", 1), (shared, 2), ("default", 3)):
        across = Fitted(world, out_dir / "across", epochs=epochs, mode=mode, resume=True)
    alike = Fitted(world, out_dir / "sharded", mode=shared)
    # a lambda cannot be pickled
    workers = {"num_workers": 1, "collate_fn": lambda batch: default_collate(batch)}
    loaded = Fitted(world, train=DataLoader(blobs(67), batch_size=12, shuffle=True, **workers))
    bad = Fitted(world, criterion=NanOnce(world, 3), config={"grad_accumulation": 1})
    results |= {"across": across.weights, "sharded": alike.weights, "loaded": loaded.weights}
    results |= {
        "bad": bad.weights,
        "bad_history": bad.result.history,
    }
    # its checkpoints compare the ranks
    results["batch_norm"] = Fitted(world, out_dir / "norm", net=Remembering()).weights
    try:
        raising = DataLoader(Raising(41, 19, 40), batch_size=8)  # one in each rank's half
        evaluate(plain.module, raising, CRITERION, plain.strategy, METRICS)
    except BatchError as error:
        results["raised"] = str(error)
    torch.save(results, out_dir / f"rank_{world.rank}.pt")
    close_world(world)


def leave_on_one_rank(out_dir):
    """Let only rank 1 fail to load a sample, ignore the error, and return."""
    world = open_world("cpu", timeout_s=30)
    with suppress(BatchError):
        Fitted(world, train=DataLoader(Raising(48, 17), batch_size=8), validation=None)
    return 0
