"""How often replicas are compared, and that a checksum misses nothing that one would think of."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gradsync.guard.fingerprint import COLUMNS, checksum
from gradsync.guard.replicas import SHARE, Comparison, of_all, schedule

SECONDS = st.floats(1e-6, 100)


@given(SECONDS, SECONDS)
def test_comparing_takes_its_share_of_a_step(everything: float, step: float) -> None:
    turns, every = schedule(everything, step)
    assert 1 <= turns * every <= max(1000, 100 * everything / step)
    if turns * every < 500:  # else it is bounded by the number of rounds, not by its cost
        assert (everything / turns + 50e-6) / every <= SHARE * step * 1.0001 or turns == 1 == every


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=12), st.integers(1, 300))
def test_every_element_has_its_turn(sizes: list[int], first: int) -> None:
    tensors = {str(at): torch.zeros(size) for at, size in enumerate(sizes)}
    comparison = Comparison(tensors, "auto")
    seen = {name: torch.zeros(len(tensor)) for name, tensor in tensors.items()}
    for number in range(first + 64, first + 64 + comparison.period):
        found = comparison.of_round(number)
        for piece in () if found is None else found.pieces:
            seen[str(piece.parameter)][piece.start : piece.stop] += 1
    assert all((count == 1).all() for count in seen.values())


def changed(tensor: Tensor) -> list[Tensor]:
    """All elements negated, set to another constant, in another order; one bit of one."""
    one = tensor.clone()
    one.view(-1).view(torch.uint8)[3] ^= 1
    return [-tensor, tensor + 1, tensor.flip(0), tensor.t().contiguous().view(tensor.shape), tensor.roll(1, 0), one]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 64), (2, 3), (2 * COLUMNS + 2, 3), (300, 64), (1000, 128)])
def test_what_a_fingerprint_sees(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    for other in changed(tensor):
        assert of_all([tensor]) != of_all([other])
        assert int(checksum(tensor.view(-1))) != int(checksum(other.reshape(-1)))
    assert of_all([tensor]) == of_all([tensor.clone()])


def test_sizes_that_changed_are_not_read_beyond() -> None:
    parameter = torch.nn.Parameter(torch.ones(5000))
    comparison = Comparison({"p": parameter}, "every")
    before = comparison.of_round(0)
    parameter.data = torch.ones(3)
    after = comparison.of_round(1)
    assert before is not None
    assert after is not None
    assert before.value() != after.value()
