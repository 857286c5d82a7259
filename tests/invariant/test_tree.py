"""The order over shards: pure arithmetic, and the sums in it on every transport, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gradsync.transport import summation
from gradsync.transport.base import Request
from gradsync.transport.label import Label
from gradsync.transport.tree import Order, Span, joins, order_of, pieces, shards_of
from tests.ranks.memory import be_on_host, transport
from tests.support.ranks import Ranks, on_ranks

Tree = Any


def whole(start: int, stop: int) -> Tree:
    """The tree itself, as nested pairs."""
    middle = (start + stop + 1) // 2
    return start if stop - start == 1 else (whole(start, middle), whole(middle, stop))


def added(shards: int, ranks: int) -> tuple[Tree, Order]:
    """What the ranks' own additions, and then the transport's, make of the shards."""
    order, terms = order_of(shards, ranks), []
    for rank in range(ranks):
        waiting: list[Tree] = []
        mine = shards_of(rank, ranks, shards)
        for shard, due in zip(range(*mine), joins(mine, shards), strict=True):
            waiting.append(shard)
            for _ in range(due):
                right = waiting.pop()
                waiting[-1] = (waiting[-1], right)
        assert len(waiting) == order.counts[rank] == len(pieces(mine, shards))
        terms += waiting
    for into, term in order.steps:
        terms[into] = (terms[into], terms[term])
    return terms[0], order


@given(st.integers(1, 40), st.data())
def test_the_same_tree_from_any_number_of_ranks(shards: int, data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, shards))
    found, order = added(shards, ranks)
    assert found == whole(0, shards)
    spans = [shards_of(rank, ranks, shards) for rank in range(ranks)]
    assert [shard for span in spans for shard in range(*span)] == list(range(shards))
    assert {span.stop - span.start for span in spans} <= {shards // ranks, -(-shards // ranks)}
    if ranks & (ranks - 1) == 0:  # a power of two
        assert order.most == 1


def test_the_picture_of_eight_shards_on_three_ranks() -> None:
    assert [pieces(shards_of(rank, 3, 8), 8) for rank in range(3)] == [
        [Span(0, 2), Span(2, 3)],
        [Span(3, 4), Span(4, 6)],
        [Span(6, 8)],
    ]


# --- sums on real ranks --------------------------------------------------------------------------------------


def value(shard: int, numel: int, dtype: torch.dtype) -> Tensor:
    """So different in size that any other order gives other bits."""
    drawn = torch.randn(numel, generator=torch.Generator().manual_seed(shard), dtype=torch.float64)
    return (drawn * 7.0 ** (shard % 4)).to(dtype)


def summed(tree: Tree, numel: int, dtype: torch.dtype) -> Tensor:
    if isinstance(tree, int):
        return value(tree, numel, dtype)
    return summed(tree[0], numel, dtype) + summed(tree[1], numel, dtype)


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)


def check_sums(name: str) -> None:
    carrier: Any = transport(name)
    rank, size = dist.get_rank(), dist.get_world_size()
    for shards in {size, size + 1, 2 * size + 1, 8, 13}:
        if shards < size:
            continue
        order, mine = order_of(shards, size), shards_of(rank, size, shards)
        for numel, dtype in [(numel, dtype) for dtype in DTYPES for numel in (1, 63, 5000)]:
            terms = carrier.allocate([Request(numel, dtype, torch.device("cpu"))] * order.most)
            for span, term in zip(pieces(mine, shards), terms, strict=False):
                term.copy_(summed(_subtree(whole(0, shards), span, shards), numel, dtype))
            work = carrier.reduce_in_order(terms, order, 0.5, Label(5, 7))
            work.wait()
            assert work.differing() == 0
            wanted = summed(whole(0, shards), numel, dtype) * 0.5
            assert torch.equal(terms[0], wanted.to(dtype)), (name, shards, numel, dtype)
            assert numel < 5000 or (work.traffic().sent > 0) == (size > 1)
            terms[0].fill_(1)
            said = carrier.reduce_in_order(terms, order, 1.0, Label(rank == 0, 1))
            said.wait()
            assert said.differing() == (size > 1)


def _subtree(tree: Tree, span: Span, shards: int) -> Tree:
    node = Span(0, shards)
    while node != span:
        left = span.stop <= node.middle
        tree = tree[0 if left else 1]
        node = Span(node.start, node.middle) if left else Span(node.middle, node.stop)
    return tree


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("name", ["shared_memory", "process_group"])
@on_ranks("size")
def test_sums(name: str, size: int) -> None:
    check_sums(name)


def between_hosts(shape: tuple[int, ...]) -> None:
    be_on_host(shape[dist.get_rank()])
    check_sums("hierarchical")


@pytest.mark.parametrize("shape", [(0, 0, 1), (0, 0, 1, 1)], ids=str)
def test_sums_between_hosts(ranks: Ranks, shape: tuple[int, ...]) -> None:
    ranks(between_hosts, len(shape), shape)


def test_another_order_has_other_bits() -> None:
    """Else the tests above could not fail."""
    terms = [value(shard, 100, torch.float32) for shard in range(8)]
    left_to_right = terms[0].clone()
    for term in terms[1:]:
        left_to_right += term
    wanted = summed(whole(0, 8), 100, torch.float32)
    assert not torch.equal(left_to_right, wanted)
    assert torch.equal(summation.sum_in_order(terms, order_of(8, 8), 1.0), wanted)
