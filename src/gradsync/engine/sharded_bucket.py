"""A bucket whose sum is made in the order of a tree over shards: each rank has one term of it, or several.

The first term lies where gradients lie and are delivered; the others have memory beside it. Each has a tail, which is
added up as the gradients are: so the weights in it do not depend on the number of ranks either.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradsync.engine.bucket import Bucket
from gradsync.engine.managed_parameters import HasGrad
from gradsync.engine.plan import BucketPlan, Spec
from gradsync.engine.reduce_config import Scaling
from gradsync.engine.shard_sums import Gradients, ShardSums
from gradsync.transport.base import Transport, Work
from gradsync.transport.label import Label


class ShardedBucket(Bucket):
    """Its gradients are those of all of this rank's shards."""

    def __init__(
        self, plan: BucketPlan, specs: Sequence[Spec], buffer: Tensor, others: Sequence[Tensor], sums: ShardSums
    ) -> None:
        """`others`: buffers of the same size, for the terms behind the first one."""
        super().__init__(plan, specs, buffer)
        self._others = [Bucket(plan, specs, one) for one in others]
        self._sums = sums
        self._terms: list[Gradients] = []

    def bring(self, holders: Sequence[HasGrad]) -> None:
        self._terms = self._sums.complete(self.indices, holders)

    def write_tail(self, used: Sequence[bool], flags: Sequence[bool] = ()) -> None:
        first, *others = self._sums.weights(self.plan.dtype)
        self._say(self, used, first, flags)
        for bucket, gradients, weight in zip(self._others, self._terms, others, strict=False):
            self._say(bucket, [gradient is not None for gradient in gradients], weight, [False] * len(flags))

    def _say(self, bucket: Bucket, used: Sequence[bool], weight: float, flags: Sequence[bool]) -> None:
        """(A parameter that was used counts as much as all of the term's shards: what matters is that it was.)"""
        said = [weight * is_used for is_used in used]
        tail = torch.tensor([*said, weight, *flags], dtype=torch.float64, device="cpu")
        bucket.tail.copy_(tail, non_blocking=True)

    def send(
        self,
        gradients: list[Tensor | None],
        used: Sequence[bool],
        scaling: Scaling,
        transport: Transport,
        label: Label,
        all_of_it: bool,
    ) -> Work:
        self.fill(gradients)
        for bucket, others in zip(self._others, self._terms, strict=False):
            bucket.fill(others)
        self._terms = []
        return self._reduce(transport, label)

    def send_nothing(self, scaling: Scaling, transport: Transport, label: Label) -> Work:
        for bucket in (self, *self._others):
            bucket.buffer.zero_()
        return self._reduce(transport, label)

    def _reduce(self, transport: Transport, label: Label) -> Work:
        terms = [self.buffer, *(bucket.buffer for bucket in self._others)]
        return transport.reduce_in_order(terms, self._sums.order, self._sums.late_factor(self.plan.dtype), label)
