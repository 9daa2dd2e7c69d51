"""Start the ranks: here, through torch's elastic launcher, or under torchrun.

Signals: the first SIGINT, SIGTERM, SIGUSR1 or SIGHUP reaches every rank once the launcher, the
process group or any one rank has it; ranks stop at their next iteration end, save and leave, and
`launch` returns 128 + the signal's number. A second SIGINT ends everything at once. Ranks of a
killed launcher get SIGTERM from the kernel and leave by themselves.

Errors in a rank end the job. A ValueError (UserError included) is a message for the user: printed
once as `error: ...`, exit code 2. Anything else: traceback and rank, once, exit code 1. The
traceback of either goes to the rank's log file. With `max_restarts`, all ranks start again after
anything but a message for the user or a stop signal; `fn` finds out by `restart_count()`.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rl_dist import events
from rl_dist.agent import Job, say
from rl_dist.flags import flag
from rl_dist.precision import PRECISIONS, check_precision, parameter_dtype
from rl_dist.rank import RankFunction, Report, run_guarded
from rl_dist.rendezvous import asked_for_address, check_address, check_variables
from rl_dist.strategy import COMPRESSIONS, MODES, StrategyConfig, check_compression, resolve_mode
from rl_dist.world import STOP_SIGNALS, UserError, close_any_world, stop_flag, threads_per_rank

__all__ = ["LaunchConfig", "ResolvedLaunch", "UserError", "launch", "resolve", "restart_count"]


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """On how many processes and on what hardware a job runs."""

    num_gpus: int = flag(
        -1, "ranks on this machine, one per GPU; -1 = all. Without a GPU: CPU processes, -1 is one", "ranks"
    )
    device: str = flag("auto", "where to train", choices=("auto", "cpu", "cuda"))
    strategy: str = flag("default", "how ranks train together; default: ddp on several, none on one", choices=MODES)
    precision: str = flag(
        "auto",
        "auto = fp32; tf32: fp32 rounded in products, GPUs; bf16, fp16: autocast, parameters stay fp32; fp64: proofs",
        choices=PRECISIONS,
    )
    gradient_compression: str = flag(
        "none", "bf16: gradients travel in half the bytes, for slow links; ddp only", choices=tuple(COMPRESSIONS)
    )
    max_restarts: int = flag(
        0, "start all ranks again, from the newest checkpoint, this often after one died or failed", "restarts"
    )
    on_event: str = flag(
        "",
        "shell command called when the run failed, restarted, skipped bad_steps, stopped or finished; "
        "gets JSON on stdin and RL_EVENT, RL_MESSAGE, RL_RUN_DIR, ...",
    )

    def __post_init__(self) -> None:
        if not 0 <= self.max_restarts <= 1_000_000:
            raise ValueError(f"max_restarts must be 0..1000000, got {self.max_restarts}")
        if self.num_gpus < -1:
            raise ValueError(f"num_gpus must be -1 (all) or at least 0, got {self.num_gpus}")
        for name, choices in (
            ("device", ("auto", "cpu", "cuda")),
            ("strategy", MODES),
            ("precision", PRECISIONS),
            ("gradient_compression", tuple(COMPRESSIONS)),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")

    @property
    def strategy_config(self) -> StrategyConfig:
        """What the flags say of the strategy."""
        return StrategyConfig(
            mode=self.strategy, precision=self.precision, gradient_compression=self.gradient_compression
        )

    @property
    def dtype(self) -> torch.dtype:
        """Type of the parameters."""
        return parameter_dtype(self.precision)


@dataclass(frozen=True, kw_only=True)
class ResolvedLaunch:
    """What `resolve` decided."""

    num_ranks: int
    device_type: str  # "cpu" or "cuda"
    message: str  # one line for the user, to be printed once


def resolve(config: LaunchConfig) -> ResolvedLaunch:
    """Decide the number of ranks and their device on this machine.

    Raises:
        ValueError: more ranks than GPUs, cuda without a GPU, strategy none with several ranks,
            num_gpus against what torchrun started, a precision or compression without effect here,
            or environment variables that contradict.
    """
    check_variables()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if config.device == "cuda" and gpus == 0:
        raise ValueError("device cuda: torch sees no CUDA GPU on this machine; use --device cpu")
    if config.device == "cuda" and config.num_gpus == 0:
        raise ValueError("num_gpus 0 contradicts device cuda; leave one of them out")
    on_gpu = config.device != "cpu" and gpus > 0 and config.num_gpus != 0
    if "RANK" in os.environ:
        num_ranks = _adopted_ranks(config.num_gpus)
    elif on_gpu:
        num_ranks = gpus if config.num_gpus == -1 else config.num_gpus
    else:
        num_ranks = max(1, config.num_gpus)
    if on_gpu and "RANK" not in os.environ and num_ranks > gpus:
        raise ValueError(f"num_gpus is {num_ranks}, but this machine has {gpus}; use at most {gpus}, or -1")
    check_compression(config.gradient_compression, resolve_mode(config.strategy, num_ranks))
    check_precision(config.precision, "cuda" if on_gpu else "cpu")
    message = _describe(num_ranks, on_gpu, gpus)
    if "RANK" in os.environ:
        if config.max_restarts:
            cure = "give --max_restarts 0 here and --max-restarts to torchrun"
            raise ValueError(f"max_restarts is {config.max_restarts}, but the ranks were started elsewhere: {cure}")
    elif num_ranks > 1 and (address := asked_for_address()):
        check_address(*address, hosted_here=True)
        message += f"; they meet at MASTER_ADDR {address[0]}, MASTER_PORT {address[1]}, an open port"
    return ResolvedLaunch(num_ranks=num_ranks, device_type="cuda" if on_gpu else "cpu", message=message)


def _adopted_ranks(num_gpus: int) -> int:
    """World size of torchrun's environment, which `--num_gpus` may repeat but not change."""
    size = int(os.environ["WORLD_SIZE"])
    if num_gpus not in (-1, size, int(os.environ.get("LOCAL_WORLD_SIZE", size))):
        raise ValueError(f"num_gpus is {num_gpus}, but the launcher started {size} ranks; leave it out")
    return size


