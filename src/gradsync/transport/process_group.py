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
from gradsync.errors import ReplicaLostError
from gradsync.events import Traffic
from gradsync.options import MIB
from gradsync.transport import label as labels
from gradsync.transport import progress_engine, summation
from gradsync.transport.base import Done, Request, ShareWork, SparseWork, Work, all_reduced
from gradsync.transport.dedicated_group import Connections
from gradsync.transport.gathered_sum import GatheredSum, ScaledAfter
from gradsync.transport.label import UNLABELLED, Label
from gradsync.transport.late_watch import LateWatch
from gradsync.transport.link import Link
from gradsync.transport.membership import Membership
from gradsync.transport.own_memory import OwnMemory
from gradsync.transport.share_of_whole import ShareOfWhole
from gradsync.transport.start_watch import StartWatch
from gradsync.transport.tensor_bytes import bytes_of
from gradsync.transport.tree import Order
from gradsync.transport.waiting import PAUSE
from gradsync.watch.watch import Watch

# Tensors are broadcast in blocks of about this size: few collectives, little extra memory.
BROADCAST_BYTES = 32 * 1024 * 1024


class ProcessGroupTransport:
    """The transport for everything: it asks of the group only all-reduce, broadcast and all-gather.

    (And all-to-all, for sums in the order of a tree.)
    """

    name = "process_group"
    usual_caps: tuple[int, ...] = (MIB, 25 * MIB)
    progress = None  # c10d has threads of its own
    reduce_rows = None  # the ranks would have to tell each other how many rows they have, and wait for that

    def __init__(
        self,
        group: dist.ProcessGroup,
        reason: str = "",
        *,
        number: int = 0,
        dedicated: Any = None,
        start_watch: StartWatch | None = None,
        watch: Watch | None = None,
        check_rendezvous: Callable[[], None] | None = None,
        late_watch: LateWatch | None = None,
    ) -> None:
        """`reason`: why it is this transport and no other. `number`: tells it from others over the same group.

        `dedicated`: connections that are its alone, see `dedicated_group.py`. `start_watch`: notices ranks that are
        lost until the replica is made; `watch`: does so from then on. `check_rendezvous`: raises if this rank skipped a
        rendezvous that others came to; `late_watch`: begins behind that.
        """
        self._member = Membership(group)
        self.rank, self.size, self.limit = self._member.rank, self._member.size, self._member.limit
        self.reason = reason
        self._number = number
        self._start_watch = start_watch
        self._late_watch = late_watch
        self._find_watch: Callable[[], Watch | None] = (lambda: watch) if late_watch is None else late_watch.find
        self._check_rendezvous = check_rendezvous
        self._connections = Connections(group if dedicated is None else dedicated, self._find_watch, self.limit)
        if dedicated is not None:
            self._connections.end_with(self)

    @contextlib.contextmanager
    def starting(self, link: Link | None = None) -> Iterator[None]:
        """`link`: on which this rank may wait meanwhile."""
        if self._start_watch is None:
            yield
            return
        try:
            with self._start_watch.starting(link):
                yield
        finally:
            self._start_watch = None

    @property
    def watch(self) -> Watch | None:
        return self._find_watch()

    def check_alive(self) -> None:
        if (watch := self._find_watch()) is not None:
            watch.check()

    def check_rendezvous(self) -> None:
        if self._check_rendezvous is not None:
            self._check_rendezvous()
        if self._late_watch is not None:
            self._late_watch.begin()

    def allocate(self, requests: Sequence[Request]) -> list[Tensor]:
        """With room for a label behind it."""
        return [
            torch.empty(one.numel + labels.PLACES, dtype=one.dtype, device=one.device)[: one.numel] for one in requests
        ]

    def is_shared(self, buffer: Tensor) -> bool:
        return False

    def allocate_once(self, nbytes: int) -> OwnMemory:
        return OwnMemory(self.rank, self.size, nbytes, self._gather_cpu, self._largest)

    def _gather_cpu(self, mine: Tensor) -> list[Tensor]:
        if self.size == 1:
            return [mine]
        return [found.to(mine.device) for found in self._gather(mine)]

    def _largest(self, number: int) -> int:
        return max(row[0] for row in self.gather([number]))

    def reduce(self, buffer: Tensor, scale: float, label: Label = UNLABELLED) -> Work:
        summation.scale_(buffer, scale)  # before the sum, not after: a sum of float16 gradients overflows easily
        if self.size == 1:
            return Done()
        places = None
        if label.mask:  # not scaled: a rank of no weight has a say too
            buffer = buffer.as_strided((buffer.numel() + labels.PLACES,), (1,))
            places = buffer[-labels.PLACES :]
            labels.write(places, (label,))
        # On a GPU the scaling above and the collective are ordered by the current stream.
        work = self._connections.track(_torch.all_reduce(self._connections.carrier, buffer))
        return _InFlight(work, buffer, places, self._connections, self.size)

    def reduce_in_order(self, terms: Sequence[Tensor], order: Order, scale: float, label: Label = UNLABELLED) -> Work:
        first = terms[0]
        if self.size == 1 or (self.size == 2 and order.most == 1):
            return ScaledAfter(self.reduce(first, 1.0, label), first, scale)
        mine, places = list(terms[: order.counts[self.rank]]), None
        if label.mask:
            mine = [one.as_strided((one.numel() + labels.PLACES,), (1,)) for one in mine]
            for one in mine[1:]:
                one[-labels.PLACES :].zero_()
            places = mine[0][-labels.PLACES :]
            labels.write(places, (label,))
        return GatheredSum(mine, order, scale, self._connections, places)

    def gather_tensors(self, mine: Tensor) -> list[Tensor]:
        return [one.view(-1) for one in self._gather_cpu(mine.contiguous())]

    def allocate_reused(self, requests: Sequence[Request]) -> list[Tensor]:
        return self.allocate(requests)

    def is_free(self, buffer: Tensor) -> bool:
        return True

    def await_free(self, buffer: Tensor) -> None:
        """Each has its own memory."""

    def reduce_share(self, buffer: Tensor, data: int, scale: float, label: Label = UNLABELLED) -> ShareWork:
        return ShareOfWhole(self.reduce(buffer, scale, label), buffer, data, self.rank, self.size)

    def reduce_sparse(self, gradient: Tensor, scale: float) -> SparseWork:
        """By gathering, as no backend but gloo sums sparse tensors; ranks pad to the longest."""
        gradient = summation.scaled(gradient, scale).coalesce()
        if self.size == 1:
            return SparseDone(gradient)
        counts = [row[0] for row in self.gather([gradient._nnz()])]
        longest = max(counts)
        indices, values = gradient.indices(), gradient.values()
        mine_i = indices.new_zeros(indices.shape[0], longest)
        mine_i[:, : indices.shape[1]] = indices
        mine_v = values.new_zeros(longest, *values.shape[1:])
        mine_v[: values.shape[0]] = values
        all_i = [torch.empty_like(mine_i) for _ in counts]
        all_v = [torch.empty_like(mine_v) for _ in counts]
        carrier, track = self._connections.carrier, self._connections.track
        works = (
            track(_torch.all_gather(carrier, all_i, mine_i)),
            track(_torch.all_gather(carrier, all_v, mine_v)),
        )
        return _SparseInFlight(works, all_i, all_v, counts, gradient.shape, self._connections)

    def broadcast(self, tensors: Sequence[Tensor], source: int) -> None:
        if self.size == 1:
            return
        for block in _blocks(tensors):
            flat = torch.cat([bytes_of(tensor) for tensor in block])
            sent = flat.to(self._device()) if flat.is_cpu else flat  # of a module whose parameters are offloaded
            self._run(partial(_torch.broadcast, self._connections.carrier, sent, source), sent.is_cpu)
            if self.rank != source:
                _unpack(sent.to(flat.device), block)

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
        self._run(partial(_torch.all_gather, self._connections.carrier, of_all, mine), mine.is_cpu)
        return of_all

    def exchange_via_store(self, topic: str, text: str, limit: float | None = None) -> list[str]:
        return self._member.exchange(f"{self._number}/{topic}", text, limit, self.check_alive)

    def _device(self) -> torch.device:
        """Where the group wants small tensors: NCCL only knows GPUs, gloo prefers the CPU."""
        types = sorted(device.type for device in _torch.device_types(self._member.group))
        return torch.device("cpu" if "cpu" in types or not types else types[0])

    def _run(self, start: Callable[[], dist.Work], on_cpu: bool) -> None:
        """Starts something and waits for it; while the replica is made, also for the news that a rank is lost."""
        try:
            work = self._connections.track(start())
            while self._start_watch is not None and not work.is_completed():
                progress_engine.progress()
                self._start_watch.check()
                time.sleep(PAUSE)
            self._connections.finish(work, on_cpu)
        except RuntimeError as error:
            if self._start_watch is not None and not isinstance(error, ReplicaLostError):
                self._start_watch.explain()
            raise


class _InFlight(NamedTuple):
    """An all-reduce under way. Keeps its buffer alive: the backend holds only a pointer."""

    work: dist.Work
    buffer: Tensor
    label: Tensor | None
    connections: Connections
    ranks: int

    def wait(self) -> None:
        self.connections.finish(self.work, self.buffer.is_cpu)

    def done(self) -> bool:
        return self.work.is_completed()

    def differing(self) -> int:
        return 0 if self.label is None else labels.read(self.label)

    def traffic(self) -> Traffic:
        return Traffic(all_reduced(self.buffer.nbytes, self.ranks))


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
    connections: Connections

    def result(self) -> Tensor:
        for work in self.works:
            self.connections.finish(work, self.values[0].is_cpu)
        return summation.sum_sparse(
            [indices[:, :count] for indices, count in zip(self.indices, self.counts, strict=True)],
            [values[:count] for values, count in zip(self.values, self.counts, strict=True)],
            self.shape,
        )


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
        # backward (batch normalization does) does not take the overwriting for a mistake.
        tensor.data.copy_(piece.view(tensor.dtype).view(tensor.shape))
