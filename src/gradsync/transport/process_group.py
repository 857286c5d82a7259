"""Buckets over any c10d process group: gloo, NCCL, MPI, or one written in Python."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gradsync import _torch
from gradsync._torch import Store
from gradsync.errors import ReplicaLostError
from gradsync.options import MIB
from gradsync.transport import label as labels
from gradsync.transport import own_group, under_way
from gradsync.transport.base import Done, Request, SparseWork, Work
from gradsync.transport.label import UNLABELLED, Label
from gradsync.transport.start_watch import StartWatch
from gradsync.transport.store import exchange
from gradsync.transport.waiting import PAUSE, finish

# Tensors are broadcast in blocks of about this size: few collectives, little extra memory.
BROADCAST_BYTES = 32 * 1024 * 1024
MANY = 256


class ProcessGroupTransport:
    """The transport for everything: it asks of the group only all-reduce, broadcast and all-gather."""

    name = "process_group"
    usual_caps: tuple[int, ...] = (MIB, 25 * MIB)
    progress = None  # c10d has threads of its own

    def __init__(
        self, group: dist.ProcessGroup, number: int = 0, own: Any = None, watch: StartWatch | None = None
    ) -> None:
        """`own`: connections of its own, see `own_group.py`. `number`: tells it from others over the same group.

        `watch`: notices ranks that are lost until the replica is made.
        """
        self.group = group
        self.rank, self.size = group.rank(), group.size()
        self.limit = _torch.timeout_of(group).total_seconds()
        self.reason = ""
        """Why it is this transport and no other."""
        self.meant_to_meet: Callable[[], None] | None = None
        """Set if nothing was communicated when it was made: raises if other ranks did communicate."""
        self._number = number
        self._watch = watch
        self._held = [group if own is None else own]
        self._pending: set[dist.Work] = set()
        if own is not None:
            own_group.release_with(self, self._held, self._pending)

    @property
    def _carrier(self) -> Any:
        return self._held[0]

    @property
    def watch(self) -> StartWatch | None:
        """While the replica is made."""
        return self._watch

    @property
    def store(self) -> Store:
        """Through which the group's ranks met."""
        return _torch.store_of(self.group)

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        if self._watch is None:
            yield
            return
        try:
            with self._watch.starting():
                yield
        finally:
            self._watch = None

    def check_met(self) -> None:
        if self.meant_to_meet is not None:
            self.meant_to_meet()

    def allocate(self, requests: Sequence[Request]) -> list[Tensor]:
        """With room for a label behind it."""
        return [
            torch.empty(one.numel + labels.PLACES, dtype=one.dtype, device=one.device)[: one.numel] for one in requests
        ]

    def reduce(self, buffer: Tensor, scale: float, label: Label = UNLABELLED) -> Work:
        # Scaled before the sum, not after: a sum of float16 gradients overflows easily.
        if scale == 0:
            buffer.zero_()  # not multiplied: a rank without data may well have computed NaN
        elif scale != 1:
            buffer.mul_(scale)
        if self.size == 1:
            return Done()
        places = None
        if label.mask:  # not scaled: a rank of no weight has a say too
            buffer = buffer.as_strided((buffer.numel() + labels.PLACES,), (1,))
            places = buffer[-labels.PLACES :]
            labels.write(places, (label,))
        # On a GPU the scaling above and the collective are ordered by the current stream.
        work = self._begun(_torch.all_reduce(self._carrier, buffer))
        return _InFlight(work, buffer, places, self._pending)

    def _begun(self, work: dist.Work) -> dist.Work:
        """Remembered until it was waited for."""
        if len(self._pending) > MANY:  # some belong to rounds that were given up
            self._pending.difference_update([one for one in self._pending if one.is_completed()])
        self._pending.add(work)
        return work

    @property
    def reduce_rows(self) -> None:
        """The ranks would have to tell each other how many rows they have, and wait for that."""
        return None

    def reduce_sparse(self, gradient: Tensor, scale: float) -> SparseWork:
        gradient = (gradient * scale if scale else torch.zeros_like(gradient)).coalesce()
        if self.size == 1:
            return SparseDone(gradient)
        counts = [row[0] for row in self.gather([gradient._nnz()])]
        return self._gather_sparse(gradient, counts)

    def broadcast(self, tensors: Sequence[Tensor], source: int) -> None:
        if self.size == 1:
            return
        for block in _blocks(tensors):
            flat = torch.cat([bytes_of(tensor) for tensor in block])
            self._finish(partial(_torch.broadcast, self._carrier, flat, source), flat.is_cpu)
            if self.rank != source:
                _unpack(flat, block)

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        if self.size == 1:
            return [list(numbers)]
        return [row.tolist() for row in self._gather(torch.tensor(numbers, dtype=torch.int64))]

    def gather_text(self, text: str) -> list[str]:
        data = text.encode()
        lengths = [row[0] for row in self.gather([len(data)])]
        padded = torch.frombuffer(bytearray(data.ljust(max(*lengths, 1), b"\0")), dtype=torch.uint8)
        rows = self._gather(padded) if self.size > 1 else [padded]
        return [bytes(row[:length].tolist()).decode() for row, length in zip(rows, lengths, strict=True)]

    def _gather(self, mine: Tensor) -> list[Tensor]:
        mine = mine.to(self._device())
        of_all = [torch.empty_like(mine) for _ in range(self.size)]
        self._finish(partial(_torch.all_gather, self._carrier, of_all, mine), mine.is_cpu)
        return of_all

    def agree(self, topic: str, text: str, limit: float | None = None) -> list[str]:
        limit = self.limit if limit is None else limit
        return exchange(self.store, f"{self._number}/{topic}", self.rank, self.size, text, limit)

    def count(self, what: str) -> int:
        """How often this rank has asked for this, in the life of the group's store; all ranks ask equally often."""
        return self.store.add(f"gradsync/{what}/{self.rank}", 1)

    def _device(self) -> torch.device:
        """Where the group wants small tensors: NCCL only knows GPUs, gloo prefers the CPU."""
        types = sorted(device.type for device in _torch.device_types(self.group))
        return torch.device("cpu" if "cpu" in types or not types else types[0])

    def _finish(self, start: Callable[[], dist.Work], on_host: bool) -> None:
        """Starts something and waits for it; while the replica is made, also for the news that a rank is lost."""
        try:
            work = self._begun(start())
            while self._watch is not None and not work.is_completed():
                under_way.progress()
                self._watch.check()
                time.sleep(PAUSE)
            finish(work, on_host)
            self._pending.discard(work)
        except RuntimeError as error:
            if self._watch is not None and not isinstance(error, ReplicaLostError):
                self._watch.explain()
            raise

    def _gather_sparse(self, gradient: Tensor, counts: list[int]) -> SparseWork:
        """By gathering, as no backend but gloo sums sparse tensors; ranks pad to the longest."""
        longest = max(counts)
        indices, values = gradient.indices(), gradient.values()
        mine_i = indices.new_zeros(indices.shape[0], longest)
        mine_i[:, : indices.shape[1]] = indices
        mine_v = values.new_zeros(longest, *values.shape[1:])
        mine_v[: values.shape[0]] = values
        all_i = [torch.empty_like(mine_i) for _ in counts]
        all_v = [torch.empty_like(mine_v) for _ in counts]
        works = (
            self._begun(_torch.all_gather(self._carrier, all_i, mine_i)),
            self._begun(_torch.all_gather(self._carrier, all_v, mine_v)),
        )
        return _SparseInFlight(works, all_i, all_v, counts, gradient.shape, self._pending)


