"""Who is measured: the same module kept in step by different means, or not at all."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import gradsync
from benchmarks import mpi

Family = Literal["none", "torch", "mpi", "gradsync"]
MIB = 1024 * 1024


def nothing() -> None:
    """What most contenders' users have to do between `backward` and `step`."""


@dataclass(frozen=True)
class Prepared:
    """A module ready to train. `finish` is called after each backward."""

    module: nn.Module
    finish: Callable[[], None] = nothing


@dataclass(frozen=True)
class Contender:
    """`wrap` may raise anything: then the contender is absent, and what it raised is the reason."""

    key: str
    name: str
    family: Family
    wrap: Callable[[nn.Module], Prepared]


# --- torch's ---------------------------------------------------------------------------------------------


def _torch(module: nn.Module, **options: Any) -> Prepared:
    return Prepared(TorchDDP(module, **options))


def _torch_best(module: nn.Module, **options: Any) -> Prepared:
    """With all that makes it faster; `batched_grad_copy` only where this torch has it."""
    known = inspect.signature(TorchDDP).parameters
    batched = {"batched_grad_copy": True} if "batched_grad_copy" in known else {}
    return _torch(module, gradient_as_bucket_view=True, static_graph=True, **batched, **options)


def _torch_replicate(module: nn.Module) -> Prepared:
    """By name, as it is private to torch and may be gone in the next one: then this contender is absent."""
    theirs = importlib.import_module("torch.distributed._composable.replicate")
    return Prepared(theirs.replicate(module))


def _torch_replicate_fsdp(module: nn.Module) -> Prepared:
    """Layer by layer and then the rest, as its users are told to: what is one call is one all-reduce."""
    theirs = importlib.import_module("torch.distributed._composable.replicate_with_fsdp")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))  # without one it looks for an accelerator
    for layer in layers(module):
        theirs.replicate(layer, mesh=mesh)
    return Prepared(theirs.replicate(module, mesh=mesh))


def layers(module: nn.Module) -> Iterator[nn.Module]:
    """The members of the module's lists, or of the module where it is one itself."""
    lists = [module, *module.children()]
    for members in (one for one in lists if isinstance(one, nn.Sequential | nn.ModuleList)):
        yield from (member for member in members if any(True for _ in member.parameters()))
        if members is module:
            return


# --- ours, and MPI ---------------------------------------------------------------------------------------


def _gradsync(module: nn.Module, **options: Any) -> Prepared:
    return Prepared(gradsync.replicate(module, **options))


def _wrapper(module: nn.Module) -> Prepared:
    """As who changes one line has it: with torch's defaults."""
    return Prepared(gradsync.DistributedDataParallel(module))


def _mpi(module: nn.Module, *, bucket_mb: int, blocking: bool = False) -> Prepared:
    reducer = mpi.MpiReducer(module, bucket_bytes=bucket_mb * MIB, blocking=blocking)
    return Prepared(module, reducer.finish)


PLAIN = Contender("plain", "no communication", "none", Prepared)
TORCH = Contender("torch", "torch DDP", "torch", _torch)
TORCH_VIEWS = Contender(
    "torch_views", "torch DDP, bucket views", "torch", partial(_torch, gradient_as_bucket_view=True)
)
TORCH_BEST = Contender("torch_best", "torch DDP at its best", "torch", _torch_best)
TORCH_SIZES = tuple(
    Contender(f"torch_best_{size}", f"torch DDP best, {size} MB", "torch", partial(_torch_best, bucket_cap_mb=size))
    for size in (5, 25, 100)
)
TORCH_REPLICATES = (
    Contender("torch_replicate", "torch replicate", "torch", _torch_replicate),
    Contender("torch_replicate_fsdp", "torch replicate, by FSDP", "torch", _torch_replicate_fsdp),
)
MPI = (
    Contender("mpi_1", "MPI Iallreduce, 1 MB", "mpi", partial(_mpi, bucket_mb=1)),
    Contender("mpi_4", "MPI Iallreduce, 4 MB", "mpi", partial(_mpi, bucket_mb=4)),
    Contender("mpi_blocking", "MPI Allreduce, 1 MB", "mpi", partial(_mpi, bucket_mb=1, blocking=True)),
)
REPLICATE = Contender("replicate", "gradsync.replicate", "gradsync", _gradsync)
WRAPPER = Contender("wrapper", "gradsync DDP, defaults", "gradsync", _wrapper)
TRANSPORTS = tuple(
    Contender(key, f"gradsync, {key.replace('_', ' ')}", "gradsync", partial(_gradsync, transport=key))
    for key in ("shared_memory", "hierarchical", "process_group")
)

IN_ENGINE = (PLAIN, TORCH, TORCH_BEST, REPLICATE, WRAPPER)
IN_MEMORY = (PLAIN, TORCH, TORCH_VIEWS, *TRANSPORTS)
IN_STEP = (PLAIN, TORCH, *TORCH_SIZES, *TORCH_REPLICATES, *MPI, *TRANSPORTS, WRAPPER)


def contender(key: str) -> Contender:
    return next(c for c in (*IN_ENGINE, *IN_MEMORY, *IN_STEP) if c.key == key)
