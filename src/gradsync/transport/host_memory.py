"""What the ranks of one host have in common: memory for symmetric tensors, wake-ups for those who sleep, a barrier."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from gradsync.transport.control_words import BYTES_PER_RANK, ControlWords, HostWord
from gradsync.transport.link import Link
from gradsync.transport.memory_file import MemoryFile
from gradsync.transport.shares import LINE, round_up
from gradsync.transport.symmetric_tensor import PAGE, SymmetricTensor

STAGING_BYTES = 512 * 1024
_STAGINGS_PER_FILE = 8


class HostMemory:
    """Of the ranks of one link, for all their transports."""

    def __init__(self, link: Link, limit: float) -> None:
        """All ranks together. `limit`: seconds after which a rank that is waited for is an error."""
        self.link, self.limit = link, limit
        self.local_rank, self.size = link.ranks.index(link.rank), len(link.ranks)
        file = MemoryFile(link, self._control_bytes(1), 0, limit)
        self._control = self._control_words(file, 0)
        link.show_sleep_in(self._control.view_of_mine(HostWord.SLEEPING))
        self._barriers = 0
        self._staging_file: tuple[int, MemoryFile] | None = None  # of the latest channels

    def allocate(
        self, requests: Sequence[tuple[int, torch.dtype]], reserve: bool = True, channel: int = 0
    ) -> list[SymmetricTensor]:
        """Flat tensors of so many elements each, in one file. All ranks ask for the same, together.

        Without `reserve`, what is used of a slot has to be reserved first, but for its last page.
        """
        offsets, section = [], 0
        for numel, dtype in requests:
            offsets.append(section)
            section += round_up(numel * dtype.itemsize, LINE)
        header = self._control_bytes(len(requests))
        file = MemoryFile(self.link, header, round_up(max(section, 1), PAGE), self.limit, reserve, channel)
        made = [
            SymmetricTensor(file, self._control_words(file, number), offset, numel, dtype)
            for number, (offset, (numel, dtype)) in enumerate(zip(offsets, requests, strict=True))
        ]
        if not reserve:
            for tensor in made:
                tensor.reserve_last_page()
        return made

    def allocate_staging(self, channel: int) -> SymmetricTensor:
        """Bytes for the small things of one channel. All ranks ask for theirs in the order of the channels.

        Several channels have a file together, which costs a descriptor; it is gone when all of them are. What is used
        has to be reserved first.
        """
        block, number = divmod(channel, _STAGINGS_PER_FILE)
        if self._staging_file is None or self._staging_file[0] != block:
            header = self._control_bytes(_STAGINGS_PER_FILE)
            file = MemoryFile(self.link, header, _STAGINGS_PER_FILE * STAGING_BYTES, self.limit, reserve=False)
            self._staging_file = block, file
        file = self._staging_file[1]
        control = self._control_words(file, number)
        return SymmetricTensor(file, control, number * STAGING_BYTES, STAGING_BYTES, torch.uint8)

    def _control_bytes(self, tensors: int) -> int:
        return round_up(tensors * self.size * BYTES_PER_RANK, PAGE)

    def _control_words(self, file: MemoryFile, number: int) -> ControlWords:
        """Of one of the file's tensors; they are in its header."""
        nbytes = self.size * BYTES_PER_RANK
        return ControlWords(file.memory[number * nbytes : (number + 1) * nbytes], self.local_rank)

    def announce(self) -> None:
        """Wakes those who sleep: something was written that they may wait for."""
        for local_rank, sleeps in enumerate(self._control.of_all(HostWord.SLEEPING)):
            if sleeps and local_rank != self.local_rank:
                self.link.wake(self.link.ranks[local_rank])

    def wait(
        self,
        ready: Callable[[], bool],
        missing: Callable[[], list[int]],
        what: str,
        late: Callable[[], Exception | None] | None = None,
    ) -> None:
        """See `Link.wait`; `missing` gives local ranks."""
        ranks = self.link.ranks
        self.link.wait(ready, self.limit, lambda: [ranks[at] for at in missing()], what, late)

    def wait_for_word(self, control: ControlWords, word: int, operation: int, what: str) -> None:
        """Until all ranks have come so far with an operation."""
        self.wait(lambda: control.all_reached(word, operation), lambda: control.behind(word, operation), what)

    def barrier(self) -> None:
        """Returns when all ranks are here."""
        self._barriers += 1
        self._control.write(HostWord.BARRIERS, self._barriers)
        self.announce()
        self.wait_for_word(self._control, HostWord.BARRIERS, self._barriers, "a barrier")
