"""Check that killing and resuming a run does not change its result.

Run it as `python -m rl_dist.resume_check [--iterations K] [training flags]`. It starts the training
script for two runs. The first run trains 2K iterations without a break. The second run is killed by
SIGKILL after it has saved its checkpoint at iteration K, and is then resumed. Both runs have the
same budget, and therefore the same learning rates.
"""

import math
import sys
import tempfile
import time
from argparse import SUPPRESS, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_dist.checkpoint.content import flatten
from rl_dist.checkpoint.store import latest_checkpoint, load_latest
from rl_dist.errors import CommandParser, UserError, explains_errors
from rl_dist.launch.child import SCRIPT, Child, leave_at_signals
from rl_dist.process_group.collectives import as_bytes
from rl_dist.run_dir import RunDir

# Flags that keep the runs small; the user's flags override them. Validation is turned off, because
# it does not affect the result.
SMALL = ("--bptt_steps=8", "--batch_size=8", "--validate_every=0", "--eval_episodes=2")
TOLERANCE = 1e-4  # used if the numbers of ranks differ, because sums are then rounded differently
# If a part of a metric's name, between slashes, is one of these words, the metric depends on the
# machine and is not compared.
MACHINE_FACTS = {"time", "host", "gpu", "cpu", "ram"}
DESCRIPTION = (
    "Train 2K iterations twice, once without a break and once with a SIGKILL and a resume "
    "after iteration K, and compare the results bit for bit."
)
EPILOG = """All other flags are passed to the training script. The default sizes are small:
  --num_envs 8 --num_steps 32 --bptt_steps 8 --batch_size 8

examples:
  python -m rl_dist.resume_check --env CartPolePositions-v1
  python -m rl_dist.resume_check --env my_module:MyEnv-v0 --iterations 10 --num_gpus 2
  python -m rl_dist.resume_check --env Recall-v0 --num_gpus 2 --resume_on 1    equal up to rounding

Runs are bit-identical only if the environment has the methods get_state and set_state (see
envs/vector/batched.py); without them, a resumed run restarts the episodes. On a GPU, some kernels
round differently from run to run: try --device cpu to find out if they cause the difference.
exit codes: 0 bit-identical (--resume_on: equal within 1e-4), 1 different or failed, 2 bad usage"""


# ---- comparing two runs


def differences(left: Any, right: Any, tolerance: float = 0.0) -> list[str]:
    """List the values in which two states differ; compare bits if `tolerance` is 0."""
    left = dict(flatten(left))
    right = dict(flatten(right))
    lines = [f"{name} exists in only one run" for name in sorted(left.keys() ^ right.keys())]
    shared_names = [name for name in left if name in right]
    return lines + [
        f"{name}: {_shown(left[name])} and {_shown(right[name])}"
        for name in shared_names
        if not _is_equal(left[name], right[name], tolerance)
    ]


def _is_equal(left: Any, right: Any, tolerance: float) -> bool:
    if type(left) is not type(right):
        return False
    if isinstance(left, float):
        return math.isclose(left, right, rel_tol=tolerance, abs_tol=tolerance)
    if not isinstance(left, Tensor):
        return bool(left == right)
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    if tolerance and left.is_floating_point():
        return torch.allclose(left, right, tolerance, tolerance)
    return torch.equal(as_bytes(left), as_bytes(right))


def _shown(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)} with sum {value.double().sum():.17g}"
    return f"{value!r:.80}"


def result_of(run_dir: Path) -> dict[str, object]:
    """Return the metrics of a run and the values in its newest checkpoint, by name.

    The configuration, the metrics of the machine and the metrics of single ranks are omitted,
    because they may differ between two equal runs.
    """
    newest = load_latest(run_dir)
    if newest is None:
        raise UserError(f"{run_dir} holds no valid checkpoint")
    by_iteration = {
        f"metrics, iteration {record['iteration']}": record | {"ranks": None}
        for record in RunDir(run_dir).records()
    }
    values = flatten(newest.state | {"config": None} | by_iteration)
    return {name: value for name, value in values if not MACHINE_FACTS & {*name.split("/")}}


# ---- training and comparing the two runs


