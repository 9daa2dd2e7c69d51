"""Start the ranks: here, as new processes, or under torchrun.

Signals: the first SIGINT, SIGTERM, SIGUSR1 or SIGHUP reaches every rank once the launcher, the
process group or any one rank has it; ranks stop at their next iteration end, save and leave, and
`launch` returns 128 + the signal's number. A second SIGINT or SIGTERM ends everything at once. Ranks of a
killed launcher get SIGTERM from the kernel and leave by themselves.

Errors in a rank end the job. A ValueError (UserError included) is a message for the user: printed
once (under torchrun once on each machine) as `error: ...`, with its exit code, mostly 2. Anything else: traceback
and rank, once, exit code 1. The traceback of either goes to the rank's log file. A rank that ends without
a report, by a signal or `os._exit`, has failed, whatever its exit code. With
`max_restarts`, all ranks start again after anything but a message for the user or a stop signal;
`fn` finds out by `restart_count()`.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rl_dist.config import flag, recorded
from rl_dist.errors import UserError, tell_once
from rl_dist.hardware.addresses import (
    RESTART_COUNT,
    asked_for_address,
    check_address,
    check_counts,
    check_variables,
    elastic_count,
)
from rl_dist.launch.gpu_ids import check_adopted, check_gpu_ids, parse_gpu_ids
from rl_dist.launch.rank import RankFunction, Report, run_guarded
from rl_dist.launch.rank_group import RankGroup, say
from rl_dist.parallel.config import COMPRESSIONS, HYBRID_FORMS, MODES, StrategyConfig
from rl_dist.parallel.data_parallel import check_devices
from rl_dist.parallel.precision import PRECISIONS, parameter_dtype
from rl_dist.process_group.process_ends import STOP_SIGNALS
from rl_dist.process_group.world import close_any_world, ignored_limit, leave_world, stop_flag, threads_per_rank
from rl_dist.telemetry import events

__all__ = ["LaunchConfig", "ResolvedLaunch", "UserError", "launch", "resolve", "restart_count"]


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """On how many processes and on what hardware a job runs."""

    num_gpus: int = flag(
        -1, "ranks on this machine, one per GPU; -1 = all. Without a GPU: CPU processes, -1 is one", "ranks"
    )
    device: str = flag("auto", "where to train", choices=("auto", "cpu", "cuda"))
    gpu_ids: str = flag(
        "", "GPUs to use, one rank each, such as 0,2,3; ids count those in CUDA_VISIBLE_DEVICES, if that is set"
    )
    strategy: str = flag(
        "default",
        "how the GPUs train together; default: ddp on several ranks, none on one; dp: one process for several GPUs; "
        "auto: what a few gradient steps at the start show to be the fastest",
        choices=MODES,
    )
    hybrid_form: str = flag(
        "shard", "what strategy hybrid does; pipeline: two stages on pairs of ranks", choices=HYBRID_FORMS
    )
    shard_size: int = flag(
        0, "ranks that share one copy of gradients and Adam's state in strategy hybrid; 0 = all of a machine", "ranks"
    )
    fallback: bool = flag(
        False, "if the strategy cannot be set up here, step down (hybrid, ddp, dp, none) and say so, instead of ending"
    )
    precision: str = flag(
        "auto",
        "auto = fp32; tf32: fp32 rounded in products, GPUs; bf16, fp16: autocast, parameters stay fp32; fp64: proofs",
        choices=PRECISIONS,
    )
    gradient_compression: str = flag(
        "none", "bf16: gradients travel in half the bytes, for slow links; ddp only", choices=tuple(COMPRESSIONS)
    )
    cudnn_autotune: bool = flag(
        False, "cuDNN times its algorithms for convolutions and keeps the fastest; GPUs, sizes that stay the same"
    )
    max_restarts: int = flag(
        0, "start all ranks again, from the newest checkpoint, this often after one died or failed", "restarts"
    )
    on_event: str = flag(
        "",
        "shell command called when the run failed, restarted, skipped bad_steps, stopped or finished; "
        "gets JSON on stdin and RL_EVENT, RL_MESSAGE, RL_RUN_DIR, ...; not stored: give it again to --resume",
        stored=False,
    )

    chosen_strategy: str = recorded("")  # what auto or fallback came to; "": nothing yet
    chosen_on: str = recorded("")  # the ranks and the device on which it did

    def __post_init__(self) -> None:
        if parse_gpu_ids(self.gpu_ids) and (self.device == "cpu" or self.num_gpus == 0):
            other = "device cpu" if self.device == "cpu" else "num_gpus 0"
            raise ValueError(f"gpu_ids {self.gpu_ids} contradicts {other}: leave one of them out")
        if self.chosen_strategy not in ("", *MODES):
            raise ValueError(f"chosen_strategy must be one of {', '.join(MODES)}, got {self.chosen_strategy!r}")
        if not 0 <= self.max_restarts <= 1_000_000:
            raise ValueError(f"max_restarts must be 0..1000000, got {self.max_restarts}")
        if self.shard_size < 0:
            raise ValueError(f"shard_size must be at least 0, got {self.shard_size}: 0 is all ranks of a machine")
        if self.num_gpus < -1:
            raise ValueError(f"num_gpus must be -1 (all) or at least 0, got {self.num_gpus}")
        for name, choices in (
            ("device", ("auto", "cpu", "cuda")),
            ("strategy", MODES),
            ("hybrid_form", HYBRID_FORMS),
            ("precision", PRECISIONS),
            ("gradient_compression", tuple(COMPRESSIONS)),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        if self.hybrid_form == "pipeline" and self.shard_size:
            cure = "use --hybrid_form shard, or --shard_size 0"
            raise ValueError(f"shard_size {self.shard_size} does nothing with hybrid_form pipeline: {cure}")

    def check_hybrid(self) -> None:
        """Refuse flags of strategy hybrid beside another one.

        Not when the flags are read: a run to resume may bring the strategy.

        Raises:
            ValueError: names the flag and the cure.
        """
        if self.shard_size and self.strategy not in ("hybrid", "auto"):
            raise ValueError(
                f"shard_size {self.shard_size} does nothing with strategy {self.strategy}: "
                "use --strategy hybrid, or --shard_size 0"
            )
        if self.hybrid_form == "pipeline" and self.strategy != "hybrid":
            raise ValueError(f"hybrid_form pipeline needs strategy hybrid, got {self.strategy}: add --strategy hybrid")

    @property
    def strategy_config(self) -> StrategyConfig:
        """What the flags say of the strategy, and what came of auto and fallback."""
        return StrategyConfig(
            mode=self.chosen_strategy or self.strategy,
            shard_size=self.shard_size,
            hybrid_form=self.hybrid_form,
            precision=self.precision,
            gradient_compression=self.gradient_compression,
            cudnn_autotune=self.cudnn_autotune,
        )

    def by_default(self) -> LaunchConfig:
        """The same with the default strategy and without the flags of others."""
        others = {"hybrid_form": "shard", "shard_size": 0, "fallback": False, "gradient_compression": "none"}
        return replace(self, strategy="default", **others)  # type: ignore[arg-type]

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
    gpu_ids: tuple[int, ...] = ()  # of this machine's ranks, or of the one process of dp; (): rank i takes number i

    @property
    def place(self) -> str:
        """The ranks and their device in words."""
        return f"{_count(self.num_ranks, 'rank')} on {self.device_type}"


def resolve(config: LaunchConfig) -> ResolvedLaunch:
    """Decide the number of ranks and their device on this machine.

    Raises:
        ValueError: more ranks than GPUs, cuda without a GPU, a strategy that cannot be here, GPUs that are not there,
            flags without effect here, num_gpus against what torchrun started, or environment variables that clash.
    """
    check_variables()
    config.check_hybrid()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if config.device == "cuda" and gpus == 0:
        raise ValueError("device cuda: torch sees no CUDA GPU on this machine; use --device cpu")
    if config.device == "cuda" and config.num_gpus == 0:
        raise ValueError("num_gpus 0 contradicts device cuda; leave one of them out")
    on_gpu = config.device != "cpu" and gpus > 0 and config.num_gpus != 0
    mode, gpu_ids = config.strategy_config.mode, parse_gpu_ids(config.gpu_ids)
    check_gpu_ids(gpu_ids, config.num_gpus, gpus)
    if "RANK" in os.environ:
        num_ranks = _adopted_ranks(config.num_gpus)
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
        check_adopted(gpu_ids, local_ranks, several_each=mode in ("dp", "auto"))
    elif on_gpu:
        num_ranks = len(gpu_ids) or (gpus if config.num_gpus == -1 else config.num_gpus)
    else:
        num_ranks = max(1, config.num_gpus)
    if on_gpu and "RANK" not in os.environ and num_ranks > gpus:
        raise ValueError(f"num_gpus is {num_ranks}, but this machine has {gpus}; use at most {gpus}, or -1")
    if mode == "dp":
        num_ranks, gpu_ids = _one_process(num_ranks, gpu_ids, gpus, on_gpu)
    config.strategy_config.resolve(num_ranks)
    message = _describe(num_ranks, on_gpu, gpus, gpu_ids)
    config.strategy_config.check_device("cuda" if on_gpu else "cpu")
    if "RANK" in os.environ:
        if config.max_restarts:
            cure = "give --max_restarts 0 here and --max-restarts to torchrun"
            raise ValueError(f"max_restarts is {config.max_restarts}, but the ranks were started elsewhere: {cure}")
    elif num_ranks > 1 and (address := asked_for_address()):
        check_address(*address, hosted_here=True)
        message += f"; they meet at MASTER_ADDR {address[0]}, MASTER_PORT {address[1]}, an open port"
    device_type = "cuda" if on_gpu else "cpu"
    return ResolvedLaunch(num_ranks=num_ranks, device_type=device_type, message=message, gpu_ids=gpu_ids)


def _one_process(num_ranks: int, gpu_ids: tuple[int, ...], gpus: int, on_gpu: bool) -> tuple[int, tuple[int, ...]]:
    """The single rank of strategy dp, and the GPUs that it takes: as many as there would be ranks.

    A process that torchrun started takes all GPUs, unless gpu_ids names some.
    """
    adopted = "RANK" in os.environ
    ids = gpu_ids or tuple(range(gpus if adopted else num_ranks))
    num_ranks = num_ranks if adopted else 1
    check_devices("cuda" if on_gpu else "cpu", len(ids), num_ranks)
    return num_ranks, ids


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + "s" * (number > 1)


def _adopted_ranks(num_gpus: int) -> int:
    """World size of torchrun's environment, which `--num_gpus` may repeat but not change."""
    size = int(os.environ["WORLD_SIZE"])
    if num_gpus not in (-1, size, int(os.environ.get("LOCAL_WORLD_SIZE", size))):
        raise ValueError(f"num_gpus is {num_gpus}, but the launcher started {size} ranks; leave it out")
    return size


