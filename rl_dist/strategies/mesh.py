"""Create device meshes whose groups have the same timeout as the world's group."""

from __future__ import annotations

from itertools import count

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from rl_dist.process_group.world import GROUP_TIMEOUT, World

_numbers = count()


def make_mesh(world: World, shape: tuple[int, int]) -> DeviceMesh:
    """Return a mesh over all ranks with one process group for each axis.

    Every rank must call this. The groups that torch creates for a mesh time out after 10 minutes
    with NCCL and 30 minutes with gloo, regardless of `--collective_timeout`; the groups created
    here leave the timeout to the watchdog. Each mesh gets new axis names: DTensor treats meshes
    that compare equal as the same mesh, and would use the closed groups of an earlier mesh.
    """
    ranks = torch.arange(world.size).reshape(shape)
    groups_of_rank: list[dist.ProcessGroup] = []
    for lines in (ranks.T, ranks):  # groups along the first axis, then along the second
        for members in lines.tolist():
            group = dist.new_group(members, timeout=GROUP_TIMEOUT)
            if world.rank in members:
                groups_of_rank.append(group)
    number = next(_numbers)
    names = f"rows_{number}", f"columns_{number}"
    return DeviceMesh.from_group(
        groups_of_rank, world.device.type, mesh=ranks, mesh_dim_names=names
    )
