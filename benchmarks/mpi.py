"""A rival: gradients averaged by MPI, as one would write it by hand with mpi4py.

Flat buckets in the order in which gradients arrive, an `Iallreduce` in place for each as soon as it is complete, a
look at those under way from every hook (MPICH makes progress only inside its own calls), gradients as views. Or, in
their place, a blocking `Allreduce`: no overlap, but MPICH has better algorithms for it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.mpi_ranks import missing


@functools.cache
def library() -> Any:
    """mpi4py's MPI, started on first use."""
    if reason := missing():
        raise RuntimeError(reason)
    from mpi4py import MPI

    return MPI


def world(size: int) -> Any:
    """The communicator of all ranks. One that is too small means that its launcher was not the one that started us."""
    communicator = library().COMM_WORLD
    if communicator.Get_size() != size:
        raise RuntimeError(f"MPI sees {communicator.Get_size()} of {size} ranks: mpiexec and mpi4py's MPI differ")
    return communicator


def memory(tensor: Tensor) -> list[Any]:
    """The tensor's numbers as mpi4py takes them, without numpy."""
    kind = {torch.float32: library().FLOAT, torch.float64: library().DOUBLE}.get(tensor.dtype, library().BYTE)
    return [library().memory.fromaddress(tensor.data_ptr(), tensor.nbytes), kind]


class Bucket:
    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self.flat = torch.zeros(sum(p.numel() for p in parameters))
        pieces = self.flat.split([p.numel() for p in parameters])
        self.views = [piece.view_as(p) for piece, p in zip(pieces, parameters, strict=True)]
        self.memory = memory(self.flat)
        self.missing = len(parameters)

    def fill(self, scale: float) -> None:
        """One call for all gradients; then they are views."""
        torch._foreach_copy_(self.views, [p.grad for p in self.parameters])  # type: ignore[misc]
        self.flat.mul_(scale)
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.grad = view
        self.missing = len(self.parameters)


class MpiReducer:
    """Averages the gradients of a module whose parameters all get exactly one gradient in each backward."""

    def __init__(self, module: nn.Module, *, bucket_bytes: int, blocking: bool) -> None:
        self._blocking = blocking
        self._world = world(torch.distributed.get_world_size())
        self._scale = 1 / self._world.Get_size()
        self._bucket_bytes = bucket_bytes
        self._buffers = list(module.buffers())
        self._order: list[nn.Parameter] = []
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[nn.Parameter, Bucket] = {}
        self._launched = 0
        self._requests: list[Any] = []
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(self._arrived)

    def _arrived(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        if not self._buckets:
            self._order.append(parameter)
            return
        bucket = self._bucket_of[parameter]
        bucket.missing -= 1
        if not bucket.missing:
            self._launch()
        if self._requests:
            library().Request.Testall(self._requests)

    def _launch(self) -> None:
        """In the order of the plan on every rank: MPI matches collectives by their order."""
        while self._launched < len(self._buckets) and not self._buckets[self._launched].missing:
            bucket = self._buckets[self._launched]
            bucket.fill(self._scale)
            if self._blocking:
                self._world.Allreduce(library().IN_PLACE, bucket.memory)
            else:
                self._requests.append(self._world.Iallreduce(library().IN_PLACE, bucket.memory))
            self._launched += 1

    def finish(self) -> None:
        """After each backward. The first one plans, the others have most of it behind them by now."""
        if not self._buckets:
            self._plan()
            self._launch()
        if self._launched != len(self._buckets):
            raise RuntimeError("a parameter without a gradient: this reducer knows only models that use all of them")
        library().Request.Waitall(self._requests)
        self._requests.clear()
        self._launched = 0
        self._share_buffers()

    def _plan(self) -> None:
        self._buckets = [Bucket(group) for group in _groups(self._order, self._bucket_bytes)]
        self._bucket_of = {p: bucket for bucket in self._buckets for p in bucket.parameters}
        for bucket in self._buckets:
            bucket.missing = 0

    def _share_buffers(self) -> None:
        """All ranks take over those of rank 0, as with torch's DDP and with ours: one broadcast for each dtype."""
        for dtype in dict.fromkeys(buffer.dtype for buffer in self._buffers):
            buffers = [buffer for buffer in self._buffers if buffer.dtype == dtype]
            flat = torch.cat([buffer.view(-1) for buffer in buffers])
            self._world.Bcast(memory(flat), root=0)
            pieces = flat.split([buffer.numel() for buffer in buffers])
            torch._foreach_copy_(buffers, [piece.view_as(b) for piece, b in zip(pieces, buffers, strict=True)])


def _groups(order: Sequence[nn.Parameter], capacity: int) -> Iterator[list[nn.Parameter]]:
    group: list[nn.Parameter] = []
    for parameter in order:
        group.append(parameter)
        if sum(p.nbytes for p in group) >= capacity:
            yield group
            group = []
    if group:
        yield group
