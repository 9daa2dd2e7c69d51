"""The same short job on 1, 2 and 4 CPU ranks: differences of parameters and returns.

    python benchmarks/world_size.py [--env CartPole-v1] [--iterations 60]

Rounding differs with the number of ranks, and training amplifies it. How much is shown by the
control: one rank again, with one weight of the untrained policy moved by one rounding step. Prints
one JSON line per run.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from agents.config import TrainConfig
from agents.policy import PolicyConfig
from agents.ppo import PPOConfig
from agents.trainer import Job, Training, train
from envs import make_vector_env
from rl_dist.launch.ranks import launch
from rl_dist.process_group.world import StopFlag, close_world, open_world
from rl_dist.telemetry.metrics import NullWriter

RANKS = (1, 2, 4)
PRECISIONS = {"fp64": torch.float64, "fp32": torch.float32}
CONTROL = "1 rank, one weight one rounding step off"


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


def train_once(args: argparse.Namespace, precision: str, out: str, name: str) -> int:
    """Train on as many ranks as there are; the main process saves what it recorded."""
    world = open_world("cpu")
    torch.set_num_threads(1)
    job = Job(
        train=TrainConfig(
            num_envs=args.num_envs,
            batch_size=args.num_envs * 2,
            num_steps=64,
            bptt_steps=16,
            total_steps=args.iterations * args.num_envs * 64,
            checkpoint_every=10**9,
            seed=args.seed,
        ),
        policy=PolicyConfig(policy=args.policy, hidden_size=args.hidden_size),
        ppo=PPOConfig(learning_rate=args.learning_rate),
        make_env=lambda num_envs, first: make_vector_env(args.env, num_envs, env_offset=first),
        run_dir=Path(out, "run"),
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
        returns, parameters = torch.tensor(recorder.returns), torch.stack(recorder.parameters)
        record = {"returns": returns, "parameters": parameters}
        torch.save(record, Path(out, f"{precision} {name}.pt"))
    close_world(world)
    return 0


def record_all(args: argparse.Namespace, out: str) -> dict[str, dict[str, dict[str, torch.Tensor]]]:
    """Records by precision and run."""
    runs = {f"{ranks} rank{'s' * (ranks > 1)}": ranks for ranks in RANKS} | {CONTROL: 1}
    records: dict[str, dict[str, dict[str, torch.Tensor]]] = {}
    for precision in PRECISIONS:
        records[precision] = {}
        for name, ranks in runs.items():
            if code := launch(train_once, (args, precision, out, name), ranks):
                raise SystemExit(code)
            file = Path(out, f"{precision} {name}.pt")
            records[precision][name] = torch.load(file, weights_only=True)
    return records


def differences(records: dict[str, dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The largest difference of a parameter from that of one rank, by run and iteration."""
    alone = records["1 rank"]["parameters"]
    return {
        name: (r["parameters"] - alone).abs().amax(1)
        for name, r in records.items()
        if name != "1 rank"
    }


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--policy", default="mlp", choices=("clstm", "mlp"))
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--num_envs", type=int, default=16)
    parser.add_argument("--hidden_size", type=int, default=32)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        records = record_all(args, directory)
    for precision, runs in records.items():
        returns = runs["1 rank"]["returns"].nan_to_num()
        for name, gap in differences(runs).items():
            part = (runs[name]["returns"].nan_to_num() != returns).nonzero()
            shown = [i for i in (1, 3, 10, 30, len(gap)) if i <= len(gap)]
            means = [float(runs[n]["returns"].nanmean()) for n in ("1 rank", name)]
            line = {
                "precision": precision,
                "run": name,
                "parameter_difference": {i: f"{gap[i - 1]:.1e}" for i in shown},
                "first_iteration_with_another_return": int(part[0]) + 1 if len(part) else None,
                "mean_return": [round(mean, 2) for mean in means],
            }
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
