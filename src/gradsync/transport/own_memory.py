"""In the place of `CommonMemory` where ranks can't see each other's memory: each has its own, and sends its shares.

Of what a rank never touches, the kernel gives it no memory: the state of an optimizer takes a share of it a rank.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable

import torch
from torch import Tensor

from gradsync.transport.shares import bounds


class OwnMemory:
    """Of one rank, with the same layout as that of all others."""

    is_common = False

    def __init__(
        self, rank: int, size: int, nbytes: int, gather: Callable[[Tensor], list[Tensor]], say: Callable[[int], int]
    ) -> None:
        """`gather`: gives all ranks' tensors, of the same size; `say`: the largest of all ranks' numbers."""
        self.local_rank, self.size, self.nbytes, self.ranks = rank, size, nbytes, list(range(size))
        self._gather, self._say = gather, say
        self._memory = memoryview(mmap.mmap(-1, max(nbytes, 1)))

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """So many elements from that byte on, with a storage of their own."""
        if not numel:
            return torch.empty(0, dtype=dtype, device="cpu")
        with torch.inference_mode(False):
            return torch.frombuffer(self._memory[offset : offset + numel * dtype.itemsize], dtype=dtype)

    def meet(self, what: str, said: int = 0) -> int:
        """The largest number that any rank has said; nobody else reads or writes what is here."""
        return self._say(said)

    def spread(self, offset: int, numel: int, dtype: torch.dtype) -> None:
        """Each rank has its share of these elements: from now on all of them. All ranks together."""
        whole = self.tensor(offset, numel, dtype)
        shares = [bounds(0, numel, rank, self.size, dtype.itemsize) for rank in range(self.size)]
        longest = max(stop - start for start, stop in shares)
        start, stop = shares[self.local_rank]
        mine = torch.zeros(longest, dtype=dtype, device="cpu")
        mine[: stop - start] = whole[start:stop]
        for (first, last), found in zip(shares, self._gather(mine), strict=True):
            whole[first:last] = found[: last - first]
