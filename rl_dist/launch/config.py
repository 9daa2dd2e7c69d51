"""Choose the number of processes of a job, their devices and their strategy."""

import os
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Literal

import torch

from rl_dist.errors import UserError, one_line
from rl_dist.flags import Field, Text, configuration
from rl_dist.launch.bench import time_reductions
from rl_dist.launch.child import ChildError
from rl_dist.machine import available_cores, get_gpu_info, nvidia_driver, torch_build
from rl_dist.process_group.join import check_interface, check_variables
from rl_dist.process_group.world import resolve_backend, threads_per_rank
from rl_dist.strategies.config import (
    Compression,
    HybridForm,
    Mode,
    StrategyConfig,
    check_strategy,
)
from rl_dist.strategies.precision import Precision, parameter_dtype

PROBE_BYTES = 4096  # size of the gradient that the ranks reduce to test a strategy


@configuration
class LaunchConfig:
    """Number of processes of a job, their hardware and their strategy."""

    num_gpus: int = Field(-1, ge=-1, le=10**6)
    """Number of training processes (ranks). On GPUs, each process uses one GPU; -1: all GPUs; 0: a
    single process on the CPU. On a machine without GPUs, -1 means a single process."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device for the training; auto: the GPUs if there are any, otherwise the CPU."""
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """Library with which ranks exchange data; auto: nccl on GPUs, gloo on CPUs. On GPUs, gloo
    copies all data through the memory of the host, but several ranks can share a GPU, for tests."""
    gpu_ids: Text = ""
    """GPUs to use, one for each rank, such as 0,2,3. If CUDA_VISIBLE_DEVICES is set, the ids are
    positions in that list."""
    threads: int = Field(0, ge=0, le=1024)
    """CPU threads of each rank; 0: 1 thread for small networks, else the rank's share of the cores.
    This flag overrides OMP_NUM_THREADS, also under torchrun. A resumed run uses the same number of
    threads as before, so that its results are equal bit for bit."""
    strategy: Mode = "default"
    """Strategy for training on several ranks; default: ddp on several ranks, none on one; dp: one
    process for several GPUs; hybrid: see hybrid_form; auto: the strategy whose gradient steps are
    fastest when training starts."""
    hybrid_form: HybridForm = "shard"
    """How strategy hybrid splits the work; shard: gradients and Adam's state are split over ranks;
    pipeline: the network is split into two stages, which run on pairs of ranks."""
    shard_size: int = Field(0, ge=0, le=10**6)
    """Number of ranks that share one copy of gradients and Adam's state in strategy hybrid; 0: all
    ranks of a machine."""
    fallback: bool = False
    """If the strategy does not work on this machine, print a note and use a simpler strategy (ddp
    instead of hybrid, then none) instead of exiting with an error."""
    precision: Precision = "fp32"
    """tf32: fp32, but GPUs round the inputs of matrix products; bf16, fp16: matrix products in this
    type, with fp32 parameters; fp64: for exact comparisons; auto: the first of fp32, tf32 (only on
    GPUs) and bf16 whose gradient steps take at most 1.1 times as long as the shortest ones."""
    gradient_compression: Compression = "none"
    """bf16: halve the bytes sent for gradients, for slow connections; only with strategy ddp."""
    max_restarts: int = Field(0, ge=0, le=10**6)
    """Largest number of restarts after a rank has died or failed. Each time, all ranks restart and
    continue from the newest checkpoint."""
    on_event: Text = Field("", exclude=True)
    """Shell command to run at each event: failed, restarted, bad_steps, stopped or finished. It
    receives JSON on stdin, and environment variables such as RL_EVENT, RL_MESSAGE and RL_RUN_DIR.
    The command is not stored: pass it again with --resume."""

    chosen_strategy: Literal[Mode, ""] = ""  # the strategy that auto or fallback selected
    # number of ranks and their device when the strategy was selected; see `ResolvedLaunch.place`
    chosen_on: Text = ""

    @property
    def strategy_config(self) -> StrategyConfig:
        """The strategy settings, with the strategy that auto or fallback selected."""
        return StrategyConfig(
            mode=self.chosen_strategy or self.strategy,
            shard_size=self.shard_size,
            hybrid_form=self.hybrid_form,
            precision=self.precision,
            gradient_compression=self.gradient_compression,
        )

    @property
    def dtype(self) -> torch.dtype:
        """The data type of the parameters."""
        return parameter_dtype(self.precision)


