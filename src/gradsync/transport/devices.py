"""Which rank computes on which accelerator: each needs one of its own, and has to have made it the current one.

The classic mistake is to leave both out: then all ranks of a host train on device 0, or small collectives go there.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from gradsync import _torch, log
from gradsync.errors import InvalidOptionError
from gradsync.transport.link import listed

_SHARE = ("gloo", "mpi", "ucc", "fake")  # backends for which ranks may have a device in common
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
_log = log.logger()


def describe(tensors: Iterable[Tensor]) -> tuple[str, ...]:
    """Names of the accelerators they are on, which are equal in two processes of a host if the devices are the same."""
    found = sorted({tensor.device for tensor in tensors if _torch.has_streams(tensor.device)}, key=str)
    return tuple(map(_name, found))


def _name(device: torch.device) -> str:
    module = torch.get_device_module(device)
    if hasattr(module, "get_device_properties"):
        uuid = getattr(module.get_device_properties(device), "uuid", None)
        if uuid is not None:
            return f"{device} ({uuid})"
    visible = [f"{name}={os.environ[name]}" for name in _VISIBLE if name in os.environ]
    return f"{device} ({', '.join(visible)})" if visible else str(device)


def check_own(group: dist.ProcessGroup, places: Sequence[str], devices: Sequence[Sequence[str]]) -> None:
    """By what all ranks have announced: no two on one host may have the same accelerator. All ranks raise alike."""
    users: dict[tuple[str, str], list[int]] = {}
    for rank, (place, names) in enumerate(zip(places, devices, strict=True)):
        for name in names:
            users.setdefault((place, name), []).append(rank)
    for (_, name), ranks in users.items():
        if len(ranks) < 2:
            continue
        text = (
            f"ranks {listed(ranks)} of one host have their parameters on the same device, {name}. Give each rank its "
            "own, before the model is made: local_rank = int(os.environ['LOCAL_RANK']); "
            "torch.accelerator.set_device_index(local_rank); model.to(torch.accelerator.current_accelerator())"
        )
        if _backend(group, name) not in _SHARE:
            raise InvalidOptionError(f"rank {group.rank()}: {text}.")
        if group.rank() == 0:
            _log.warning("%s. (They may share one over this backend, but each then waits for the other.)", text)
        return


def check_current(group: dist.ProcessGroup, tensors: Iterable[Tensor]) -> None:
    """Where the group has nothing for the CPU, small things travel by the current device: which must be theirs."""
    found = {tensor.device for tensor in tensors if _torch.has_streams(tensor.device)}
    if not found or any(device.type == "cpu" for device in _torch.device_types(group)):
        return
    current = torch.accelerator.current_device_index()
    if current not in {device.index for device in found}:
        device = min(found, key=str)
        raise InvalidOptionError(
            f"rank {group.rank()}: the parameters are on {device}, but the current device is {device.type}:{current}, "
            "which this group's small collectives would use, perhaps on all ranks of the host. Call "
            f"torch.accelerator.set_device_index({device.index}), or of int(os.environ['LOCAL_RANK']), first."
        )


def _backend(group: dist.ProcessGroup, name: str) -> str:
    kind = name.split(":")[0]
    for entry in str(dist.get_backend_config(group)).split(","):
        device, _, backend = entry.rpartition(":")
        if device in ("", kind):
            return backend
    return "fake"
