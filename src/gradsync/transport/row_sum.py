"""Sums of matrices of which every rank has changed a few rows: the gradient of an embedding, for example.

A rank sends the numbers of its rows that are not zero and what is in them, through its slot; each rank adds all of
them to its own matrix, in rank order. If a rank has too many and sends the whole matrix, the others notice, send the
whole too, and it is a sum as any other.

    slot   | row numbers | the rows, times the rank's scale | ...                           | tail |
    else   | the matrix                                                                     | tail |
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradsync.transport.symmetric import LINE, WHOLE, Reduction, SymmetricTensor, up


class RowSum(Reduction):
    """A sum under way that replaces the matrix given, or, if a rank sent the whole of it, what is in the slots."""

    def __init__(self, tensor: SymmetricTensor, scale: float, matrix: Tensor, rows: Tensor | None) -> None:
        self.result: Tensor | None = None
        self._matrix = matrix.view(len(matrix), -1)
        self._given = matrix
        self._sent = rows
        self._filled_up = False
        self._tail = Tensor()
        if rows is not None:
            numbers, values = self._rows_in(tensor.tensor(), len(rows))
            numbers.copy_(rows)
            torch.index_select(self._matrix, 0, rows, out=values)
            values.mul_(scale)
        super().__init__(tensor, scale, 0, tensor.numel, WHOLE if rows is None else len(rows))

    @torch.no_grad()
    def advance(self) -> bool:
        tensor = self._tensor
        if not tensor.is_filled(self._operation):
            return False
        if not self._filled_up:
            if WHOLE not in (counts := tensor.rows):
                self._add_rows(counts)
                tensor.take()
                return True
            if self._sent is not None:
                tensor.tensor()[: self._matrix.numel()].copy_(self._matrix.view(-1))
            tensor.fill_up()
            self._filled_up = True
        return tensor.is_whole(self._operation) and super().advance()

    def wait(self) -> None:
        super().wait()
        if self.result is not None:  # all ranks have read this one's slot
            self._tensor.tensor()[self._matrix.numel() :].copy_(self._tail)

    def _add_rows(self, counts: list[int]) -> None:
        """Begins with nothing and adds one rank after the other: so all ranks round alike."""
        tensor, matrix = self._tensor, self._matrix
        assert self._sent is not None
        matrix.index_fill_(0, self._sent, 0)
        self._tail = torch.zeros_like(tensor.tensor()[matrix.numel() :])
        for rank, (count, scale) in enumerate(zip(counts, tensor.scales, strict=True)):
            slot = tensor.tensor(rank)
            if count:
                numbers, values = self._rows_in(slot, count)
                matrix.index_add_(0, numbers, values)
            self._tail.add_(slot[matrix.numel() :], alpha=scale)
        self.result = self._given

    def _rows_in(self, slot: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Where a slot has row numbers, and the rows."""
        memory = slot.view(torch.uint8)
        width = self._matrix.shape[1]
        start = up(count * torch.int64.itemsize, LINE)
        values = memory[start : start + count * width * slot.element_size()]
        return memory[: count * torch.int64.itemsize].view(torch.int64), values.view(slot.dtype).view(count, width)
