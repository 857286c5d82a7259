"""What is rare or odd goes through a staging buffer, piece by piece: text, sparse gradients, a whole model.

Inside a host each channel has one, a symmetric tensor of bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gradsync.transport.host_memory import STAGING_BYTES, HostMemory
from gradsync.transport.shares import LINE, round_up
from gradsync.transport.slot_reads import SlotReads
from gradsync.transport.tensor_bytes import bytes_of

_LENGTH = struct.Struct("=q")
_PURPOSE = "what ranks send each other beside gradients"


class Staging:
    """The staging buffers of the ranks of a host, for one channel."""

    def __init__(self, host: HostMemory, channel: int) -> None:
        """All ranks together, in the order of their channels."""
        self._buffers = host.allocate_staging(channel)
        self._reads = SlotReads(host, self._buffers)
        self._latest_views: tuple[object, list[Tensor]] = None, []

    def exchange(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, of any length, in as many pieces as the longest takes."""
        room = STAGING_BYTES - _LENGTH.size
        shown = [self._buffers.slot_bytes(rank) for rank in range(self._buffers.size)]
        mine, received = shown[self._buffers.local_rank], [bytearray() for _ in shown]
        at, longest = 0, 1
        self._reads.await_readers()
        while at < longest:
            piece = data[at : at + room]
            self._buffers.reserve(_LENGTH.size + len(piece), _PURPOSE)
            _LENGTH.pack_into(mine, 0, len(data))
            mine[_LENGTH.size : _LENGTH.size + len(piece)] = piece
            with self._reads.reading_all():
                lengths = [_LENGTH.unpack_from(one)[0] for one in shown]
                for whole, length, one in zip(received, lengths, shown, strict=True):
                    whole += one[_LENGTH.size : _LENGTH.size + min(room, length - at)] if length > at else b""
            longest, at = max(lengths), at + room
        return list(map(bytes, received))

    def broadcast(self, tensors: Sequence[Tensor], source: int) -> None:
        """Overwrites the tensors with those of rank `source`."""
        tensors = [tensor.data for tensor in tensors if tensor.numel()]  # `.data`: see `process_group._unpack`
        for some in _fitting(tensors):
            if len(some) > 1 or some[0].nbytes <= STAGING_BYTES:
                self._broadcast_at_once(some, source)
                continue
            (tensor,) = some
            flat = bytes_of(tensor)
            for start in range(0, len(flat), STAGING_BYTES):
                self._broadcast_at_once([flat[start : start + STAGING_BYTES]], source)
            if self._buffers.local_rank != source and not tensor.is_contiguous():  # else it was written to in place
                tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))

    def _broadcast_at_once(self, tensors: list[Tensor], source: int) -> None:
        """Those that fit the staging buffer together, such as a module's buffers in every round."""
        shown = self._views(source, tensors)
        if self._buffers.local_rank == source:
            self._reads.await_readers()
            self._buffers.reserve(STAGING_BYTES, _PURPOSE)
            torch._foreach_copy_(shown, tensors)
        with self._reads.reading(source):
            if self._buffers.local_rank != source:
                torch._foreach_copy_(tensors, shown)

    def _views(self, source: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        """For each tensor the view of rank `source`'s staging buffer through which it goes.

        The latest ones are kept: a module's buffers are the same in every round.
        """
        key = source, tuple([(tensor.dtype, tensor.shape) for tensor in tensors])
        if key != self._latest_views[0]:
            offset, views = 0, []
            with torch.inference_mode(False):  # as in `SymmetricTensor.slot`
                buffer = self._buffers.slot(source)
                for tensor in tensors:
                    views.append(buffer[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
                    offset += round_up(tensor.nbytes, LINE)
            self._latest_views = key, views
        return self._latest_views[1]


def _fitting(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """As many at a time as fit the staging buffer, and each that does not by itself."""
    some: list[Tensor] = []
    taken = 0
    for tensor in tensors:
        nbytes = round_up(tensor.nbytes, LINE)
        if some and taken + nbytes > STAGING_BYTES:
            yield some
            some, taken = [], 0
        some.append(tensor)
        taken += nbytes
    if some:
        yield some