def train(
    flags: Sequence[str], num_gpus: int, folder: Path, until: Callable[[], bool] = lambda: False
) -> None:
    """Run a training in a child process; kill it as soon as `until` returns True.

    Args:
        folder: directory for the temporary files of the run.

    Raises:
        UserError: the training run failed.
    """
    arguments = [SCRIPT, *flags, f"--num_gpus={num_gpus}"]
    with Child(arguments, folder) as child:
        while (code := child.job.poll()) is None and not until():
            time.sleep(0.002)
    if code:
        raise UserError(str(child.error()), exit_code=2 if code == 2 else 1)


def check(args: Namespace, folder: Path) -> bool:
    """Train both runs and compare them; return True if the runs are equal."""
    k = args.iterations
    straight = RunDir(folder / "straight")
    killed = RunDir(folder / "killed")
    print(f"uninterrupted: iterations 1..{2 * k} ...", flush=True)
    train([*args.flags, f"--run_dir={straight.path}"], args.num_gpus, folder)
    print(f"killed: iterations 1..{k}, a checkpoint, then SIGKILL ...", flush=True)
    checkpoint = killed.checkpoints / f"iteration_{k:08d}.pt"
    train([*args.flags, f"--run_dir={killed.path}"], args.num_gpus, folder, checkpoint.exists)
    if latest_checkpoint(killed.path) != checkpoint or killed.summary_path.exists():
        fix = f"set --iterations above {k}, or make iterations longer (--num_steps)"
        raise UserError(f"the run ended before it could be killed: {fix}", exit_code=1)
    print(f"resumed: iterations {k + 1}..{2 * k} ...", flush=True)
    train([f"--resume={killed.path}"], args.resume_on, folder)
    tolerance = 0.0 if args.resume_on == args.num_gpus else TOLERANCE
    return compare(straight.path, killed.path, tolerance)


def compare(straight: Path, resumed: Path, tolerance: float) -> bool:
    """Return True if two runs are equal, and print the result; `tolerance` 0: compare bits."""
    left = result_of(straight)
    right = result_of(resumed)
    lines = differences(left, right, tolerance)
    limit = f" within {tolerance:g}" if tolerance else ""
    if lines:
        print(f"different{limit}: {lines[0]} ({len(lines)} values differ)")
        # A checkpoint contains None as "environments" if the environment cannot be saved.
        if left.get("environments", 0) is None:
            print("the environment has no get_state and set_state: a resume starts new episodes")
    else:
        equal = f"equal{limit}" if tolerance else "bit-identical"
        print(f"{equal}: all {len(left)} tensors and numbers in the checkpoint and the metrics")
    return not lines


# ---- the command


def parse(argv: Sequence[str] | None) -> Namespace:
    """Parse the command line; `flags` in the result are the flags of both training runs."""
    parser = CommandParser(
        prog="python -m rl_dist.resume_check",
        usage="%(prog)s [--iterations K] [--num_gpus N] [--resume_on M] [training flags]",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    for name, default, placeholder, text in (
        ("iterations", 5, "K", "K iterations run before the kill, and K after it (default: 5)"),
        ("num_gpus", -1, "N", "number of ranks; -1: choose it as in training (default: -1)"),
        ("resume_on", None, "M", "number of ranks in the resumed run (default: N)"),
        ("num_envs", 8, "", SUPPRESS),
        ("num_steps", 32, "", SUPPRESS),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, metavar=placeholder, help=text)
    args, training_flags = parser.parse_known_args(argv)
    if args.iterations < 1:
        raise UserError(f"--iterations {args.iterations} must be at least 1")
    if args.resume_on is None:
        args.resume_on = args.num_gpus
    args.flags = [
        *SMALL,
        *training_flags,
        f"--num_envs={args.num_envs}",
        f"--num_steps={args.num_steps}",
        f"--total_steps={2 * args.iterations * args.num_envs * args.num_steps}",
        f"--checkpoint_every={args.iterations}",
        "--keep_checkpoints=3",
        "--scaling=strong",
    ]
    return args


@explains_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    leave_at_signals()
    with tempfile.TemporaryDirectory(prefix="resume_check_", ignore_cleanup_errors=True) as folder:
        return 0 if check(parse(argv), Path(folder)) else 1


if __name__ == "__main__":
    sys.exit(main())
