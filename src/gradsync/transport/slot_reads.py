"""Slots of a symmetric tensor that other ranks read: gathers and broadcasts inside a host.

A rank announces that its slot may be read, and writes to it again only when all ranks have said that they did.

    SHOWN  by its rank -> others copy the slot -> READ  by all ranks
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import Tensor

from gradsync.transport.control_words import Word
from gradsync.transport.host_memory import HostMemory
from gradsync.transport.symmetric_tensor import SymmetricTensor


class SlotReads:
    """The gathers and broadcasts of one symmetric tensor; all ranks begin them in the same order."""

    def __init__(self, host: HostMemory, tensor: SymmetricTensor) -> None:
        self.tensor = tensor
        self._host, self._control = host, tensor.control
        self._latest = 0  # operation

    @contextlib.contextmanager
    def reading_all(self) -> Iterator[None]:
        """Inside, all slots may be read, as they were when their ranks called this; then they may be overwritten."""
        self._show()
        self._host.wait_for_word(self._control, Word.SHOWN, self._latest, "what each rank says of itself")
        yield
        self._publish(Word.READ)
        self.await_readers()

    @contextlib.contextmanager
    def reading(self, source: int) -> Iterator[None]:
        """Inside, the slot of rank `source` may be read; that rank may write to it again after `await_readers`."""
        self._show()
        self._host.wait(
            lambda: self._control.of_all(Word.SHOWN)[source] >= self._latest,
            lambda: [source],
            "a copy of what another rank has",
        )
        yield
        self._publish(Word.READ)

    def await_readers(self) -> None:
        """Until all ranks have read what the latest operation showed."""
        self._host.wait_for_word(self._control, Word.READ, self._latest, "an end of copying")

    def gather(self) -> list[Tensor]:
        """A copy of every rank's slot, as it was when that rank called this."""
        with self.reading_all():
            return [self.tensor.slot(rank).clone() for rank in range(self.tensor.size)]

    def broadcast(self, source: int) -> None:
        """Overwrites this rank's slot with that of rank `source`."""
        with self.reading(source):
            if self.tensor.local_rank != source:
                self.tensor.slot().copy_(self.tensor.slot(source))
        self.await_readers()

    def _show(self) -> None:
        """The operation before must be over for this rank's slot."""
        self._host.link.check_not_forked()
        self._latest += 1
        self._publish(Word.SHOWN)

    def _publish(self, word: int) -> None:
        self._control.write(word, self._latest)
        self._host.announce()
