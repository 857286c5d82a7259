"""Sums of the slots of a symmetric tensor.

Each rank announces that its slot is filled. Rank r then adds up the r-th share of all slots and writes the result to
all of them: every element is read once and written once a rank, in blocks that stay in the cache. No rank waits for
another until the end, and no thread runs: whoever calls the progress engine does what is possible.

    FILLED  all ranks -> each adds up its share -> REDUCED  all ranks: every slot holds the sum

Between hosts (`hierarchical.py`) there are two more stops: a share is added up into the first slot only, crosses to
the other hosts from there, and is then copied to the other slots.

    FILLED -> SUMMED, the share is in the first slot -> CROSSED -> REDUCED

Low precision crosses in a wider type, from private memory of the rank that carries it: only that rank adds up what it
carries, and the first slot gets the rounded sum when it has crossed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gradsync.events import Traffic
from gradsync.transport import progress_engine, summation
from gradsync.transport.base import all_reduced
from gradsync.transport.control_words import Word
from gradsync.transport.host_memory import HostMemory
from gradsync.transport.label import UNLABELLED, Label, differing
from gradsync.transport.shares import block_numel, blocks, bounds
from gradsync.transport.symmetric_tensor import SymmetricTensor, as_real


class SlotSums:
    """The sums of one symmetric tensor, which come one after the other: they have control words in common."""

    def __init__(self, host: HostMemory, tensor: SymmetricTensor) -> None:
        self.host, self.tensor = host, tensor
        self._control = tensor.control
        self._latest = 0  # operation
        self._blocks: dict[tuple[int, int, int], list[list[Tensor]]] = {}  # by elements, and whose share of them
        self._block_numel = block_numel(tensor.size, tensor.dtype.itemsize)

    def fill(self, scale: float, label: Label = UNLABELLED) -> int:
        """This rank's slot is filled, and counts `scale` times. Gives the operation's number."""
        self.await_free()
        self.host.link.check_not_forked()
        self._control.write_float(Word.SCALE, scale)
        self._control.write(Word.LABEL, label.value)
        self._control.write(Word.LABEL_MASK, label.mask)
        self._latest += 1
        self.publish(Word.FILLED)
        return self._latest

    def await_free(self) -> None:
        """Until nobody reads or writes this rank's slot for the sum before."""
        if not self.is_over(self._latest):
            self.wait(self._latest, lambda: self.missing(self._latest))

    def publish(self, word: int) -> None:
        """This rank has come so far with the latest sum."""
        self._control.write(word, self._latest)
        self.host.announce()

    def labels(self) -> tuple[Label, ...]:
        """What each rank says of the sum, once all slots are filled and until this rank's part in it is done."""
        return tuple(map(Label, self._control.of_all(Word.LABEL), self._control.of_all(Word.LABEL_MASK)))

    def scales(self) -> list[float]:
        return self._control.floats_of_all(Word.SCALE)

    def add_up(self, start: int, stop: int, into_all: bool = True) -> None:
        """Writes this rank's share of the sum to all slots, or else to the first one."""
        scales = self.scales()
        scratch = summation.scratch_for(self.tensor.dtype, self._block_numel)
        for block in self._share(start, stop):
            summation.sum_into_first(block, scales, scratch)
            if into_all:
                for other in block[1:]:
                    other.copy_(block[0])
        self.publish(Word.REDUCED if into_all else Word.SUMMED)

    def add_up_wide(self, start: int, stop: int, share: bool, behind: int = 0) -> Tensor:
        """Low precision, added up in a wider type: a tensor that has the shape of `sum_in_first`, and its place later.

        The slots stay as they are.
        """
        tensor = self.tensor
        dtype = summation.wide_type(tensor.dtype)
        wide = torch.empty(self.sum_in_first(start, stop, share, behind).numel(), dtype=dtype, device="cpu")
        scales, scratch = self.scales(), torch.empty(self._block_numel, dtype=dtype, device="cpu")
        done = 0
        for local_rank in [tensor.local_rank] if share else range(tensor.size):
            for block in self._share(start, stop, local_rank):
                first, done = done, done + block[0].numel()
                summation.sum_wide(block, scales, wide[first:done], scratch)
        return wide

    def copy_from_first(self, start: int, stop: int) -> None:
        """Copies this rank's share from the first slot to the others."""
        for first, *others in self._share(start, stop):
            for other in others:
                other.copy_(first)
        self.publish(Word.REDUCED)

    def sum_in_first(self, start: int, stop: int, share: bool, behind: int = 0) -> Tensor:
        """The sum in the first slot, or this rank's share of it, in real numbers.

        `behind`: with so many elements behind it; they are in the share of the last rank.
        """
        tensor = self.tensor
        factor = 2 if tensor.dtype.is_complex else 1
        first = as_real(tensor.slot(0))
        end = (stop + behind) * factor
        if not share:
            return first[start * factor : end]
        begin, last = bounds(start * factor, stop * factor, tensor.local_rank, tensor.size, first.element_size())
        if tensor.local_rank == tensor.size - 1 and behind:
            return first[begin if last > begin else stop * factor : end]
        return first[begin:last]

    def share_in_first(self, start: int, stop: int) -> Tensor:
        """This rank's share of the sum in the first slot, as it is: complex numbers are such."""
        tensor = self.tensor
        first, last = bounds(start, stop, tensor.local_rank, tensor.size, tensor.dtype.itemsize)
        return tensor.slot(0)[first:last]

    def is_free(self) -> bool:
        """Whether nobody reads or writes this rank's slot for the latest sum."""
        return self.is_over(self._latest)

    def missing(self, operation: int) -> list[int]:
        """The local ranks whose part in a sum is not done; if some have yet to fill their slots, only those."""
        unreduced, link = self._control.behind(Word.REDUCED, operation), self.host.link
        # One that filled its slot and is gone won't come, however slow the others are.
        lost = [at for at in unreduced if link.is_gone(link.ranks[at])]
        return lost or self._control.behind(Word.FILLED, operation) or unreduced

    def is_over(self, operation: int) -> bool:
        """Whether all slots hold the sum, and nobody reads or writes them for it any more."""
        return self._control.all_reached(Word.REDUCED, operation)

    def wait(
        self,
        operation: int,
        missing: Callable[[], list[int]],
        late: Callable[[], Exception | None] | None = None,
    ) -> None:
        """Until it is over. `missing`, `late`: see `HostMemory.wait`."""
        self.host.wait(lambda: self.is_over(operation), missing, "a bucket", late)

    def _share(self, start: int, stop: int, local_rank: int | None = None) -> list[list[Tensor]]:
        """For each block of a rank's share, by default this one's, that part of every slot."""
        tensor = self.tensor
        local_rank = tensor.local_rank if local_rank is None else local_rank
        found = self._blocks.get((start, stop, local_rank))
        if found is None:
            slots = [as_real(tensor.slot(rank)) for rank in range(tensor.size)]
            factor = 2 if tensor.dtype.is_complex else 1
            of_rank = blocks(start * factor, stop * factor, local_rank, tensor.size, slots[0].element_size())
            found = [[slot[first:last] for slot in slots] for first, last in of_rank]
            self._blocks[start, stop, local_rank] = found
        return found


