"""One sum over all ranks of several hosts: added up inside each host, carried across, and copied to all slots.

See `hierarchical.py` for the way, and `slot_sums.py` for the words by which the ranks of a host tell each other how far
they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gradsync.events import Traffic
from gradsync.transport import label as labels
from gradsync.transport import progress_engine, summation
from gradsync.transport.base import all_reduced
from gradsync.transport.bridge import Bridge
from gradsync.transport.control_words import Word
from gradsync.transport.label import Label
from gradsync.transport.shared_buffers import Found


class Crossing:
    """A sum over all ranks of all hosts under way."""

    def __init__(self, bridge: Bridge, found: Found, scale: float, label: Label, stop: int | None = None) -> None:
        """`stop`: where that ends of which each rank adds up its share, if there is more behind it."""
        self._bridge, self._sums, self._control = bridge, found.sums, found.sums.tensor.control
        self._range = found.start, found.stop if stop is None else stop
        # Of the ranks of a host together, in the first slot behind what is summed; the last rank carries them across.
        self._label = found.sums.tensor.slot(0)[found.stop : found.stop + labels.PLACES] if label.mask else None
        self._behind = found.stop - self._range[1] + (0 if self._label is None else labels.PLACES)
        self._operation = found.sums.fill(scale, label)
        self._is_wide = summation.wide_type(found.sums.tensor.dtype) is not None
        self._wide: Tensor | None = None  # what this rank carries of a sum of low precision
        self._is_added_up = self._is_sent = False
        self._work: Any = None
        bridge.enqueue(self)
        progress_engine.begin(self)

    @torch.no_grad()
    def advance(self) -> bool:
        bridge = self._bridge
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
        return self._deliver()

    def _deliver(self) -> bool:
        """What this rank carried is in the first slot; whether its part in the sum is done with this."""
        if self._bridge.carries and not self._bridge.by_shares:
            self._sums.publish(Word.CROSSED)
        self._sums.copy_from_first(*self._range)
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
