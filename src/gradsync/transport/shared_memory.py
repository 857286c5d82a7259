"""Buckets between the ranks of one host, in memory that all of them see. For tensors on the CPU.

Gradients are written where they are reduced. What is rare or odd (sparse gradients, other devices, text) goes the
way of the process group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from gradsync.options import MIB
from gradsync.transport import symmetric, under_way
from gradsync.transport.base import Request, RowWork, SparseWork, Work
from gradsync.transport.label import UNLABELLED, Label
from gradsync.transport.process_group import ProcessGroupTransport
from gradsync.transport.row_sum import RowSum
from gradsync.transport.symmetric import HostMemory, SymmetricTensor

STAGING_BYTES = 1024 * 1024


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
        self._staging: SymmetricTensor | None = None
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
            return self._group.reduce(buffer, scale, label)
        start = int(buffer.storage_offset())
        return self._begin(found, scale, start, start + buffer.numel(), label)

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
        return self._group.reduce_sparse(gradient, scale)

    def broadcast(self, tensors: Sequence[Tensor], source: int) -> None:
        """Small ones, such as buffers in every round, through memory; a whole model goes with the group."""
        tensors = [tensor.data for tensor in tensors if tensor.numel()]  # `.data`: see `process_group._unpack`
        if not tensors:
            return
        nbytes = sum(symmetric.up(tensor.nbytes, symmetric.LINE) for tensor in tensors)
        if nbytes > STAGING_BYTES or any(tensor.device.type != "cpu" for tensor in tensors):
            self._group.broadcast(tensors, source)
            return
        if self._staging is None:
            (self._staging,) = self._memory.allocate([(STAGING_BYTES, torch.uint8)], channel=self._channel)
        shown = self._views(source, tensors)
        if self.rank == source:
            self._staging.await_taken()
            torch._foreach_copy_(shown, tensors)
        with self._staging.shown_by(source):
            if self.rank != source:
                torch._foreach_copy_(tensors, shown)

    def _views(self, source: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        """For each tensor its place in the staging slot of rank `source`."""
        key = source, tuple([(tensor.dtype, tensor.shape) for tensor in tensors])
        if key != self._shown_as:
            assert self._staging is not None
            offset, views = 0, []
            with torch.inference_mode(False):  # as in `SymmetricTensor.tensor`
                slot = self._staging.tensor(source)
                for tensor in tensors:
                    views.append(slot[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
                    offset += symmetric.up(tensor.nbytes, symmetric.LINE)
            self._shown_as, self._shown = key, views
        return self._shown

    def check_met(self) -> None:
        self._group.check_met()

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        return self._group.gather(numbers)

    def gather_text(self, text: str) -> list[str]:
        return self._group.gather_text(text)

    def agree(self, topic: str, text: str, limit: float | None = None) -> list[str]:
        return self._group.agree(topic, text, limit)
