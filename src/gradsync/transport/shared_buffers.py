"""Buffers that lie in shared memory, and how they are found again when somebody reduces them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from torch import Tensor

from gradsync.options import MIB
from gradsync.transport import summation
from gradsync.transport.base import Request
from gradsync.transport.host_memory import HostMemory
from gradsync.transport.slot_sums import SlotSums
from gradsync.transport.symmetric_tensor import SymmetricTensor

# Of buffers that take turns: how many there are, and how many of those that no cache holds anyway.
_AT_A_TIME, _LARGE_AT_A_TIME, _LARGE = 4, 2, 8 * MIB


class Found(NamedTuple):
    """Where a buffer is: elements `start` to `stop` of this rank's slot."""

    sums: SlotSums
    start: int
    stop: int


class SharedBuffers:
    """The buffers of one transport. Each is forgotten with the last tensor over it."""

    def __init__(self, host: HostMemory, channel: int, room: int = 0) -> None:
        """`room`: elements behind each buffer that are the transport's."""
        self._host, self._channel, self._room = host, channel, room
        self._sums: dict[int, SlotSums] = {}  # by the address of this rank's slot

    def allocate(
        self, requests: Sequence[Request], otherwise: Callable[[Sequence[Request]], list[Tensor]]
    ) -> list[Tensor]:
        """All ranks together. What can't be summed in shared memory comes from `otherwise`.

        What is not to be reserved has a file of its own, which takes memory as it is used.
        """
        suitable = [one.device.type == "cpu" and summation.can_sum(one.dtype) for one in requests]
        made: dict[bool, Iterator[SymmetricTensor]] = {}
        for reserve in (True, False):
            wanted = [
                (one.numel + self._room, one.dtype)
                for one, is_suitable in zip(requests, suitable, strict=True)
                if is_suitable and one.reserve == reserve
            ]
            made[reserve] = iter(self._host.allocate(wanted, reserve, self._channel) if wanted else [])
        others = iter(otherwise([one for one, is_suitable in zip(requests, suitable, strict=True) if not is_suitable]))
        return [
            self._register(next(made[one.reserve]))[: one.numel] if is_suitable else next(others)
            for one, is_suitable in zip(requests, suitable, strict=True)
        ]

    def allocate_reused(
        self, requests: Sequence[Request], otherwise: Callable[[Sequence[Request]], list[Tensor]]
    ) -> list[Tensor]:
        """The same for buffers of which few are under way at a time: they take turns in the same memory, which then
        stays in the cache.
        """
        places, sizes = list[tuple[object, int]](), dict[tuple[object, int], Request]()
        turns = Counter[object]()
        for number, one in enumerate(requests):
            large = one.numel * one.dtype.itemsize > _LARGE
            kind = (one.dtype, one.device, large) if one.reserve else (number,)
            place = kind, turns[kind] % (_LARGE_AT_A_TIME if large else _AT_A_TIME)
            turns[kind] += 1
            places.append(place)
            if place not in sizes or sizes[place].numel < one.numel:
                sizes[place] = one
        made = dict(zip(sizes, self.allocate(list(sizes.values()), otherwise), strict=True))
        return [made[place][: one.numel] for place, one in zip(places, requests, strict=True)]

    def _register(self, made: SymmetricTensor) -> Tensor:
        address = made.slot().data_ptr()
        self._sums[address] = SlotSums(self._host, made)
        return made.release_with_slot(partial(self._sums.pop, address, None))

    def is_free(self, buffer: Tensor) -> bool:
        """Whether nobody needs what is in it for the latest sum. Memory of one's own is free between rounds."""
        found = self.find(buffer)
        return found is None or found.sums.is_free()

    def await_free(self, buffer: Tensor) -> None:
        """Until it is."""
        if (found := self.find(buffer)) is not None:
            found.sums.await_free()

    def find(self, buffer: Tensor) -> Found | None:
        """None: it is no part of what was allocated here."""
        sums = self._sums.get(buffer.untyped_storage().data_ptr()) if buffer.device.type == "cpu" else None
        if sums is None:
            return None
        start = int(buffer.storage_offset())
        return Found(sums, start, start + buffer.numel())
