"""In which order the shards of a step are added up, however many ranks compute them: pure arithmetic, no tensors.

The shards are the leaves of a binary tree, which is halved from the root on. A rank has neighbouring shards. It adds
up by itself what makes whole subtrees of those: its pieces. The other additions, in the order of the same tree, are
the transport's (`summation.sum_in_order`).

    shards        0   1   2   3   4   5   6   7
    rank 0 of 3   0   1   2                        pieces 0-1 and 2
    rank 1                    3   4   5            pieces 3 and 4-5
    rank 2                                6   7    piece 6-7
    transport     ((0-1) + (2 + 3)) + ((4-5) + (6-7))

With as many ranks as a power of two each rank has one piece.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple


class Span(NamedTuple):
    """The shards from `start` on, but for `stop`."""

    start: int
    stop: int

    @property
    def middle(self) -> int:
        """Where the subtree of these shards is halved."""
        return (self.start + self.stop + 1) // 2


class Order(NamedTuple):
    """Of a sum of what the ranks have: each rank's terms, the next rank's behind them."""

    counts: tuple[int, ...]
    """How many terms each rank has."""
    steps: tuple[tuple[int, int], ...]
    """One after the other: which term is replaced by the sum of itself and of which one. The first has it all then."""

    @property
    def most(self) -> int:
        return max(self.counts)

    @property
    def starts(self) -> list[int]:
        """By rank, the first of its terms."""
        return [0, *accumulate(self.counts)][:-1]


def shards_of(rank: int, ranks: int, shards: int) -> Span:
    """Those that a rank computes: neighbours, as many as any other rank has, or one less.

    Ranks are halved as shards are: with as many as a power of two, each has a subtree.
    """
    start, stop = 0, shards
    while ranks > 1:
        left = (ranks + 1) // 2
        each, over = divmod(stop - start, ranks)
        middle = start + each * left - (-over * left // ranks)
        if rank < left:
            stop, ranks = middle, left
        else:
            start, rank, ranks = middle, rank - left, ranks - left
    return Span(start, stop)


def pieces(span: Span, shards: int) -> list[Span]:
    """The largest subtrees that have no other shards than these, from left to right."""
    return list(_pieces(span, Span(0, shards)))


def _pieces(span: Span, node: Span) -> list[Span]:
    if node.start >= span.stop or node.stop <= span.start:
        return []
    if node.start >= span.start and node.stop <= span.stop:
        return [node]
    middle = node.middle
    return _pieces(span, Span(node.start, middle)) + _pieces(span, Span(middle, node.stop))


@lru_cache(maxsize=64)
def joins(span: Span, shards: int) -> tuple[int, ...]:
    """For each of a rank's shards, how many additions are due behind it: each makes one of the latest two terms."""
    due, waiting = [], list[Span]()
    kept = set(pieces(span, shards))
    for shard in range(*span):
        waiting.append(Span(shard, shard + 1))
        before = len(waiting)
        while waiting[-1] not in kept and len(waiting) > 1:
            both = Span(waiting[-2].start, waiting[-1].stop)
            if both.middle != waiting[-1].start or not _is_node(both, Span(0, shards)):
                break
            waiting[-2:] = [both]
        due.append(before - len(waiting))
    return tuple(due)


def _is_node(span: Span, node: Span) -> bool:
    while span != node and node.start <= span.start and span.stop <= node.stop and node.stop - node.start > 1:
        node = Span(node.start, node.middle) if span.stop <= node.middle else Span(node.middle, node.stop)
    return span == node


@lru_cache(maxsize=64)
def order_of(shards: int, ranks: int) -> Order:
    """Of the sum of all ranks' pieces."""
    by_rank = [pieces(shards_of(rank, ranks, shards), shards) for rank in range(ranks)]
    terms = {span: number for number, span in enumerate(span for one in by_rank for span in one)}
    steps: list[tuple[int, int]] = []

    def add_up(node: Span) -> int:
        if (found := terms.get(node)) is not None:
            return found
        left, right = add_up(Span(node.start, node.middle)), add_up(Span(node.middle, node.stop))
        steps.append((left, right))
        return left

    add_up(Span(0, shards))
    return Order(tuple(map(len, by_rank)), tuple(steps))
