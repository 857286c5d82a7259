"""A bucket of which each rank gets its share: for an optimizer that steps shares as soon as they are reduced.

No gradient is ever delivered from it, so it may take turns with other buckets in the same memory. Everything that is
different for such a bucket is here: when it may be filled, what is sent, and where the sum is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from gradsync.engine.bucket import Bucket
from gradsync.engine.plan import BucketPlan, Spec
from gradsync.engine.reduce_config import Scaling
from gradsync.transport.base import ShareWork, Transport, Work
from gradsync.transport.label import Label


class ShareBucket(Bucket):
    """Its tail is its own: what others are still reading behind the gradients must not be overwritten by the sum."""

    delivers = False

    def __init__(self, plan: BucketPlan, specs: Sequence[Spec], buffer: Tensor) -> None:
        super().__init__(plan, specs, buffer)
        self._sent_tail, self.tail = self.tail, torch.zeros_like(self.tail)

    def renew_views(self) -> None:
        """Nobody has them."""

    def let_go(self, gradients: Sequence[Tensor | None]) -> bool:
        """Nobody has kept any."""
        return True

    def is_free(self, transport: Transport) -> bool:
        return transport.is_free(self.buffer)

    def await_free(self, transport: Transport) -> None:
        transport.await_free(self.buffer)

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
        self.split_unused(gradients, used, scaling)
        self._sent_tail.copy_(self.tail)
        return transport.reduce_share(self.buffer, self.plan.numel, scaling.factor, label)

    def send_nothing(self, scaling: Scaling, transport: Transport, label: Label) -> Work:
        self.await_free(transport)
        self.buffer.zero_()
        return transport.reduce_share(self.buffer, self.plan.numel, scaling.factor, label)

    def reduced(self, work: Work) -> None:
        """The work is over: reads what the ranks have said."""
        self.tail.copy_(cast(ShareWork, work).tail())

    def share(self, work: Work, start: int, stop: int) -> Tensor:
        return cast(ShareWork, work).share()

    def release(self, work: Work) -> None:
        cast(ShareWork, work).release()
