"""Tensors that all ranks of a host see, and what they can do with them without a socket.

A `SymmetricTensor` is one tensor a rank, its slot, in memory that all ranks have mapped. Beside the slots lie flags,
two cache lines a rank: an aligned word says up to which operation a rank has come. A flag is written after the data
it speaks of; on x86 other cores see the two in that order (elsewhere this is not used).

A sum: each rank announces that its slot is filled. Rank r then adds up the r-th share of all slots, in rank order,
and writes the result to all of them: every element is read once and written once a rank, in blocks that stay in the
cache. No rank waits for another until the end, no thread runs: whoever calls `progress` does what is possible.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from gradsync.transport import under_way
from gradsync.transport.label import UNLABELLED, Label, differing
from gradsync.transport.link import Link
from gradsync.transport.memory_file import MemoryFile

LINE = 64  # bytes in a cache line: what two ranks write must not share one
PAGE = 4096
# All slots' blocks together should be about as large as a core's second-level cache.
BLOCK_BYTES = 512 * 1024
FLAGS = 2 * LINE  # bytes for the flags of one rank
STAGING_BYTES, STAGINGS = 512 * 1024, 8  # see `HostMemory.staging`
_WORDS = FLAGS // 8
_FILLED, _SCALE, _SUMMED, _CROSSED, _REDUCED, _TAKEN, _ROWS, _WHOLE, _LABEL, _MASK = range(10)
WHOLE = -1  # in place of a number of rows: the slot holds all of them
_ACCUMULATE_IN = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
_SUMMABLE = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)


class HostMemory:
    """What the ranks of one link have in common: allocates symmetric tensors, and wakes who sleeps."""

    def __init__(self, link: Link, limit: float) -> None:
        self.link = link
        self.limit = limit
        self.position = link.ranks.index(link.rank)
        self.size = len(link.ranks)
        control = MemoryFile(link, PAGE * math.ceil(self.size * FLAGS / PAGE), 0, limit)
        self._words = control.memory.cast("q")
        self._asleep_at = [number * _WORDS for number in range(self.size)]
        self._barriers = 0
        self._stagings: tuple[int, MemoryFile] | None = None  # of the latest channels
        link.progress = under_way.progress
        link.restless = under_way.waited_for_elsewhere
        link.asleep = partial(self._words.__setitem__, self._asleep_at[self.position])  # no cycle with the link

    def allocate(
        self, requests: Sequence[tuple[int, torch.dtype]], reserve: bool = True, channel: int = 0
    ) -> list[SymmetricTensor]:
        """Flat tensors of so many elements each, in one piece of memory. All ranks ask for the same, together.

        Without `reserve`, what is used of a slot has to be reserved first, but for its last page.
        """
        offsets, slot = [], 0
        for numel, dtype in requests:
            offsets.append(slot)
            slot += up(numel * dtype.itemsize, LINE)
        header = up(len(requests) * self.size * FLAGS, PAGE)
        file = MemoryFile(self.link, header, up(max(slot, 1), PAGE), self.limit, reserve, channel)
        made = [
            SymmetricTensor(self, file, number, offset, numel, dtype)
            for number, (offset, (numel, dtype)) in enumerate(zip(offsets, requests, strict=True))
        ]
        if not reserve:
            for tensor in made:
                tensor.reserve_end()
        return made

    def barrier(self) -> None:
        """Returns when all ranks are here."""
        self._barriers += 1
        self._words[self._asleep_at[self.position] + 1] = self._barriers
        self.announce()
        come = self._words[1::_WORDS]
        self.wait(
            lambda: [at for at, count in enumerate(come[: self.size].tolist()) if count < self._barriers], "a barrier"
        )

    def announce(self) -> None:
        """Something was written that a sleeping rank may wait for."""
        words = self._words
        for position, at in enumerate(self._asleep_at):
            if words[at] and position != self.position:
                self.link.wake([self.link.ranks[position]])

    def wait(
        self, missing: Callable[[], list[int]], what: str, late: Callable[[], Exception | None] | None = None
    ) -> None:
        """Until no position is missing. `late`: see `Link.wait`."""
        ranks = self.link.ranks
        told = {} if late is None else {"late": late}
        self.link.wait(lambda: not missing(), self.limit, lambda: [ranks[at] for at in missing()], what, **told)

    def staging(self, channel: int) -> SymmetricTensor:
        """Bytes for the small things of one channel. All ranks ask for theirs in the order of the channels.

        Many channels have a file together; it is gone when all of them are. What is used has to be reserved first.
        """
        block, at = divmod(channel, STAGINGS)
        if self._stagings is None or self._stagings[0] != block:
            header = up(STAGINGS * self.size * FLAGS, PAGE)
            file = MemoryFile(self.link, header, STAGINGS * STAGING_BYTES, self.limit, reserve=False)
            self._stagings = block, file
        return SymmetricTensor(self, self._stagings[1], at, at * STAGING_BYTES, STAGING_BYTES, torch.uint8)


class SymmetricTensor:
    """One flat tensor a rank, each in memory that all ranks of the host see."""

    def __init__(
        self, memory: HostMemory, file: MemoryFile, number: int, offset: int, numel: int, dtype: torch.dtype
    ) -> None:
        self._memory = memory
        self.link = memory.link
        self.numel, self.dtype = numel, dtype
        self.rank, self.size = memory.position, memory.size
        first = number * self.size * FLAGS
        flags = file.memory[first : first + self.size * FLAGS]
        self._words, self._numbers = flags.cast("q"), flags.cast("d")
        self._filled, self._summed, self._crossed, self._reduced, self._taken, self._rows, self._whole = (
            self._words[flag::_WORDS] for flag in (_FILLED, _SUMMED, _CROSSED, _REDUCED, _TAKEN, _ROWS, _WHOLE)
        )
        self._values, self._masks = self._words[_LABEL::_WORDS], self._words[_MASK::_WORDS]
        self._operations = self._summing = 0
        self._blocks: dict[tuple[int, int], list[list[Tensor]]] = {}
        starts = [file.start_of(position) + offset for position in range(self.size)]
        self.nbytes = nbytes = numel * dtype.itemsize
        self._file, self._offset, self._reserved = file, offset, 0
        self._exporters = [file.memory[start : start + nbytes] for start in starts]
        # What users hold keeps the memory mapped, but not this object: see `release_with_tensor`.
        self._mine = file.memory[starts[self.rank] : starts[self.rank] + nbytes]

    def reserve(self, nbytes: int) -> None:
        """Makes sure that there is memory for the first `nbytes` of this rank's slot."""
        if nbytes > self._reserved:
            self._file.reserve(self._offset, self._offset + nbytes)
            self._reserved = nbytes

    def reserve_end(self) -> None:
        """The same for the last page, on which a bucket has its tail."""
        self._file.reserve(self._offset + max(0, self.nbytes - PAGE), self._offset + self.nbytes)

    def tensor(self, rank: int | None = None) -> Tensor:
        """The slot of a rank, or of this one. Another rank's may change at any time."""
        exporter = self._mine if rank is None else self._exporters[rank]
        if not self.numel:
            return torch.empty(0, dtype=self.dtype, device="cpu")
        with torch.inference_mode(False):  # a tensor made in evaluation could not be written to in training
            return torch.frombuffer(exporter, dtype=self.dtype)

    def release_with_tensor(self, callback: Callable[[], object]) -> Tensor:
        """This rank's slot, and `callback` when the last tensor over it is gone."""
        tensor = self.tensor()
        weakref.finalize(self._mine, callback).atexit = False
        self._mine = self._exporters[self.rank]
        return tensor

    def reduce(
        self, scale: float = 1.0, start: int = 0, stop: int | None = None, label: Label = UNLABELLED
    ) -> Reduction:
        """Starts replacing elements `start` to `stop` in all slots by the sum over the ranks of `scale * slot`.

        Ranks may pass different scales. The result is bitwise the same on all ranks and in every run.
        """
        return Reduction(self, scale, start, self.numel if stop is None else stop, label=label)

    def gather(self) -> list[Tensor]:
        """A copy of every rank's slot, as it was when that rank called this."""
        with self.shown_by_all():
            return [self.tensor(rank).clone() for rank in range(self.size)]

    @contextlib.contextmanager
    def shown_by_all(self) -> Iterator[None]:
        """Inside, all slots may be read, as they were when their ranks called this."""
        self._begin(_FILLED)
        self._await(self._filled, "a slot to gather")
        yield
        self.publish(_TAKEN)
        self.await_taken()

    def bytes_of(self, rank: int) -> memoryview:
        """A rank's slot as bytes."""
        return self._exporters[rank]

    def broadcast(self, source: int) -> None:
        """Overwrites this rank's slot with that of rank `source`."""
        with self.shown_by(source):
            if self.rank != source:
                self.tensor().copy_(self.tensor(source))
        self.await_taken()

    @contextlib.contextmanager
    def shown_by(self, source: int) -> Iterator[None]:
        """Inside, the slot of rank `source` may be read; that rank may write to it again after `await_taken`."""
        self._begin(_FILLED)
        operation = self._operations
        self._memory.wait(lambda: [] if self._filled[source] >= operation else [source], "a slot to copy")
        yield
        self.publish(_TAKEN)

    def await_taken(self) -> None:
        """Until all ranks have read what the last operation showed."""
        self._await(self._taken, "an end of copying")

    # --- flags -----------------------------------------------------------------------------------

    def _begin(self, flag: int) -> None:
        """Announces that this rank's slot is ready for the next operation; the one before must be over everywhere."""
        self._memory.link.check()
        self._operations += 1
        self.publish(flag)

    def publish(self, flag: int) -> None:
        self._words[self.rank * _WORDS + flag] = self._operations
        self._memory.announce()

    def _await(self, flags: memoryview, what: str) -> None:
        operation = self._operations
        self._memory.wait(lambda: [at for at, done in enumerate(flags.tolist()) if done < operation], what)

    # --- sums, step by step; each is announced, and asked for by the number of the operation ----------

    def fill(self, scale: float, rows: int = WHOLE, label: Label = UNLABELLED) -> int:
        """This rank's slot is filled, and counts `scale` times. Gives the operation's number.

        `rows`: it holds so many rows of a matrix only, see `row_sum.py`.

        Sums of parts of one tensor come one after the other: they have flags and scales in common.
        """
        self.await_free()
        self._numbers[self.rank * _WORDS + _SCALE] = scale
        self._words[self.rank * _WORDS + _ROWS] = rows
        self._words[self.rank * _WORDS + _LABEL], self._words[self.rank * _WORDS + _MASK] = label
        self._begin(_FILLED)
        self._summing = self._operations
        return self._operations

    def await_free(self) -> None:
        """Until nobody reads or writes this rank's slot for the sum before."""
        if not self.is_reduced(self._summing):
            self.await_all(lambda: self.missing(self._summing))

    def is_filled(self, operation: int) -> bool:
        return min(self._filled.tolist()) >= operation

    @property
    def labels(self) -> tuple[Label, ...]:
        """What each rank says of the sum, once all slots are filled and until this rank's part in it is done."""
        return tuple(map(Label, self._values.tolist(), self._masks.tolist()))

    @property
    def rows(self) -> list[int]:
        """How many rows the slot of each rank holds, once it is filled."""
        return self._rows.tolist()

    @property
    def scales(self) -> list[float]:
        found: list[float] = self._numbers[_SCALE::_WORDS].tolist()  # type: ignore[assignment]  # a view of doubles
        return found

    def fill_up(self) -> None:
        """This rank's slot holds the whole matrix now, if it did not before."""
        self.publish(_WHOLE)

    def is_whole(self, operation: int) -> bool:
        return min(self._whole.tolist()) >= operation

    def not_whole(self, operation: int) -> list[int]:
        """The positions of those who have yet to say so."""
        return [at for at, done in enumerate(self._whole.tolist()) if done < operation]

    def take(self) -> None:
        """This rank has what it needs from the other slots, and its own one holds nothing but its own."""
        self.publish(_REDUCED)

    def add_up(self, start: int, stop: int, everywhere: bool = True) -> None:
        """This rank's share of the sum is in all slots, or, if not `everywhere`, in the first one."""
        scales = self.scales
        wide = self._scratch()
        for block in self._share(start, stop):
            if wide is None:
                _add_up(block, scales, everywhere)
            else:
                numel = block[0].numel()
                _add_up_wide(block, scales, wide[0][:numel], wide[1][:numel], everywhere)
        self.publish(_REDUCED if everywhere else _SUMMED)

    def is_added_up(self, operation: int) -> bool:
        return min(self._summed.tolist()) >= operation

    def total(self, start: int, stop: int, share: bool, behind: int = 0) -> Tensor:
        """The sum in the first slot, or this rank's share of it, in real numbers.

        `behind`: with so many elements behind it; they are in the share of the last rank.
        """
        factor = 2 if self.dtype.is_complex else 1
        whole = _as_real(self.tensor(0))
        end = (stop + behind) * factor
        if not share:
            return whole[start * factor : end]
        bounds = list(blocks(start * factor, stop * factor, self.rank, self.size, whole.element_size()))
        if self.rank == self.size - 1 and behind:
            return whole[bounds[0][0] if bounds else stop * factor : end]
        return whole[bounds[0][0] : bounds[-1][1]] if bounds else whole[:0]

    def cross(self) -> None:
        """The first slot holds the sum over all hosts; said by the first rank."""
        self.publish(_CROSSED)

    def is_crossed(self, operation: int) -> bool:
        return self._crossed[0] >= operation

    def spread(self, start: int, stop: int) -> None:
        """This rank's share is copied from the first slot to the others."""
        for first, *others in self._share(start, stop):
            for other in others:
                other.copy_(first)
        self.publish(_REDUCED)

    def is_reduced(self, operation: int) -> bool:
        return min(self._reduced.tolist()) >= operation

    def missing(self, operation: int) -> list[int]:
        """The positions of those whose part in a sum is not done."""
        filled, reduced = self._filled.tolist(), self._reduced.tolist()
        unfilled = [at for at, done in enumerate(filled) if done < operation]
        unreduced = [at for at, done in enumerate(reduced) if done < operation]
        if self.link.gone:  # one that filled its slot and is gone won't come, however slow the others are
            return [at for at in unreduced if self.link.ranks[at] in self.link.gone] or unfilled or unreduced
        return unfilled or unreduced

    def await_all(self, missing: Callable[[], list[int]], late: Callable[[], Exception | None] | None = None) -> None:
        self._memory.wait(missing, "a bucket", late)

    def _share(self, start: int, stop: int) -> list[list[Tensor]]:
        """For each block of this rank's share, the part of every slot."""
        found = self._blocks.get((start, stop))
        if found is None:
            slots = [_as_real(self.tensor(rank)) for rank in range(self.size)]
            factor = 2 if self.dtype.is_complex else 1
            item = slots[0].element_size()
            found = [
                [slot[first:last] for slot in slots]
                for first, last in blocks(start * factor, stop * factor, self.rank, self.size, item)
            ]
            self._blocks[start, stop] = found
        return found

    def _scratch(self) -> tuple[Tensor, Tensor] | None:
        wide = _ACCUMULATE_IN.get(self.dtype)
        if wide is None:
            return None
        numel = block_numel(self.size, self.dtype.itemsize)
        return torch.empty(numel, dtype=wide, device="cpu"), torch.empty(numel, dtype=wide, device="cpu")


