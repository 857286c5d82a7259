"""A shared optimizer that steps during backward: each share of a bucket as soon as it is reduced.

Nothing is gathered, and no gradient is delivered: each rank adds up its share of a bucket and steps it while it is in
the cache. A share may be stepped once all ranks have filled the bucket, for then none of them needs its parameters any
more in this backward. Nobody begins the next forward before all have stepped: the ranks meet once a round, at its end.

    rank 0   backward ... | fill 0 | backward ... | add up and step share 0 of bucket 0 | ... | meet | forward
    rank 1   backward ......... | fill 0 | add up and step share 1 of bucket 0 | backward ... | meet | forward

With a limit on the norm of all gradients, the shares are kept until all are there; the ranks exchange one number, and
then step.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradsync.errors import NotSupportedError
from gradsync.hooks.optimizer_overlap import Exchange, clipping_factor, refuse_other_steps
from gradsync.sharing import kinds
from gradsync.sharing.optimizer import plain_class, share_optimizer, step_of


class Share(NamedTuple):
    """What this rank has of a reduced bucket."""

    bucket: int
    used: Sequence[bool]
    """By any rank, for each of its parameters."""
    gradient: Tensor


class SharesInBackward:
    """Of one optimizer."""

    def __init__(self, optimizer: Optimizer, clip_value: float | None, max_norm: float | None) -> None:
        if not kinds.is_elementwise(plain_class(optimizer)):
            raise NotSupportedError(
                f"{type(optimizer).__name__} can't step shares of buckets during backward: it is not known to treat "
                "each element for itself. Use gradsync.share_optimizer(), which cuts it by whole parameters."
            )
        self.optimizer = share_optimizer(optimizer)
        self._step = step_of(self.optimizer)
        self._clip_value, self._max_norm = clip_value, max_norm
        self._kept: list[Share] = []
        self._memory: dict[int, Tensor] = {}  # for kept shares, by buckets
        self._is_torn = False
        refuse_other_steps(optimizer)

    def planned(self) -> None:
        self._memory.clear()
        self._step.plan_shares(self.optimizer)

    def bucket_left(self, parameters: Sequence[nn.Parameter]) -> None:
        """If this backward has saved one and uses it later, autograd notices: the value may be another one then."""
        if self._max_norm is None:
            self._is_torn = True
            torch.autograd.graph.increment_version(parameters)

    def step_share(self, bucket: int, used: Sequence[bool], gradient: Tensor) -> None:
        if self._clip_value is not None:
            gradient.clamp_(-self._clip_value, self._clip_value)
        if self._max_norm is None:
            self._step.step_shares(self.optimizer, [Share(bucket, used, gradient)])
            return
        if bucket not in self._memory:
            self._memory[bucket] = torch.empty_like(gradient)
        self._kept.append(Share(bucket, used, self._memory[bucket].copy_(gradient)))

    @torch.no_grad()
    def round_closed(self, exchange: Exchange, failed: bool) -> None:
        try:
            if self._max_norm is not None and not failed:
                self._step_clipped(exchange, self._max_norm)
        except BaseException:
            failed = True
            raise
        finally:
            self._kept.clear()
            self._step.end_shares(failed)
        self._is_torn = False

    def _step_clipped(self, exchange: Exchange, max_norm: float) -> None:
        """By the norm of all gradients: every host has all of them, and those of rank 0's say what it is."""
        squares = sum(float(_norm(share.gradient)) ** 2 for share in self._kept)
        (bits,) = struct.unpack("=q", struct.pack("=d", squares))
        rows = exchange.gather([bits, self._step.first_rank])
        of_host = [struct.unpack("=d", struct.pack("=q", bits))[0] for bits, first in rows if first == rows[0][1]]
        factor = clipping_factor(self.optimizer, sum(of_host) ** 0.5, max_norm)
        for share in self._kept if factor != 1 else ():
            share.gradient.mul_(factor)
        self._step.parameters_change()
        self._is_torn = True
        self._step.step_shares(self.optimizer, self._kept)

    def torn(self) -> str:
        return self._step.torn("this backward raised, or a rank was lost") if self._is_torn else ""

    def round_dropped(self) -> None:
        self._kept.clear()
        self._step.drop_shares(self.torn())
        self._is_torn = False


def _norm(gradient: Tensor) -> Tensor:
    values = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    found: Tensor = torch.linalg.vector_norm(values, dtype=torch.float64)
    return found
