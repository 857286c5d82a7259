"""Buckets between several hosts with several ranks each: as little as possible crosses the network.

Inside a host the ranks add up their slots in shared memory, each its own share. Then the sums cross: with equally
many ranks on all hosts, each rank all-reduces its share with the ranks of the same position elsewhere, through gloo;
else the first rank of each host does that with the whole bucket. Then each rank copies its share of the result to
all slots of its host.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradsync import _torch
from gradsync.errors import ReplicaLostError, RoundTimeoutError
from gradsync.transport import label as labels
from gradsync.transport import under_way
from gradsync.transport.base import Work
from gradsync.transport.label import Label
from gradsync.transport.link import Link
from gradsync.transport.process_group import ProcessGroupTransport
from gradsync.transport.shared_memory import SharedMemoryTransport
from gradsync.transport.symmetric import HostMemory, SymmetricTensor


class HierarchicalTransport(SharedMemoryTransport):
    """The transport for a group over several hosts of which at least one has several ranks."""

    name = "hierarchical"
    usual_caps = ProcessGroupTransport.usual_caps
    _room = labels.PLACES  # for what the ranks of this host say of a sum: it crosses with it

    def __init__(self, group: ProcessGroupTransport, memory: HostMemory, hosts: Sequence[Sequence[int]]) -> None:
        super().__init__(group, memory)
        self.reason = f"{group.size} ranks are on {len(hosts)} hosts"
        self._bridge = Bridge(group, hosts)
        memory.link.restless = _restless

    @property
    def reduce_rows(self) -> None:
        """As over a process group: the other hosts can't see how many rows there are."""
        return None

    def broadcast(self, tensors: Sequence[Tensor], source: int) -> None:
        self._group.broadcast(tensors, source)

    def _begin(self, found: SymmetricTensor, scale: float, start: int, stop: int, label: Label) -> Work:
        return Crossing(self._bridge, found, scale, start, stop, label)


class Bridge:
    """This rank's connection with the other hosts, if it has one. Sums cross in the order in which they began."""

    def __init__(self, group: ProcessGroupTransport, hosts: Sequence[Sequence[int]]) -> None:
        host = next(ranks for ranks in hosts if group.rank in ranks)
        self.shares = len({len(ranks) for ranks in hosts}) == 1
        """Whether each rank carries its own share."""
        position = host.index(group.rank)
        carriers = [ranks[position if self.shares else 0] for ranks in hosts]
        self.ends = carriers if self.shares or position == 0 else []
        self.others = [rank for rank in carriers if rank not in host]
        self.queue: deque[Crossing] = deque()
        self._rank, self._limit = group.rank, group.limit
        self._under_way: list[Any] = []
        number = group.count("bridges")
        self._gloo = (
            _torch.gloo(
                _torch.store_of(group.group),
                f"gradsync/bridge/{number}/{position}",
                hosts.index(host),
                len(hosts),
                group.limit,
            )
            if len(self.ends) > 1
            else None
        )
        _bridges.add(self)

    def busy(self) -> bool:
        self._under_way = [work for work in self._under_way if not work.is_completed()]
        return bool(self._under_way)

    def send(self, sums: Tensor) -> Any:
        """Starts adding up what the hosts have; None if there is nothing to do."""
        if self._gloo is None or not sums.numel():
            return None
        work = self._gloo.allreduce([sums])
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
            raise ReplicaLostError(
                f"rank {self._rank}: the connection with rank {', '.join(map(str, self.others))} on the other hosts "
                f"broke: {error}. Either a process ended, see its own output, or the network failed, or a rank took "
                "longer than the group's timeout.",
                self.others,
            ) from None
        return True

    def late(self) -> RoundTimeoutError:
        return RoundTimeoutError(
            f"rank {self._rank}: waited {self._limit:g} s for rank {', '.join(map(str, self.others))} on the other "
            "hosts. Either it is slow or stuck, or the network is: look at what it does (py-spy dump), or give the "
            "process group a longer timeout.",
            self.others,
        )


# Several replicas may have the same link.
_bridges: weakref.WeakSet[Bridge] = weakref.WeakSet()


def _restless(link: Link) -> bool:
    return any(bridge.busy() for bridge in _bridges) or under_way.waited_for_elsewhere(link)


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
            self._tensor.await_all(lambda: self._tensor.missing(self._operation))
        except RoundTimeoutError:
            under_way.give_up(self)
            if self._has_crossed() or not self._tensor.is_added_up(self._operation):
                raise
            raise self._bridge.late() from None  # this host is in time
        except BaseException:
            under_way.give_up(self)
            raise
