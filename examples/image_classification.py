"""Train a small CNN on generated images of shapes, on one rank or many: the general-purpose API.

    python examples/image_classification.py
    python examples/image_classification.py --num_gpus 2 --device cpu

Every rank sees its share of the same batches, so the figures do not depend on the number of ranks.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, installed or not

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from rl_dist.errors import explains_errors
from rl_dist.flags import Field, Text, configuration, parse_flags
from rl_dist.launch.config import LaunchConfig, resolve
from rl_dist.launch.ranks import launch
from rl_dist.process_group.world import close_world, open_world
from rl_dist.strategies.config import StrategyConfig
from rl_dist.strategies.strategy import Strategy
from rl_dist.supervised.config import FitConfig
from rl_dist.supervised.fit import accuracy, evaluate, fit

CLASSES = ("disc", "ring", "cross", "stripes")
SIZE = 16  # pixels each way


@configuration
class ExampleConfig:
    """Settings of this example alone."""

    num_gpus: int = Field(-1, ge=-1, le=10**6)
    """ranks: one per GPU, -1 = all; on a CPU this many processes, -1 = one."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to train on."""
    batch_size: int = Field(64, ge=1, le=10**7)
    """Images in a batch, total over all ranks."""
    learning_rate: float = Field(1e-2, ge=0, le=10)
    """Step size of Adam."""
    json: Text = ""
    """Write the test figures to this file."""


def make_images(count: int, seed: int) -> TensorDataset:
    """Return noisy shapes [count, 1, SIZE, SIZE] at random places, and their classes [count]."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(len(CLASSES), (count,), generator=generator)
    centre = torch.rand(count, 2, 1, 1, generator=generator) * 4 - 2 + SIZE / 2
    radius = torch.rand(count, 1, 1, generator=generator) * 2 + 4
    grid = torch.arange(SIZE, dtype=torch.float32)
    # each [count, SIZE, SIZE]
    dy = (grid[:, None] - centre[:, 0]).abs()
    dx = (grid[None, :] - centre[:, 1]).abs()
    distance = (dy.square() + dx.square()).sqrt()
    shapes = torch.stack(
        [
            (distance < radius).float(),
            ((distance - radius).abs() < 1.0).float(),
            (torch.minimum(dy, dx) < 1.0).float() * (torch.maximum(dy, dx) < radius),
            ((dy // 2) % 2 == 0).float() * (torch.maximum(dy, dx) < radius),
        ],
        dim=1,
    )
    images = shapes[torch.arange(count), labels] + 0.6 * torch.randn(
        count, SIZE, SIZE, generator=generator
    )
    return TensorDataset(images.unsqueeze(1), labels)


def make_network() -> nn.Module:
    """Return two convolutions and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
        nn.Flatten(), nn.Linear(128, len(CLASSES)),
    )  # fmt: skip


def run_rank(fitting: FitConfig, config: ExampleConfig, device: str) -> int:
    """Train and test on this rank."""
    world = open_world(device)
    strategy = Strategy(StrategyConfig(), world)  # ddp on several ranks, nothing on one
    torch.manual_seed(fitting.seed)
    module = strategy.wrap(make_network().to(world.device))
    optimizer = torch.optim.Adam(strategy.parameters, lr=config.learning_rate)
    loader = partial(DataLoader, batch_size=config.batch_size)
    criterion = nn.CrossEntropyLoss()
    metrics = {"accuracy": accuracy}
    result = fit(
        module,
        loader(make_images(1024, seed=1), shuffle=True),
        optimizer,
        criterion,
        strategy,
        validation=loader(make_images(333, seed=2)),
        metrics=metrics,
        config=fitting,
    )
    figures = evaluate(module, loader(make_images(1001, seed=3)), criterion, strategy, metrics)
    if world.is_main_process:
        shown = f"accuracy {figures['accuracy']:.4f}, loss {figures['loss']:.4f}"
        print(f"test, {figures['samples']:.0f} images: {shown}")
        if config.json:
            Path(config.json).write_text(json.dumps(figures))
    close_world(world)
    return 128 + result.signum if result.signum else 0


@explains_errors
def main() -> int:
    """Run the example; return the exit code."""
    sections = {"fit": FitConfig(epochs=5, patience=2), "example": ExampleConfig()}
    parsed = parse_flags(sections, description=(__doc__ or "").partition("\n")[0])
    fitting, config = (parsed.configs[name] for name in sections)
    resolved = resolve(LaunchConfig(num_gpus=config.num_gpus, device=config.device))
    if os.environ.get("RANK", "0") == "0":  # torchrun starts this on every rank
        print(resolved.message, flush=True)
    return launch(run_rank, (fitting, config, resolved.device_type), resolved.num_ranks)


if __name__ == "__main__":
    sys.exit(main())
