"""Buckets between several hosts with several ranks each: as little as possible crosses the network.

Inside a host the ranks add up their slots in shared memory, each its own share. Then the sums cross: with equally
many ranks on all hosts, each rank all-reduces its share with the ranks of the same local rank elsewhere, through gloo;
else the first rank of each host does that with the whole bucket. Then each rank copies its share of the result to
all slots of its host.

Low precision crosses in float32, and is rounded once, when it is back. What crosses is in private memory then: as much
as the rank carries, as long as it is under way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from torch import Tensor

from gradsync.transport import label as labels
from gradsync.transport import progress_engine
from gradsync.transport.base import Request, ShareWork, SparseWork, Work
from gradsync.transport.bridge import Bridge
from gradsync.transport.common_memory import CommonMemory
from gradsync.transport.crossing import Crossing
from gradsync.transport.host_memory import HostMemory
from gradsync.transport.label import UNLABELLED, Label
from gradsync.transport.process_group import ProcessGroupTransport
from gradsync.transport.share_crossing import ShareCrossing
from gradsync.transport.share_of_whole import ShareOfWhole
from gradsync.transport.shared_buffers import SharedBuffers
from gradsync.transport.tree import Order
from gradsync.watch.watch import Watch


class HierarchicalTransport:
    """The transport for a group over several hosts of which at least one has several ranks."""

    name = "hierarchical"
    usual_caps = ProcessGroupTransport.usual_caps
    reduce_rows = None  # as over a process group: the other hosts can't see how many rows there are

    def __init__(self, group: ProcessGroupTransport, host: HostMemory, bridge: Bridge) -> None:
        self.rank, self.size, self.limit = group.rank, group.size, group.limit
        self.reason = f"{group.size} ranks are on {bridge.hosts} hosts"
        self._group, self._host, self._bridge = group, host, bridge
        # With room for what the ranks of this host say of a sum: it crosses with it.
        self._channel = host.link.open_channel()
        self._buffers = SharedBuffers(host, self._channel, labels.PLACES)

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
        return (
            self._group.reduce(buffer, scale, label) if found is None else Crossing(self._bridge, found, scale, label)
        )

    def allocate_reused(self, requests: Sequence[Request]) -> list[Tensor]:
        return self.allocate(requests)  # many are under way at a time, as crossing takes long

    def is_free(self, buffer: Tensor) -> bool:
        return self._buffers.is_free(buffer)

    def await_free(self, buffer: Tensor) -> None:
        self._buffers.await_free(buffer)

    def reduce_share(self, buffer: Tensor, data: int, scale: float, label: Label = UNLABELLED) -> ShareWork:
        found = self._buffers.find(buffer)
        if found is None:
            whole = self._group.reduce(buffer, scale, label)
            return ShareOfWhole(whole, buffer, data, self._host.local_rank, self._host.size)
        return ShareCrossing(self._bridge, found, data, scale, label)

    def reduce_in_order(self, terms: Sequence[Tensor], order: Order, scale: float, label: Label = UNLABELLED) -> Work:
        return self._group.reduce_in_order(terms, order, scale, label)

    # What is rare or odd goes the way of the process group: not all ranks see the same memory.

    def gather_tensors(self, mine: Tensor) -> list[Tensor]:
        return self._group.gather_tensors(mine)

    def reduce_sparse(self, gradient: Tensor, scale: float) -> SparseWork:
        return self._group.reduce_sparse(gradient, scale)

    def broadcast(self, tensors: Sequence[Tensor], source: int) -> None:
        self._group.broadcast(tensors, source)

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        return self._group.gather(numbers)

    def gather_text(self, text: str) -> list[str]:
        return self._group.gather_text(text)

    def exchange_via_store(self, topic: str, text: str, limit: float | None = None) -> list[str]:
        return self._group.exchange_via_store(topic, text, limit)