class Reduction:
    """A sum under way of elements `start` to `stop`, which replaces them in all slots."""

    def __init__(
        self, sums: SlotSums, scale: float = 1.0, start: int = 0, stop: int | None = None, label: Label = UNLABELLED
    ) -> None:
        """This rank's slot is filled, and counts `scale` times; ranks may pass different scales."""
        self._sums, self._control = sums, sums.tensor.control
        self._start, self._stop = start, sums.tensor.numel if stop is None else stop
        self._differing, self._essential = 0, label.essential
        self._operation = sums.fill(scale, label)
        progress_engine.begin(self)

    def advance(self) -> bool:
        """Adds up this rank's share once all ranks have filled their slots."""
        if not self._control.all_reached(Word.FILLED, self._operation):
            return False
        if self._refuse_if_labels_differ():
            return True
        with torch.no_grad():
            self._sums.add_up(self._start, self._stop)
        return True

    def needs_polling(self, link: object) -> bool:
        """Ranks of another link may wait for this one, and can't wake it."""
        return link is not self._sums.host.link

    def _refuse_if_labels_differ(self) -> bool:
        """Whether the slots are no terms of one sum; then they stay what they are, and this rank's part is done."""
        self._differing = differing(self._sums.labels())
        refused = bool(self._differing & self._essential)
        if refused:
            self._sums.publish(Word.REDUCED)
        return refused

    def differing(self) -> int:
        return self._differing

    def traffic(self) -> Traffic:
        tensor = self._sums.tensor
        return Traffic(all_reduced((self._stop - self._start) * tensor.dtype.itemsize, tensor.size))

    def missing(self) -> list[int]:
        """The local ranks whose part in it is not done yet."""
        return self._sums.missing(self._operation)

    def done(self) -> bool:
        progress_engine.progress()
        return self._sums.is_over(self._operation)

    def wait(self) -> None:
        try:
            self._sums.wait(self._operation, self.missing)
        except Exception:  # not if somebody interrupts this wait: the other ranks still count on it
            progress_engine.abandon(self)
            raise