class Reduction:
    """A sum under way. This rank's share is added up by whoever calls `progress` once all slots are filled."""

    def __init__(
        self,
        tensor: SymmetricTensor,
        scale: float,
        start: int,
        stop: int,
        rows: int = WHOLE,
        label: Label = UNLABELLED,
    ) -> None:
        self._tensor, self._start, self._stop = tensor, start, stop
        self._differing = 0
        self.link = tensor.link
        self._operation = tensor.fill(scale, rows, label)
        under_way.begin(self)

    def advance(self) -> bool:
        """Adds up this rank's share if all ranks have filled their slots; whether that is done."""
        if not self._tensor.is_filled(self._operation):
            return False
        if self._disagree():
            return True
        with torch.no_grad():
            self._tensor.add_up(self._start, self._stop)
        return True

    def _disagree(self) -> bool:
        """Whether the slots are no parts of one sum; then they stay what they are."""
        self._differing = differing(self._tensor.labels)
        if self._differing:
            self._tensor.take()
        return bool(self._differing)

    def differing(self) -> int:
        return self._differing

    def missing(self) -> list[int]:
        """The positions of those whose part in it is not done yet."""
        return self._tensor.missing(self._operation)

    def done(self) -> bool:
        under_way.progress()
        return not self.missing()

    def wait(self) -> None:
        try:
            self._tensor.await_all(self.missing)
        except BaseException:
            under_way.give_up(self)
            raise


