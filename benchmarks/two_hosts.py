"""Two hosts with one rank each against one host with two ranks, in turns, beside the model.

    python benchmarks/two_hosts.py --rounds 3

The hosts are network namespaces of this machine (root and Linux): a cable between them costs what
the kernel takes for it. Each rank has one core, as the two runs take turns. Before them the
estimator predicts two ranks; after each run, so does the model with that run's own times.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO), str(REPO / "tests")]

from simulated_hosts import connected, torchrun  # noqa: E402
from train_runs import start_training  # noqa: E402

JOB = shlex.split(
    "--env Recall-v0 --num_envs 64 --num_steps 64 --bptt_steps 16 --batch_size 64 "
    "--hidden_size 64 --device cpu"
)
FLAGS = [*JOB, "--total_steps", "163840"]


def predicted() -> float:
    """Return the steps/s of two ranks by `rl_dist.speedup`, which trains with one and two."""
    words = ["-m", "rl_dist.speedup", "--gpus", "1", "2", "--scaling", "strong", "--json"]
    command = [sys.executable, *words, *JOB]
    done = subprocess.run(command, cwd=REPO, stdout=subprocess.PIPE, text=True, check=True)
    (two,) = (row for row in json.loads(done.stdout)["rows"] if row["gpus"] == 2)
    return float(two["steps_per_s"])


def scaling(run_dir: Path) -> tuple[float, float, str]:
    """Return steps/s, those of the model, and the hash of the parameters."""
    found = json.loads((run_dir / "summary.json").read_text())
    of_model = found["scaling"]["predicted_steps_per_s"]
    return found["scaling"]["measured_steps_per_s"], of_model, found["parameter_sha256"]


def main() -> None:
    """Print a line for each round, and the medians."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    rounds = []
    count = parser.parse_args().rounds
    print(f"predicted beforehand: {predicted():.0f} steps/s", flush=True)
    for number in range(1, count + 1):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            with connected(folder, "first", "second") as network:
                flags = [*FLAGS, "--run_dir", folder / "two"]
                for job in [torchrun(network.hosts[each], *flags) for each in network.names]:
                    job.succeed()
            job = start_training(*FLAGS, "--num_gpus", "2", "--run_dir", folder / "one")
            job.communicate()
            two, one = scaling(folder / "two"), scaling(folder / "one")
            assert two[2] == one[2], "other parameters"
            rounds.append((two[0], one[0], two[0] / one[0], two[1]))
            words = "two hosts {:.0f} steps/s, one host {:.0f}, ratio {:.2f}; the model {:.0f}"
            print(f"round {number}: {words.format(*rounds[-1])}", flush=True)
    print(f"medians: {words.format(*map(median, zip(*rounds, strict=True)))}")


if __name__ == "__main__":
    main()
