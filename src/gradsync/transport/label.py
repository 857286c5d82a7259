"""What a rank says of a sum it takes part in: all ranks must say the same, or theirs are not parts of one sum.

A label is a few bits that travel with what is added up, at no extra cost, and only where a rank has something to say
(`mask`). Where ranks can look into each other's memory they compare labels as they are. Where all they see of each
other are sums, each bit has two places, of which a rank sets one: if both of them are above zero after the sum, the
ranks disagree. That holds for any number of ranks in any precision, as nothing cancels and no count has to be exact.

    places    | not bit 0 | not bit 1 | ... || bit 0 | bit 1 | ... |
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

BITS = 63  # what fits a signed word of shared memory
PLACES = 2 * BITS


class Label(NamedTuple):
    """`value`, as far as `mask` says: the other bits are whatever the other ranks say."""

    value: int = 0
    mask: int = 0
    essential: int = -1
    """The bits on which ranks must agree for theirs to be parts of one sum; it is not made else."""


UNLABELLED = Label()


def differing(labels: Iterable[Label]) -> int:
    """The bits on which some disagree."""
    ones = zeros = 0
    for value, mask, _ in labels:
        ones |= value & mask
        zeros |= ~value & mask
    return ones & zeros


def write(places: Tensor, labels: tuple[Label, ...]) -> None:
    """Says what all of these say."""
    places.copy_(_written(labels, places.dtype), non_blocking=True)  # else it would stop the host on an accelerator


@lru_cache(maxsize=16)  # all buckets of a round have the same
def _written(labels: tuple[Label, ...], dtype: torch.dtype) -> Tensor:
    """(On the CPU: on an accelerator it would belong to the stream on which it was made.)"""
    ones = zeros = 0
    for value, mask, _ in labels:
        ones |= value & mask
        zeros |= ~value & mask
    bits = [(number >> bit) & 1 for number in (zeros, ones) for bit in range(BITS)]
    with torch.inference_mode(False):
        return torch.tensor(bits, dtype=dtype, device="cpu")


def read(places: Tensor) -> int:
    """After the sum: the bits on which ranks disagree. On a GPU this waits for the sum."""
    values = (places.real if places.is_complex() else places).tolist()  # so few that numbers are quicker than tensors
    found = 0
    for bit, (zero, one) in enumerate(zip(values[:BITS], values[BITS:], strict=True)):
        if zero and one:
            found |= 1 << bit
    return found