def _describe(num_ranks: int, on_gpu: bool, gpus: int) -> str:
    ranks = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
    if on_gpu:
        return f"{ranks} over NCCL, one GPU each ({torch.cuda.get_device_name(0)})"
    why = "no CUDA GPU found" if gpus == 0 else "the CPU was asked for"
    processes = "1 CPU process" if num_ranks == 1 else f"{num_ranks} CPU processes over gloo"
    return f"{why}: {ranks} as {processes}, {threads_per_rank(num_ranks)} thread(s) each"


def restart_count() -> int:
    """How often the ranks were started again before this start."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def launch(
    fn: RankFunction,
    args: tuple[Any, ...],
    num_ranks: int,
    *,
    max_restarts: int = 0,
    run_dir: Path | None = None,
) -> int:
    """Run `fn(*args)` on every rank and return the job's exit code.

    Under torchrun (RANK is set), and with one rank that shall not restart, `fn` runs in this
    process. Otherwise `fn` must be importable and `args` picklable: each rank is a new process.

    Args:
        fn: what a rank does.
        args: for `fn`.
        num_ranks: processes.
        max_restarts: how often all ranks start again after one died or failed.
        run_dir: where `fn` keeps its checkpoints, to say where a restart goes on from.

    Returns:
        0, or the first non-zero code a rank returned; 1 a rank failed; 2 bad input; 128 + signal.
    """
    if "RANK" in os.environ or (num_ranks == 1 and not max_restarts):
        report, restarts = _run_here(fn, args), restart_count()
    else:
        job = Job(fn, args, num_ranks, max_restarts, run_dir)
        report, restarts = job.run(), job.restarts
    if report.message:
        say(report.message)
    _tell_the_user(report, restarts)
    return report.exit_code


def _run_here(fn: RankFunction, args: tuple[Any, ...]) -> Report:
    stop_flag.install()
    try:
        report = run_guarded(fn, args)
        close_any_world(failed=report.at_ns > 0)
    finally:
        stop_flag.uninstall()
    return report


def _tell_the_user(report: Report, restarts: int) -> None:
    """The one event of how a run ended; see `rl_dist.events`."""
    facts = {"exit_code": report.exit_code, "restarts": restarts}
    if report.exit_code == 0:
        events.notify("finished", "the run has finished", **facts)
    elif report.exit_code - 128 in STOP_SIGNALS:
        name = signal.Signals(report.exit_code - 128).name
        events.notify("stopped", report.summary or f"stopped by {name}, saved", **facts)
    else:
        events.notify("failed", report.summary or f"ended with code {report.exit_code}", rank=report.rank, **facts)
    pressed_twice = report.exit_code == 128 + signal.SIGINT and report.message
    events.close(2.0 if pressed_twice else events.LIMIT_S)
