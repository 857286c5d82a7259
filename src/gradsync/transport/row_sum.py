"""Sums of matrices of which every rank has changed a few rows: the gradient of an embedding, for example.

A rank sends the numbers of its rows that are not zero and what is in them, through its slot; each rank adds all of
them to its own matrix. If a rank has too many and sends the whole matrix, the others notice, send the whole too, and
it is a sum as any other. Nothing else in the transports knows of rows.

    slot   | tail | row numbers | the rows, times the rank's scale | ...                    | tail |
    else   | the matrix                                                                     | tail |
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gradsync.events import Traffic
from gradsync.transport import summation
from gradsync.transport.control_words import Word
from gradsync.transport.label import UNLABELLED, Label
from gradsync.transport.shares import LINE, round_up
from gradsync.transport.slot_sums import Reduction, SlotSums
from gradsync.transport.summation import Rows

_NUMBER = torch.int64
_WHOLE = -1  # in place of a number of rows: the slot holds the matrix
_PURPOSE = "a gradient that was sent row by row before"


class RowsInSlot(NamedTuple):
    """Views of a slot that holds rows."""

    tail: Tensor
    rows: Rows
    nbytes: int  # of the slot, up to the end of the rows


class RowSum(Reduction):
    """A sum under way that replaces the matrix given, or, if a rank sent the whole of it, what is in the slots."""

    def __init__(
        self,
        sums: SlotSums,
        scale: float,
        matrix: Tensor,
        rows: Tensor | None,
        label: Label = UNLABELLED,
    ) -> None:
        """`rows`: the numbers of those that are not zero; None: the whole."""
        self.result: Tensor | None = None
        self._sums, self._slot = sums, sums.tensor.slot()
        self._given: Tensor | None = matrix
        self._numel, self._width = matrix.numel(), matrix[0].numel()
        self._told_whole = False
        self._row_bytes = 0
        sums.await_free()
        if rows is None:
            self._write_whole()
        else:
            self._write_rows(matrix, rows, scale)
        sums.tensor.control.write(Word.ROWS, _WHOLE if rows is None else len(rows))
        super().__init__(sums, scale, label=label)

    @torch.no_grad()
    def advance(self) -> bool:
        sums = self._sums
        if not self._control.all_reached(Word.FILLED, self._operation):
            return False
        if self._refuse_if_labels_differ():
            return True
        counts = self._control.of_all(Word.ROWS)
        if _WHOLE not in counts:
            self._add_rows(counts)
            sums.publish(Word.REDUCED)
            return True
        if not self._told_whole:
            self._write_whole()
            sums.publish(Word.WHOLE)
            self._told_whole = True
        return self._control.all_reached(Word.WHOLE, self._operation) and super().advance()

    def traffic(self) -> Traffic:
        """Every other rank reads all rows that this one has sent."""
        return super().traffic() if self.result is None else Traffic(self._row_bytes * (self._sums.tensor.size - 1))

    def missing(self) -> list[int]:
        not_whole = self._control.behind(Word.WHOLE, self._operation) if self._told_whole else []
        return not_whole or super().missing()

    def _write_whole(self) -> None:
        """From now on the slot is the only place for it."""
        if self._given is not None:
            self._sums.tensor.reserve(self._sums.tensor.nbytes, _PURPOSE)
            self._slot[: self._numel].copy_(self._given.view(-1))
            self._given = None

    def _write_rows(self, matrix: Tensor, rows: Tensor, scale: float) -> None:
        mine = self._rows_in(self._slot, len(rows))
        self._sums.tensor.reserve(mine.nbytes, _PURPOSE)
        self._row_bytes = mine.nbytes
        mine.tail.copy_(self._slot[self._numel :])
        mine.rows.numbers.copy_(rows)
        values = mine.rows.values
        torch.index_select(matrix.view(-1, self._width), 0, rows, out=values)
        values.mul_(scale).add_(0.0)  # which makes 0.0 of -0.0: it is the same to all, whoever adds it to what

    def _add_rows(self, counts: list[int]) -> None:
        tensor, given = self._sums.tensor, self._given
        assert given is not None
        sent = [self._rows_in(tensor.slot(rank), count) for rank, count in enumerate(counts)]
        summation.sum_rows_into(given.view(-1, self._width), [one.rows for one in sent], tensor.local_rank)
        summation.sum_few([one.tail for one in sent], self._sums.scales(), out=self._slot[self._numel :])
        self.result = given

    def _rows_in(self, slot: Tensor, count: int) -> RowsInSlot:
        """Where a slot has so many rows; the tail is in front of them, see above."""
        memory, item = slot.view(torch.uint8), slot.element_size()
        tail_end = (slot.numel() - self._numel) * item
        numbers = round_up(tail_end, LINE)
        values = round_up(numbers + count * _NUMBER.itemsize, LINE)
        end = values + count * self._width * item
        return RowsInSlot(
            memory[:tail_end].view(slot.dtype),
            Rows(
                memory[numbers : numbers + count * _NUMBER.itemsize].view(_NUMBER),
                memory[values:end].view(slot.dtype).view(count, self._width),
            ),
            end,
        )
