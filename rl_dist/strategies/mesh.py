"""A device mesh whose groups wait as long as the world's group does."""

from __future__ import annotations

from itertools import count

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from rl_dist.process_group.world import GROUP_TIMEOUT, World, destroy_group

_numbers = count()


def make_mesh(world: World, shape: tuple[int, int]) -> DeviceMesh:
    """Return a mesh over all ranks; ask for its groups by axis; all ranks call.

    torch's own groups of a mesh give up after 10 minutes over NCCL and 30 over gloo, whatever
    `--collective_timeout` says: here only the watchdog decides. The names of its axes are its own:
    meshes that compare equal are one to DTensor, which gives the results of its operators a mesh
    that it keeps, and the groups of an earlier one may be closed.
    """
    ranks = torch.arange(world.size).reshape(shape)
    own: list[dist.ProcessGroup] = []
    for lines in (ranks.T, ranks):  # along the first axis, then along the second
        for members in lines.tolist():
            group = dist.new_group(members, timeout=GROUP_TIMEOUT)
            if world.rank in members:
                own.append(group)
    number = next(_numbers)
    names = f"rows_{number}", f"columns_{number}"
    return DeviceMesh.from_group(own, world.device.type, mesh=ranks, mesh_dim_names=names)


def close_mesh(mesh: DeviceMesh) -> None:
    """Close the mesh's groups, unless they went with the world; all their ranks call."""
    if dist.is_initialized():
        for group in mesh.get_all_groups():
            destroy_group(group)
