"""Buckets between several hosts with several ranks each: as little as possible crosses the network.

Inside a host the ranks add up their slots in shared memory, each its own share. Then the sums cross: with equally
many ranks on all hosts, each rank all-reduces its share with the ranks of the same position elsewhere, through gloo;
else the first rank of each host does that with the whole bucket. Then each rank copies its share of the result to
all slots of its host.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradsync import _torch
from gradsync.errors import ReplicaLostError, RoundTimeoutError
from gradsync.transport import label as labels
from gradsync.transport import own_group, under_way
from gradsync.transport.base import SparseWork, Work
from gradsync.transport.label import Label
from gradsync.transport.link import Link
from gradsync.transport.process_group import ProcessGroupTransport
from gradsync.transport.shared_memory import SharedMemoryTransport
from gradsync.transport.store import PATIENCE, Causes
from gradsync.transport.symmetric import HostMemory, SymmetricTensor


class HierarchicalTransport(SharedMemoryTransport):
    """The transport for a group over several hosts of which at least one has several ranks."""

    name = "hierarchical"
    usual_caps = ProcessGroupTransport.usual_caps
    _room = labels.PLACES  # for what the ranks of this host say of a sum: it crosses with it

    def __init__(self, group: ProcessGroupTransport, memory: HostMemory, bridge: Bridge) -> None:
        super().__init__(group, memory)
        self.reason = f"{group.size} ranks are on {bridge.hosts} hosts"
        self._bridge = bridge
        memory.link.restless = _restless

    @property
    def reduce_rows(self) -> None:
        """As over a process group: the other hosts can't see how many rows there are."""
        return None

    # What is rare or odd goes the way of the process group: not all ranks see the same memory.

    def broadcast(self, tensors: Sequence[Tensor], source: int) -> None:
        self._group.broadcast(tensors, source)

    def reduce_sparse(self, gradient: Tensor, scale: float) -> SparseWork:
        return self._group.reduce_sparse(gradient, scale)

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        return self._group.gather(numbers)

    def gather_text(self, text: str) -> list[str]:
        return self._group.gather_text(text)

    def _reduce_elsewhere(self, buffer: Tensor, scale: float, label: Label) -> Work:
        return self._group.reduce(buffer, scale, label)

    def _begin(self, found: SymmetricTensor, scale: float, start: int, stop: int, label: Label) -> Work:
        return Crossing(self._bridge, found, scale, start, stop, label)


def connect_bridge(
    group: ProcessGroupTransport, hosts: Sequence[Sequence[int]], number: int, check: Callable[[], None], causes: Causes
) -> Bridge:
    """Connects this rank with those that carry the same across on the other hosts; all ranks together."""
    host = next(ranks for ranks in hosts if group.rank in ranks)
    shares = len({len(ranks) for ranks in hosts}) == 1
    position = host.index(group.rank)
    carriers = [ranks[position if shares else 0] for ranks in hosts]
    carries = len(hosts) > 1 and (shares or position == 0)
    gloo = None
    if carries:
        name = f"gradsync/bridge/{number}/{position}"
        like, at = _torch.gloo_of(group.group), hosts.index(host)
        # It gives up after us: what we say is better.
        limit = group.limit + 5 * PATIENCE
        gloo = own_group.connect_gloo(like, group.store, name, at, len(hosts), limit, check)
    others = [rank for rank in carriers if rank not in host]
    return Bridge(group, len(hosts), shares, shares or position == 0, others, gloo, causes)