def can_sum(dtype: torch.dtype) -> bool:
    return dtype in _SUMMABLE


def widened(tensor: Tensor) -> Tensor:
    """In the type in which such tensors are added up."""
    return tensor.to(_ACCUMULATE_IN.get(tensor.dtype, tensor.dtype))


def block_numel(ranks: int, itemsize: int) -> int:
    """Elements of one slot's block, a whole number of cache lines."""
    line = LINE // itemsize
    return max(BLOCK_BYTES // ranks // itemsize // line, 1) * line


def blocks(start: int, stop: int, position: int, ranks: int, itemsize: int) -> Iterator[tuple[int, int]]:
    """The blocks of one rank's share of the elements from `start` to `stop`.

    Shares end at multiples of a cache line, as counted from the slot's begin: no two ranks write to the same one.
    """
    line = LINE // itemsize
    share = up(math.ceil((stop - start) / ranks), line)
    first = start if position == 0 else up(start, line) + position * share
    last = stop if position == ranks - 1 else min(up(start, line) + (position + 1) * share, stop)
    step = block_numel(ranks, itemsize)
    for begin in range(min(first, stop), last, step):
        yield begin, min(begin + step, last)


def _add_up(block: Sequence[Tensor], scales: Sequence[float], everywhere: bool) -> None:
    """Sums the parts of one block into the first. Scaled before they are added: a sum overflows earlier."""
    total, *others = block
    _scale(total, scales[0])
    for other, scale in zip(others, scales[1:], strict=True):
        if scale:  # not multiplied by 0: a rank without data may well have computed NaN
            total.add_(other, alpha=scale)
    if everywhere:
        for other in others:
            other.copy_(total)


def _add_up_wide(
    block: Sequence[Tensor], scales: Sequence[float], total: Tensor, term: Tensor, everywhere: bool
) -> None:
    """The same with sums in a wider type, rounded once."""
    total.copy_(block[0])
    _scale(total, scales[0])
    for other, scale in zip(block[1:], scales[1:], strict=True):
        if scale:
            term.copy_(other)
            total.add_(term, alpha=scale)
    for other in block if everywhere else block[:1]:
        other.copy_(total)


def _scale(tensor: Tensor, scale: float) -> None:
    if scale == 0:
        tensor.zero_()
    elif scale != 1:
        tensor.mul_(scale)


def _as_real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor


def up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
