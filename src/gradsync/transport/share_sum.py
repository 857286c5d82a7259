"""Sums inside a host of which each rank gets its share, and nobody the whole: half of an all-reduce.

Each rank adds up its share in the first slot, where it uses it; what is behind the shares, a few elements, everybody
adds up in private memory. Nobody waits for what others add up.

    FILLED  all ranks -> each adds up its share -> uses it -> REDUCED  all ranks: the slots may be filled again
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradsync.events import Traffic
from gradsync.transport import progress_engine, summation
from gradsync.transport.control_words import Word
from gradsync.transport.label import Label
from gradsync.transport.slot_sums import Reduction, SlotSums


class ShareSum(Reduction):
    """Of the first `data` elements of the slots, with those up to `stop` behind them."""

    def __init__(self, sums: SlotSums, scale: float, data: int, stop: int, label: Label) -> None:
        self._tail: Tensor | None = None  # None: not added up yet
        self._end = stop
        self._is_released = False
        super().__init__(sums, scale, 0, data, label)

    def advance(self) -> bool:
        if not self._control.all_reached(Word.FILLED, self._operation):
            return False
        self._tail = torch.empty(self._end - self._stop, dtype=self._sums.tensor.dtype, device="cpu")
        if self._refuse_if_labels_differ():
            self._is_released = True
            return True
        with torch.no_grad():
            self._sums.add_up(self._start, self._stop, into_all=False)
            tails = [self._sums.tensor.slot(rank)[self._stop : self._end] for rank in range(self._sums.tensor.size)]
            self._tail.copy_(summation.sum_of_copies(list(map(summation.scaled, tails, self._sums.scales()))))
        return True

    def share(self) -> Tensor:
        return self._sums.share_in_first(self._start, self._stop)

    def tail(self) -> Tensor:
        assert self._tail is not None
        return self._tail

    def release(self) -> None:
        if not self._is_released:
            self._is_released = True
            self._sums.publish(Word.REDUCED)

    def traffic(self) -> Traffic:
        """What others read of this rank's slot: their shares of it."""
        tensor = self._sums.tensor
        return Traffic((self._stop - self._start) * tensor.dtype.itemsize * (tensor.size - 1) // tensor.size)

    def missing(self) -> list[int]:
        return self._control.behind(Word.FILLED, self._operation)

    def done(self) -> bool:
        progress_engine.progress()
        return self._tail is not None

    def wait(self) -> None:
        try:
            self._sums.host.wait(lambda: self._tail is not None, self.missing, "a bucket")
        except Exception:  # not if somebody interrupts this wait: the other ranks still count on it
            progress_engine.abandon(self)
            raise
