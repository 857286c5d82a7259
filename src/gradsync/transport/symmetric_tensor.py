"""A tensor for each rank of a host, its slot, in memory that all of them have mapped.

This is memory only. What ranks do with it, in which order, is in `slot_sums.py` and `slot_reads.py`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from gradsync.transport.control_words import ControlWords
from gradsync.transport.memory_file import MemoryFile

PAGE = 4096


class SymmetricTensor:
    """One flat tensor a rank, of the same size and type, at the same place in the section of each rank."""

    def __init__(self, file: MemoryFile, control: ControlWords, offset: int, numel: int, dtype: torch.dtype) -> None:
        """`offset`: bytes from the begin of a section."""
        self.local_rank, self.size = file.local_rank, file.size
        self.numel, self.dtype, self.nbytes = numel, dtype, numel * dtype.itemsize
        self.control = control
        self._file, self._offset, self._reserved = file, offset, 0
        starts = [file.section_start(rank) + offset for rank in range(self.size)]
        self._slots = [file.memory[start : start + self.nbytes] for start in starts]
        # What users hold keeps the memory mapped, but not this object: see `release_with_slot`.
        start = starts[self.local_rank]
        self._mine = file.memory[start : start + self.nbytes]

    def slot(self, local_rank: int | None = None) -> Tensor:
        """The tensor of a rank, or of this one. Another rank's may change at any time."""
        exporter = self._mine if local_rank is None else self._slots[local_rank]
        if not self.numel:
            return torch.empty(0, dtype=self.dtype, device="cpu")
        with torch.inference_mode(False):  # a tensor made in evaluation could not be written to in training
            return torch.frombuffer(exporter, dtype=self.dtype)

    def slot_bytes(self, local_rank: int) -> memoryview:
        return self._slots[local_rank]

    def release_with_slot(self, callback: Callable[[], object]) -> Tensor:
        """This rank's slot, and `callback` when the last tensor over it is gone."""
        tensor = self.slot()
        weakref.finalize(self._mine, callback).atexit = False
        self._mine = self._slots[self.local_rank]
        return tensor

    def reserve(self, nbytes: int, purpose: str) -> None:
        """Makes sure that there is memory for the first `nbytes` of this rank's slot."""
        if nbytes > self._reserved:
            self._file.reserve(self._offset, self._offset + nbytes, purpose)
            self._reserved = nbytes

    def reserve_last_page(self) -> None:
        """The same for the last page, on which a bucket has its tail."""
        first = self._offset + max(0, self.nbytes - PAGE)
        self._file.reserve(first, self._offset + self.nbytes, "the tail of a bucket")


def as_real(tensor: Tensor) -> Tensor:
    """Complex numbers as twice as many real ones."""
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor
