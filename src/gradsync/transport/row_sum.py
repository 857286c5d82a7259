"""Sums of matrices of which every rank has changed a few rows: the gradient of an embedding, for example.

A rank sends the numbers of its rows that are not zero and what is in them, through its slot; each rank adds all of
them to its own matrix, in rank order. If a rank has too many and sends the whole matrix, the others notice, send the
whole too, and it is a sum as any other.

    slot   | tail | row numbers | the rows, times the rank's scale | ...                    | tail |
    else   | the matrix                                                                     | tail |
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gradsync.transport.symmetric import LINE, WHOLE, Reduction, SymmetricTensor, up

_NUMBER = torch.int64


class Rows(NamedTuple):
    """Views of a slot."""

    tail: Tensor
    numbers: Tensor
    values: Tensor


class RowSum(Reduction):
    """A sum under way that replaces the matrix given, or, if a rank sent the whole of it, what is in the slots."""

    def __init__(self, tensor: SymmetricTensor, scale: float, matrix: Tensor, rows: Tensor | None) -> None:
        """`rows`: the numbers of those that are not zero; None: the whole."""
        self.result: Tensor | None = None
        self._given = matrix
        self._matrix = matrix.view(len(matrix), -1)
        self._is_whole = self._told = False  # what is in the slot; and the others know that
        self._slot = tensor.tensor()
        tensor.await_free()
        if rows is None:
            self._write_whole()
        else:
            mine = self._rows_in(self._slot, len(rows))
            mine.tail.copy_(self._tail)
            mine.numbers.copy_(rows)
            torch.index_select(self._matrix, 0, rows, out=mine.values)
            mine.values.mul_(scale)
        super().__init__(tensor, scale, 0, tensor.numel, WHOLE if rows is None else len(rows))

    @property
    def _tail(self) -> Tensor:
        return self._slot[self._matrix.numel() :]

    @torch.no_grad()
    def advance(self) -> bool:
        tensor = self._tensor
        if not tensor.is_filled(self._operation):
            return False
        if WHOLE not in (counts := tensor.rows):
            self._add_rows(counts)
            tensor.take()
            return True
        if not self._is_whole:
            self._write_whole()
        if not self._told:
            tensor.fill_up()
            self._told = True
        return tensor.is_whole(self._operation) and super().advance()

    def missing(self) -> list[int]:
        """With its own rows and those of all others this rank has all it needs, also before others have."""
        return [] if self.result is not None else super().missing()

    def _write_whole(self) -> None:
        self._slot[: self._matrix.numel()].copy_(self._matrix.view(-1))
        self._is_whole = True

    def _add_rows(self, counts: list[int]) -> None:
        """All ranks round alike: they begin with nothing and add one rank's rows after the other's."""
        tensor, matrix = self._tensor, self._matrix
        sent = [self._rows_in(tensor.tensor(rank), count) for rank, count in enumerate(counts)]
        tails = torch.stack([rows.tail for rows in sent])
        mine = sent[tensor.rank]
        if tensor.size == 2:  # of two, either may be the first
            matrix.index_copy_(0, mine.numbers, mine.values)
            del sent[tensor.rank]
        else:
            matrix.index_fill_(0, mine.numbers, 0)
        for rows in sent:
            matrix.index_add_(0, rows.numbers, rows.values)
        torch.mv(tails.T, tails.new_tensor(tensor.scales), out=self._tail)
        self.result = self._given

    def _rows_in(self, slot: Tensor, count: int) -> Rows:
        """Where a slot has so many rows."""
        memory, width = slot.view(torch.uint8), self._matrix.shape[1]
        tail = (slot.numel() - self._matrix.numel()) * slot.element_size()
        numbers = up(tail, LINE)
        values = up(numbers + count * _NUMBER.itemsize, LINE)
        end = values + count * width * slot.element_size()
        return Rows(
            memory[:tail].view(slot.dtype),
            memory[numbers : numbers + count * _NUMBER.itemsize].view(_NUMBER),
            memory[values:end].view(slot.dtype).view(count, width),
        )