class Bridge:
    """This rank's connection with the other hosts, if it has one. Sums cross in the order in which they began."""

    def __init__(
        self,
        group: ProcessGroupTransport,
        hosts: int,
        shares: bool,
        ends: bool,
        others: Sequence[int],
        gloo: Any,
        causes: Causes,
    ) -> None:
        """`shares`: each rank carries its own share; `ends`: this rank carries something, by way of `gloo`."""
        self.hosts, self.shares, self.ends, self.others = hosts, shares, ends, list(others)
        self.queue: deque[Crossing] = deque()
        self._rank, self._limit = group.rank, group.limit
        self._causes = causes
        self._under_way: list[Any] = []
        self._held = [gloo]
        if gloo is not None:
            own_group.release_with(self, self._held, self._under_way)
        _bridges.add(self)

    def busy(self) -> bool:
        self._under_way[:] = [work for work in self._under_way if not work.is_completed()]
        return bool(self._under_way)

    def send(self, sums: Tensor) -> Any:
        """Starts adding up what the hosts have; None if there is nothing to do."""
        gloo = self._held[0]
        if gloo is None or not sums.numel():
            return None
        work = gloo.allreduce([sums])
        self._under_way.append(work)
        return work

    def arrived(self, work: Any) -> bool:
        if work is None:
            return True
        if not work.is_completed():
            return False
        try:
            work.wait()
        except RuntimeError as error:
            lost = self._causes.first(self.others)
            raise ReplicaLostError(
                f"rank {self._rank}: the connection with the other hosts broke, where rank {_listed(lost)} is gone, or "
                f"the network is: {error}. See that rank's own output. Start the job again from the last checkpoint "
                "(torchrun --max-restarts does).",
                lost,
            ) from None
        return True

    def late(self) -> RoundTimeoutError:
        late = self._causes.first(self.others, min(self._limit, PATIENCE))
        return RoundTimeoutError(
            f"rank {self._rank}: waited {self._limit:g} s for rank {_listed(late)}. Either it is slow or stuck, or the "
            "network between the hosts is: look at what it does (py-spy dump), or give the process group a longer "
            "timeout.",
            late,
        )


# Several replicas may have the same link.
_bridges: weakref.WeakSet[Bridge] = weakref.WeakSet()


def _restless(link: Link) -> bool:
    return any(bridge.busy() for bridge in _bridges) or under_way.waited_for_elsewhere(link)


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


class Crossing:
    """A sum over all ranks of all hosts under way."""

    def __init__(
        self, bridge: Bridge, tensor: SymmetricTensor, scale: float, start: int, stop: int, label: Label
    ) -> None:
        self._bridge, self._tensor, self._range = bridge, tensor, (start, stop)
        # Of the ranks of a host together, in the first slot behind what is summed; the last rank carries them across.
        self._label = tensor.tensor(0)[stop : stop + labels.PLACES] if label.mask else None
        self.link = tensor.link
        self._operation = tensor.fill(scale, label=label)
        self._added_up = self._sent = False
        self._work: Any = None
        bridge.queue.append(self)
        under_way.begin(self)

    @torch.no_grad()
    def advance(self) -> bool:
        tensor, bridge, operation = self._tensor, self._bridge, self._operation
        if not self._added_up:
            if not tensor.is_filled(operation):
                return False
            if self._label is not None and tensor.rank == tensor.size - 1:
                labels.write(self._label, tensor.labels)
            tensor.add_up(*self._range, everywhere=False)
            self._added_up = True
        if not self._sent:
            if bridge.queue[0] is not self or not self._may_cross():
                return False
            behind = 0 if self._label is None else labels.PLACES
            self._work = bridge.send(tensor.total(*self._range, bridge.shares, behind)) if bridge.ends else None
            self._sent = True
            bridge.queue.popleft()
        if not self._has_crossed():
            return False
        if bridge.ends and not bridge.shares:
            tensor.cross()
        tensor.spread(*self._range)
        return True

    def _may_cross(self) -> bool:
        """A rank's own share at once; the whole when all ranks of the host have added up theirs."""
        return self._bridge.shares or not self._bridge.ends or self._tensor.is_added_up(self._operation)

    def _has_crossed(self) -> bool:
        return self._bridge.arrived(self._work) if self._bridge.ends else self._tensor.is_crossed(self._operation)

    def done(self) -> bool:
        under_way.progress()
        return self._tensor.is_reduced(self._operation)

    def differing(self) -> int:
        return 0 if self._label is None else labels.read(self._label)

    def wait(self) -> None:
        if self._tensor.is_reduced(self._operation):
            return
        try:
            self._bridge.arrived(self._work)  # raises if it broke while somebody waited for another one
            self._tensor.await_all(lambda: self._tensor.missing(self._operation), self._late)
        except BaseException:
            under_way.give_up(self)
            raise

    def _late(self) -> Exception | None:
        """If this host is in time, it is another one that is late."""
        in_time = not self._has_crossed() and self._tensor.is_added_up(self._operation)
        return self._bridge.late() if in_time else None
