"""The same short job on 1, 2 and 4 CPU ranks: differences of parameters and returns.

    python benchmarks/world_size.py [--env CartPole-v1] [--policy mlp] [--iterations 60]

Rounding differs with the number of ranks, and training amplifies it. A control shows by how much:
one rank again, after moving one weight of the untrained policy by one rounding step. Prints one
JSON line per run.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from any directory

import torch

from agents.config import TrainConfig
from agents.policy import PolicyConfig
from agents.ppo import PPOConfig
from agents.trainer import Job, Training, train
from envs import make_vector_env
from rl_dist.launch.ranks import launch
from rl_dist.process_group.world import StopFlag, close_world, open_world
from rl_dist.telemetry.metrics import NullWriter

CONTROL = "1 rank, one weight one rounding step off"
RUNS = {"1 rank": 1, "2 ranks": 2, "4 ranks": 4, CONTROL: 1}
PRECISIONS = {"fp64": torch.float64, "fp32": torch.float32}
NUM_ENVS, NUM_STEPS = 16, 64


class Recorder(NullWriter):
    """Keeps the return and the parameters after every iteration."""

    def __init__(self, training: Training) -> None:
        self.training = training
        self.returns: list[float] = []
        self.parameters: list[torch.Tensor] = []

    def write(self, record: Mapping[str, Any], *, done: int) -> None:
        """Remember this iteration."""
        value = record["episode/return"]
        self.returns.append(float("nan") if value is None else value)
        flat = [p.detach().flatten().double() for p in self.training.policy.parameters()]
        self.parameters.append(torch.cat(flat))


def train_rank(args: argparse.Namespace, precision: str, name: str, path: Path) -> int:
    """Train on this rank; the main process saves the returns and parameters."""
    world = open_world("cpu")
    torch.set_num_threads(1)
    job = Job(
        train=TrainConfig(
            num_envs=NUM_ENVS,
            batch_size=NUM_ENVS * 2,
            num_steps=NUM_STEPS,
            bptt_steps=16,
            total_steps=args.iterations * NUM_ENVS * NUM_STEPS,
            checkpoint_every=10**9,
        ),
        policy=PolicyConfig(policy=args.policy, hidden_size=32),
        ppo=PPOConfig(learning_rate=1e-3),
        make_env=lambda num_envs, first: make_vector_env(args.env, num_envs, env_offset=first),
        run_dir=path.with_suffix(""),
        dtype=PRECISIONS[precision],
    )
    training = Training(job, world)
    if name == CONTROL:
        with torch.no_grad():
            weight = training.policy.critic_head.weight
            weight[0, 0] = torch.nextafter(weight[0, 0], weight.new_tensor(float("inf")))
    recorder = Recorder(training)
    train(training, recorder, StopFlag())
    if world.is_main_process:
        parameters = torch.stack(recorder.parameters)
        torch.save({"returns": torch.tensor(recorder.returns), "parameters": parameters}, path)
    close_world(world)
    return 0


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--policy", default="mlp")
    parser.add_argument("--iterations", type=int, default=60)
    args = parser.parse_args()
    for precision in PRECISIONS:
        records = {}
        for name, ranks in RUNS.items():
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, "record.pt")
                if code := launch(train_rank, (args, precision, name, path), ranks):
                    sys.exit(code)
                records[name] = torch.load(path, weights_only=True)
        alone = records.pop("1 rank")
        for name, record in records.items():
            gap = (record["parameters"] - alone["parameters"]).abs().amax(1)
            shown = [i for i in (1, 3, 10, 30, len(gap)) if i <= len(gap)]
            line = {
                "precision": precision,
                "run": name,
                "parameter_difference": {i: f"{gap[i - 1]:.1e}" for i in shown},
                "mean_return": round(float(record["returns"].nanmean()), 2),
                "mean_return_of_1_rank": round(float(alone["returns"].nanmean()), 2),
            }
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
