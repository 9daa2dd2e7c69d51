"""Cost of safety: sync checks, announcements, snapshots and checkpoints, as a share of training.

    python benchmarks/safety_cost.py [--num_gpus 2] [--iterations 10]

Trains the main job at its default sizes and times each part in the same run: medians, in seconds,
then the share of an iteration that it takes at the default intervals. Prints one JSON line.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, whatever the directory

from main_job import command_line, iterate, main_job, median_s

from agents.trainer import save
from rl_dist.checkpoint.folder import Best
from rl_dist.launch.launcher import launch
from rl_dist.process_group.collectives import all_reduce_max, check_in_sync
from rl_dist.process_group.world import close_world, open_world
from rl_dist.telemetry.metrics import NullWriter


def measure(iterations: int, run_dir: str) -> int:
    """The part of the command that every rank runs."""
    world = open_world("cpu")
    training = main_job(world, run_dir)
    train = training.job.train
    best = Best((), Path(run_dir, "checkpoints"), world)

    def save_one() -> None:
        training.iteration += 1  # a name of its own, as in a run
        save(training, best, last=False, writer=NullWriter())

    iterate(training)
    iteration_s = median_s(lambda: iterate(training), iterations)
    check_s = median_s(lambda: check_in_sync(training.replicated(), world), 3 * iterations)
    save_s = median_s(save_one, iterations)
    found = {
        "ranks": world.size,
        "iteration_s": iteration_s,
        "sync_check_s": check_s,
        "save_s": save_s,
        "agreement_s": median_s(lambda: all_reduce_max(0, world), 10 * iterations),
        "share_of_time": (check_s / train.sync_check_every + save_s / train.checkpoint_every)
        / iteration_s,
    }
    if world.is_main_process:
        print(json.dumps({name: round(value, 6) for name, value in found.items()}), flush=True)
    close_world(world)
    return 0


def main() -> int:
    """Entry of the command."""
    parser = command_line(__doc__)
    parser.add_argument("--num_gpus", type=int, default=1, help="CPU ranks")
    parser.add_argument("--iterations", type=int, default=10)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as run_dir:
        return launch(measure, (args.iterations, run_dir), args.num_gpus)


if __name__ == "__main__":
    sys.exit(main())
