"""In which order terms are added: rank order, from left to right, to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradsync.transport import summation
from gradsync.transport.summation import Rows

SCALES = [0.3, 1.0, 0.0, 1.7, 0.9]
NUMEL = 1000


def terms(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """One a rank, so different in size that any other order gives other bits."""
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(NUMEL, generator=generator) * 10.0**rank).to(dtype) for rank in range(len(SCALES))]


def left_to_right(those: list[Tensor], scales: list[float]) -> Tensor:
    total = those[0] * scales[0]
    for term, scale in zip(those[1:], scales[1:], strict=True):
        total = torch.add(total, term, alpha=scale) if scale else total
    return total


def test_another_order_has_other_bits() -> None:
    """Else the tests below could not fail."""
    assert not torch.equal(left_to_right(terms()[::-1], SCALES[::-1]), left_to_right(terms(), SCALES))


def test_in_place() -> None:
    mine = terms()
    summation.sum_into_first(mine, SCALES)
    assert torch.equal(mine[0], left_to_right(terms(), SCALES))
    assert all(torch.equal(*both) for both in zip(mine[1:], terms()[1:], strict=True))  # the others stay


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_is_rounded_once(dtype: torch.dtype) -> None:
    mine, wide = terms(dtype), [term.float() for term in terms(dtype)]
    summation.sum_into_first(mine, SCALES, summation.scratch_for(dtype, NUMEL + 7))
    assert torch.equal(mine[0], left_to_right(wide, SCALES).to(dtype))
    copies = summation.sum_of_copies(terms(dtype))
    assert copies.dtype == torch.float32
    assert torch.equal(copies, left_to_right(wide, [1.0] * len(wide)))


def test_copies() -> None:
    assert torch.equal(summation.sum_of_copies(terms()), left_to_right(terms(), [1.0] * len(SCALES)))


def test_sparse_sums_are_the_same_every_time() -> None:
    """In an order that torch decides."""
    indices = torch.arange(NUMEL)[None]
    found = [summation.sum_sparse([indices] * len(SCALES), terms(), torch.Size([NUMEL])).to_dense() for _ in range(3)]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    wanted = left_to_right(terms(), [1.0] * len(SCALES))
    torch.testing.assert_close(found[0], wanted, rtol=0, atol=0.01)  # terms are as large as 40,000, in float32


@pytest.mark.parametrize("size", [2, 3, 5])
def test_rows(size: int) -> None:
    """Each rank has another matrix, and all come to the same."""
    sent = [Rows(torch.arange(NUMEL), term[:, None]) for term in terms()[:size]]
    for rank in range(size):
        matrix = terms()[rank][:, None].clone()
        summation.sum_rows_into(matrix, sent, rank)
        assert torch.equal(matrix[:, 0], left_to_right(terms()[:size], [1.0] * size))


def test_a_rank_without_data_may_have_nan() -> None:
    mine = terms()
    mine[2].fill_(torch.nan)
    summation.sum_into_first(mine, SCALES)
    assert torch.equal(mine[0], left_to_right(terms(), SCALES))
    nothing = torch.full((3,), torch.nan)
    assert torch.equal(summation.scaled(nothing, 0.0), torch.zeros(3))
    summation.scale_(nothing, 0.0)
    assert torch.equal(nothing, torch.zeros(3))
