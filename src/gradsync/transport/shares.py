"""Which rank adds up which elements: pure arithmetic, no memory.

Each rank has one share of a sum and works through it in blocks that stay in the cache.

    elements   | share of rank 0          | share of rank 1          | ...
    blocks     | 0 | 1 | 2 | ... |        | 0 | 1 | 2 | ... |
"""

from __future__ import annotations

import math
from collections.abc import Iterator

LINE = 64  # bytes in a cache line: what two ranks write must not share one
# All slots' blocks together should be about as large as a core's second-level cache.
BLOCK_BYTES = 512 * 1024


def block_numel(size: int, itemsize: int) -> int:
    """Elements of one slot's block, a whole number of cache lines."""
    line = LINE // itemsize
    return max(BLOCK_BYTES // size // itemsize // line, 1) * line


def bounds(start: int, stop: int, local_rank: int, size: int, itemsize: int) -> tuple[int, int]:
    """One rank's share of the elements from `start` to `stop`.

    Shares end at multiples of a cache line, as counted from the slot's begin: no two ranks write to the same one.
    """
    line = LINE // itemsize
    share = round_up(math.ceil((stop - start) / size), line)
    first = start if local_rank == 0 else round_up(start, line) + local_rank * share
    last = stop if local_rank == size - 1 else min(round_up(start, line) + (local_rank + 1) * share, stop)
    first = min(first, stop)
    return first, max(first, last)


def blocks(start: int, stop: int, local_rank: int, size: int, itemsize: int) -> Iterator[tuple[int, int]]:
    """The blocks of one rank's share of the elements from `start` to `stop`."""
    first, last = bounds(start, stop, local_rank, size, itemsize)
    step = block_numel(size, itemsize)
    for begin in range(first, last, step):
        yield begin, min(begin + step, last)


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