@dataclass(frozen=True, kw_only=True)
class ResolvedLaunch:
    """The ranks and devices that `resolve` chose."""

    num_ranks: int
    device_type: str  # "cpu" or "cuda"
    backend: str = "gloo"  # or "nccl"
    message: str  # one line for the user; print it once
    # GPUs of this machine's ranks, or of the single process of strategy dp; (): rank i uses GPU i
    gpu_ids: tuple[int, ...] = ()
    threads: int = 0  # threads per rank

    @property
    def place(self) -> str:
        """The number of ranks and their device, for messages and comparisons."""
        ranks = "rank" if self.num_ranks == 1 else "ranks"
        return f"{self.num_ranks} {ranks} on {self.device_type}"


def resolve(config: LaunchConfig) -> ResolvedLaunch:
    """Choose the number of ranks and their devices on this machine.

    Raises:
        ValueError: the flags or the environment variables do not fit this machine.
    """
    check_variables()
    ranks_exist = "RANK" in os.environ  # another launcher has already started the ranks
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if config.device == "cuda" and 0 in (gpus, config.num_gpus):
        raise ValueError(
            f"device cuda: torch sees {gpus} GPU(s), num_gpus is {config.num_gpus}: "
            "use --device cpu"
        )
    on_gpu = config.device != "cpu" and gpus > 0 and config.num_gpus != 0
    # the user has not chosen the CPU, but torch sees no GPU
    misses_gpus = config.device == "auto" and config.num_gpus != 0 and gpus == 0
    gpus_are_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if misses_gpus and not gpus_are_hidden and (driver := nvidia_driver()):
        raise ValueError(
            f"this machine has the NVIDIA driver {driver}, but torch {torch_build()} sees no GPU "
            f"({get_gpu_info().error}): install the build of torch for this driver "
            "(pytorch.org/get-started), start the container with GPUs, or use --device cpu"
        )
    device_type = "cuda" if on_gpu else "cpu"
    backend = resolve_backend(config.backend, device_type)
    if backend == "gloo":
        check_interface()
    gpu_ids = parse_gpu_ids(config.gpu_ids, gpus if on_gpu else 0)
    mode = config.strategy_config.mode
    # choose the number of ranks
    num_usable = len(gpu_ids) or gpus
    num_ranks = num_usable if on_gpu and config.num_gpus == -1 else max(1, config.num_gpus)
    if ranks_exist:
        if config.max_restarts:
            raise ValueError("max_restarts has no effect here: pass --max-restarts to torchrun")
        num_ranks = int(os.environ["WORLD_SIZE"])
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
    # gloo lets several ranks use the same GPU, NCCL does not
    shares_gpus = on_gpu and backend == "gloo" and mode != "dp" and local_ranks > num_usable
    if shares_gpus:
        gpu_ids = tuple(islice(cycle(gpu_ids or range(gpus)), local_ranks))
    allowed_numbers: Collection[int] = [config.num_gpus]
    if ranks_exist:
        allowed_numbers = {num_ranks, local_ranks}
    elif on_gpu and not shares_gpus:
        allowed_numbers = [num_usable] if gpu_ids else range(1, gpus + 1)
    if config.num_gpus not in (-1, *allowed_numbers):
        listed = " or ".join(map(str, allowed_numbers))
        raise ValueError(f"num_gpus is {config.num_gpus}, but can only be {listed}: omit it")
    may_use_several = mode in ("dp", "auto") and local_ranks == 1
    if ranks_exist and gpu_ids and len(gpu_ids) != local_ranks and not may_use_several:
        raise ValueError(
            f"gpu_ids names {len(gpu_ids)} GPU(s), but the launcher started {local_ranks} rank(s) "
            "on this machine: name one GPU for each rank"
        )
    if mode == "dp":
        # Strategy dp uses a single rank for several GPUs: num_gpus of them, or all under torchrun.
        gpu_ids = gpu_ids or tuple(range(gpus if ranks_exist else num_ranks))
        if not ranks_exist:
            num_ranks = local_ranks = 1
    check_strategy(config.strategy_config, num_ranks, device_type, len(gpu_ids))
    threads = config.threads or threads_per_rank(local_ranks)
    if on_gpu:
        message = f"{num_ranks} rank(s) on {torch.cuda.get_device_name(0)}"
        if shares_gpus:
            message += f", sharing {num_usable} GPU(s) over gloo"
    else:
        message = f"{num_ranks} CPU process(es), {threads} thread(s) each"
        if misses_gpus and config.num_gpus > 0 and not ranks_exist:
            message = f"no GPU: {message}, share {available_cores()} core(s)"
    return ResolvedLaunch(
        num_ranks=num_ranks,
        device_type=device_type,
        backend=backend,
        message=message,
        gpu_ids=gpu_ids,
        threads=threads,
    )


