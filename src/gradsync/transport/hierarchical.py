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
from typing import Any

import torch
from torch import Tensor

from gradsync.events import Traffic
from gradsync.transport import label as labels
from gradsync.transport import progress_engine, summation
from gradsync.transport.base import Request, SparseWork, Work, all_reduced
from gradsync.transport.bridge import Bridge
from gradsync.transport.common_memory import CommonMemory
from gradsync.transport.control_words import Word
from gradsync.transport.host_memory import HostMemory
from gradsync.transport.label import UNLABELLED, Label
from gradsync.transport.process_group import ProcessGroupTransport
from gradsync.transport.shared_buffers import Found, SharedBuffers
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

    # What is rare or odd goes the way of the process group: not all ranks see the same memory.

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


class Crossing:
    """A sum over all ranks of all hosts under way."""

    def __init__(self, bridge: Bridge, found: Found, scale: float, label: Label) -> None:
        self._bridge, self._sums, self._control = bridge, found.sums, found.sums.tensor.control
        self._range = found.start, found.stop
        # Of the ranks of a host together, in the first slot behind what is summed; the last rank carries them across.
        self._label = found.sums.tensor.slot(0)[found.stop : found.stop + labels.PLACES] if label.mask else None
        self._behind = 0 if self._label is None else labels.PLACES
        self._operation = found.sums.fill(scale, label)
        self._is_wide = summation.wide_type(found.sums.tensor.dtype) is not None
        self._wide: Tensor | None = None  # what this rank carries of a sum of low precision
        self._is_added_up = self._is_sent = False
        self._work: Any = None
        bridge.enqueue(self)
        progress_engine.begin(self)

    @torch.no_grad()
    def advance(self) -> bool:
        sums, bridge = self._sums, self._bridge
        if not self._is_added_up:
            if not self._control.all_reached(Word.FILLED, self._operation):
                return False
            self._add_up()
            self._is_added_up = True
        if not self._is_sent:
            if not bridge.is_next(self) or not self._may_cross():
                return False
            if bridge.carries:
                self._work = bridge.send(self._carried() if self._wide is None else self._wide)
            self._is_sent = True
            bridge.dequeue()
        if not self._has_crossed():
            return False
        if self._wide is not None:
            self._carried().copy_(self._wide)
            self._wide = None
        if bridge.carries and not bridge.by_shares:
            sums.publish(Word.CROSSED)
        sums.copy_from_first(*self._range)
        return True

    def _add_up(self) -> None:
        sums, by_shares, carries = self._sums, self._bridge.by_shares, self._bridge.carries
        is_last = sums.tensor.local_rank == sums.tensor.size - 1
        if not self._is_wide:
            if self._label is not None and is_last:
                labels.write(self._label, sums.labels())
            sums.add_up(*self._range, into_all=False)
            return
        if carries:
            self._wide = sums.add_up_wide(*self._range, by_shares, self._behind)
            if self._label is not None and (is_last or not by_shares):
                labels.write(self._wide[-labels.PLACES :], sums.labels())
        sums.publish(Word.SUMMED)

    def _carried(self) -> Tensor:
        """The place of what this rank carries, in the first slot."""
        return self._sums.sum_in_first(*self._range, self._bridge.by_shares, self._behind)

    def needs_polling(self, link: object) -> bool:
        """Nobody is woken when gloo is done; nor can ranks of another link wake this one, who may wait for it."""
        return self._work is not None or link is not self._sums.host.link

    def _may_cross(self) -> bool:
        """A rank's own share at once; the whole when all ranks of the host have added up theirs."""
        bridge = self._bridge
        return bridge.by_shares or not bridge.carries or self._control.all_reached(Word.SUMMED, self._operation)

    def _has_crossed(self) -> bool:
        """Where the first rank carries the whole, it says so to the others of its host."""
        if self._bridge.carries:
            return self._bridge.has_arrived(self._work)
        return self._control.of_all(Word.CROSSED)[0] >= self._operation

    def done(self) -> bool:
        progress_engine.progress()
        return self._sums.is_over(self._operation)

    def traffic(self) -> Traffic:
        tensor, bridge = self._sums.tensor, self._bridge
        start, stop = self._range
        nbytes, crossing = (stop - start) * tensor.dtype.itemsize, 0
        if bridge.carries:
            wide = summation.wide_type(tensor.dtype)
            carried = self._carried().numel() * (self._carried().element_size() if wide is None else wide.itemsize)
            crossing = all_reduced(carried, bridge.hosts)
        return Traffic(all_reduced(nbytes, tensor.size) + crossing, crossing)

    def differing(self) -> int:
        return 0 if self._label is None else labels.read(self._label)

    def wait(self) -> None:
        if self._sums.is_over(self._operation):
            return
        try:
            self._bridge.has_arrived(self._work)  # raises if it broke while somebody waited for another one
            self._sums.wait(self._operation, lambda: self._sums.missing(self._operation), self._late)
        except Exception:  # not if somebody interrupts this wait: the other ranks still count on it
            progress_engine.abandon(self)
            raise

    def _late(self) -> Exception | None:
        """If this host is in time, it is another one that is late."""
        in_time = not self._has_crossed() and self._control.all_reached(Word.SUMMED, self._operation)
        return self._bridge.late() if in_time else None
