"""Prove that a run that is killed and resumed equals one that never was.

Run it as `python -m rl_dist.resume_check [--iterations K] [training flags]`: the real training
script trains 2K iterations straight; then again, but it is ended by SIGKILL between its checkpoint
at iteration K and its end, and resumed. Both runs have the same budget, and so the same schedule of
the learning rate.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from rl_dist.checkpoint.store import CHECKPOINT_DIR, latest_checkpoint, load_checkpoint
from rl_dist.errors import CommandParser, UserError, explains_errors
from rl_dist.launch.child import SCRIPT, Child, leave_at_signals
from rl_dist.resume_check.comparison import differences, flatten, parameter_sha256, result_of
from rl_dist.run_dir import RunDir

# Sizes of training that are not given are small; the totals of the run follow from them.
SIZES = {"num_envs": 8, "num_steps": 32, "bptt_steps": 8, "batch_size": 8}
# Evaluation has no part in the proof, unless asked for.
SAVED_TIME = {"validate_every": 0, "eval_episodes": 2}
OWN = ("run_dir", "resume", "total_steps", "num_episodes", "checkpoint_every", "keep_checkpoints")
TRADING = "StockTrading-v0"  # evaluated on all of its days: it takes no --eval_episodes
# on another number of ranks, sums are rounded differently
TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-9}
ATTEMPTS = 3
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

An environment takes part through get_state and set_state (see envs/vector/snapshots.py); without
them its episodes restart at resume, and no run of it can be bit-identical. On a GPU some kernels
round differently from run to run: try --device cpu to tell the two apart.
exit codes: 0 bit-identical (--resume_on: equal within 1e-4, in fp64 1e-9), 1 different or failed, 2
bad usage"""