class _InFlight(NamedTuple):
    """An all-reduce under way. Keeps its buffer alive: the backend holds only a pointer."""

    work: dist.Work
    buffer: Tensor
    label: Tensor | None
    pending: set[dist.Work]

    def wait(self) -> None:
        finish(self.work, self.buffer.is_cpu)
        self.pending.discard(self.work)

    def done(self) -> bool:
        return self.work.is_completed()

    def differing(self) -> int:
        return 0 if self.label is None else labels.read(self.label)


class SparseDone(NamedTuple):
    gradient: Tensor

    def result(self) -> Tensor:
        return self.gradient


class _SparseInFlight(NamedTuple):
    """Indices and values of all ranks on their way; `counts` says how many are real, not padding."""

    works: tuple[dist.Work, dist.Work]
    indices: list[Tensor]
    values: list[Tensor]
    counts: list[int]
    shape: torch.Size
    pending: set[dist.Work]

    def result(self) -> Tensor:
        for work in self.works:
            finish(work, self.values[0].is_cpu)
            self.pending.discard(work)
        # In rank order on every rank, so that the sums are bitwise the same everywhere.
        indices = torch.cat([i[:, :n] for i, n in zip(self.indices, self.counts, strict=True)], dim=1)
        values = torch.cat([v[:n] for v, n in zip(self.values, self.counts, strict=True)])
        return torch.sparse_coo_tensor(indices, values, self.shape, check_invariants=False).coalesce()


def bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _blocks(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Groups of tensors of one device and of about `BROADCAST_BYTES`; empty tensors are left out."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            by_device.setdefault(tensor.device, []).append(tensor)
    for group in by_device.values():
        block: list[Tensor] = []
        size = 0
        for tensor in group:
            block.append(tensor)
            size += tensor.nbytes
            if size >= BROADCAST_BYTES:
                yield block
                block, size = [], 0
        if block:
            yield block


def _unpack(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    offset = 0
    for tensor in tensors:
        piece = flat[offset : offset + tensor.nbytes]
        offset += tensor.nbytes
        # A view of bytes as wider elements must begin at a multiple of their size.
        if piece.storage_offset() % tensor.element_size():
            piece = piece.clone()
        # Through `.data`, which has a version counter of its own: a graph that saved the tensor for
        # backward (batch normalisation does) does not take the overwriting for a mistake.
        tensor.data.copy_(piece.view(tensor.dtype).view(tensor.shape))
