"""Buckets between the ranks of one host, in memory that all of them see. For tensors on the CPU.

Gradients are written where they are reduced. What is rare or odd (sparse gradients, text, a whole model) goes through
the same memory in pieces, by way of a staging slot a rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from gradsync.options import MIB
from gradsync.transport import label as labels
from gradsync.transport import symmetric, under_way
from gradsync.transport.base import Done, Request, RowWork, SparseWork, Work
from gradsync.transport.label import UNLABELLED, Label
from gradsync.transport.link import Link
from gradsync.transport.process_group import ProcessGroupTransport, SparseDone, bytes_of
from gradsync.transport.row_sum import RowSum
from gradsync.transport.start_watch import StartWatch
from gradsync.transport.symmetric import STAGING_BYTES, HostMemory, SymmetricTensor

_LENGTH = struct.Struct("=q")
_LABEL = struct.Struct("=qq")


class SharedMemoryTransport:
    """The transport for a group whose ranks all share a host."""

    name = "shared_memory"
    reason = "all ranks share a host"
    usual_caps: tuple[int, ...] = (MIB, 4 * MIB)
    _room = 0  # elements behind each buffer

    def __init__(self, group: ProcessGroupTransport, memory: HostMemory) -> None:
        self._group = group
        self._memory = memory
        self._channel = memory.link.open_channel()  # replicas may train in threads of their own
        self.rank, self.size, self.limit = group.rank, group.size, group.limit
        self.progress = under_way.progress_now_and_then
        self._at: dict[int, SymmetricTensor] = {}  # by the address of this rank's slot
        self._staging = memory.staging(self._channel)
        self._shown_as: object = None
        self._shown: list[Tensor] = []

    def allocate(self, requests: Sequence[Request]) -> list[Tensor]:
        ours = [one.device.type == "cpu" and symmetric.can_sum(one.dtype) for one in requests]
        asked = [one for one, is_ours in zip(requests, ours, strict=True) if is_ours]
        made = {by_rows: iter(self._make(asked, by_rows)) for by_rows in (False, True)}
        rest = iter(self._group.allocate([one for one, is_ours in zip(requests, ours, strict=True) if not is_ours]))
        return [
            self._remember(next(made[one.by_rows]))[: one.numel] if is_ours else next(rest)
            for one, is_ours in zip(requests, ours, strict=True)
        ]

    def _make(self, requests: Sequence[Request], by_rows: bool) -> list[SymmetricTensor]:
        """Those by rows in a file of their own, of which only what is used becomes real memory."""
        asked = [(one.numel + self._room, one.dtype) for one in requests if one.by_rows == by_rows]
        return self._memory.allocate(asked, not by_rows, self._channel) if asked else []

    def _remember(self, made: SymmetricTensor) -> Tensor:
        address = made.tensor().data_ptr()
        self._at[address] = made
        return made.release_with_tensor(partial(self._at.pop, address, None))

    def reduce(self, buffer: Tensor, scale: float, label: Label = UNLABELLED) -> Work:
        found = self._at.get(buffer.untyped_storage().data_ptr()) if buffer.device.type == "cpu" else None
        if found is None:
            return self._reduce_elsewhere(buffer, scale, label)
        start = int(buffer.storage_offset())
        return self._begin(found, scale, start, start + buffer.numel(), label)

    def _reduce_elsewhere(self, buffer: Tensor, scale: float, label: Label) -> Work:
        """A buffer that is not in memory that all see: every rank adds up what all of them show, in rank order."""
        shown = self._exchange(_LABEL.pack(*label) + _pack(_scaled(buffer, scale)))
        differing = labels.differing(Label(*_LABEL.unpack_from(one)) for one in shown)
        if not differing:
            total, *others = (symmetric.widened(_unpack(one, buffer, _LABEL.size)) for one in shown)
            for other in others:
                total += other
            buffer.copy_(total)
        return Done(differing)

    def _begin(self, found: SymmetricTensor, scale: float, start: int, stop: int, label: Label) -> Work:
        return found.reduce(scale, start, stop, label)

    @property
    def reduce_rows(self) -> Callable[[Tensor, Tensor, Tensor | None, float, Label], RowWork] | None:
        return self._reduce_rows

    def _reduce_rows(
        self, buffer: Tensor, matrix: Tensor, rows: Tensor | None, scale: float, label: Label = UNLABELLED
    ) -> RowWork:
        return RowSum(self._at[buffer.data_ptr()], scale, matrix, rows, label)

    def reduce_sparse(self, gradient: Tensor, scale: float) -> SparseWork:
        gradient = _scaled(gradient, scale).coalesce()
        indices, values = gradient.indices(), gradient.values()
        of_all_i = [_unpack(one, indices.new_empty(0)) for one in self._exchange(_pack(indices))]
        of_all_v = [_unpack(one, values.new_empty(0)) for one in self._exchange(_pack(values))]
        # In rank order on every rank, so that the sums are bitwise the same everywhere.
        joined_i = torch.cat([one.view(len(indices), -1) for one in of_all_i], dim=1)
        joined_v = torch.cat([one.view(-1, *values.shape[1:]) for one in of_all_v])
        return SparseDone(
            torch.sparse_coo_tensor(joined_i, joined_v, gradient.shape, check_invariants=False).coalesce()
        )

    def broadcast(self, tensors: Sequence[Tensor], source: int) -> None:
        tensors = [tensor.data for tensor in tensors if tensor.numel()]  # `.data`: see `process_group._unpack`
        for some in _fitting(tensors):
            if len(some) > 1 or some[0].nbytes <= STAGING_BYTES:
                self._broadcast_together(some, source)
            else:
                self._broadcast_large(some[0], source)

    def _broadcast_together(self, tensors: list[Tensor], source: int) -> None:
        """Those that fit the staging slot, such as buffers in every round."""
        shown = self._views(source, tensors)
        if self.rank == source:
            self._staging.await_taken()
            self._staging.reserve(STAGING_BYTES)
            torch._foreach_copy_(shown, tensors)
        with self._staging.shown_by(source):
            if self.rank != source:
                torch._foreach_copy_(tensors, shown)

    def _broadcast_large(self, tensor: Tensor, source: int) -> None:
        flat = bytes_of(tensor)
        for start in range(0, len(flat), STAGING_BYTES):
            self._broadcast_together([flat[start : start + STAGING_BYTES]], source)
        if self.rank != source and not tensor.is_contiguous():  # else it was written to where it is
            tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))

    def _views(self, source: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        """For each tensor its place in the staging slot of rank `source`."""
        key = source, tuple([(tensor.dtype, tensor.shape) for tensor in tensors])
        if key != self._shown_as:
            offset, views = 0, []
            with torch.inference_mode(False):  # as in `SymmetricTensor.tensor`
                slot = self._staging.tensor(source)
                for tensor in tensors:
                    views.append(slot[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
                    offset += symmetric.up(tensor.nbytes, symmetric.LINE)
            self._shown_as, self._shown = key, views
        return self._shown

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        watching = None if self._group.watch is None else _Watching(self._memory.link, self._group.watch)
        with self._group.starting():
            if watching is not None:
                under_way.begin(watching)
            try:
                yield
            finally:
                if watching is not None:
                    under_way.give_up(watching)

    def check_met(self) -> None:
        self._group.check_met()

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        layout = f"={len(numbers)}q"
        return [list(struct.unpack(layout, one)) for one in self._exchange(struct.pack(layout, *numbers))]

    def gather_text(self, text: str) -> list[str]:
        return [one.decode() for one in self._exchange(text.encode())]

    def agree(self, topic: str, text: str, limit: float | None = None) -> list[str]:
        return self._group.agree(topic, text, limit)

    def _exchange(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, of any length, in as many pieces as the longest takes."""
        staging, room = self._staging, STAGING_BYTES - _LENGTH.size
        of_all: list[bytearray] = [bytearray() for _ in range(self.size)]
        mine, at, longest = staging.bytes_of(self.rank), 0, 1
        staging.await_taken()
        while at < longest:
            piece = data[at : at + room]
            staging.reserve(_LENGTH.size + len(piece))
            _LENGTH.pack_into(mine, 0, len(data))
            mine[_LENGTH.size : _LENGTH.size + len(piece)] = piece
            with staging.shown_by_all():
                shown = [staging.bytes_of(rank) for rank in range(self.size)]
                lengths = [_LENGTH.unpack_from(one)[0] for one in shown]
                for whole, length, one in zip(of_all, lengths, shown, strict=True):
                    whole += one[_LENGTH.size : _LENGTH.size + min(room, length - at)] if length > at else b""
            longest, at = max(lengths), at + room
        return list(map(bytes, of_all))


