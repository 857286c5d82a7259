"""Buckets between the ranks of one host, in memory that all of them see. For tensors on the CPU.

Gradients are written where they are reduced. What is rare or odd (sparse gradients, text, a whole model) goes through
the same memory in pieces, by way of a staging buffer.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from torch import Tensor

from gradsync.events import Traffic
from gradsync.options import MIB
from gradsync.transport import label as labels
from gradsync.transport import progress_engine, summation
from gradsync.transport.base import Done, Request, RowWork, ShareWork, SparseWork, Work
from gradsync.transport.common_memory import CommonMemory
from gradsync.transport.host_memory import HostMemory
from gradsync.transport.label import UNLABELLED, Label
from gradsync.transport.process_group import ProcessGroupTransport, SparseDone
from gradsync.transport.row_sum import RowSum
from gradsync.transport.share_of_whole import ShareOfWhole
from gradsync.transport.share_sum import ShareSum
from gradsync.transport.shared_buffers import SharedBuffers
from gradsync.transport.slot_sum_in_order import SlotSumInOrder
from gradsync.transport.slot_sums import Reduction
from gradsync.transport.staging import Staging
from gradsync.transport.tensor_bytes import pack, unpack
from gradsync.transport.tree import Order
from gradsync.watch.watch import Watch

_LABEL = struct.Struct("=qq")


class SharedMemoryTransport:
    """The transport for a group whose ranks all share a host."""

    name = "shared_memory"
    reason = "all ranks share a host"
    usual_caps: tuple[int, ...] = (MIB, 4 * MIB)

    def __init__(self, group: ProcessGroupTransport, host: HostMemory) -> None:
        self.rank, self.size, self.limit = group.rank, group.size, group.limit
        self._group, self._host = group, host
        self._channel = channel = host.link.open_channel()  # replicas may train in threads of their own
        self._buffers, self._staging = SharedBuffers(host, channel), Staging(host, channel)

    @property
    def watch(self) -> Watch | None:
        return self._group.watch

    @property
    def progress(self) -> Callable[[], None]:
        return progress_engine.progress_throttled

    def starting(self) -> AbstractContextManager[None]:
        return self._group.starting(self._host.link)

    def check_alive(self) -> None:
        self._group.check_alive()

    def check_rendezvous(self) -> None:
        self._group.check_rendezvous()

    def allocate(self, requests: Sequence[Request]) -> list[Tensor]:
        return self._buffers.allocate(requests, otherwise=self._group.allocate)

    def is_shared(self, buffer: Tensor) -> bool:
        return self._buffers.find(buffer) is not None

    def allocate_once(self, nbytes: int) -> CommonMemory:
        return CommonMemory(self._host, nbytes, self._channel)

    def reduce(self, buffer: Tensor, scale: float, label: Label = UNLABELLED) -> Work:
        found = self._buffers.find(buffer)
        if found is None:
            return self._reduce_staged(buffer, scale, label)
        return Reduction(found.sums, scale, found.start, found.stop, label)

    def allocate_reused(self, requests: Sequence[Request]) -> list[Tensor]:
        return self._buffers.allocate_reused(requests, otherwise=self._group.allocate)

    def is_free(self, buffer: Tensor) -> bool:
        return self._buffers.is_free(buffer)

    def await_free(self, buffer: Tensor) -> None:
        self._buffers.await_free(buffer)

    def reduce_share(self, buffer: Tensor, data: int, scale: float, label: Label = UNLABELLED) -> ShareWork:
        found = self._buffers.find(buffer)
        if found is None:  # a type that has no sums in shared memory
            return ShareOfWhole(self._reduce_staged(buffer, scale, label), buffer, data, self.rank, self.size)
        return ShareSum(found.sums, scale, data, found.stop, label)

    def reduce_in_order(self, terms: Sequence[Tensor], order: Order, scale: float, label: Label = UNLABELLED) -> Work:
        found = [one for term in terms if (one := self._buffers.find(term)) is not None]
        if len(found) < len(terms):
            return self._reduce_staged_in_order(terms, order, scale, label)
        first = found[0]
        return SlotSumInOrder(first.sums, [one.sums.tensor for one in found], order, scale, first.stop, label)

    def _reduce_staged_in_order(self, terms: Sequence[Tensor], order: Order, scale: float, label: Label) -> Work:
        mine = terms[: order.counts[self.rank]]
        shown = self._staging.exchange(_LABEL.pack(label.value, label.mask) + b"".join(map(pack, mine)))
        differing = labels.differing(Label(*_LABEL.unpack_from(one)) for one in shown)
        if not differing & label.essential:
            buffer = terms[0]
            received = [unpack(one[_LABEL.size :], buffer.dtype, buffer.device).split(buffer.numel()) for one in shown]
            total = summation.sum_in_order([term for one in received for term in one], order, scale)
            buffer.copy_(total.view(buffer.shape))
        return Done(differing, Traffic(sum(term.nbytes for term in mine) * (self.size - 1)))

    def gather_tensors(self, mine: Tensor) -> list[Tensor]:
        return [unpack(one, mine.dtype, mine.device) for one in self._staging.exchange(pack(mine))]

    def _reduce_staged(self, buffer: Tensor, scale: float, label: Label) -> Work:
        """A buffer that is not in memory that all see: every rank adds up copies of all of them."""
        shown = self._staging.exchange(_LABEL.pack(label.value, label.mask) + pack(summation.scaled(buffer, scale)))
        differing = labels.differing(Label(*_LABEL.unpack_from(one)) for one in shown)
        if not differing & label.essential:
            terms = [unpack(one[_LABEL.size :], buffer.dtype, buffer.device) for one in shown]
            buffer.copy_(summation.sum_of_copies(terms).view(buffer.shape))
        return Done(differing, Traffic(buffer.nbytes * (self.size - 1)))

    @property
    def reduce_rows(self) -> Callable[[Tensor, Tensor, Tensor | None, float, Label], RowWork] | None:
        return self._reduce_rows

    def _reduce_rows(
        self, buffer: Tensor, matrix: Tensor, rows: Tensor | None, scale: float, label: Label = UNLABELLED
    ) -> RowWork:
        found = self._buffers.find(buffer)
        assert found is not None, "rows are for buffers that were allocated here"
        return RowSum(found.sums, scale, matrix, rows, label)

    def reduce_sparse(self, gradient: Tensor, scale: float) -> SparseWork:
        gradient = summation.scaled(gradient, scale).coalesce()
        indices, values = gradient.indices(), gradient.values()
        of_all_i = [unpack(one, indices.dtype, indices.device) for one in self._staging.exchange(pack(indices))]
        of_all_v = [unpack(one, values.dtype, values.device) for one in self._staging.exchange(pack(values))]
        return SparseDone(
            summation.sum_sparse(
                [one.view(len(indices), -1) for one in of_all_i],
                [one.view(-1, *values.shape[1:]) for one in of_all_v],
                gradient.shape,
            )
        )

    def broadcast(self, tensors: Sequence[Tensor], source: int) -> None:
        self._staging.broadcast(tensors, source)

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        layout = f"={len(numbers)}q"
        return [list(struct.unpack(layout, one)) for one in self._staging.exchange(struct.pack(layout, *numbers))]

    def gather_text(self, text: str) -> list[str]:
        return [one.decode() for one in self._staging.exchange(text.encode())]

    def exchange_via_store(self, topic: str, text: str, limit: float | None = None) -> list[str]:
        return self._group.exchange_via_store(topic, text, limit)
