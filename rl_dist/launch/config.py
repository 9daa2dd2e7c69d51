"""Decide on how many processes and devices a job runs."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Literal

import torch

from rl_dist.errors import UserError
from rl_dist.flags import Field, Text, configuration
from rl_dist.process_group.addresses import asked_for_address, check_address, check_variables
from rl_dist.process_group.world import ignored_limit, threads_per_rank
from rl_dist.strategies.config import (
    Compression,
    Hardware,
    HybridForm,
    Mode,
    StrategyConfig,
    check_strategy,
)
from rl_dist.strategies.precision import Precision, parameter_dtype


@configuration
class LaunchConfig:
    """On how many processes and on what hardware a job runs."""

    num_gpus: int = Field(-1, ge=-1, le=10**6)
    """Number of training processes (ranks): one per GPU, -1 = all, 0 = one on the CPU; on a CPU
    that many processes, -1 = one."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto: on the GPUs if there are any."""
    gpu_ids: Text = ""
    """GPUs to use, one rank each, such as 0,2,3; the ids count those in CUDA_VISIBLE_DEVICES, if
    that is set."""
    threads: int = Field(0, ge=0, le=1024)
    """Threads of each rank on the CPU; 0: 1 for small networks, else the rank's cores. Wins over
    OMP_NUM_THREADS, also under torchrun. A resumed run keeps its number, and with it its results
    to the bit."""
    strategy: Mode = "default"
    """How the ranks train together; default: ddp on several ranks, none on one; dp: one process
    for several GPUs; hybrid: see hybrid_form; auto: the fastest in a few gradient steps at the
    start."""
    hybrid_form: HybridForm = "shard"
    """What strategy hybrid does; shard: gradients and Adam's state are split over ranks; pipeline:
    the network is cut into two stages on pairs of ranks."""
    shard_size: int = Field(0, ge=0, le=10**6)
    """Ranks that share one copy of gradients and Adam's state in strategy hybrid; 0: all of a
    machine."""
    fallback: bool = False
    """If the strategy cannot be set up here, take a simpler one (ddp for hybrid, then none) and say
    so, instead of ending."""
    precision: Precision = "fp32"
    """tf32: fp32 with rounded products, on GPUs; bf16, fp16: autocast, the parameters stay fp32;
    fp64: for proofs; auto: bf16 if a CPU has units for it and a training's gradient steps are 1.1
    times as fast with it, else fp32."""
    gradient_compression: Compression = "none"
    """bf16: gradients travel in half the bytes, for slow links; strategy ddp only."""
    max_restarts: int = Field(0, ge=0, le=10**6)
    """Start all ranks again from the newest checkpoint after one died or failed, this often at
    most."""
    on_event: Text = Field("", exclude=True)
    """Shell command called when the run failed, restarted, skipped bad steps, stopped or finished;
    gets JSON on stdin and RL_EVENT, RL_MESSAGE, RL_RUN_DIR, ...; not stored: give it again to
    --resume."""

    # what auto or fallback came to; "": nothing yet
    chosen_strategy: Literal[Mode, ""] = ""
    chosen_on: Text = ""  # the ranks and the device on which it did

    def __post_init__(self) -> None:
        if parse_gpu_ids(self.gpu_ids) and (self.device == "cpu" or self.num_gpus == 0):
            other = "device cpu" if self.device == "cpu" else "num_gpus 0"
            raise ValueError(f"gpu_ids {self.gpu_ids} contradicts {other}: leave one of them out")

    @property
    def strategy_config(self) -> StrategyConfig:
        """What the flags say of the strategy, and what came of auto and fallback."""
        return StrategyConfig(
            mode=self.chosen_strategy or self.strategy,
            shard_size=self.shard_size,
            hybrid_form=self.hybrid_form,
            precision=self.precision,
            gradient_compression=self.gradient_compression,
        )

    def by_default(self) -> LaunchConfig:
        """The same with the default strategy and without the flags of others."""
        return replace(
            self,
            strategy="default",
            hybrid_form="shard",
            shard_size=0,
            fallback=False,
            gradient_compression="none",
        )

    @property
    def dtype(self) -> torch.dtype:
        """Type of the parameters."""
        return parameter_dtype(self.precision)


@dataclass(frozen=True, kw_only=True)
class ResolvedLaunch:
    """The ranks and devices that `resolve` decided on."""

    num_ranks: int
    device_type: str  # "cpu" or "cuda"
    message: str  # one line for the user, to be printed once
    # of this machine's ranks, or of the one process of dp; (): rank i takes number i
    gpu_ids: tuple[int, ...] = ()
    threads: int = 0  # of each rank

    @property
    def place(self) -> str:
        """The ranks and their device in words."""
        return f"{_count(self.num_ranks, 'rank')} on {self.device_type}"


