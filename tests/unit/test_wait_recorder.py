"""What a rank tells of its waits, and when."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gradsync.events import RoundClosed
from gradsync.observe import wait_recorder
from gradsync.observe.wait_recorder import WaitRecorder
from gradsync.watch.waits import Block


class Told:
    """Blocks as rank 0 gets them, from rounds of 1 + 2 + 3 s of data, forward and backward, and a wait of 4 s."""

    def __init__(self, size: int = 2, scale: float = 0.001) -> None:
        self.blocks: list[Block] = []
        self.scale, self.now = scale, 100.0
        self.recorder = WaitRecorder(1, size, "GPT", self._take)

    def _take(self, make: Callable[[], Block]) -> None:
        self.blocks.append(make())

    def round(self, number: int, module: int = 7, forward: bool = True) -> None:
        at = [self.now + self.scale * after for after in (1, 3, 6, 10)]
        forward_at = at[0] if forward else self.now - self.scale
        closed = RoundClosed(
            round=number,
            opened_at=at[1],
            first_launch_at=0.0,
            reduced_at=0.0,
            closed_at=at[3],
            waited=4 * self.scale,
            nbytes=0,
            buckets=(),
            overlapped_buckets=0,
            order=(),
            corrected=False,
            repaired=False,
            forward_at=forward_at,
            backward_ended_at=at[2],
            module=module,
        )
        self.recorder.record(closed)
        self.now = at[3]

    def rounds(self) -> list[tuple[int, int]]:
        """The first and the last of each block."""
        return [(one.first, one.first + len(one.waits) - 1) for one in self.blocks]


def test_blocks_end_at_the_same_rounds_on_all_ranks() -> None:
    told = Told()
    for number in range(130):
        told.round(number)
    assert told.rounds() == [(1, 63), (64, 127)]  # of the very first nobody knows when it began
    block = told.blocks[1]
    assert (block.rank, block.module, block.name) == (1, 7, "GPT")
    assert block.waits == pytest.approx([0.004] * 64)
    assert block.phases == pytest.approx((0.064, 0.128, 0.192, 0.64))


def test_slow_rounds_are_told_in_time() -> None:
    told = Told(scale=0.3)
    for number in range(20):
        told.round(number)
    assert told.rounds() == [(1, 4), (5, 8), (9, 12), (13, 16)]


def test_what_is_missing_is_not_told() -> None:
    """A round that failed here, and rounds that are counted anew or are another module's."""
    told = Told()
    for number in (*range(10), *range(11, 64)):
        told.round(number)
    for number in range(64):
        told.round(number)
    for number in range(64, 128):
        told.round(number, module=8)
    assert told.rounds() == [(12, 63), (1, 63), (65, 127)]
    assert [one.module for one in told.blocks] == [7, 7, 8]


def test_without_a_forward_of_its_own() -> None:
    told = Told()
    for number in range(64):
        told.round(number, forward=number % 2 == 0)
    outside, forward, backward, _ = told.blocks[0].phases
    assert (outside, forward, backward) == pytest.approx((31 * 0.001 + 32 * 0.003, 31 * 0.002, 63 * 0.003))


@pytest.mark.parametrize("size", [512, 513, 10_000])
def test_many_ranks_leave_out_the_same_blocks(size: int) -> None:
    told, every = Told(size), -(-size // wait_recorder._RANKS_THAT_TELL_ALL)
    for number in range(64 * 41):
        told.round(number)
    assert [last // 64 for _, last in told.rounds()] == list(range(0, 41, every))
    assert all(first // 64 == last // 64 for first, last in told.rounds())
