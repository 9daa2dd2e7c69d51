"""Prove that a run that is killed and resumed equals one that never was.

Run it as `python -m rl_dist.resume_check [--iterations K] [training flags]`: the real training
script trains 2K iterations straight; then again, but it is ended by SIGKILL between its checkpoint
at iteration K and its end, and resumed. Both runs have the same budget, and so the same schedule of
the learning rate.
"""

from __future__ import annotations

import argparse
import math
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from rl_dist.checkpoint.file import load_checkpoint
from rl_dist.checkpoint.folder import CHECKPOINT_DIR, latest_checkpoint
from rl_dist.errors import CommandParser, UserError, explains_errors
from rl_dist.launch.child_process import SCRIPT, errors_of, kill_group, start
from rl_dist.resume_check.comparison import differences, flatten, parameter_sha256, result_of
from rl_dist.telemetry.metrics import METRICS_FILE

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
exit codes: 0 bit-identical (--resume_on: equal within the tolerance), 1 different or failed, 2 bad
usage"""


class CheckFailedError(Exception):
    """The check could not be made, or training failed; the message is for the user."""


class _ResumeCheckParser(CommandParser):
    """Raises its errors."""

    def error(self, message: str) -> NoReturn:
        raise UserError(" ".join(message.split()))


@dataclass(frozen=True, kw_only=True)
class ResumePlan:
    """The runs to make."""

    script: Path
    iterations: int  # before the kill, and again after it
    num_gpus: int
    resume_on: int
    flags: list[str]  # for every fresh run
    folder: Path

    @property
    def exact(self) -> bool:
        """True if the resumed run has as many ranks as the killed one."""
        return self.num_gpus == self.resume_on

    def fresh(self, run_dir: Path) -> list[str]:
        """Return the command line of a run from the beginning."""
        where = ["--num_gpus", str(self.num_gpus), "--run_dir", str(run_dir)]
        return [str(self.script), *self.flags, *where]

    def resume(self, run_dir: Path) -> list[str]:
        """Return the command line of a run that goes on."""
        alone = self.resume_on == 1 and not self.exact
        of_several = {"strategy": "default", "gradient_compression": "none"} if alone else {}
        given = _given(self.flags)
        changed = [f"--{name}={value}" for name, value in of_several.items() if name in given]
        where = ["--resume", str(run_dir), "--num_gpus", str(self.resume_on)]
        return [str(self.script), *where, *changed]


# ---- the command line


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return our own flags, and those for the training script."""
    parser = _ResumeCheckParser(
        prog="python -m rl_dist.resume_check",
        usage="%(prog)s [--iterations K] [--num_gpus N] [--resume_on M] [training flags]",
        description=DESCRIPTION,
        epilog=EPILOG,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    what = "before the kill and after it (default: 5)"
    add("--iterations", type=int, default=5, metavar="K", help=what)
    what = "as in training (default: -1)"
    add("--num_gpus", "--num-gpus", type=int, default=-1, metavar="N", help=what)
    what = "ranks of the resumed run (default: as many as before)"
    add("--resume_on", "--resume-on", type=int, metavar="M", help=what)
    what = "difference allowed on another number of ranks (default: 1e-4, for fp64 1e-9)"
    add("--tolerance", type=float, metavar="X", help=what)
    what = "training script (default: train_distributed.py)"
    add("--script", type=Path, default=SCRIPT, metavar="FILE", help=what)
    add("--keep", action="store_true", help="keep the run directories and print where they are")
    args, flags = parser.parse_known_args(argv)
    if not 1 <= args.iterations <= 10**6:
        raise UserError(f"--iterations must be 1..1000000, got {args.iterations}")
    if args.tolerance is not None and (
        args.resume_on is None or not 0 <= args.tolerance < math.inf
    ):
        raise UserError(
            f"--tolerance {args.tolerance} must be a number from 0 and goes with --resume_on only"
        )
    if not args.script.is_file():
        raise UserError(f"--script {args.script}: no such file; name the training script")
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


# ---- the three runs


def _start(command: list[str], folder: Path, name: str) -> subprocess.Popen[bytes]:
    """Start a run in its own process group; its output goes to files, it ends when we do."""
    with (folder / f"{name}.out").open("wb") as out, (folder / f"{name}.err").open("wb") as err:
        return start(command, variables={"TMPDIR": str(folder)}, stdout=out, stderr=err)


def _require_success(job: subprocess.Popen[bytes], folder: Path, name: str) -> None:
    """Raise UserError if training refused its flags, CheckFailedError if it failed otherwise."""
    if job.returncode == 0:
        return
    lines = (folder / f"{name}.err").read_text(errors="replace").splitlines()
    errors = errors_of(lines)
    if job.returncode == 2 and errors:
        raise UserError(errors[-1])
    last = f"error: the {name} run ended with code {job.returncode}, see above"
    raise CheckFailedError("\n".join([*lines[-20:], last]))


def _run_to_end(what: str, command: list[str], folder: Path, name: str) -> None:
    """Run the training script to its end, and print how long it took."""
    _say(f"{what} ...")
    started_s = time.monotonic()
    job = _start(command, folder, name)
    try:
        job.wait()
    finally:
        kill_group(job)
    _require_success(job, folder, name)
    _say(f"  done in {time.monotonic() - started_s:.0f} s")


def run_and_kill(plan: ResumePlan, run_dir: Path) -> int:
    """Start a run and kill it after its checkpoint at `iterations`.

    Returns:
        The last iteration of which it had written metrics.

    Raises:
        CheckFailedError: it was always faster than the kill.
    """
    saved = run_dir / CHECKPOINT_DIR / f"iteration_{plan.iterations:08d}.pt"
    beyond = min(plan.iterations + 1, 2 * plan.iterations - 1)  # so that metrics must be cut back
    for _ in range(ATTEMPTS):
        shutil.rmtree(run_dir, ignore_errors=True)
        job = _start(plan.fresh(run_dir), plan.folder, "killed")
        try:
            while job.poll() is None and not (saved.exists() and _num_lines(run_dir) >= beyond):
                time.sleep(0.002)
        finally:
            kill_group(job)
        if job.returncode != -signal.SIGKILL:
            _require_success(job, plan.folder, "killed")
        if latest_checkpoint(run_dir) == saved and not (run_dir / "summary.json").exists():
            return _num_lines(run_dir)
    raise CheckFailedError(
        "error: the run always ended before it could be killed: "
        f"give more than {plan.iterations} --iterations or longer ones (--num_steps)"
    )


def _num_lines(run_dir: Path) -> int:
    path = run_dir / METRICS_FILE
    return path.read_bytes().count(b"\n") if path.exists() else 0


# ---- the check


def check(plan: ResumePlan, tolerance: float | None) -> bool:
    """Make the three runs and print the verdict; return True if they are equal."""
    folder = plan.folder
    straight = folder / "straight"
    killed = folder / "killed"
    k = plan.iterations
    _run_to_end(f"straight: iterations 1..{2 * k}", plan.fresh(straight), folder, "straight")
    _say(f"killed: iterations 1..{k}, a checkpoint, then SIGKILL ...")
    reached = run_and_kill(plan, killed)
    _say(f"  killed after iteration {reached}, goes on from the checkpoint of iteration {k}")
    state = load_checkpoint(killed / CHECKPOINT_DIR / f"iteration_{k:08d}.pt")
    if state.get("environments") is None:
        _without_snapshots(plan, killed)
        return False
    _run_to_end(f"resumed: iterations {k + 1}..{2 * k}", plan.resume(killed), folder, "resumed")
    if plan.exact:
        return _verdict(straight, killed)
    if tolerance is None:
        tolerance = TOLERANCES[next(leaf.dtype for leaf in flatten(state["policy"]).values())]
    return _verdict_within(straight, killed, tolerance, plan)


def _without_snapshots(plan: ResumePlan, killed: Path) -> None:
    """Print why nothing can be identical, and check the rest: two resumes are equal."""
    again = plan.folder / "again"
    shutil.copytree(killed, again)
    for run_dir in (killed, again):
        _run_to_end("resumed, once and again", plan.resume(run_dir), plan.folder, "resumed")
    found = differences(result_of(killed), result_of(again))
    _say(
        "not bit-identical, and cannot be: this environment cannot be snapshot (it has no get_state"
        " and set_state), so its episodes restart at resume; envs/vector/snapshots.py shows how it"
        " can take part"
    )
    same = f"are bit-identical (parameters SHA-256 {parameter_sha256(killed)})"
    _say("two resumes of the same checkpoint " + (f"differ, too: {found[0]}" if found else same))


def _verdict(straight: Path, resumed: Path) -> bool:
    left = result_of(straight)
    found = differences(left, result_of(resumed))
    hashes = [parameter_sha256(run_dir) for run_dir in (straight, resumed)]
    if not found and hashes[0] == hashes[1]:
        _say(f"bit-identical: all {len(left)} tensors and numbers of checkpoint and metrics")
        _say(f"parameters SHA-256 {hashes[0]}")
        return True
    _say(f"different: {_first_of(found) if found else 'parameters'}")
    _say_hashes(straight, resumed)
    return False


def _verdict_within(straight: Path, resumed: Path, tolerance: float, plan: ResumePlan) -> bool:
    left = result_of(straight, with_ranks=False)
    right = result_of(resumed, with_ranks=False)
    found = differences(left, right, tolerance)
    ranks = f"killed on {plan.num_gpus} rank(s) and resumed on {plan.resume_on}"
    if found:
        _say(f"different by more than {tolerance:g}, {ranks}: {_first_of(found)}")
        return False
    _say(
        f"equal within {tolerance:g}: {ranks}, sums are rounded in another order; not bit for bit: "
        f"{len(differences(left, right))} of {len(left)} tensors and numbers"
    )
    _say_hashes(straight, resumed)
    return True


def _first_of(found: Sequence[str]) -> str:
    return found[0] + (f" ({len(found) - 1} more differ)" if len(found) > 1 else "")


def _say_hashes(straight: Path, resumed: Path) -> None:
    _say(f"parameters SHA-256 straight {parameter_sha256(straight)}")
    _say(f"                   resumed {parameter_sha256(resumed)}")


def _say(text: str) -> None:
    print(text, flush=True)


def _leave(signum: int, frame: Any) -> NoReturn:
    raise SystemExit(128 + signum)  # through all `finally`: runs are ended, files removed


@explains_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    args, flags = parse(sys.argv[1:] if argv is None else argv)
    flags = training_flags(flags, args.iterations, args.num_gpus)
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, _leave)
    plan = ResumePlan(
        script=args.script,
        iterations=args.iterations,
        num_gpus=args.num_gpus,
        resume_on=args.num_gpus if args.resume_on is None else args.resume_on,
        flags=flags,
        folder=Path(tempfile.mkdtemp(prefix="resume_check_")),
    )
    try:
        return 0 if check(plan, args.tolerance) else 1
    except CheckFailedError as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        if args.keep:
            _say(f"kept: {plan.folder}")
        else:
            shutil.rmtree(plan.folder, ignore_errors=True)