class _Watching:
    """Looks for lost ranks while this one waits for others, until that is over."""

    def __init__(self, link: Link, watch: StartWatch) -> None:
        self.link = link
        self._watch = watch

    def advance(self) -> bool:
        self._watch.check()
        return False


def _scaled(tensor: Tensor, scale: float) -> Tensor:
    """Not multiplied by 0: a rank without data may well have computed NaN."""
    return (tensor * scale).to(tensor.dtype) if scale else torch.zeros_like(tensor)


def _pack(tensor: Tensor) -> bytes:
    flat = bytes_of(tensor.cpu())
    return ctypes.string_at(flat.data_ptr(), len(flat))


def _unpack(data: bytes, like: Tensor, offset: int = 0) -> Tensor:
    """Elements of the type of `like`, in its shape unless that is empty."""
    if len(data) == offset:
        return like.new_empty(0)
    found = torch.frombuffer(bytearray(data[offset:]), dtype=like.dtype).to(like.device)
    return found.view(like.shape) if like.numel() else found


def _fitting(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """As many at a time as fit the staging slot, and each that does not by itself."""
    some: list[Tensor] = []
    taken = 0
    for tensor in tensors:
        nbytes = symmetric.up(tensor.nbytes, symmetric.LINE)
        if some and taken + nbytes > STAGING_BYTES:
            yield some
            some, taken = [], 0
        some.append(tensor)
        taken += nbytes
    if some:
        yield some
