"""Which process group the fronts use. Below them nobody reads the default group."""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from gradsync import arguments, launchers, log, restarts
from gradsync.errors import InvalidOptionError, NoProcessGroupError

_log = log.logger()


def resolve_group(group: dist.ProcessGroup | None, device_type: str) -> dist.ProcessGroup:
    """The given group, else the default one, made from the environment if there is none yet."""
    if group is not None:
        check_group("process_group", group)
        if not isinstance(group, dist.ProcessGroup) or group.rank() < 0:
            raise NoProcessGroupError(
                f"this process is not a member of the process group it was given ({group!r}). Every rank that "
                "replicates a module must belong to the group: pass the one that dist.new_group() returned here."
            )
        return group
    if not dist.is_available():
        raise NoProcessGroupError("this build of torch has no torch.distributed; install one that has.")
    if not dist.is_initialized():
        _make_default(device_type)
    default = dist.group.WORLD
    assert default is not None
    if device_type == "cpu":
        _tell_of_threads(default)
    return default


def _make_default(device_type: str) -> None:
    """As the environment describes it."""
    world = launchers.describe(os.environ)
    backend = backend_for(device_type)
    if world is not None and world.size == 1:
        alone, shows = dist.HashStore(), sys.excepthook  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=alone, rank=0, world_size=1)
        if launchers.is_elastic(os.environ):  # it is not known yet with whom, and as which rank
            vars(sys)["excepthook"] = shows
        else:
            _log.warning(
                "no launcher has started this process, or it has started only one: training in a world of one. %s",
                launchers.how_to_start_more(os.environ),
            )
    elif world is not None:
        host = f"[{world.host}]" if ":" in world.host else world.host
        where = f"tcp://{host}:{world.port}"
        dist.init_process_group(backend, init_method=where, rank=world.rank, world_size=world.size)
    elif restarts.prefix():
        store = restarts.apart(restarts.store_of_the_agent())
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    else:
        dist.init_process_group(backend)
    end_at_exit()


def backend_for(device_type: str) -> str:
    """gloo always, for the small things on the CPU; the device's own backend for its tensors."""
    if device_type == "cpu":
        return "gloo"
    return f"cpu:gloo,{device_type}:{dist.get_default_backend_for_device(device_type)}"


_told_of_threads = False


def _tell_of_threads(group: dist.ProcessGroup) -> None:
    """Once a process, by rank 0: the others would say the same."""
    global _told_of_threads
    if not _told_of_threads and group.rank() == 0:
        _told_of_threads = True
        if said := launchers.too_many_threads(os.environ, group.size(), torch.get_num_threads()):
            _log.warning("%s", said)


at_exit: Callable[[], None] | None = None
"""Ends the group that was made here."""


def end_at_exit() -> None:
    """Of the default group. Threads of gloo's that are left to the end of the process abort it now and then.

    Not after an exception: other ranks may wait inside a collective.
    """
    global at_exit
    if at_exit is not None:
        atexit.unregister(at_exit)
    made = weakref.ref(dist.group.WORLD)

    def end() -> None:
        if dist.is_initialized() and dist.group.WORLD is made() and not hasattr(sys, "last_value"):
            dist.destroy_process_group()

    at_exit = atexit.register(end)


def check_group(name: str, group: object) -> None:
    """Refuses what is no group. What `dist.new_group` gives on a rank that is not in the new one passes."""
    if group is not dist.GroupMember.NON_GROUP_MEMBER:
        cure = "Pass what dist.new_group([...]) returned, or dist.group.WORLD."
        arguments.instance(name, group, dist.ProcessGroup, cure)


def check_mesh(name: str, mesh: object) -> None:
    cure = 'Make one with torch.distributed.init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",)).'
    arguments.instance(name, mesh, DeviceMesh, cure)


def group_of_mesh(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The group of a mesh with one dimension."""
    if mesh.ndim != 1:
        raise InvalidOptionError(
            f"Only 1D device mesh is supported, but got {mesh}. Pass one of its dimensions, as mesh['name']."
        )
    return mesh.get_group(mesh_dim=0)


def replicated_dimensions(mesh: DeviceMesh | None, dims: Any) -> tuple[dist.ProcessGroup, DeviceMesh]:
    """The part of a mesh that torch's `DataParallelMeshDims` names, and its group: of several dimensions all ranks."""
    if mesh is None:
        raise InvalidOptionError("dp_mesh_dims names dimensions of a mesh: pass mesh too.")
    cure = 'Pass torch.distributed.fsdp.DataParallelMeshDims(replicate="dp").'
    arguments.policy("dp_mesh_dims", dims, "DataParallelMeshDims", ("shard", "replicate"), cure)
    if _names(dims.shard):
        raise InvalidOptionError(
            "replicate() with dp_mesh_dims requires replicate-only dims (no shard dims). "
            "Use fully_shard() for sharding."
        )
    names = _names(dims.replicate)
    for name in names:
        if name not in (mesh.mesh_dim_names or ()):
            raise InvalidOptionError(f"Mesh dim name {name!r} not found in mesh.mesh_dim_names {mesh.mesh_dim_names}")
    part = mesh[tuple(names)]
    return (part if len(names) == 1 else part._flatten("_".join(names))).get_group(), part


def _names(dims: Any) -> list[str]:
    if dims is None:
        return []
    return [dims] if isinstance(dims, str) else list(dims)