def _describe(num_ranks: int, on_gpu: bool, gpus: int, gpu_ids: tuple[int, ...]) -> str:
    ranks = _count(num_ranks, "rank")
    if on_gpu:
        name = torch.cuda.get_device_name(gpu_ids[0] if gpu_ids else 0)
        numbers = f"GPU {', '.join(map(str, gpu_ids))}: " if gpu_ids else ""
        if num_ranks < len(gpu_ids):
            return f"{ranks}, one process for {len(gpu_ids)} GPUs ({numbers}{name})"
        return f"{ranks} over NCCL, one GPU each ({numbers}{name})"
    why = "no CUDA GPU found" if gpus == 0 else "the CPU was asked for"
    processes = "1 CPU process" if num_ranks == 1 else f"{num_ranks} CPU processes over gloo"
    message = f"{why}: {ranks} as {processes}, {threads_per_rank(num_ranks)} thread(s) each"
    ignored = f"; OMP_NUM_THREADS is {ignored_limit()!r}, no number of threads, and is ignored"
    return message + ignored * bool(ignored_limit())


def restart_count() -> int:
    """How often the ranks were started again before this start."""
    return elastic_count(RESTART_COUNT)


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

    Raises:
        ValueError: torchrun's variables are no counts.
    """
    check_counts()
    if "RANK" in os.environ or (num_ranks == 1 and not max_restarts):
        report, restarts = _run_here(fn, args), restart_count()
    else:
        group = RankGroup(fn, args, num_ranks, max_restarts, run_dir)
        report, restarts = group.run(), group.restarts
    if report.message:
        (say if "\n" in report.message else tell_once)(report.message)  # several lines: a traceback of this rank
    _tell_the_user(report, restarts)
    if report.failed and leave_world():
        atexit.register(_exit_without_teardown, report.exit_code or 1)
    return report.exit_code


def _run_here(fn: RankFunction, args: tuple[Any, ...]) -> Report:
    stop_flag.install()
    try:
        report = run_guarded(fn, args)
        if not report.failed:
            close_any_world()
        return report
    finally:
        stop_flag.uninstall()
        stop_flag.signum = 0


def _exit_without_teardown(code: int) -> None:
    """End a failed rank: closing its process group could wait for ranks that are inside a collective."""
    sys.stdout.flush()
    sys.stderr.flush()
    logging.shutdown()
    os._exit(code)


def _tell_the_user(report: Report, restarts: int) -> None:
    """The one event of how a run ended; see `rl_dist.telemetry.events`."""
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