@dataclass(frozen=True, kw_only=True)
class ResumePlan:
    """The runs to make: one straight, one killed and then resumed."""

    iterations: int  # before the kill, and again after it
    num_gpus: int
    resume_on: int
    flags: list[str]  # for every fresh run
    folder: Path

    @property
    def exact(self) -> bool:
        """True if the resumed run has as many ranks as the killed one."""
        return self.num_gpus == self.resume_on

    def start(self, name: str) -> Child:
        """Start a run from the beginning."""
        where = ["--num_gpus", str(self.num_gpus), "--run_dir", str(self.folder / name)]
        return self._start(name, [*self.flags, *where])

    def resume(self) -> Child:
        """Let the killed run go on."""
        return self._start("resumed", self.resume_flags())

    def resume_flags(self) -> list[str]:
        """Return the flags of the resume; one rank takes no strategy of several."""
        flags = ["--resume", str(self.folder / "killed"), "--num_gpus", str(self.resume_on)]
        if self.resume_on == 1 and not self.exact:
            of_several = {"strategy": "default", "gradient_compression": "none"}
            given = _given(self.flags)
            flags += [f"--{name}={value}" for name, value in of_several.items() if name in given]
        return flags

    def _start(self, name: str, flags: list[str]) -> Child:
        variables = {"TMPDIR": str(self.folder)}
        return Child([SCRIPT, *flags], self.folder, name, variables=variables)


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return our own flags, and those for the training script."""
    parser = CommandParser(
        prog="python -m rl_dist.resume_check",
        usage="%(prog)s [--iterations K] [--num_gpus N] [--resume_on M] [training flags]",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    add = parser.add_argument
    what = "before the kill and after it (default: 5)"
    add("--iterations", type=int, default=5, metavar="K", help=what)
    what = "as in training (default: -1)"
    add("--num_gpus", "--num-gpus", type=int, default=-1, metavar="N", help=what)
    what = "ranks of the resumed run (default: as many as before)"
    add("--resume_on", "--resume-on", type=int, metavar="M", help=what)
    add("--keep", action="store_true", help="keep the run directories and print where they are")
    args, flags = parser.parse_known_args(argv)
    if not 1 <= args.iterations <= 10**6:
        raise UserError(f"--iterations must be 1..1000000, got {args.iterations}")
    return args, flags


def training_flags(flags: Sequence[str], iterations: int, num_gpus: int) -> list[str]:
    """Return the flags of a fresh run: those given, small sizes and the budget."""
    given = _given(flags)
    for name in OWN:
        if name in given:
            raise UserError(f"--{name} is chosen by resume_check: leave it out")
    defaults = SIZES | SAVED_TIME
    if given.get("env", TRADING) == TRADING:
        del defaults["eval_episodes"]
    steps = 2 * iterations * max(1, num_gpus) ** (given.get("scaling") == "weak")
    for name in ("num_envs", "num_steps"):
        value = str(given.get(name, defaults[name]))
        if not value.isdecimal() or int(value) < 1:
            raise UserError(f"--{name} {value}: resume_check needs a number from 1")
        steps *= int(value)
    added = [f"--{name}={value}" for name, value in defaults.items() if name not in given]
    budget = [f"--total_steps={steps}", f"--checkpoint_every={iterations}", "--keep_checkpoints=3"]
    return [*flags, *added, *budget]


def _given(flags: Sequence[str]) -> dict[str, str]:
    """Return flags by their name with underscores; a value may follow an equals sign."""
    found = {}
    for word, following in zip(flags, [*flags[1:], ""], strict=True):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            found[name.replace("-", "_")] = value if equals else following
    return found


def _finish(run: Child) -> None:
    """Wait for the end of a run, which must be a good one."""
    try:
        code = run.job.wait()
    finally:
        run.kill()
    if code:
        raise UserError(f"training ended with code {code}: {run.error()}", exit_code=1)


def run_and_kill(plan: ResumePlan, saved: Path) -> int:
    """Start a run and kill it after a checkpoint; return its last iteration."""
    run_dir = plan.folder / "killed"
    beyond = min(plan.iterations + 1, 2 * plan.iterations - 1)  # so that metrics must be cut back
    for _ in range(ATTEMPTS):
        shutil.rmtree(run_dir, ignore_errors=True)
        run = plan.start("killed")
        try:
            while run.job.poll() is None:
                if saved.exists() and len(RunDir(run_dir).records()) >= beyond:
                    break
                time.sleep(0.002)
        finally:
            run.kill()
        if run.job.returncode != -signal.SIGKILL:
            _finish(run)
        if latest_checkpoint(run_dir) == saved and not (run_dir / "summary.json").exists():
            return len(RunDir(run_dir).records())
    problem = "the run always ended before it could be killed"
    fix = f"give more than {plan.iterations} --iterations or longer ones (--num_steps)"
    raise UserError(f"{problem}: {fix}", exit_code=1)


def check(plan: ResumePlan) -> bool:
    """Make the three runs and print what came of them; return True if they are equal."""
    k = plan.iterations
    _say(f"straight: iterations 1..{2 * k} ...")
    _finish(plan.start("straight"))
    _say(f"killed: iterations 1..{k}, a checkpoint, then SIGKILL ...")
    saved = plan.folder / "killed" / CHECKPOINT_DIR / f"iteration_{k:08d}.pt"
    reached = run_and_kill(plan, saved)
    state = load_checkpoint(saved)
    if state.get("environments") is None:
        _say(
            "not bit-identical, and cannot be: this environment cannot be snapshotted (it has no "
            "get_state and set_state), so its episodes restart at resume; docs/own_environment.md, "
            "Exact resume, shows how it can take part"
        )
        return False
    _say(f"killed after iteration {reached}; resumed: iterations {k + 1}..{2 * k} ...")
    _finish(plan.resume())
    dtype = next(leaf.dtype for leaf in flatten(state["policy"]).values())
    return compare(plan, 0.0 if plan.exact else TOLERANCES[dtype])


def compare(plan: ResumePlan, tolerance: float) -> bool:
    """Print whether both runs are equal; tolerance 0: bit for bit."""
    runs = {"straight": plan.folder / "straight", "resumed": plan.folder / "killed"}
    left, right = (result_of(run_dir, with_ranks=plan.exact) for run_dir in runs.values())
    found = differences(left, right, tolerance)
    limit = "" if plan.exact else f" within {tolerance:g}"
    if found:
        more = f" ({len(found) - 1} more differ)" if len(found) > 1 else ""
        _say(f"different{limit}: {found[0]}{more}")
    elif plan.exact:
        _say(f"bit-identical: all {len(left)} tensors and numbers of checkpoint and metrics")
    else:
        _say(f"equal{limit}, on {plan.num_gpus} and then on {plan.resume_on} rank(s)")
    for name, run_dir in runs.items():
        _say(f"parameters SHA-256 {parameter_sha256(run_dir)} {name}")
    return not found


def _say(text: str) -> None:
    print(text, flush=True)


@explains_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    args, flags = parse(sys.argv[1:] if argv is None else argv)
    flags = training_flags(flags, args.iterations, args.num_gpus)
    leave_at_signals()
    plan = ResumePlan(
        iterations=args.iterations,
        num_gpus=args.num_gpus,
        resume_on=args.num_gpus if args.resume_on is None else args.resume_on,
        flags=flags,
        folder=Path(tempfile.mkdtemp(prefix="resume_check_")),
    )
    try:
        return 0 if check(plan) else 1
    finally:
        if args.keep:
            _say(f"kept: {plan.folder}")
        else:
            shutil.rmtree(plan.folder, ignore_errors=True)
