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
        self._distinct = [device for device in dict.fromkeys(self._devices) if _torch.has_streams(device)]
        self._latest: list[torch.Stream | None] = [None] * len(leaves)
        self._first: dict[torch.device, torch.Stream] = {}
        self._several = False  # on one device

    @classmethod
    def of(cls, leaves: Sequence[Tensor]) -> ArrivalStreams | None:
        """None on the CPU, which has no streams."""
        return cls(leaves) if any(_torch.has_streams(leaf.device) for leaf in leaves) else None

    def arrived(self, index: int) -> None:
        """Its gradient is written by what is queued on the current stream of its device."""
        device = self._devices[index]
        if _torch.has_streams(device):
            self._latest[index] = self._current(device)

    def join(self, indices: Iterable[int] | None = None) -> None:
        """From here on the current stream may read these gradients, or all, and they may be freed at once."""
        current = {device: self._current(device) for device in self._distinct}
        if not self._several:
            return
        for index in range(len(self._leaves)) if indices is None else indices:
            here = current.get(self._devices[index])
            if here is None:
                continue
            if (came := self._latest[index]) is not None and came != here:
                here.wait_stream(came)
            if (gradient := self._leaves[index].grad) is not None:
                _torch.keep_for(gradient, here)

    def _current(self, device: torch.device) -> torch.Stream:
        stream = _torch.current_stream(device)
        if not self._several:
            self._several = self._first.setdefault(device, stream) != stream
        return stream
