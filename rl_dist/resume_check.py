"""Prove that a run that is killed and resumed equals one that never was.

Run it as `python -m rl_dist.resume_check [--iterations K] [training flags]`: the training script
trains 2K iterations straight; then again, but it is ended by SIGKILL after its checkpoint at
iteration K, and resumed. Both runs have the same budget, and so the same learning rates.
"""

from __future__ import annotations

import argparse
import functools
import math
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_dist.checkpoint.store import latest_checkpoint, load_checkpoint, load_latest
from rl_dist.errors import CommandParser, UserError, explains_errors
from rl_dist.launch.child import SCRIPT, Child, leave_at_signals
from rl_dist.run_dir import RunDir

# Small sizes unless the user gives others, and no validation, which has no part in the proof.
SIZES = {"num_envs": 8, "num_steps": 32}
SMALL = ("--bptt_steps=8", "--batch_size=8", "--validate_every=0", "--eval_episodes=2")
# on another number of ranks, sums are rounded differently
TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-9}
ATTEMPTS = 3
MACHINE_FACTS = {"time", "host", "gpu", "cpu", "ram"}  # first parts of the names of metrics
DESCRIPTION = (
    "Train K + K iterations with SIGKILL in between and 2K straight, "
    "and compare everything bit for bit."
)
EPILOG = """All other flags are passed to the training script; sizes that are not given are small:
  --num_envs 8 --num_steps 32 --bptt_steps 8 --batch_size 8

examples:
  python -m rl_dist.resume_check --env CartPolePositions-v1
  python -m rl_dist.resume_check --env my_module:MyEnv-v0 --iterations 10 --num_gpus 2
  python -m rl_dist.resume_check --env Recall-v0 --num_gpus 2 --resume_on 1    within a tolerance

An environment takes part through get_state and set_state (see envs/vector/batched.py); without
them its episodes restart at resume, and no run of it can be bit-identical. On a GPU some kernels
round differently from run to run: try --device cpu to tell the two apart.
exit codes: 0 bit-identical (--resume_on: equal within 1e-4, in fp64 1e-9), 1 different or failed, 2
bad usage"""


# ---- comparing two runs


def flatten(value: Any, path: str = "") -> dict[str, Any]:
    """Return nested dicts and lists as one dict from path to tensor or plain value."""
    if isinstance(value, list | tuple):
        value = dict(enumerate(value))
    if not isinstance(value, dict) or not value:  # an empty one counts as a value
        return {path: value}
    leaves: dict[str, Any] = {}
    for key, entry in value.items():
        leaves |= flatten(entry, f"{path}/{key}".lstrip("/"))
    return leaves


def differences(left: Any, right: Any, tolerance: float = 0.0) -> list[str]:
    """List what differs between two nested states; tolerance 0: bit for bit."""
    left, right = flatten(left), flatten(right)
    lines = [f"{name} is in one of them only" for name in sorted(left.keys() ^ right.keys())]
    both = [name for name in left if name in right]
    gaps = {name: _difference(left[name], right[name], tolerance) for name in both}
    return lines + [f"{name}: {gap}" for name, gap in gaps.items() if gap]


def _difference(left: Any, right: Any, tolerance: float) -> str:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        if (left.dtype, left.shape) != (right.dtype, right.shape):
            return f"{left.dtype} {tuple(left.shape)} and {right.dtype} {tuple(right.shape)}"
        near = tolerance and left.is_floating_point()
        if torch.equal(_bits(left), _bits(right)) or (
            near and torch.allclose(left, right, tolerance, tolerance)
        ):
            return ""
        gap = (left.double() - right.double()).abs()
        number = int((gap != 0).sum())
        return f"{number} of {gap.numel()} numbers differ, by up to {float(gap.max()):.3g}"
    if isinstance(left, float) and isinstance(right, float):
        same = math.isclose(left, right, rel_tol=tolerance, abs_tol=tolerance)
    else:
        same = type(left) is type(right) and left == right
    return "" if same else f"{left!r:.80} and {right!r:.80}"


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def result_of(run_dir: Path, with_ranks: bool = True) -> dict[str, Any]:
    """Return what two equal runs share: last checkpoint (without config) and metrics."""
    newest = load_latest(run_dir)
    if newest is None:
        raise UserError(f"{run_dir} holds no valid checkpoint")
    state = {name: value for name, value in newest.state.items() if name != "config"}
    records = RunDir(run_dir).records()
    if not with_ranks:
        records = [record | {"ranks": None} for record in records]
    by_iteration = {f"metrics, iteration {record['iteration']}": record for record in records}
    metrics = flatten(by_iteration).items()
    return flatten(state) | {
        name: value for name, value in metrics if not MACHINE_FACTS & {*name.split("/")}
    }


def parameter_sha256(run_dir: Path) -> str:
    """Return the hash of the final parameters, which summary.json holds."""
    return str(RunDir(run_dir).summary()["parameter_sha256"])


# ---- making them


@dataclass(frozen=True, kw_only=True)
class ResumePlan:
    """The runs to make: one straight, one killed and then resumed."""

    iterations: int  # before the kill, and again after it
    num_gpus: int
    resume_on: int
    flags: list[str]  # flags of training, for every fresh run
    folder: Path

    def start(self, name: str) -> Child:
        """Start a run from the beginning."""
        return self._start([*self.flags, f"--run_dir={self.folder / name}"], self.num_gpus)

    def resume(self, name: str) -> Child:
        """Continue a run."""
        return self._start([f"--resume={self.folder / name}"], self.resume_on)

    def _start(self, flags: list[str], num_gpus: int) -> Child:
        words = [SCRIPT, *flags, f"--num_gpus={num_gpus}"]
        return Child(words, self.folder, variables={"TMPDIR": str(self.folder)})


