"""Memory that lies once a host: the same bytes for all of its ranks, who read and write them by turns.

Who may write when is agreed by meeting: `meet` returns when all ranks of the host have come to it.

    | control words | what they have in common |
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradsync.transport.control_words import BYTES_PER_RANK, ControlWords
from gradsync.transport.host_memory import HostMemory
from gradsync.transport.memory_file import MemoryFile
from gradsync.transport.shares import round_up
from gradsync.transport.symmetric_tensor import PAGE

_MET = 0  # the word that says to how many meetings a rank has come
_SAID = (1, 2)  # what it said there; two of them by turns, as a rank may come to the next one before others have read


class CommonMemory:
    """Freed with the last tensor over it."""

    is_common = True

    def __init__(self, host: HostMemory, nbytes: int, channel: int = 0) -> None:
        """All ranks of the host together."""
        self.local_rank, self.size, self.nbytes = host.local_rank, host.size, nbytes
        self.ranks = list(host.link.ranks)
        """Of the host, in the group."""
        words = host.size * BYTES_PER_RANK
        self._start = round_up(words, PAGE)
        file = MemoryFile(host.link, self._start + round_up(max(nbytes, 1), PAGE), 0, host.limit, channel=channel)
        self._host, self._memory = host, file.memory
        self._control = ControlWords(file.memory[:words], host.local_rank)
        self._meetings = 0

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """So many elements from that byte on, with a storage of their own."""
        if not numel:
            return torch.empty(0, dtype=dtype, device="cpu")
        start = self._start + offset
        with torch.inference_mode(False):
            return torch.frombuffer(self._memory[start : start + numel * dtype.itemsize], dtype=dtype)

    def spread(self, offset: int, numel: int, dtype: torch.dtype) -> None:
        """Each rank has written its share of these elements: all of them see it."""

    def meet(self, what: str, said: int = 0) -> int:
        """Returns when all ranks of the host are here, with the largest number that any of them has said.

        `what`: they do together, for those who wait long.
        """
        self._meetings += 1
        word = _SAID[self._meetings % 2]
        self._control.write(word, said)
        self._control.write(_MET, self._meetings)
        self._host.announce()
        self._host.wait_for_word(self._control, _MET, self._meetings, what)
        return max(self._control.of_all(word))
