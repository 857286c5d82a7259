"""Shared memory between the ranks of a host, for everybody."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from gradsync import _torch
from gradsync.errors import InvalidOptionError, NoProcessGroupError, SharedMemoryError
from gradsync.transport.host_memory import HostMemory
from gradsync.transport.membership import Membership
from gradsync.transport.rendezvous import rendezvous
from gradsync.transport.slot_reads import SlotReads
from gradsync.transport.slot_sums import Reduction, SlotSums
from gradsync.transport.summation import can_sum
from gradsync.transport.symmetric_tensor import SymmetricTensor


class SymmetricMemory:
    """Tensors on the CPU that all ranks of one host see, each in a slot of its own rank.

    All ranks of `group` (default: the default group) make it together, and call its methods, and those of what
    it allocates, in the same order. Memory is freed when the last tensor over it is, on each rank by itself.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        group = group if group is not None else dist.group.WORLD
        if group is None:
            raise NoProcessGroupError("call torch.distributed.init_process_group() first, or pass a group")
        if not _torch.knows(group):
            raise SharedMemoryError(
                "this process group was not made by torch.distributed: it has no store to meet through"
            )
        member = Membership(group)
        with rendezvous(member) as come:
            obstacles = [f"rank {rank}: {one.obstacle}" for rank, one in enumerate(come.announcements) if one.obstacle]
            if not obstacles and len(come.hosts) > 1:
                obstacles = [f"the ranks are on {len(come.hosts)} hosts: {come.hosts}; make a group for each"]
            memory, problem = (None, "; ".join(obstacles)) if obstacles else come.connect()
            if memory is None:
                raise SharedMemoryError(f"rank {member.rank}: no memory can be shared: {problem}")
            come.end_start_watch()
        self._host = memory
        self.rank, self.size = member.rank, member.size

    def allocate(self, shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> SharedTensor:
        """One tensor a rank, with zeros in it. All ranks ask for the same."""
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        (made,) = self._host.allocate([(math.prod(shape), dtype)])
        return SharedTensor(self._host, made, shape)

    def barrier(self) -> None:
        """Returns when all ranks are here; what they wrote before can be read."""
        self._host.barrier()


class SharedTensor:
    """A tensor of one shape for each rank, all of them visible to all."""

    def __init__(self, host: HostMemory, flat: SymmetricTensor, shape: tuple[int, ...]) -> None:
        self._flat = flat
        self._sums, self._reads = SlotSums(host, flat), SlotReads(host, flat)
        self.shape = shape
        self.mine = self.of(flat.local_rank)
        """This rank's own."""
        self._latest: Reduction | None = None  # the other ranks count on it, also if nobody here waits for it

    def of(self, rank: int) -> Tensor:
        """That of a rank, as it is now: it may change while it is read, unless the ranks agree otherwise."""
        return self._flat.slot(rank).view(self.shape)

    def reduce(self, scale: float = 1.0) -> Reduction:
        """Starts replacing every rank's tensor by the sum over the ranks of `scale` times theirs.

        Between this and the end of `.wait()` on what it returns, the tensors must be left alone. The result is
        bitwise the same on all ranks and in every run. Low precision is added up in float32.
        """
        if not can_sum(self._flat.dtype):
            raise TypeError(f"sums are for floating-point and complex tensors, not for {self._flat.dtype}")
        self._latest = Reduction(self._sums, scale)
        return self._latest

    def gather(self) -> list[Tensor]:
        """A copy of every rank's tensor, as it was when that rank called this."""
        return [one.view(self.shape) for one in self._reads.gather()]

    def broadcast(self, source: int) -> None:
        """Overwrites every rank's tensor with that of rank `source`."""
        if not 0 <= source < self._flat.size:
            raise InvalidOptionError(f"there is no rank {source}: the ranks are 0 to {self._flat.size - 1}")
        self._reads.broadcast(source)