def _finish(run: Child) -> None:
    """Wait for the end of a run, which must be a good one."""
    try:
        code = run.job.wait()
    finally:
        run.kill()
    if code:
        raise UserError(str(run.error()), exit_code=2 if code == 2 else 1)


def run_and_kill(plan: ResumePlan, saved: Path) -> int:
    """Start a run and kill it after a checkpoint; return its last iteration."""
    killed = RunDir(plan.folder / "killed")
    beyond = min(plan.iterations + 1, 2 * plan.iterations - 1)  # so that metrics must be cut back
    for _ in range(ATTEMPTS):
        shutil.rmtree(killed.path, ignore_errors=True)
        run = plan.start("killed")
        try:
            while run.job.poll() is None:
                if saved.exists() and len(killed.records()) >= beyond:
                    break
                time.sleep(0.002)
        finally:
            run.kill()
        if run.job.returncode != -signal.SIGKILL:
            _finish(run)
        if latest_checkpoint(killed.path) == saved and not killed.summary_path.exists():
            return len(killed.records())
    problem = "the run always ended before it could be killed"
    fix = f"give more than {plan.iterations} --iterations or longer ones (--num_steps)"
    raise UserError(f"{problem}: {fix}", exit_code=1)


def check(plan: ResumePlan) -> bool:
    """Make the three runs and print the comparison; return True if they are equal."""
    k = plan.iterations
    print(f"straight: iterations 1..{2 * k} ...", flush=True)
    _finish(plan.start("straight"))
    print(f"killed: iterations 1..{k}, a checkpoint, then SIGKILL ...", flush=True)
    saved = RunDir(plan.folder / "killed").checkpoints / f"iteration_{k:08d}.pt"
    reached = run_and_kill(plan, saved)
    state = load_checkpoint(saved)
    if state.get("environments") is None:
        print(
            "not bit-identical: this environment cannot be snapshotted, so its episodes restart at "
            "resume. Add get_state and set_state, see Exact resume in docs/own_environment.md"
        )
        return False
    print(f"killed after iteration {reached}; resumed: iterations {k + 1}..{2 * k} ...", flush=True)
    _finish(plan.resume("killed"))
    dtype = next(leaf.dtype for leaf in flatten(state["policy"]).values())
    return compare(plan, TOLERANCES[dtype])


def compare(plan: ResumePlan, tolerance: float) -> bool:
    """Print whether both runs are equal: bit for bit on the same number of ranks."""
    is_exact = plan.num_gpus == plan.resume_on
    limit = "" if is_exact else f" within {tolerance:g}"
    runs = {"straight": plan.folder / "straight", "resumed": plan.folder / "killed"}
    left, right = (result_of(run_dir, with_ranks=is_exact) for run_dir in runs.values())
    lines = differences(left, right, 0.0 if is_exact else tolerance)
    if lines:
        more = f" ({len(lines) - 1} more differ)" if len(lines) > 1 else ""
        print(f"different{limit}: {lines[0]}{more}")
    elif is_exact:
        print(f"bit-identical: all {len(left)} tensors and numbers of checkpoint and metrics")
    else:
        print(f"equal{limit}, on {plan.num_gpus} and then on {plan.resume_on} rank(s)")
    for name, run_dir in runs.items():
        print(f"parameters SHA-256 {parameter_sha256(run_dir)} {name}")
    return not lines


# ---- the command


def plan_of(argv: Sequence[str] | None, folder: Path) -> ResumePlan:
    """Return the runs that a command line means; their budget follows from the sizes."""
    parser = CommandParser(
        prog="python -m rl_dist.resume_check",
        usage="%(prog)s [--iterations K] [--num_gpus N] [--resume_on M] [training flags]",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    add = functools.partial(parser.add_argument, type=int)
    add("--iterations", default=5, metavar="K", help="before the kill and after it (default: 5)")
    add("--num_gpus", default=-1, metavar="N", help="as in training (default: -1)")
    add("--resume_on", metavar="M", help="ranks of the resumed run (default: as before)")
    for name, default in SIZES.items():
        add(f"--{name}", f"--{name.replace('_', '-')}", default=default, help=argparse.SUPPRESS)
    parser.add_argument("--scaling", default="strong", help=argparse.SUPPRESS)
    args, flags = parser.parse_known_args(argv)
    for name in ("iterations", *SIZES):
        if not 1 <= getattr(args, name) <= 10**6:
            raise UserError(f"--{name} must be 1..1000000, got {getattr(args, name)}")
    copies = max(1, args.num_gpus) if args.scaling == "weak" else 1
    chosen = {name: getattr(args, name) for name in ("scaling", *SIZES)}
    chosen["total_steps"] = 2 * args.iterations * args.num_envs * args.num_steps * copies
    chosen |= {"checkpoint_every": args.iterations, "keep_checkpoints": 3}
    return ResumePlan(
        iterations=args.iterations,
        num_gpus=args.num_gpus,
        resume_on=args.num_gpus if args.resume_on is None else args.resume_on,
        flags=[*SMALL, *flags, *(f"--{name}={value}" for name, value in chosen.items())],
        folder=folder,
    )


@explains_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    leave_at_signals()
    with tempfile.TemporaryDirectory(prefix="resume_check_", ignore_cleanup_errors=True) as folder:
        return 0 if check(plan_of(argv, Path(folder))) else 1


if __name__ == "__main__":
    sys.exit(main())
