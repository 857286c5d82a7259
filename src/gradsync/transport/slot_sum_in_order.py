"""Sums inside a host in the order of a tree, of which each rank has one term or several, each in memory of its own.

As in any sum inside a host, each rank adds up its share, here of all terms of all ranks, and writes the result to the
first term of every rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradsync.events import Traffic
from gradsync.transport import summation
from gradsync.transport.base import all_reduced
from gradsync.transport.control_words import Word
from gradsync.transport.label import Label
from gradsync.transport.shares import blocks
from gradsync.transport.slot_sums import Reduction, SlotSums
from gradsync.transport.symmetric_tensor import SymmetricTensor, as_real
from gradsync.transport.tree import Order


class SlotSumInOrder(Reduction):
    """Of the elements of `terms`, the first of which `sums` is about; then it is times `scale`."""

    def __init__(
        self, sums: SlotSums, terms: Sequence[SymmetricTensor], order: Order, scale: float, stop: int, label: Label
    ) -> None:
        self._terms, self._order, self._scale = terms, order, scale
        super().__init__(sums, 1.0, 0, stop, label)

    def advance(self) -> bool:
        if not self._control.all_reached(Word.FILLED, self._operation):
            return False
        if self._refuse_if_labels_differ():
            return True
        tensor = self._sums.tensor
        factor = 2 if tensor.dtype.is_complex else 1
        slots = [
            as_real(self._terms[number].slot(rank))
            for rank, count in enumerate(self._order.counts)
            for number in range(count)
        ]
        results = [as_real(tensor.slot(rank)) for rank in range(tensor.size)]
        with torch.no_grad():
            itemsize = results[0].element_size()
            for first, last in blocks(0, self._stop * factor, tensor.local_rank, tensor.size, itemsize):
                total = summation.sum_in_order([slot[first:last] for slot in slots], self._order, self._scale)
                for result in results[1:]:
                    result[first:last].copy_(total)
        self._sums.publish(Word.REDUCED)
        return True

    def traffic(self) -> Traffic:
        """What others read of this rank's terms, and what it tells them."""
        tensor = self._sums.tensor
        nbytes = self._stop * tensor.dtype.itemsize
        more = self._order.counts[tensor.local_rank] - 1
        return Traffic(all_reduced(nbytes, tensor.size) + more * nbytes * (tensor.size - 1) // tensor.size)
