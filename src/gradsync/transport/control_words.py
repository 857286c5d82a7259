"""Words in shared memory by which the ranks of a host tell each other how far they are.

Each rank has two cache lines of them for each tensor, which it alone writes and all read. A word is written after the
data it speaks of; on x86 other cores see the two in that order (elsewhere shared memory is not used). Most words hold
the number of the latest operation that got so far: they only grow, so nobody ever has to reset them.
"""

from __future__ import annotations

from gradsync.transport.shares import LINE

BYTES_PER_RANK = 2 * LINE
_WORDS = BYTES_PER_RANK // 8


class Word:
    """What the words of a tensor say. Plain numbers, no enum: progress reads them all the time."""

    # Sums, see `slot_sums.py`: operations up to which ...
    FILLED = 0  # ... the rank's slot was filled
    SUMMED = 1  # ... its share of the sum is in the first slot
    CROSSED = 2  # ... the sum over all hosts is in the first slot
    REDUCED = 3  # ... its part in the sum is done
    SCALE = 4  # by which its slot is multiplied, a float
    LABEL = 5  # what it says of the sum, see `label.py`
    LABEL_MASK = 6
    # Sums of single rows, see `row_sum.py`.
    ROWS = 7  # how many its slot holds
    WHOLE = 8  # operations up to which it filled in the rest
    # Slots that others read, see `slot_reads.py`: operations up to which ...
    SHOWN = 9  # ... its slot may be read
    READ = 10  # ... it has read the others'


class HostWord:
    """What those say that belong to no tensor, see `host_memory.py`."""

    SLEEPING = 0  # whether the rank has to be woken
    BARRIERS = 1  # to how many it has come


class ControlWords:
    """The words of all ranks for one tensor."""

    def __init__(self, memory: memoryview, local_rank: int) -> None:
        integers, floats = memory.cast("q"), memory.cast("d")
        mine = slice(local_rank * _WORDS, (local_rank + 1) * _WORDS)
        self._mine, self._my_floats = integers[mine], floats[mine]
        self._of_all = [integers[word::_WORDS] for word in range(_WORDS)]
        self._floats = floats

    def write(self, word: int, value: int) -> None:
        self._mine[word] = value

    def write_float(self, word: int, value: float) -> None:
        self._my_floats[word] = value

    def of_all(self, word: int) -> list[int]:
        """By local rank."""
        return self._of_all[word].tolist()

    def floats_of_all(self, word: int) -> list[float]:
        found: list[float] = self._floats[word::_WORDS].tolist()  # type: ignore[assignment]  # a view of doubles
        return found

    def all_reached(self, word: int, operation: int) -> bool:
        return min(self._of_all[word].tolist()) >= operation

    def behind(self, word: int, operation: int) -> list[int]:
        """The local ranks that have not come so far."""
        return [rank for rank, reached in enumerate(self._of_all[word].tolist()) if reached < operation]

    def view_of_mine(self, word: int) -> memoryview:
        """For somebody who writes this one word of this rank."""
        return self._mine[word : word + 1]
