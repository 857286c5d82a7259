"""One step of a replicated module, computed shard by shard: which backward is a round, and what each begins with.

The shards before a rank's last one only accumulate. The last one's backward is the round, as any other backward is, so
that its buckets leave while it computes; in the first step, and where shards run several backwards, the round comes
behind it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradsync.engine import backward_rounds
from gradsync.engine.shard_buffers import ShardBuffers
from gradsync.engine.shard_sums import ShardSums
from gradsync.errors import ShardsError

if TYPE_CHECKING:
    from gradsync.engine.engine import Engine


class ShardedStep:
    """What `Shards` does to one engine."""

    def __init__(self, engine: Engine, sums: ShardSums, overlap: bool) -> None:
        self.engine, self._sums, self._overlap = engine, sums, overlap
        self._buffers = ShardBuffers(engine, sums)
        self._earlier: list[tuple[int, Tensor]] = []  # gradients that were there before
        self._group = engine.reducer.group
        self._foreign: set[int] = set()  # those of them that no round has delivered
        self._once = False  # in the latest shards one backward each brought everything
        self._backwards = 0

    @property
    def touched(self) -> bool:
        """Whether any shard of this step has brought a gradient that no round has carried yet."""
        return bool(self.engine.reducer.group.dirty)

    def begin(self, step: int) -> None:
        engine, reducer = self.engine, self.engine.reducer
        engine.before_shards()
        if reducer.config.shards is not self._sums:
            raise ShardsError(
                f"rank {engine.transport.rank}: another gradsync.Shards was made of this module since. Use that one."
            )
        self._group = group = reducer.group
        rank = engine.transport.rank
        if reducer.is_unfinished:
            raise ShardsError(f"rank {rank}: a step by shards can't begin inside a backward, or before it has ended.")
        if not engine.synchronizing:
            raise ShardsError(
                f"rank {rank}: a step by shards inside no_sync(), or after set_requires_gradient_sync(False). To "
                "accumulate, run several backwards inside each shard."
            )
        if engine.joining is not None:
            raise ShardsError(
                f"rank {rank}: a step by shards inside a Join context. gradsync.data gives each shard its part of "
                "every batch, so ranks don't run out of data: leave out the context."
            )
        if dirty := reducer.name_dirty(range(len(group.parameters))):
            raise ShardsError(
                f"rank {rank}: '{dirty[0]}' has a gradient of a backward outside of the shards, which no round has "
                "carried. To accumulate, run several backwards inside each shard; or call zero_grad() first."
            )
        self._sums.set_ranks(rank, engine.transport.size)
        self._sums.begin()
        reducer.lockstep.set_step(step)
        self._foreign = set(group.gradients.foreign(range(len(group.parameters))))
        self._earlier = [(index, one.grad) for index, one in enumerate(group.holders) if one.grad is not None]
        for index, _ in self._earlier:
            group.holders[index].grad = None
        self._buffers.begin()

    def begin_shard(self, last: bool) -> None:
        """`last`: of this rank's."""
        reducer = self.engine.reducer
        self._buffers.begin_shard()
        self._backwards = self.engine.backwards
        overlaps = last and self._overlap and self._once
        reducer.hold(not overlaps)
        reducer.keep_open(overlaps)
        reducer.note_arrivals(last and not overlaps)

    def weigh(self, weight: float) -> None:
        """How much this shard counts."""
        self._sums.weigh(self.engine.transport.rank, weight)

    def end_shard(self, last: bool) -> None:
        engine, reducer = self.engine, self.engine.reducer
        self._check_group()
        backwards = engine.backwards - self._backwards
        if backwards:
            self._once = backwards == 1
        reducer.hold(True)
        if reducer.round is not None and not reducer.is_kept_open:  # its backward has raised, and somebody caught that
            engine.abandon_dead()
        reducer.group.join_streams()
        reducer.group.fold_in()
        if not backwards and not any(holder.grad is not None for holder in reducer.group.holders):
            self._sums.weigh(engine.transport.rank, 0.0)  # it was left out
        if not last:
            self._sums.put(reducer.group.holders)
        self._buffers.end_shard()

    def _check_group(self) -> None:
        if self.engine.reducer.group is not self._group or self.engine.has_changed():
            raise ShardsError(
                f"rank {self.engine.transport.rank}: parameters were frozen, converted, added or replaced inside a "
                "step by shards: some shards would have computed with others. Change the module between two steps."
            )

    def open_round(self) -> None:
        """Behind the last shard, if there was none in its backward."""
        self.engine.open_without_backward(self.engine.reducer.arrivals or ())

    def end(self) -> None:
        """The round is over."""
        reducer = self.engine.reducer
        with torch.no_grad():
            for index, earlier in self._earlier:
                self._add_earlier(index, earlier)
        self._buffers.end()
        reducer.lockstep.set_step(None)
        self.leave()

    def _add_earlier(self, index: int, earlier: Tensor) -> None:
        """Several steps add up, as several backwards do."""
        group = self.engine.reducer.group
        holder = group.holders[index]
        if (gradient := holder.grad) is None:
            holder.grad = earlier
        elif index in self._foreign and earlier.layout is torch.strided:  # what the user has given has to hold it
            holder.grad = earlier.add_(gradient)
            group.gradients.gave(index, self.engine.reducer.rounds)
        elif gradient.layout is torch.strided:
            gradient.add_(earlier)
        else:
            holder.grad = gradient + earlier
            group.gradients.gave(index, self.engine.reducer.rounds)

    def take_back(self) -> None:
        """As if the latest step had not been begun: its gradients are dropped, buffers are put back."""
        self._buffers.put_back()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        for holder in self._group.holders:
            holder.grad = None
        for module in self.engine.modules:
            module.zero_grad()

    def leave(self) -> None:
        """Also in the middle of it, by an exception."""
        if self._sums.is_open:
            self._sums.drop()
            self.engine.reducer.note_arrivals(False)
            self.engine.reducer.hold(False)
            self.engine.reducer.keep_open(False)
            self._earlier = []


def end_together(steps: list[ShardedStep]) -> None:
    """Behind the last shard of all these modules: ends their rounds, also those that no backward has opened."""
    for step in steps:
        if step.engine.reducer.round is None and (step.touched or len(steps) == 1):
            step.open_round()
    if opened := [step.engine for step in steps if step.engine.reducer.round is not None]:
        backward_rounds.end_rounds(opened)
