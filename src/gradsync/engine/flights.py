"""What has left of a round, bucket by bucket in the order of the plan: sent, empty if need be, and waited for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.futures import Future

from gradsync.engine.bucket import Bucket
from gradsync.engine.in_flight import NOT_SENT, InFlight, Taken
from gradsync.engine.lockstep import Identity, Kind, Lockstep
from gradsync.engine.parameter_group import ParameterGroup
from gradsync.engine.reduce_config import Scaling
from gradsync.errors import ReplicaLostError, RoundTimeoutError
from gradsync.hooks import comm_hook
from gradsync.hooks.comm_hook import GradBucket, Hook, HookWork, name_of
from gradsync.observe.ranges import ranged
from gradsync.transport.base import Work
from gradsync.transport.label import Label
from gradsync.watch.position import Awaited


class Flights:
    """Of one round. It knows nothing of arrivals: what is due is told by `Round`."""

    def __init__(
        self, group: ParameterGroup, lockstep: Lockstep, hook: tuple[Hook, object] | None, kept: Iterable[int]
    ) -> None:
        """`hook`: reduces the buckets instead of the transport; `kept`: buckets whose memory somebody refers to."""
        self._group, self._lockstep, self._hook = group, lockstep, hook
        self.launched: list[InFlight] = []
        """One for each bucket in the order of the plan, idle ones unsent; then idle ones that turned out to be used."""
        self._delivered = self._noticed = 0  # how many of those
        self._latest_hook: Work | None = None  # what a communication hook has under way
        self._kept = {number: group.buckets[number].data.clone() for number in kept}  # restored after delivery
        self._overwritten: dict[int, Tensor] = {}  # what was in buckets that were sent without it

    @property
    def count(self) -> int:
        """How many have left: also the number of the next one."""
        return len(self.launched)

    @property
    def has_sent(self) -> bool:
        """Whether other ranks have something of it."""
        return any(flight.is_sent for flight in self.launched)

    @property
    def has_left(self) -> bool:
        """Whether all of its buckets have left, with gradients or with nothing."""
        return bool(self._group.buckets) and len(self.launched) >= len(self._group.buckets)

    @property
    def undelivered(self) -> list[InFlight]:
        return self.launched[self._delivered :]

    def indices(self) -> set[int]:
        """Parameters whose gradients have left and are not back yet."""
        return {index for flight in self.undelivered if flight.is_sent for index in flight.bucket.indices}

    def differing(self) -> int:
        """When all are back: the bits of their labels on which ranks disagree."""
        bits = 0
        for flight in self.launched:
            bits |= flight.work.differing()
        return bits

    # --- there -----------------------------------------------------------------------------------

    def pass_idle(self) -> None:
        """Leaves out idle buckets whose turn it is."""
        while (number := len(self.launched)) in self._group.idle:
            bucket = self._group.buckets[number]
            self.launched.append(InFlight(number, bucket, NOT_SENT, Taken.nothing(bucket)))

    def send(
        self,
        number: int,
        taken: Taken,
        scaling: Scaling,
        label: Label,
        *,
        second_order: bool,
        see_all: bool,
    ) -> None:
        """Hands a bucket, whose tail is written, to the transport or to the hook. If that raises, it has not left.

        `second_order`: somebody may want to differentiate the result; `see_all`: somebody looks at the whole of it.
        """
        bucket = self._group.buckets[number]
        if self._hook is not None:
            bucket.fill(taken.gradients)
            bucket.split_unused(taken.gradients, taken.used, scaling)
            work = self._run_hook(self._hook, bucket, number, scaling, label)
        else:
            transport = self._group.transport
            work = bucket.send(taken.gradients, taken.used, scaling, transport, label, see_all)
        kept = self._kept.pop(number, None)
        self.launched.append(InFlight(number, bucket, work, taken, kept, second_order))
        self._lockstep.count_launch()

    def send_nothing(self, identity: Identity, kind: Kind, scaling: Scaling, most: int | None = None) -> None:
        """Sends what is left, or `most` buckets of it, as if nothing were in them; `restore_memory` puts it back."""
        buckets, transport = self._group.buckets, self._group.transport
        self.pass_idle()
        while most != 0 and (number := len(self.launched)) < len(buckets):
            label = identity.label(kind, number)
            bucket = buckets[number]
            if not bucket.is_free(transport):
                self.await_all()
            if bucket.delivers and any(self._group.holders[index].grad is not None for index in bucket.indices):
                self._overwritten[number] = bucket.data.clone()
            if self._hook is not None:
                bucket.buffer.zero_()
                work = self._run_hook(self._hook, bucket, number, scaling, label, ignore_hook=True)
            else:
                work = bucket.send_nothing(scaling, transport, label)
            self.launched.append(InFlight(number, bucket, work, Taken.nothing(bucket)))
            self._lockstep.count_launch()
            most = None if most is None else most - 1
            if most != 0:
                self.pass_idle()

    def restore_memory(self) -> None:
        """Of buckets that were sent without what was in them, or to whose memory somebody refers."""
        for number, data in (self._kept | self._overwritten).items():
            self._group.buckets[number].data.copy_(data)
        self._overwritten.clear()

    def _run_hook(
        self,
        comm: tuple[Hook, object],
        bucket: Bucket,
        number: int,
        scaling: Scaling,
        label: Label,
        ignore_hook: bool = False,
    ) -> Work:
        """`ignore_hook`: ignores errors of the hook, as the result is thrown away."""
        hook, state = comm
        transport = self._group.transport
        if bucket.plan.device.type == "cpu":
            # A hook may start further collectives when its first one is done, from whatever thread that is. Two such
            # hooks at a time would start them in different orders on different ranks.
            self._await_hook(ignore_hook)
        parameters = [self._group.leaves[index] for index in bucket.indices]
        last = number == len(self._group.buckets) - 1
        seen = GradBucket(bucket.data, bucket.views, parameters, number, last)
        future: Future[Any] | None = None
        try:
            future = comm_hook.call(hook, state, seen, transport.rank)
        except Exception:
            if not ignore_hook:
                raise  # before anything of this bucket has left: the round can be abandoned
        tail = transport.reduce(bucket.tail, scaling.factor, label)
        if future is None:
            return tail
        self._latest_hook = HookWork(future, bucket.data, tail, transport.rank, name_of(hook), transport.limit)
        return self._latest_hook

    def _await_hook(self, ignore_hook: bool) -> None:
        """Waits for what a hook has under way. `ignore_hook`: whatever it says."""
        if self._latest_hook is not None:
            with contextlib.suppress(*[Exception] if ignore_hook else []):
                self._latest_hook.wait()

    def forget_hook(self) -> None:
        """What it had under way is over, well or not; the next bucket need not wait for it."""
        self._await_hook(ignore_hook=True)
        self._latest_hook = None

    # --- and back --------------------------------------------------------------------------------

    def take_noticed(self) -> int | None:
        """The next one, by its number, that is back and was not noticed before. Where asking costs nothing: on CPUs."""
        if self._noticed == len(self.launched):
            return None
        flight = self.launched[self._noticed]
        if flight.bucket.plan.device.type != "cpu" or not flight.work.done():
            return None
        self._noticed += 1
        return flight.number

    def take_reduced(self) -> InFlight | None:
        """The next one to deliver, if it is back; it counts as delivered from now on."""
        if self._delivered == len(self.launched) or not self.launched[self._delivered].work.done():
            return None
        return self.take_next()

    def take_next(self) -> InFlight:
        """The next one to deliver, back or not; it counts as delivered from now on."""
        self._delivered += 1
        return self.launched[self._delivered - 1]

    def mark_delivered(self) -> None:
        """All of those that have left."""
        self._delivered = len(self.launched)

    def wait_for(self, flight: InFlight) -> None:
        """Returns when it is reduced. Who is waited for, and for what, is known to the watch meanwhile."""
        bucket, group = flight.bucket, self._group
        first = group.name(bucket.indices[0]) if bucket.indices else ""
        awaited = Awaited(flight.number, len(group.buckets), first, len(bucket.indices))
        self._lockstep.enter("at the end of backward", awaited)
        try:
            with ranged("wait", flight.number):
                flight.work.wait()
            if flight.is_sent:
                flight.bucket.reduced(flight.work)
            self._lockstep.enter("at the end of backward")
        except (ReplicaLostError, RoundTimeoutError) as error:
            raise type(error)(f"{error} {self._where(flight)}", error.ranks) from None

    def await_all(self, ignore_hook: bool = False) -> None:
        """Of what was not delivered, nobody wants the result. `ignore_hook`: whatever a communication hook says."""
        for flight in self.launched:
            try:
                self.wait_for(flight)
                if flight.is_sent:
                    flight.bucket.release(flight.work)
            except (ReplicaLostError, RoundTimeoutError):
                raise
            except Exception:
                if not ignore_hook:
                    raise

    def _where(self, flight: InFlight) -> str:
        number, buckets = flight.number, len(self._group.buckets)
        names = [self._group.name(index) for index in flight.bucket.indices]
        holds = f"with '{names[0]}'" if len(names) == 1 else f"from '{names[0]}' to '{names[-1]}'" if names else ""
        return f"(Round {self._lockstep.number}, bucket {number + 1} of {buckets}, {holds}.)"
