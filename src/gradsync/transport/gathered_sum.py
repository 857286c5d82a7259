"""Sums over a process group in the order of a tree: the backend carries the terms, and adds up nothing.

Each rank is sent its share of every term, adds those up, and sends the result to all: what an all-reduce in a ring
sends, as long as each rank has one term. Two ranks with one term each need no order: a + b is b + a, to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from gradsync import _torch
from gradsync.events import Traffic
from gradsync.transport import label as labels
from gradsync.transport import summation
from gradsync.transport.base import Work
from gradsync.transport.dedicated_group import Connections
from gradsync.transport.tree import Order


class GatheredSum:
    """Under way. The result replaces the first of `terms`, of which `label` are the last elements, if there is one.

    Its second half starts in `wait`: all ranks wait for their sums in the same order, but are told at different times
    that the first halves are over.
    """

    def __init__(
        self,
        terms: Sequence[Tensor],
        order: Order,
        scale: float,
        connections: Connections,
        label: Tensor | None,
    ) -> None:
        """`terms`: this rank's, flat, and with nothing in the label but in that of the first."""
        self._first, self._order, self._scale = terms[0], order, scale
        self._connections, self._label = connections, label
        ranks = len(order.counts)
        self._share = -(-terms[0].numel() // ranks)
        mine = terms[0].new_zeros((ranks, len(terms), self._share))
        for number, term in enumerate(terms):
            _by_shares(mine[:, number], term)
        received = mine.new_empty(sum(order.counts) * self._share)
        sizes = [count * self._share for count in order.counts]
        self._sent, self._received = mine.view(-1), received  # the backend holds only pointers
        sent = [len(terms) * self._share] * ranks
        self._work: dist.Work | None = connections.track(
            _torch.all_to_all(connections.carrier, received, self._sent, sizes, sent)
        )
        self._nbytes = (self._sent.nbytes + self._share * ranks * self._sent.element_size()) * (ranks - 1) // ranks

    def wait(self) -> None:
        work, self._work = self._work, None
        if work is None:
            return
        on_cpu = self._first.is_cpu
        self._connections.finish(work, on_cpu)
        terms = list(self._received.split(self._share))
        with torch.no_grad():
            total = summation.sum_in_order(terms, self._order, self._scale)
            ranks = len(self._order.counts)
            whole = [torch.empty_like(total) for _ in range(ranks)]
            self._connections.finish(
                self._connections.track(_torch.all_gather(self._connections.carrier, whole, total)), on_cpu
            )
            self._first.copy_(torch.cat(whole)[: self._first.numel()])

    def done(self) -> bool:
        return self._work is None

    def differing(self) -> int:
        return 0 if self._label is None else labels.read(self._label)

    def traffic(self) -> Traffic:
        return Traffic(self._nbytes)


class ScaledAfter:
    """A sum whose result is multiplied when it is there."""

    def __init__(self, work: Work, buffer: Tensor, scale: float) -> None:
        self._work, self._buffer, self._scale = work, buffer, scale

    def wait(self) -> None:
        self._work.wait()
        scale, self._scale = self._scale, 1.0
        with torch.no_grad():
            summation.scale_(self._buffer, scale)

    def done(self) -> bool:
        return self._work.done()

    def differing(self) -> int:
        return self._work.differing()

    def traffic(self) -> Traffic:
        return self._work.traffic()


def _by_shares(shares: Tensor, term: Tensor) -> None:
    """Cuts a flat tensor into rows."""
    length = shares.shape[1]
    whole = term.numel() // length
    shares[:whole].copy_(term[: whole * length].view(whole, length))
    if whole * length < term.numel():
        shares[whole, : term.numel() - whole * length].copy_(term[whole * length :])
