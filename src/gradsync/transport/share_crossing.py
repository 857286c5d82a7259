"""Sums over several hosts of which each rank gets its share: shares cross, and nothing is gathered inside a host.

As in `hierarchical.py`, but for the end: a share stays in the first slot, where its rank uses it, and is not copied to
the others. What is behind the shares crosses with the last one, or with the whole, and is read by all.

    FILLED -> SUMMED -> CROSSED -> each uses its share in the first slot -> REDUCED  all ranks: it may be filled again
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradsync.events import Traffic
from gradsync.transport import progress_engine, summation
from gradsync.transport.base import all_reduced
from gradsync.transport.bridge import Bridge
from gradsync.transport.control_words import Word
from gradsync.transport.crossing import Crossing
from gradsync.transport.label import Label
from gradsync.transport.shared_buffers import Found


class ShareCrossing(Crossing):
    """Of the first `data` elements of what was found."""

    def __init__(self, bridge: Bridge, found: Found, data: int, scale: float, label: Label) -> None:
        self._data, self._end = data, found.stop
        self._tail: Tensor | None = None  # None: not all that this rank needs is here
        self._says = 0
        self._is_published = self._is_released = False
        tensor = found.sums.tensor
        self._carrier = tensor.size - 1 if bridge.by_shares else 0  # of what is behind the shares
        super().__init__(bridge, found, scale, label, stop=data)

    def _add_up(self) -> None:
        """With what is behind the shares, by the last rank, who carries it or is waited for by who does."""
        sums = self._sums
        if not self._is_wide and sums.tensor.local_rank == sums.tensor.size - 1:
            summation.sum_into_first(self._tails(), sums.scales())
        super()._add_up()
        if self._wide is not None and sums.tensor.local_rank == self._carrier:
            wide = self._wide[self._wide.numel() - self._behind :][: self._end - self._data]
            summation.sum_wide(self._tails(), sums.scales(), wide, torch.empty_like(wide))

    def _tails(self) -> list[Tensor]:
        tensor = self._sums.tensor
        return [tensor.slot(rank)[self._data : self._end] for rank in range(tensor.size)]

    def _deliver(self) -> bool:
        """What this rank has carried is in the first slot; is the rest of what it needs?"""
        if not self._is_published:
            if self._bridge.carries:
                self._sums.publish(Word.CROSSED)
            self._is_published = True
        if self._control.of_all(Word.CROSSED)[self._carrier] < self._operation:
            return False
        self._says = super().differing()
        self._tail = self._sums.tensor.slot(0)[self._data : self._end].clone()
        return True

    def share(self) -> Tensor:
        return self._sums.share_in_first(0, self._data)

    def tail(self) -> Tensor:
        assert self._tail is not None
        return self._tail

    def release(self) -> None:
        if not self._is_released:
            self._is_released = True
            self._sums.publish(Word.REDUCED)

    def differing(self) -> int:
        return self._says

    def traffic(self) -> Traffic:
        tensor = self._sums.tensor
        inside, crossing = self._data * tensor.dtype.itemsize * (tensor.size - 1) // tensor.size, 0
        if self._bridge.carries:
            wide = summation.wide_type(tensor.dtype)
            carried = self._carried()
            crossing = all_reduced(
                carried.numel() * (carried.element_size() if wide is None else wide.itemsize), self._bridge.hosts
            )
        return Traffic(inside + crossing, crossing)

    def done(self) -> bool:
        progress_engine.progress()
        return self._tail is not None

    def wait(self) -> None:
        if self._tail is not None:
            return
        try:
            self._bridge.has_arrived(self._work)  # raises if it broke while somebody waited for another one
            self._sums.host.wait(lambda: self._tail is not None, self._missing, "a bucket", self._late)
        except Exception:  # not if somebody interrupts this wait: the other ranks still count on it
            progress_engine.abandon(self)
            raise

    def _missing(self) -> list[int]:
        return self._control.behind(Word.FILLED, self._operation) or [self._carrier]
