"""Module buffers of a step that is computed shard by shard: running statistics, counters and the like.

Each shard begins with the buffers that the step began with. Behind the last one a floating buffer is the mean of what
the shards that changed it have made of it, added up in the order of the tree; any other is what the first shard of all
has made of it. What no shard has changed costs nothing, and stays as it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradsync.engine.shard_sums import ShardSums
from gradsync.transport import summation
from gradsync.transport.tree import joins

if TYPE_CHECKING:
    from gradsync.engine.engine import Engine

_BITS = 62  # of a number that ranks tell each other


class ShardBuffers:
    """Those of one replicated module."""

    def __init__(self, engine: Engine, sums: ShardSums) -> None:
        self._engine, self._sums = engine, sums
        self._start: dict[str, Tensor] = {}
        self._waiting: list[dict[str, tuple[Tensor, int]]] = []  # sums of some shards, and of how many
        self._of_first: dict[str, Tensor] = {}
        self._done = 0

    def begin(self) -> None:
        """A step."""
        named = self._engine.buffers.named()
        self._start = {name: buffer.detach().clone() for name, buffer in named}
        self._waiting, self._of_first, self._done = [], {}, 0

    @torch.no_grad()
    def begin_shard(self) -> None:
        """As the step began."""
        for name, buffer in self._named() if self._done else ():
            buffer.data.copy_(self._start[name])

    @torch.no_grad()
    def put_back(self) -> None:
        """As the step began: it did not happen."""
        for name, buffer in self._named():
            buffer.data.copy_(self._start[name])

    @torch.no_grad()
    def end_shard(self) -> None:
        changed = {name: buffer for name, buffer in self._named() if self._has_changed(name, buffer)}
        floating = {name: one for name, one in changed.items() if one.is_floating_point()}
        self._waiting.append({name: (one.detach().clone(), 1) for name, one in floating.items()})
        if self._sums.mine.start + self._done == 0:
            self._of_first = {n: one.detach().clone() for n, one in changed.items() if not one.is_floating_point()}
        for _ in range(joins(self._sums.mine, self._sums.shards)[self._done]):
            term = self._waiting.pop()
            self._waiting[-1] = _added(self._waiting[-1], term)
        self._done += 1

    @torch.no_grad()
    def end(self) -> None:
        """The ranks add up what their shards have made of them."""
        named = self._named()
        if not named:
            return
        changed = self._changed_anywhere([name for name, _ in named])
        by_kind: dict[tuple[torch.dtype, torch.device], list[tuple[str, Tensor]]] = defaultdict(list)
        others: list[Tensor] = []
        for name, buffer in named:
            if name in changed and buffer.is_floating_point():
                by_kind[buffer.dtype, buffer.device].append((name, buffer))
            elif name in changed:
                buffer.data.copy_(self._of_first.get(name, self._start[name]))
                others.append(buffer)
        if others:
            self._engine.transport.broadcast(others, 0)
        for buffers in by_kind.values():
            self._add_up(buffers)
        self._waiting = []

    def _named(self) -> list[tuple[str, Tensor]]:
        return [(name, one) for name, one in self._engine.buffers.named() if name in self._start]

    def _has_changed(self, name: str, buffer: Tensor) -> bool:
        """By their values: batch normalization writes past torch's version counters."""
        return not torch.equal(buffer, self._start[name])

    def _changed_anywhere(self, names: list[str]) -> set[str]:
        here = {name for term in self._waiting for name in term} | self._of_first.keys()
        flags = [name in here for name in names]
        mine = [_pack(flags[at : at + _BITS]) for at in range(0, len(flags), _BITS)]
        words = [0] * len(mine)
        for row in self._engine.transport.gather(mine):
            words = [one | other for one, other in zip(words, row, strict=True)]
        return {name for at, name in enumerate(names) if words[at // _BITS] >> at % _BITS & 1}

    def _add_up(self, buffers: list[tuple[str, Tensor]]) -> None:
        """All of one kind."""
        order, like = self._sums.order, buffers[0][1]
        length = sum(one.numel() for _, one in buffers) + len(buffers)
        mine = like.new_zeros(order.most, length)
        for row, term in zip(mine, self._waiting, strict=False):
            parts = [term.get(name, (torch.zeros_like(one), 0)) for name, one in buffers]
            counts = like.new_tensor([count for _, count in parts])
            row.copy_(torch.cat([*(part.reshape(-1) for part, _ in parts), counts]))
        received = self._engine.transport.gather_tensors(mine)
        terms = [
            one.view_as(mine)[at].clone() for one, n in zip(received, order.counts, strict=True) for at in range(n)
        ]
        total = summation.sum_in_order(terms, order, 1.0)
        sizes = [one.numel() for _, one in buffers]
        for (_, buffer), made, count in zip(
            buffers, total[: -len(buffers)].split(sizes), total[-len(buffers) :], strict=True
        ):
            buffer.data.copy_((made / count).view(buffer.shape))


def _added(into: dict[str, tuple[Tensor, int]], term: dict[str, tuple[Tensor, int]]) -> dict[str, tuple[Tensor, int]]:
    for name, (other, count) in term.items():
        if name in into:
            into[name] = into[name][0].add_(other), into[name][1] + count
        else:
            into[name] = other, count
    return into


def _pack(flags: Iterable[bool]) -> int:
    return sum(1 << at for at, flag in enumerate(flags) if flag)
