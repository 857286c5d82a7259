"""A rank's connection with the other hosts, over which it carries what its host has added up."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from gradsync import _torch
from gradsync.errors import ReplicaLostError, RoundTimeoutError
from gradsync.transport import dedicated_group
from gradsync.transport.dedicated_group import Connections
from gradsync.transport.link import listed
from gradsync.transport.membership import Membership
from gradsync.watch.watch import Watch


class Bridge:
    """Sums cross in the order in which they began: gloo matches them by that, as any group does."""

    def __init__(
        self,
        member: Membership,
        hosts: Sequence[Sequence[int]],
        number: int,
        check: Callable[[], None],
        watch: Watch | None,
    ) -> None:
        """Connects this rank with those that carry the same on the other hosts; all ranks together.

        `hosts`: the ranks of each host. `number`: tells the bridges over one group from each other. `check`: raises if
        a rank is lost meanwhile; `watch`: knows who is lost later.
        """
        host = next(ranks for ranks in hosts if member.rank in ranks)
        local_rank = host.index(member.rank)
        self.hosts = len(hosts)
        self.by_shares = len({len(ranks) for ranks in hosts}) == 1
        """Each rank carries its own share; else the first one of each host the whole."""
        self.carries = self.by_shares or local_rank == 0
        """Whether this rank carries anything."""
        carriers = [ranks[local_rank if self.by_shares else 0] for ranks in hosts]
        self._counterparts = [rank for rank in carriers if rank not in host]
        self._rank, self._limit = member.rank, member.limit
        self._queue: deque[object] = deque()
        self._connections: Connections | None = None
        if self.carries and len(hosts) > 1:
            gloo = dedicated_group.connect_gloo(
                _torch.gloo_of(member.group),
                member.store,
                f"gradsync/bridge/{number}/{local_rank}",
                hosts.index(host),
                len(hosts),
                member.limit + dedicated_group.LATER,
                check,
            )
            self._connections = Connections(gloo, lambda: watch, member.limit)
            self._connections.end_with(self)

    def enqueue(self, crossing: object) -> None:
        self._queue.append(crossing)

    def is_next(self, crossing: object) -> bool:
        return self._queue[0] is crossing

    def dequeue(self) -> None:
        """The next one was sent, or has nothing to send: now it is the turn of the one behind it."""
        self._queue.popleft()

    def send(self, sums: Tensor) -> Any:
        """Starts adding up what the hosts have; None if there is nothing to do."""
        if self._connections is None or not sums.numel():
            return None
        return self._connections.track(self._connections.carrier.allreduce([sums]))

    def has_arrived(self, work: Any) -> bool:
        """Whether what `send` gave is over; raises if it failed."""
        if work is None or self._connections is None:
            return True
        if not work.is_completed():
            return False
        try:
            self._connections.finish(work, on_cpu=True)
        except RuntimeError as error:
            if isinstance(error, (ReplicaLostError, RoundTimeoutError)):
                raise
            raise ReplicaLostError(
                f"rank {self._rank}: the connection with the other hosts broke, where rank "
                f"{listed(self._counterparts)} is gone, or the network is: {error}. See that rank's own output. Start "
                "the job again from the last checkpoint (torchrun --max-restarts does).",
                self._counterparts,
            ) from None
        return True

    def late(self) -> RoundTimeoutError:
        late = self._counterparts
        return RoundTimeoutError(
            f"rank {self._rank}: waited {self._limit:g} s for rank {listed(late)}. Either it is slow or stuck, or the "
            "network between the hosts is: look at what it does (py-spy dump), or give the process group a longer "
            "timeout.",
            late,
        )
