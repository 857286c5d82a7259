"""In which order the terms of the ranks are added up. This is the only place that says so.

Addition of floating-point numbers is not associative, so the order decides the bits of the result. It is rank order,
from left to right: ((0 + 1) + 2) + 3. Every function here takes its terms by rank. The result is the same on all ranks
and in every run, whatever the timing. Where it must not depend on the number of ranks either, it is the order of a tree
(`tree.py`): `sum_in_order`.

Where torch decides the order, that still holds, as all ranks give it the same: `sum_sparse` and `sum_few`.

Two sums are not made here: those of a process group, and those between hosts, of which every host has added up its own
ranks in rank order before. There the backend decides. Between hosts it adds up low precision in a wider type, too: what
crosses is `sum_wide`, and is rounded once, by the host that delivers it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradsync.transport.tree import Order

# Low precision is added up in a wider type and rounded once.
_ACCUMULATE_IN = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
_SUMMABLE = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)


class Scratch(NamedTuple):
    """Memory for the sum of one block of low precision, and for one of its terms."""

    total: Tensor
    term: Tensor


class Rows(NamedTuple):
    """Some rows of a matrix, those of one rank."""

    numbers: Tensor
    values: Tensor


def can_sum(dtype: torch.dtype) -> bool:
    return dtype in _SUMMABLE


def wide_type(dtype: torch.dtype) -> torch.dtype | None:
    """The wider type in which terms of low precision are added up; None: in their own."""
    return _ACCUMULATE_IN.get(dtype)


def scratch_for(dtype: torch.dtype, numel: int) -> Scratch | None:
    """What `sum_into_first` needs for blocks of up to `numel` elements of this type."""
    wide = wide_type(dtype)
    if wide is None:
        return None
    return Scratch(torch.empty(numel, dtype=wide, device="cpu"), torch.empty(numel, dtype=wide, device="cpu"))


def sum_into_first(terms: Sequence[Tensor], scales: Sequence[float], scratch: Scratch | None = None) -> None:
    """Replaces the first of the terms, one a rank, by the sum of `scale * term`.

    Scaled before they are added, not after: a sum overflows earlier than its terms.
    """
    first = terms[0]
    if scratch is not None:
        first.copy_(sum_wide(terms, scales, scratch.total[: first.numel()], scratch.term))
        return
    scale_(first, scales[0])
    for term, scale in zip(terms[1:], scales[1:], strict=True):
        if scale:  # not multiplied by 0, see `scale_`
            first.add_(term, alpha=scale)


def sum_wide(terms: Sequence[Tensor], scales: Sequence[float], total: Tensor, scratch: Tensor) -> Tensor:
    """Writes the same sum to `total`, which is of a wider type than the terms, and does not round it to theirs.

    `scratch`: for one of the terms, of the type of `total`.
    """
    scale_(total.copy_(terms[0]), scales[0])
    for term, scale in zip(terms[1:], scales[1:], strict=True):
        if scale:
            total.add_(scratch[: term.numel()].copy_(term), alpha=scale)
    return total


def sum_of_copies(terms: Sequence[Tensor]) -> Tensor:
    """The sum of terms that are this rank's to overwrite, in the type in which such terms are added up."""
    wide = [term.to(_ACCUMULATE_IN.get(term.dtype, term.dtype)) for term in terms]
    sum_into_first(wide, [1] * len(wide))  # integers have sums here, but no scale of another type
    return wide[0]


def sum_in_order(terms: Sequence[Tensor], order: Order, scale: float) -> Tensor:
    """The sum in the order of a tree, times `scale`; it is in the first of the terms, which are all overwritten.

    Each addition rounds to the type of the terms, as those do that a rank makes of its own shards: whoever makes an
    addition, it is the same one. For the same reason the sum is scaled, not the terms.
    """
    for into, term in order.steps:
        terms[into].add_(terms[term])
    scale_(terms[0], scale)
    return terms[0]


def sum_sparse_in_order(terms: Sequence[Tensor], order: Order) -> Tensor:
    """The same for sparse tensors, which are coalesced: two at a time have at most two values of an index."""
    sums = list(terms)
    for into, term in order.steps:
        sums[into] = (sums[into] + sums[term]).coalesce()
    return sums[0]


def sum_rows_into(matrix: Tensor, sent: Sequence[Rows], mine: int) -> None:
    """Adds up the rows that the ranks have sent, of which `sent[mine]` are this rank's; `matrix` has those already.

    All ranks round alike, although each has another matrix: they begin with zeros, not with their own rows.
    """
    if len(sent) == 2:  # a + b is b + a, to the bit: either rank may begin with its own, and saves a pass
        matrix.index_copy_(0, *sent[mine])
        matrix.index_add_(0, *sent[1 - mine])
        return
    matrix.index_fill_(0, sent[mine].numbers, 0)
    for numbers, values in sent:
        matrix.index_add_(0, numbers, values)


def sum_few(terms: Sequence[Tensor], scales: Sequence[float], out: Tensor) -> None:
    """Writes the sum of `scale * term` to `out`, for terms so short that one call counts more than the additions.

    The order is that of torch's matrix-vector product.
    """
    together = torch.stack(list(terms))
    torch.mv(together.T, together.new_tensor(scales), out=out)


def sum_sparse(indices: Sequence[Tensor], values: Sequence[Tensor], shape: torch.Size) -> Tensor:
    """The sum of sparse tensors, one a rank.

    Not in rank order within one index: `coalesce` sorts by the indices, and that sort is not stable (torch 2.13). But
    it does the same with the same input, which all ranks have.
    """
    joined = torch.sparse_coo_tensor(
        torch.cat(list(indices), dim=1), torch.cat(list(values)), shape, check_invariants=False
    )
    return joined.coalesce()


def scale_(tensor: Tensor, scale: float) -> None:
    """In place. Not multiplied by 0: a rank without data may well have computed NaN."""
    if scale == 0:
        tensor.zero_()
    elif scale != 1:
        tensor.mul_(scale)


def scaled(tensor: Tensor, scale: float) -> Tensor:
    """The same for a tensor that is to stay as it is, dense or sparse."""
    return (tensor * scale).to(tensor.dtype) if scale else torch.zeros_like(tensor)
