"""The gradients of the shards that this rank computes one after the other, added up in the order of a tree.

Each shard's backward begins without gradients. When it has ended they are a term, and two terms that make a subtree
become one: so few are kept. The last shard's gradients are added to those when their bucket leaves (`ShardedBucket`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from gradsync.engine.managed_parameters import HasGrad
from gradsync.errors import ShardsError
from gradsync.transport.tree import joins, order_of, shards_of

Gradients = list[Tensor | None]
# Types whose sums overflow early: their gradients are scaled before they are added, by a power of two.
_SCALED_FIRST = (torch.float16,)


class ShardSums:
    """Of one replicated module, in one step at a time."""

    def __init__(self, shards: int, mean: bool) -> None:
        """`mean`: over the shards; else gradients become their sum."""
        self.shards, self._mean = shards, mean
        self.is_open = False
        """Whether a step is under way."""
        self.weight = 1.0
        """Of the shard that is computed now."""
        self._waiting: list[Gradients] = []  # terms, by the parameters' indices
        self._weights: list[float] = []  # of the shards that are computed
        self.set_ranks(0, 1)

    def set_ranks(self, rank: int, ranks: int) -> None:
        """From the next step on."""
        self.order = order_of(self.shards, ranks)
        self.mine = shards_of(rank, ranks, self.shards)
        self._joins = joins(self.mine, self.shards)
        self.terms = self.order.counts[rank]
        """How many sums this rank's shards make."""

    def begin(self) -> None:
        """A step."""
        self.is_open, self.weight = True, 1.0
        self._waiting, self._weights = [], []

    def drop(self) -> None:
        """No step is under way any more, and nothing is left of it."""
        self.is_open = False
        self._waiting, self._weights = [], []

    def weigh(self, rank: int, weight: float) -> None:
        """How much the shard counts that is computed now."""
        if not self.is_open:
            raise ShardsError(
                f"rank {rank}: set_round_weight() outside of a step by shards: it is for the shard that is computed. "
                "Call it inside `for batch in shards.each(batches)`, before backward."
            )
        self.weight = weight

    def has(self, index: int) -> bool:
        """Whether a shard before the one that is computed now has brought a gradient of this parameter."""
        return any(term[index] is not None for term in self._waiting)

    @torch.no_grad()
    def put(self, holders: Sequence[HasGrad]) -> None:
        """A shard is computed, and others follow: takes what is in `.grad`."""
        self._waiting.append(self._take(holders))
        for _ in range(self._joins[len(self._weights)]):
            term = self._waiting.pop()
            self._waiting[-1] = _added(self._waiting[-1], term)
        self._weights.append(self.weight)
        self.weight = 1.0

    @torch.no_grad()
    def complete(self, indices: Sequence[int], holders: Sequence[HasGrad]) -> list[Gradients]:
        """Adds up what all shards have brought of these parameters: the first of this rank's terms is in `.grad` then.

        Gives the other terms.
        """
        some = [holders[index] for index in indices]
        term = self._take(some)
        joined = len(self._waiting) - self._joins[-1]
        for waiting in reversed(self._waiting[joined:]):
            term = _added(term, [waiting[index] for index in indices])  # the other way round, which is the same
        terms = [[waiting[index] for index in indices] for waiting in self._waiting[:joined]] + [term]
        for holder, gradient in zip(some, terms[0], strict=True):
            holder.grad = gradient
        return terms[1:]

    def _take(self, holders: Sequence[HasGrad]) -> Gradients:
        gradients = [holder.grad for holder in holders]
        for holder in holders:
            holder.grad = None
        if not self.weight:  # worth nothing, whatever is in them
            return [None] * len(gradients)
        by_factor: dict[float, list[Tensor]] = defaultdict(list)
        for gradient in gradients:
            if gradient is not None:
                by_factor[self.weight * self.early_factor(gradient.dtype)].append(gradient)
        for factor, found in by_factor.items():
            if factor != 1:
                torch._foreach_mul_(found, factor)
        return gradients

    # --- how much they count -----------------------------------------------------------------------------

    @property
    def factor(self) -> float:
        """A power of two: with that the sum of all shards is about their mean."""
        return 2.0 ** -(self.shards - 1).bit_length() if self._mean else 1.0

    def early_factor(self, dtype: torch.dtype) -> float:
        """By which gradients are multiplied before they are added."""
        return self.factor if dtype in _SCALED_FIRST else 1.0

    def late_factor(self, dtype: torch.dtype) -> float:
        """By which their sum is."""
        return self.factor / self.early_factor(dtype)

    def weights(self, dtype: torch.dtype) -> list[float]:
        """Of each of this rank's terms, added up like gradients of this type, to the bit."""
        waiting: list[Tensor] = []
        early = self.early_factor(dtype)
        for weight, due in zip([*self._weights, self.weight], self._joins, strict=True):
            waiting.append(torch.tensor(weight, dtype=torch.float64, device="cpu").to(dtype) * early)
            for _ in range(due):
                term = waiting.pop()
                waiting[-1] = waiting[-1] + term
        return [weight.real.item() if weight.is_complex() else weight.item() for weight in waiting]


def _added(into: Gradients, terms: Gradients) -> Gradients:
    """Adds to those that are there."""
    both = [(one, other) for one, other in zip(into, terms, strict=True) if one is not None and other is not None]
    strided = [pair for pair in both if all(one.layout is torch.strided for one in pair)]
    if strided:
        torch._foreach_add_([one for one, _ in strided], [other for _, other in strided])
    sums = list(map(_sum, into, terms)) if len(strided) < len(both) else into
    return [other if one is None else one for one, other in zip(sums, terms, strict=True)]


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Of those that are sparse; the others are added up."""
    if one is None or other is None or (one.layout is torch.strided and other.layout is torch.strided):
        return one
    if one.layout is torch.strided or other.layout is torch.strided:
        return one.to_dense() + other.to_dense()
    return (one.coalesce() + other.coalesce()).coalesce()
