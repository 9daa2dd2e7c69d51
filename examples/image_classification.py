"""Train a small CNN on noisy images, as an example of the general-purpose API.

The network learns to find the brightest quarter of each image.

    python -m examples.image_classification
    python -m examples.image_classification --num_gpus 2 --device cpu

The batches are the same for any number of ranks, and each rank processes its share of every batch.
Therefore the results do not depend on the number of ranks.
"""

import json
import sys
from functools import partial

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from rl_dist.errors import explains_errors
from rl_dist.flags import parse_flags
from rl_dist.launch.config import LaunchConfig, resolve
from rl_dist.launch.ranks import launch
from rl_dist.process_group.world import close_world, open_world
from rl_dist.strategies.strategy import Strategy
from rl_dist.supervised.fit import FitConfig, accuracy, evaluate, fit


def make_images(count, seed):
    """Return noisy images [count, 1, 16, 16] and labels: the bright quarter, 0 to 3."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (count,), generator=generator)
    quarters = torch.eye(4).reshape(4, 1, 2, 2).kron(torch.ones(8, 8))  # [4, 1, 16, 16]
    noise = torch.randn(count, 1, 16, 16, generator=generator)
    return TensorDataset(0.5 * quarters[labels] + noise, labels)


def run_rank(fitting, launching, device):
    """Train and test on this rank; the main process prints the test metrics."""
    world = open_world(device)
    strategy = Strategy(launching.strategy_config, world)
    torch.manual_seed(fitting.seed)
    network = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4),
        nn.Flatten(), nn.Linear(256, 4),
    )  # fmt: skip
    module = strategy.wrap(network.to(world.device))
    loader = partial(DataLoader, batch_size=64)  # 64 images on all ranks together
    criterion, metrics = nn.CrossEntropyLoss(), {"accuracy": accuracy}
    result = fit(
        module,
        loader(make_images(1024, seed=1), shuffle=True),
        torch.optim.Adam(strategy.parameters, lr=1e-2),
        criterion,
        strategy,
        config=fitting,
    )
    figures = evaluate(module, loader(make_images(1001, seed=2)), criterion, strategy, metrics)
    if world.is_main_process:
        print(json.dumps(figures), flush=True)
    close_world()
    return 128 + result.signum if result.signum else 0


@explains_errors
def main():
    """Run the example; return the exit code."""
    sections = {"fit": FitConfig(epochs=5), "launch": LaunchConfig()}
    fitting, launching = parse_flags(sections, description=__doc__).configs.values()
    resolved = resolve(launching)
    return launch(run_rank, (fitting, launching, resolved.device_type), resolved.num_ranks)


if __name__ == "__main__":
    sys.exit(main())
