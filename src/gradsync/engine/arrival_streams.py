"""On which streams of an accelerator gradients have come.

Autograd runs a backward on the streams of its forward, and joins them at its end. A bucket leaves before that: it is
filled on the stream of its last gradient, which knows nothing of the others. (On most programs there is one stream, and
nothing to do.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from gradsync import _torch


class ArrivalStreams:
    """Of one list of parameters."""

    def __init__(self, leaves: Sequence[Tensor]) -> None:
        self._leaves = leaves
        self._devices = [leaf.device for leaf in leaves]
        self._latest: list[torch.Stream | None] = [None] * len(leaves)
        self._first: torch.Stream | None = None
        self._several = False  # streams were met

    @classmethod
    def of(cls, leaves: Sequence[Tensor]) -> ArrivalStreams | None:
        """None on the CPU, which has no streams."""
        return cls(leaves) if any(_torch.has_streams(leaf.device) for leaf in leaves) else None

    def arrived(self, index: int) -> None:
        """Its gradient is written by what is queued on the current stream of its device."""
        device = self._devices[index]
        if _torch.has_streams(device):
            self._latest[index] = self._met(torch.accelerator.current_stream(device))

    def join(self, indices: Iterable[int]) -> None:
        """From here on the current stream may read these gradients, and they may be freed at once."""
        indices = list(indices)
        for device in {self._devices[index] for index in indices}:
            if not _torch.has_streams(device):
                continue
            current = self._met(torch.accelerator.current_stream(device))
            if not self._several:
                continue
            there = [index for index in indices if self._devices[index] == device]
            for other in {self._latest[index] for index in there} - {None, current}:
                assert other is not None
                current.wait_stream(other)
            for index in there:
                if (gradient := self._leaves[index].grad) is not None:
                    _torch.keep_for(gradient, current)

    def _met(self, stream: torch.Stream) -> torch.Stream:
        if self._first is None:
            self._first = stream
        elif not self._several and stream.device == self._first.device:
            self._several = stream != self._first
        return stream
