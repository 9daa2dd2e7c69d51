"""Open, use and leave the process group of all ranks."""

import atexit
import itertools
import os
import sys
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from rl_dist.errors import UserError, one_line, text_of
from rl_dist.machine import available_cores
from rl_dist.process_group.clock import Mark, between, mark
from rl_dist.process_group.join import (
    JOB_DIR_VARIABLE,
    check_interface,
    open_store,
    started_elsewhere,
)
from rl_dist.process_group.process_ends import StopFlag, leave_with_parent
from rl_dist.process_group.watchdog import (
    CONNECTION,
    STARTUP_TIMEOUT_S,
    RankStatus,
    Verdicts,
    Watchdog,
)

# Data is gathered in chunks of this size. Gloo copies received data in a thread. If a copy had more
# than 32,768 elements (ATen's grain size), this thread would create a second OpenMP team and keep
# it. Then libgomp would no longer spin between the parallel regions of the training, and iterations
# would take twice as long.
CHUNK_BYTES = 32_768
# The first chunk is shorter than the others, because most messages are short. The first bytes of a
# message contain its length.
FIRST_BYTES, LENGTH_BYTES = 4096, 8
GROUP_TIMEOUT = timedelta(days=1)  # never reached, because the watchdog ends a rank much earlier
_mesh_numbers = itertools.count()

stop_flag = StopFlag()  # only one, because signal handlers belong to the whole process
_left_groups: deque[object] = deque(maxlen=8)  # `destroy_group` frees their memory later
atexit.register(_left_groups.clear)


class CollectiveError(UserError):
    """Raised if a rank leaves during a collective call or the ranks' calls differ."""


def connection_broke(error: BaseException) -> bool:
    """Return True if the error shows that the connection to another rank is lost."""
    by_gloo = isinstance(error, RuntimeError) and "gloo" in text_of(error)
    return by_gloo or isinstance(error, CollectiveError | dist.DistError)


@dataclass
class World:
    """The open process group of all ranks, and this rank's position in it."""

    rank: int
    local_rank: int  # index among the ranks of this machine
    size: int
    device: torch.device
    backend: str  # "gloo" or "nccl"
    local_size: int  # number of ranks on this machine
    # begin and end of each wait in a collective call
    sync_waits: list[tuple[Mark, Mark]] = field(default_factory=list)
    # begin and end of each wait for the gradients of other ranks
    gradient_waits: list[tuple[Mark, Mark]] = field(default_factory=list)
    # what this rank is doing; the watchdogs of all ranks read it
    doing: RankStatus = field(default_factory=RankStatus)
    _gradients_ready: Mark | None = None

    @property
    def is_main_process(self) -> bool:
        """True on rank 0, which writes the files and prints for the user."""
        return self.rank == 0

    def set_phase(self, phase: str) -> None:
        """Begin a phase of the work, such as "collect" or "update"."""
        self.doing.phase = phase
        self.heartbeat()

    def heartbeat(self) -> None:
        """Record that this rank makes progress, so that other ranks wait for it."""
        self.doing.progress += 1

    @contextmanager
    def waiting(self, place: str) -> Iterator[None]:
        """Enclose a collective call; add its duration to `sync_seconds`.

        Args:
            place: name of the call in messages.
        """
        begun = mark(self.device)
        try:
            with self._in_collective(place):
                yield
        finally:
            self.sync_waits.append((begun, mark(self.device)))

    @contextmanager
    def reduction_context(self, place: str = "") -> Iterator[None]:
        """Enclose a backward pass; add the time after `gradients_ready` to `gradient_seconds`.

        Args:
            place: name of the backward pass in messages, if ranks exchange data before
                `gradients_ready`; otherwise "".
        """
        self._gradients_ready = None
        with self._in_collective(place):
            yield
        if self._gradients_ready is not None:
            self.gradient_waits.append((self._gradients_ready, mark(self.device)))

    def gradients_ready(self) -> None:
        """Record that this rank's gradients are ready and their reduction begins."""
        self._gradients_ready = mark(self.device)
        self._announce("gradient reduction")

    @property
    def sync_seconds(self) -> float:
        """Seconds spent in collective calls; to read this, the process waits for the GPU."""
        return sum(between(*marks) for marks in self.sync_waits)

    @property
    def gradient_seconds(self) -> float:
        """Seconds of waiting for gradients; to read this, the process waits for the GPU."""
        return sum(between(*marks) for marks in self.gradient_waits)

    def forget_waits(self) -> None:
        """Reset `sync_seconds` and `gradient_seconds` to 0."""
        self.sync_waits = []
        self.gradient_waits = []

    @contextmanager
    def _in_collective(self, place: str) -> Iterator[None]:
        """Announce a collective call; if the connection breaks, say in which call."""
        try:
            if place:
                self._announce(place)
            yield
        except RuntimeError as error:
            if not connection_broke(error):
                raise
            reason = one_line(error, named=False)
            raise CollectiveError(
                f"rank {self.rank}: the connection broke {self.doing.where}: {reason}", exit_code=1
            ) from error
        finally:
            self.doing.place = ""
            self.heartbeat()

    def _announce(self, place: str) -> None:
        """Record that this rank enters a collective call; check that all ranks enter the same one.

        If different calls met, gloo would abort, wait forever or mix up numbers.
        """
        self.doing.place = place
        self.doing.calls += 1
        if self.backend != "gloo" or self.size == 1:
            return
        checksum = zlib.crc32(f"{place} {self.doing.calls}".encode())
        # The maximum of -x is the negative minimum of x, so one reduction gives both extremes.
        extremes = torch.tensor([checksum, -checksum])
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
        highest, lowest = extremes.tolist()
        if highest == -lowest:
            return
        local = torch.frombuffer(bytearray(self.doing.where.encode()), dtype=torch.uint8)
        places = [bytes(text.numpy()).decode() for text in self.exchange_bytes(local)]
        listed = "; ".join(f"rank {rank} {where}" for rank, where in enumerate(places))
        raise CollectiveError(f"the ranks made different collective calls: {listed}", exit_code=1)

    def exchange_bytes(self, raw: Tensor) -> list[Tensor]:
        """Return the bytes that each rank passed, as CPU tensors in rank order."""
        data = torch.cat([torch.tensor([raw.numel()]).view(torch.uint8), raw])

        def gather(begin: int, end: int) -> Tensor:
            """Gather data[begin:end] of W ranks, padded with zeros: [W, end - begin]."""
            chunk = data[begin:end]
            chunk = nn.functional.pad(chunk, (0, end - begin - len(chunk))).to(self.device)
            gathered = [torch.empty_like(chunk) for _ in range(self.size)]
            dist.all_gather(gathered, chunk)
            return torch.stack(gathered).cpu()

        parts = [gather(0, FIRST_BYTES)]
        ends = [LENGTH_BYTES + int(row[:LENGTH_BYTES].view(torch.int64)) for row in parts[0]]
        begins = range(FIRST_BYTES, max(ends), CHUNK_BYTES)
        parts += [gather(begin, begin + CHUNK_BYTES) for begin in begins]
        rows = torch.cat(parts, dim=1)
        return [row[LENGTH_BYTES:end] for row, end in zip(rows, ends, strict=True)]


