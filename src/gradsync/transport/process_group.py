"""Buckets over any c10d process group: gloo, NCCL, MPI, or one written in Python."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gradsync import _torch
from gradsync.options import MIB
from gradsync.transport import label as labels
from gradsync.transport import under_way
from gradsync.transport.base import Request, SparseWork, Work
from gradsync.transport.label import UNLABELLED, Label

# Tensors are broadcast in blocks of about this size: few collectives, little extra memory.
BROADCAST_BYTES = 32 * 1024 * 1024
PAUSE = 200e-6


class ProcessGroupTransport:
    """The transport for everything: it asks of the group only all-reduce, broadcast and all-gather."""

    name = "process_group"
    usual_caps: tuple[int, ...] = (MIB, 25 * MIB)
    progress = None  # c10d has threads of its own

    def __init__(self, group: dist.ProcessGroup, own: bool = True) -> None:
        """`own`: over a group of its own with the same ranks, which all of them make now.

        A group matches collectives by the order in which each rank starts them. Two replicated modules, or a
        model with collectives in its own backward, may start theirs in different orders on different ranks.
        """
        # Only for all ranks of the world: c10d names groups by counting, and other ranks would not count this one.
        if own and 1 < dist.get_world_size(group) == dist.get_world_size() and _torch.knows(group):
            # Never destroyed before the process ends: c10d would give the next one the same name, under which the
            # store still has the addresses of this one.
            group = _torch.twin_of(group)
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.limit = _torch.timeout_of(group).total_seconds()
        self.reason = ""
        """Why it is this transport and no other."""
        self.meant_to_meet: Callable[[], None] | None = None
        """Set if nothing was communicated when it was made: raises if other ranks did communicate."""

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
            return _Done()
        places = None
        if label.mask:  # not scaled: a rank of no weight has a say too
            buffer = buffer.as_strided((buffer.numel() + labels.PLACES,), (1,))
            places = buffer[-labels.PLACES :]
            labels.write(places, (label,))
        # On a GPU the scaling above and the collective are ordered by the current stream.
        return _InFlight(dist.all_reduce(buffer, group=self.group, async_op=True), buffer, places)

    @property
    def reduce_rows(self) -> None:
        """The ranks would have to tell each other how many rows they have, and wait for that."""
        return None

    def reduce_sparse(self, gradient: Tensor, scale: float) -> SparseWork:
        gradient = (gradient * scale if scale else torch.zeros_like(gradient)).coalesce()
        if self.size == 1:
            return _SparseDone(gradient)
        counts = [row[0] for row in self.gather([gradient._nnz()])]
        return _gather_sparse(gradient, counts, self.group)

    def broadcast(self, tensors: Sequence[Tensor], source: int) -> None:
        if self.size == 1:
            return
        root = dist.get_global_rank(self.group, source)
        for block in _blocks(tensors):
            flat = torch.cat([_bytes(tensor) for tensor in block])
            _finish(dist.broadcast(flat, root, group=self.group, async_op=True))
            if self.rank != source:
                _unpack(flat, block)

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        if self.size == 1:
            return [list(numbers)]
        mine = torch.tensor(numbers, dtype=torch.int64, device=self._device())
        of_all = [torch.empty_like(mine) for _ in range(self.size)]
        _finish(dist.all_gather(of_all, mine, group=self.group, async_op=True))
        return [row.tolist() for row in of_all]

    def gather_text(self, text: str) -> list[str]:
        if self.size == 1:
            return [text]
        texts = [""] * self.size
        dist.all_gather_object(texts, text, group=self.group)
        return texts

    def agree(self, topic: str, text: str, limit: float | None = None) -> list[str]:
        store = _torch.store_of(self.group)
        keys = [f"gradsync/{topic}/{rank}" for rank in range(self.size)]
        store.set(keys[self.rank], text)
        try:
            store.wait(keys, timedelta(seconds=limit or self.limit))
        except RuntimeError:
            silent = [rank for rank, key in enumerate(keys) if not store.check([key])]
            if silent:
                raise TimeoutError(f"no word from rank {', '.join(map(str, silent))}") from None
        return [found.decode() for found in _torch.read_all(store, keys)]

    def count(self, what: str) -> int:
        """How often this rank has asked for this, in the life of the group's store; all ranks ask equally often."""
        return _torch.store_of(self.group).add(f"gradsync/{what}/{self.rank}", 1)

    def global_ranks(self) -> list[int]:
        return dist.get_process_group_ranks(self.group)

    def _device(self) -> torch.device:
        """Where the group wants small tensors: NCCL only knows GPUs, gloo prefers the CPU."""
        types = sorted(device.type for device in _torch.device_types(self.group))
        return torch.device("cpu" if "cpu" in types or not types else types[0])


def _finish(work: dist.Work) -> None:
    """Waits, and meanwhile does for the ranks of this host what they may wait for: they could be one step behind."""
    while under_way.anything() and not work.is_completed():
        under_way.progress()
        time.sleep(PAUSE)
    work.wait()


class _InFlight(NamedTuple):
    """An all-reduce under way. Keeps its buffer alive: the backend holds only a pointer."""

    work: dist.Work
    buffer: Tensor
    label: Tensor | None

    def wait(self) -> None:
        self.work.wait()

    def done(self) -> bool:
        return self.work.is_completed()

    def differing(self) -> int:
        return 0 if self.label is None else labels.read(self.label)


class _Done:
    def wait(self) -> None:
        return

    def done(self) -> bool:
        return True

    def differing(self) -> int:
        return 0


class _SparseDone(NamedTuple):
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

    def result(self) -> Tensor:
        for work in self.works:
            work.wait()
        # In rank order on every rank, so that the sums are bitwise the same everywhere.
        indices = torch.cat([i[:, :n] for i, n in zip(self.indices, self.counts, strict=True)], dim=1)
        values = torch.cat([v[:n] for v, n in zip(self.values, self.counts, strict=True)])
        return torch.sparse_coo_tensor(indices, values, self.shape, check_invariants=False).coalesce()


def _gather_sparse(gradient: Tensor, counts: list[int], group: dist.ProcessGroup) -> SparseWork:
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
        dist.all_gather(all_i, mine_i, group=group, async_op=True),
        dist.all_gather(all_v, mine_v, group=group, async_op=True),
    )
    return _SparseInFlight(works, all_i, all_v, counts, gradient.shape)


def _bytes(tensor: Tensor) -> Tensor:
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