def parse_gpu_ids(text: str, num_visible: int) -> tuple[int, ...]:
    """Parse GPU ids such as "0,2,3"; each must be smaller than `num_visible`."""
    ids = text.replace(" ", "").split(",") if text else []
    are_visible = all(gpu_id.isdecimal() and int(gpu_id) < num_visible for gpu_id in ids)
    if not are_visible or len(set(ids)) < len(ids):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
        raise UserError(
            f"gpu_ids {text!r} must be different numbers separated by commas, such as 0,2,3, and "
            f"each below {num_visible}, the number of usable GPUs (CUDA_VISIBLE_DEVICES: {visible})"
        )
    return tuple(map(int, ids))


# ---- strategies chosen earlier, and fallbacks


def resolve_launch(config: LaunchConfig) -> tuple[LaunchConfig, ResolvedLaunch, str]:
    """Return a configuration that works on this machine, its ranks, and a note on a fallback.

    If a strategy was chosen earlier in this run, it is used again, unless the number of ranks or
    their device has changed. With --fallback, this function first starts the ranks briefly as a
    test. If the test fails, it tries simpler strategies: after "hybrid", first "ddp" and then
    "none"; after any other strategy, only "none". Strategy "none" uses a single rank.
    """
    if config.chosen_strategy:
        with suppress(ValueError):
            resolved = resolve(_with_mode(config, config.chosen_strategy))
            if resolved.place == config.chosen_on:
                return config, resolved, ""
        config = replace(config, chosen_strategy="", chosen_on="")
    problems = ""
    simpler: tuple[Mode, ...] = ("ddp", "none") if config.strategy == "hybrid" else ("none",)
    for mode in (config.strategy, *simpler):
        try:
            resolved = resolve(_with_mode(config, mode) if problems else config)
            if config.fallback and resolved.num_ranks > 1 and "RANK" not in os.environ:
                time_reductions(
                    resolved.num_ranks,
                    [PROBE_BYTES],
                    resolved.device_type,
                    resolved.gpu_ids,
                    resolved.backend,
                )
            break
        except (ValueError, ChildError) as error:
            if mode == "none" or not config.fallback:
                raise
            problems += f"{mode} does not work here ({one_line(error, named=False)}); "
    if not problems:
        return config, resolved, ""
    note = f"{problems}using strategy {mode} instead: {resolved.place}"
    chosen = replace(config, chosen_strategy=mode, chosen_on=resolved.place)
    return replace(chosen, gradient_compression="none"), resolved, note


def _with_mode(config: LaunchConfig, mode: Mode) -> LaunchConfig:
    """Return the configuration with strategy `mode`; mode "none" uses one rank."""
    config = replace(config, strategy=mode, chosen_strategy="", gradient_compression="none")
    if mode != "none" or "RANK" in os.environ:
        return config
    num_gpus = 1 if config.num_gpus else 0
    return replace(config, num_gpus=num_gpus, gpu_ids=config.gpu_ids.split(",")[0])