_leaving = ExitStack()  # calls with which `close_world` undoes `open_world`


def threads_per_rank(local_ranks: int) -> int:
    """Return the number of threads for each of `local_ranks` ranks on this machine.

    The variable OMP_NUM_THREADS sets an upper limit. It is ignored if another launcher, such as
    torchrun, started the ranks: torchrun sets OMP_NUM_THREADS to 1 by default.
    """
    share = max(1, available_cores() // local_ranks)
    limit = os.environ.get("OMP_NUM_THREADS", "")
    if not limit.isdecimal() or started_elsewhere():
        return share
    return max(1, min(share, int(limit)))


def open_world(
    device: str,
    timeout_s: float = 300.0,
    gpu_ids: Sequence[int] = (),
    threads: int = 0,
    startup_timeout_s: float = STARTUP_TIMEOUT_S,
    *,
    backend: str = "auto",
    watches_work: bool = False,
) -> World:
    """Join the group that environment variables describe, or open a group of 1 rank.

    Args:
        device: "cpu" or "cuda".
        timeout_s: longest wait for another rank that makes no progress.
        gpu_ids: GPUs for the ranks of this machine, in order. If empty, rank i uses GPU i, or the
            only GPU that the launcher lets the rank see.
        threads: number of threads of this rank; 0: `threads_per_rank` decides.
        startup_timeout_s: replaces `timeout_s` until the first phase begins.
        backend: "auto", "nccl" or "gloo"; see `resolve_backend`.
        watches_work: also end this rank if its own work makes no progress for `timeout_s`. If
            True, the work must call `heartbeat` regularly.

    Raises:
        UserError: there is no CUDA device for this rank.
        ValueError: the ranks cannot meet at MASTER_ADDR and MASTER_PORT, or gloo cannot use the
            interface in GLOO_SOCKET_IFNAME.
    """
    assert not dist.is_initialized(), "the process group is already open"
    rank = int(os.environ.get("RANK", 0))
    size = int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    if started_elsewhere():
        leave_with_parent(os.getppid())  # stop the training if torchrun is killed
    _leaving.callback(torch.set_num_threads, torch.get_num_threads())
    _leaving.callback(setattr, sys, "excepthook", sys.excepthook)  # torch will replace it
    torch.set_num_threads(threads or threads_per_rank(local_size))
    backend = resolve_backend(backend, device)
    torch_device = torch.device("cpu")
    if device == "cuda":
        torch_device = _own_gpu(local_rank, gpu_ids)
        torch.cuda.set_device(torch_device)
    store = open_store(rank, size, startup_timeout_s)
    world = World(rank, local_rank, size, torch_device, backend, local_size)
    _leaving.callback(destroy_group)
    if size > 1 or watches_work:
        verdicts = Verdicts(rank, size, timeout_s, startup_timeout_s, watches_work=watches_work)
        _leaving.callback(Watchdog(world.doing, store, verdicts).close)
    # Without LOCAL_WORLD_SIZE (as under srun and mpirun), ranks may be on several machines.
    if size == 1 or os.environ.get("LOCAL_WORLD_SIZE") == str(size):
        # Let the ranks communicate over loopback, unless the user has chosen another interface.
        for variable in {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"} - os.environ.keys():
            os.environ[variable] = "lo"
            # `close_world` unsets the variable, because later children may need other interfaces.
            _leaving.callback(os.environ.pop, variable, None)
    if backend == "gloo":
        check_interface()
    # All ranks have reached the store, but they may fail to connect to each other. In that case,
    # the watchdog ends this rank with a message that contains the value of `place`.
    world.doing.place = CONNECTION
    dist.init_process_group(
        backend,
        rank=rank,
        world_size=size,
        timeout=GROUP_TIMEOUT,
        store=store,
        device_id=torch_device if backend == "nccl" else None,
    )
    world.doing.place = ""
    if JOB_DIR_VARIABLE in os.environ:
        # If the launcher dies before this call, its ranks receive SIGKILL. If it dies later, they
        # receive SIGTERM instead, and can save a checkpoint.
        leave_with_parent(os.getppid())
    return world


def resolve_backend(backend: str, device: str) -> str:
    """Return the backend for a device after resolving "auto": nccl on GPUs, gloo on CPUs.

    Gloo also works on GPUs, but it copies all data through the memory of the host.
    """
    if backend == "auto":
        return "nccl" if device == "cuda" else "gloo"
    if backend == "nccl" and device == "cpu":
        raise UserError("backend nccl works only on GPUs, and this run is on the CPU: use gloo")
    return backend


def _own_gpu(local_rank: int, gpu_ids: Sequence[int]) -> torch.device:
    """Return the GPU of this rank, whose index on this machine is `local_rank`."""
    count = torch.cuda.device_count()
    gpu = gpu_ids[local_rank] if gpu_ids else local_rank
    # Some launchers let each rank see only 1 GPU, for example SLURM with --gpus-per-task.
    if count == 1 and not gpu_ids and "CUDA_VISIBLE_DEVICES" in os.environ:
        gpu = 0
    if gpu >= count:
        raise UserError(
            f"device cuda: rank {local_rank} of this machine needs GPU {gpu}, but torch sees "
            f"{count} GPU(s): start fewer ranks or use --device cpu"
        )
    return torch.device("cuda", gpu)


def close_world() -> None:
    """Leave the process group and undo `open_world`; a second call does nothing.

    If a process exits without leaving the group, gloo's threads can abort the process.
    """
    _leaving.close()


def destroy_group(group: dist.ProcessGroup | None = None) -> None:
    """Leave a process group, by default the global one, and free its memory later.

    Freeing the group immediately could cause a deadlock: it would hold Python's global lock while
    it waits for a thread of gloo, and that thread may need the lock to release a Python object.
    """
    if dist.is_initialized():
        _left_groups.append(group or dist.group.WORLD)
        dist.destroy_process_group(group)


def make_mesh(world: World, shape: tuple[int, int]) -> DeviceMesh:
    """Return a mesh over all ranks with one process group for each axis.

    Every rank must call this. If torch created the groups for the mesh, calls would time out after
    10 minutes with NCCL and 30 minutes with gloo, regardless of `--collective_timeout`. Therefore
    this function creates groups that leave the timeout to the watchdog. Each mesh has new axis
    names: DTensor treats equal meshes as the same mesh, and would otherwise use the closed groups
    of an earlier mesh.
    """
    ranks = torch.arange(world.size).reshape(shape)
    groups_of_rank: list[dist.ProcessGroup] = []
    for lines in (ranks.T, ranks):  # first the groups along axis 0, then those along axis 1
        for members in lines.tolist():
            group = dist.new_group(members, timeout=GROUP_TIMEOUT)
            if world.rank in members:
                groups_of_rank.append(group)
    number = next(_mesh_numbers)
    names = f"rows_{number}", f"columns_{number}"
    return DeviceMesh.from_group(
        groups_of_rank, world.device.type, mesh=ranks, mesh_dim_names=names
    )
