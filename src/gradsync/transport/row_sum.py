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

from gradsync.transport.label import UNLABELLED, Label
from gradsync.transport.symmetric import LINE, WHOLE, Reduction, SymmetricTensor, up

_NUMBER = torch.int64


class Layout(NamedTuple):
    """Where things are in a slot that holds rows, in bytes; the tail is at its begin."""

    tail_end: int
    numbers: int
    values: int
    end: int


class Rows(NamedTuple):
    """Views of a slot."""

    tail: Tensor
    numbers: Tensor
    values: Tensor


class RowSum(Reduction):
    """A sum under way that replaces the matrix given, or, if a rank sent the whole of it, what is in the slots."""

    def __init__(
        self,
        tensor: SymmetricTensor,
        scale: float,
        matrix: Tensor,
        rows: Tensor | None,
        label: Label = UNLABELLED,
    ) -> None:
        """`rows`: the numbers of those that are not zero; None: the whole."""
        self.result: Tensor | None = None
        self._given: Tensor | None = matrix
        self._numel, self._width = matrix.numel(), matrix[0].numel()
        self._slot = tensor.tensor()
        self._told = False  # the others, that the whole is in the slot
        tensor.await_free()
        if rows is None:
            self._write_whole(tensor)
        else:
            self._write_rows(tensor, matrix, rows, scale)
        super().__init__(tensor, scale, 0, tensor.numel, WHOLE if rows is None else len(rows), label)

    @property
    def _tail(self) -> Tensor:
        return self._slot[self._numel :]

    @torch.no_grad()
    def advance(self) -> bool:
        tensor = self._tensor
        if not tensor.is_filled(self._operation):
            return False
        if self._disagree():
            return True
        if WHOLE not in (counts := tensor.rows):
            self._add_rows(counts)
            tensor.take()
            return True
        if not self._told:
            self._write_whole(tensor)
            tensor.fill_up()
            self._told = True
        return tensor.is_whole(self._operation) and super().advance()

    def missing(self) -> list[int]:
        return (self._told and self._tensor.not_whole(self._operation)) or super().missing()

    def _write_whole(self, tensor: SymmetricTensor) -> None:
        """From now on the slot is the only place for it."""
        if self._given is not None:
            tensor.reserve(tensor.nbytes)
            self._slot[: self._numel].copy_(self._given.view(-1))
            self._given = None

    def _write_rows(self, tensor: SymmetricTensor, matrix: Tensor, rows: Tensor, scale: float) -> None:
        tensor.reserve(self._layout(len(rows)).end)
        mine = self._rows_in(self._slot, len(rows))
        mine.tail.copy_(self._tail)
        mine.numbers.copy_(rows)
        torch.index_select(matrix.view(-1, self._width), 0, rows, out=mine.values)
        mine.values.mul_(scale).add_(0.0)  # which makes 0.0 of -0.0: it is the same to all, whoever adds it to what

    def _add_rows(self, counts: list[int]) -> None:
        """All ranks round alike: they begin with nothing and add one rank's rows after the other's."""
        tensor, given = self._tensor, self._given
        assert given is not None
        matrix = given.view(-1, self._width)
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
        self.result = given

    def _layout(self, count: int) -> Layout:
        item = self._slot.element_size()
        tail_end = (self._slot.numel() - self._numel) * item
        numbers = up(tail_end, LINE)
        values = up(numbers + count * _NUMBER.itemsize, LINE)
        return Layout(tail_end, numbers, values, values + count * self._width * item)

    def _rows_in(self, slot: Tensor, count: int) -> Rows:
        """Where a slot has so many rows."""
        memory, at = slot.view(torch.uint8), self._layout(count)
        return Rows(
            memory[: at.tail_end].view(slot.dtype),
            memory[at.numbers : at.numbers + count * _NUMBER.itemsize].view(_NUMBER),
            memory[at.values : at.end].view(slot.dtype).view(count, self._width),
        )