def resolve(config: LaunchConfig) -> ResolvedLaunch:
    """Decide the number of ranks and their device on this machine."""
    check_variables()
    adopted = "RANK" in os.environ
    # the device
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if config.device == "cuda" and gpus == 0:
        raise ValueError("device cuda: torch sees no CUDA GPU on this machine; use --device cpu")
    if config.device == "cuda" and config.num_gpus == 0:
        raise ValueError("num_gpus 0 contradicts device cuda; leave one of them out")
    on_gpu = config.device != "cpu" and gpus > 0 and config.num_gpus != 0
    device_type = "cuda" if on_gpu else "cpu"
    # the ranks
    mode = config.strategy_config.mode
    gpu_ids = parse_gpu_ids(config.gpu_ids)
    check_gpu_ids(gpu_ids, config.num_gpus, gpus)
    if adopted:
        num_ranks = _adopted_ranks(config, gpu_ids)
    elif on_gpu:
        num_ranks = len(gpu_ids) or (gpus if config.num_gpus == -1 else config.num_gpus)
        if num_ranks > gpus:
            raise ValueError(
                f"num_gpus is {num_ranks}, but this machine has {gpus}; use at most {gpus}, or -1"
            )
    else:
        num_ranks = max(1, config.num_gpus)
    if mode == "dp":
        # one rank takes as many GPUs as there would be ranks; one of torchrun's takes all
        gpu_ids = gpu_ids or tuple(range(gpus if adopted else num_ranks))
        num_ranks = num_ranks if adopted else 1
    check_strategy(config.strategy_config, Hardware(num_ranks, device_type, len(gpu_ids)))
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks)) if adopted else num_ranks
    threads = config.threads or threads_per_rank(local_ranks)
    message = _describe(num_ranks, on_gpu, gpus, gpu_ids, threads)
    # where they meet
    if not adopted and num_ranks > 1 and (address := asked_for_address()):
        check_address(*address, hosted_here=True)
        message += (
            f"; they meet at MASTER_ADDR {address[0]}, MASTER_PORT {address[1]}, an open port"
        )
    return ResolvedLaunch(
        num_ranks=num_ranks,
        device_type=device_type,
        message=message,
        gpu_ids=gpu_ids,
        threads=threads,
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + "s" * (number > 1)


def _adopted_ranks(config: LaunchConfig, gpu_ids: tuple[int, ...]) -> int:
    """Return the world size of torchrun's environment; flags may repeat it only."""
    size = int(os.environ["WORLD_SIZE"])
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    if config.num_gpus not in (-1, size, local_size):
        raise ValueError(
            f"num_gpus is {config.num_gpus}, but the launcher started {size} ranks; leave it out"
        )
    if config.max_restarts:
        raise ValueError(
            f"max_restarts is {config.max_restarts}, but the ranks were started elsewhere: "
            "give --max_restarts 0 here and --max-restarts to torchrun"
        )
    several_each = config.strategy_config.mode in ("dp", "auto") and local_size == 1
    if gpu_ids and len(gpu_ids) != local_size and not several_each:
        raise ValueError(
            f"gpu_ids names {len(gpu_ids)} GPU(s), but the launcher started {local_size} rank(s) "
            "on this machine: name one for each"
        )
    return size


def _describe(
    num_ranks: int, on_gpu: bool, gpus: int, gpu_ids: tuple[int, ...], threads: int
) -> str:
    ranks = _count(num_ranks, "rank")
    if on_gpu:
        name = torch.cuda.get_device_name(gpu_ids[0] if gpu_ids else 0)
        numbers = f"GPU {', '.join(map(str, gpu_ids))}: " if gpu_ids else ""
        if num_ranks < len(gpu_ids):
            return f"{ranks}, one process for {len(gpu_ids)} GPUs ({numbers}{name})"
        return f"{ranks} over NCCL, one GPU each ({numbers}{name})"
    why = "no CUDA GPU found" if gpus == 0 else "the CPU was asked for"
    processes = "1 CPU process" if num_ranks == 1 else f"{num_ranks} CPU processes over gloo"
    words = f"{why}: {ranks} as {processes}, {threads} thread(s) each"
    if limit := ignored_limit():
        words += f"; OMP_NUM_THREADS is {limit!r}, no number of threads, and is ignored"
    return words


def parse_gpu_ids(text: str) -> tuple[int, ...]:
    """Read ids out of "0,2,3"; none out of ""."""
    words = [word.strip() for word in text.split(",")] if text.strip() else []
    if not all(word.isdecimal() for word in words):
        raise UserError(
            f"gpu_ids must be whole numbers with commas between, such as 0,2,3, got {text!r}"
        )
    ids = tuple(int(word) for word in words)
    twice = sorted({number for number in ids if ids.count(number) > 1})
    if twice:
        raise UserError(f"gpu_ids has {twice[0]} more than once in {text!r}: name each GPU once")
    return ids


def check_gpu_ids(ids: tuple[int, ...], num_gpus: int, visible: int) -> None:
    """Compare ids with the GPUs that torch sees and with the number asked for."""
    unknown = [number for number in ids if number >= visible]
    if unknown:
        limit = os.environ.get("CUDA_VISIBLE_DEVICES")
        counted = f" in CUDA_VISIBLE_DEVICES={limit}, whose entries are counted from 0"
        there = f"0..{visible - 1}" if visible else "no CUDA GPU"
        raise UserError(
            f"gpu_ids has {unknown[0]}, but torch sees {there}{counted if limit else ''}"
        )
    if ids and num_gpus not in (-1, len(ids)):
        raise UserError(
            f"gpu_ids names {len(ids)} GPU(s), but num_gpus is {num_gpus}: leave num_gpus out"
        )
