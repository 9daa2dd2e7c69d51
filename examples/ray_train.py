"""Train on a Ray cluster; Ray Train places the ranks and restarts failed runs.

    python examples/ray_train.py --workers 2 --max_failures 3 --run_dir /shared/run

All other flags are passed to train_distributed.py. Every node needs this checkout at the same path,
the same Python environment with the extra `ray` installed, and access to the run directory.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[1] / "train_distributed.py"


def train_as_rank(config):
    """Run one rank in a new process; Ray's environment variables set the rank's number.

    Ray has opened a process group of the processes that call this function. This function uses that
    group only to send a free port to all ranks. The training processes connect to each other at
    this port.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.elastic.utils.distributed import get_free_port

    port = torch.tensor([get_free_port()])
    dist.broadcast(port, src=0)
    variables = os.environ | {"MASTER_PORT": str(port.item())}
    argv = [sys.executable, config["script"], *config["flags"]]
    code = subprocess.run(argv, env=variables).returncode
    if code:  # the error makes Ray end the other ranks and restart all ranks
        raise RuntimeError(f"rank {variables['RANK']} ended with code {code}")


def main():
    """Start the ranks and wait until all of them have ended."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--workers", type=int, default=2, help="number of ranks")
    parser.add_argument("--gpus", action="store_true", help="use one GPU per rank")
    parser.add_argument("--max_failures", type=int, default=0, help="largest number of restarts")
    parser.add_argument(
        "--address", default="auto", help="address of a Ray cluster; local: start a new one"
    )
    parser.add_argument(
        "--run_dir", required=True, help="shared folder of the run; restarts resume the run from it"
    )
    args, flags = parser.parse_known_args()
    flags += ["--run_dir", args.run_dir, "--resume", "auto"]

    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    python_path = f"{SCRIPT.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    ray.init(args.address, runtime_env={"env_vars": {"PYTHONPATH": python_path}})
    TorchTrainer(
        train_as_rank,
        train_loop_config={"script": str(SCRIPT), "flags": flags},
        scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=args.gpus),
        torch_config=TorchConfig(backend="gloo"),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=args.max_failures)),
    ).fit()


if __name__ == "__main__":
    main()
