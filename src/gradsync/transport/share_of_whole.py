"""A share of a sum that was made as a whole, on every rank: where nothing is to be saved."""

from __future__ import annotations

from torch import Tensor

from gradsync.events import Traffic
from gradsync.transport.base import Work
from gradsync.transport.shares import bounds


class ShareOfWhole:
    """Of the first `data` elements of a buffer that is being reduced."""

    def __init__(self, whole: Work, buffer: Tensor, data: int, local_rank: int, size: int) -> None:
        self._whole, self._buffer, self._data = whole, buffer, data
        self._bounds = bounds(0, data, local_rank, size, buffer.element_size())

    def wait(self) -> None:
        self._whole.wait()

    def done(self) -> bool:
        return self._whole.done()

    def differing(self) -> int:
        return self._whole.differing()

    def traffic(self) -> Traffic:
        return self._whole.traffic()

    def share(self) -> Tensor:
        first, last = self._bounds
        return self._buffer[first:last]

    def tail(self) -> Tensor:
        return self._buffer[self._data :]

    def release(self) -> None:
        """Nobody else reads it."""
