"""What lasts from round to round for one list of managed parameters: plan, buckets, what is known of their arrivals.

It knows nothing of phases: `round.py` does. When parameters are frozen, added or replaced, there is another group.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterable, MutableMapping, Sequence

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from gradsync import _torch
from gradsync.engine.arrival_streams import ArrivalStreams
from gradsync.engine.bucket import LARGE, Bucket
from gradsync.engine.compute_parameter import ComputeParameter
from gradsync.engine.managed_parameters import Managed
from gradsync.engine.ownership import Gradients
from gradsync.engine.plan import BucketPlan, Plan, Spec, delay, make_plan
from gradsync.engine.row_bucket import RowBucket, may_travel, touched_rows
from gradsync.engine.shard_sums import ShardSums
from gradsync.engine.sharded_bucket import ShardedBucket
from gradsync.engine.share_bucket import ShareBucket
from gradsync.errors import UnfinishedRoundError
from gradsync.events import NO_LAYOUT, Layout, PlannedBucket
from gradsync.options import Options
from gradsync.transport.base import Request, Transport

COMPANIONS = 32  # other replicas with a round in the same backward, by their serial numbers
ROUND_FLAGS = 3 + COMPANIONS  # what the last bucket's tail says besides usage and weight, see `Round.launch_rest`


class ParameterGroup:
    """Parameters whose gradients travel together, in the order of registration; `index` is a place in it."""

    def __init__(self, managed: Sequence[Managed], transport: Transport, as_view: bool) -> None:
        """`as_view`: gradients are views of their buckets."""
        self.managed = list(managed)
        self.transport = transport
        self.parameters = [one.parameter for one in managed]
        self.specs = [one.spec for one in managed]
        self.leaves = [one.leaf for one in managed]
        self.holders = [one.holder for one in managed]
        self.index_of = {id(one.leaf): index for index, one in enumerate(managed)}
        """By the identity of what backward accumulates into."""
        self.hidden = {id(one.leaf): one.spec.name for one in managed if one.leaf is not one.parameter}
        self.as_view = as_view
        self.gradients = Gradients(self.holders, as_view)
        self._streams = ArrivalStreams.of(self.leaves)

        self.dirty: set[int] = set()
        """Those with gradients that were never synchronized, also through many backwards without synchronization."""
        self.lost: set[int] = set()
        """Those whose gradients were lost with a round whose backward raised; until one ends well."""
        self.divided: dict[int, float] = {}
        """Those whose `.grad` was divided for a sum, and has yet to grow."""
        self.expected = [0] * len(managed)
        """How often each parameter arrived in the round in which it did so most often."""
        self.as_expected = False
        """Whether in the latest round each parameter arrived as often as it ever did."""
        self._missing: dict[bool, list[int]] = {}  # see `count_expected`

        self.plan: Plan | None = None
        """None before the first round has ended."""
        self.layout = NO_LAYOUT
        """What is told of it."""
        self.buckets: list[Bucket] = []
        self.bucket_of = [-1] * len(managed)
        """-1: no plan yet, or a sparse gradient, which needs no bucket."""
        self.large: set[int] = set()
        """Those whose gradients take so much memory that they should not wait for their bucket."""
        self.idle: frozenset[int] = frozenset()
        """Buckets that nobody filled in the latest round, if those are left out."""
        self.at_once: frozenset[int] = frozenset()
        """Those that come together when nothing is left to compute."""

    def name(self, index: int) -> str:
        return self.specs[index].name

    def fold_in(self, indices: Sequence[int] | None = None) -> None:
        """Gradients that backward has left on compute parameters, all or these, go where their holders show them."""
        if self.hidden:
            self.join_streams(indices)
            for index in range(len(self.holders)) if indices is None else indices:
                holder = self.holders[index]
                if isinstance(holder, ComputeParameter):
                    holder.fold_in()

    def gradient_arrived(self, leaf: Tensor) -> int:
        """Autograd has accumulated into it, and it is dirty; -1 if it is none of these."""
        index = self.index_of.get(id(leaf), -1)
        if index >= 0:
            self.dirty.add(index)
            if self.divided:
                self.divided.pop(index, None)
            if self._streams is not None:
                self._streams.arrived(index)
        return index

    def join_streams(self, indices: Iterable[int] | None = None) -> None:
        """Before the current stream of an accelerator reads these gradients, or all, which may have come on others."""
        if self._streams is not None:
            self._streams.join(indices)

    def divide(self, index: int, ranks: float) -> None:
        """With sums: before autograd adds to a `.grad` that was reduced, as each rank will bring it."""
        gradient = self.holders[index].grad
        if gradient is not None and index not in self.divided:
            with torch.no_grad():
                gradient.div_(ranks)
            self.divided[index] = ranks

    def undo_divisions(self) -> None:
        """Of gradients that never came: their backward has raised."""
        for index, ranks in self.divided.items():
            if (gradient := self.holders[index].grad) is not None:
                with torch.no_grad():
                    gradient.mul_(ranks)
        self.divided.clear()

    def lose(self, index: int) -> None:
        """Its gradient was lost with a round whose backward raised."""
        self.lost.add(index)

    def check_lost(self) -> None:
        """Before a round: raises if it would add to some gradients of before, while others of them are lost."""
        clean = [index for index in range(len(self.holders)) if index not in self.dirty | self.lost]
        kept = [index for index in clean if (one := self.holders[index].grad) is not None and one.count_nonzero()]
        if self.lost and kept:
            raise UnfinishedRoundError(
                f"rank {self.transport.rank}: the gradient of '{self.name(min(self.lost))}' was lost with a backward "
                f"that raised, while that of '{self.name(kept[0])}', of an earlier one, is still there: the next one "
                "would add to some of them only. Call zero_grad() first."
            )

    def mark_clean(self, indices: Iterable[int]) -> None:
        """Their gradients are synchronized."""
        self.dirty.difference_update(indices)

    def mark_dirty(self, indices: Iterable[int]) -> None:
        """They have gradients that were never synchronized."""
        self.dirty.update(indices)

    def drop_gradients(self) -> None:
        for holder in self.holders:
            holder.grad = None
        self.dirty.clear()

    def has_gradient(self, index: int) -> bool:
        return self.holders[index].grad is not None or self.leaves[index].grad is not None

    # --- what rounds teach -----------------------------------------------------------------------

    def make_plan(
        self,
        order: Sequence[int],
        gradients: Sequence[Tensor | None],
        options: Options,
        by_rows: bool,
        by_shares: bool = False,
        shards: ShardSums | None = None,
    ) -> None:
        """At the end of the first round, by rank 0's order of arrival and what came; all ranks together.

        `by_rows`: single rows of large tables may travel; `by_shares`: each rank gets only its share of the sums;
        `shards`: which are made in the order of a tree.
        """
        plan = self.plan = plan_of_first_rank(self.specs, order, gradients, self.transport, options, by_rows)
        flags = ROUND_FLAGS + len(plan.sparse)
        if options.skip_all_reduce_unused_params:
            flags += len(plan.buckets) - 1
        self.buckets = make_buckets(plan.buckets, self.specs, self.transport, flags, by_shares, shards)
        self.layout = self._describe(plan)
        # Of several terms only the first one's place is where gradients are delivered, and the last shard's is another.
        brings_large = self.as_view and not by_shares and (shards is None or shards.terms == 1)
        for number, planned in enumerate(plan.buckets):
            for place in planned.places:
                index = place.index
                self.bucket_of[index] = number
                self.gradients.place(index, self.buckets[number])
                is_large = self.specs[index].nbytes >= LARGE and not planned.by_rows
                if is_large and brings_large and self.holders[index] is self.leaves[index]:
                    self.large.add(index)

    def _describe(self, plan: Plan) -> Layout:
        buckets = tuple(
            PlannedBucket(
                tuple(bucket.indices),
                bucket.plan.nbytes,
                bucket.buffer.nbytes,
                self.transport.is_shared(bucket.buffer),
                str(bucket.plan.device),
                str(bucket.plan.dtype).removeprefix("torch."),
            )
            for bucket in self.buckets
        )
        return Layout(tuple(spec.name for spec in self.specs), buckets, plan.sparse, self.as_view)

    def count_expected(self, and_new_ones: bool) -> list[int]:
        """For each bucket how many parameters are expected; one more number at the end for those without a bucket.

        `and_new_ones`: with those that have never come. A bucket that must not leave before one that comes for the
        first time waits for them, until the end of backward.
        """
        found = self._missing.get(and_new_ones, [])
        if len(found) != len(self.buckets) + 1:
            found = self._missing[and_new_ones] = [0] * (len(self.buckets) + 1)
            for number, expected in zip(self.bucket_of, self.expected, strict=True):
                found[number] += and_new_ones or expected > 0
        return found.copy()

    def learn(self, counts: list[int]) -> None:
        """A round has carried every gradient; each parameter came so often, and is expected to do so again."""
        self.lost.clear()
        self.dirty = set()
        self.as_expected = counts == self.expected
        if not self.as_expected:
            self.expected = list(map(max, self.expected, counts))
            self._missing.clear()

    def leave_out(self, idle: frozenset[int]) -> None:
        """Buckets that need not travel in the next round, unless somebody fills them."""
        self.idle = idle

    def expect_at_once(self, indices: Iterable[int]) -> None:
        """These come together when nothing is left to compute: sending them does not overlap with anything."""
        self.at_once = frozenset(indices)

    def inherit(self, before: ParameterGroup, left: Container[int], managed_before: Container[int]) -> None:
        """Takes over from another list of parameters what is known of those that stay. By identities of parameters:

        `left`: had gradients that were never synchronized, now or when they were frozen; `managed_before`: at any time.
        """
        indices = {id(parameter): index for index, parameter in enumerate(before.parameters)}
        self.gradients.inherit(before.gradients, indices, self.managed)
        # A parameter that nobody listened to until now may have a gradient that nobody saw arrive. (One that was frozen
        # in between has what an earlier round left.)
        unseen = [
            index
            for index, one in enumerate(self.managed)
            if id(one.parameter) in left
            or id(one.parameter) not in managed_before
            or (one.leaf is not one.parameter and one.leaf.grad is not None)
        ]
        self.fold_in(unseen)
        self.dirty.update(index for index in unseen if self.holders[index].grad is not None)


class ManagedBefore:
    """The history of one reducer's parameters."""

    def __init__(self) -> None:
        self._ever: MutableMapping[Tensor, None] = WeakTensorKeyDictionary()
        self._held: dict[int, Tensor] = {}  # DTensors: torch can't convert one that is referred to weakly
        self._dirty: list[weakref.ref[nn.Parameter]] = []

    def __contains__(self, parameter: Tensor) -> bool:
        return id(parameter) in self._held if _torch.is_dtensor(parameter) else parameter in self._ever

    def remember(self, parameters: Iterable[Tensor]) -> None:
        for parameter in parameters:
            if _torch.is_dtensor(parameter):
                self._held[id(parameter)] = parameter
            else:
                self._ever[parameter] = None

    def left_dirty(self) -> list[nn.Parameter]:
        """Frozen or removed with gradients that were never synchronized."""
        return [parameter for one in self._dirty if (parameter := one()) is not None]

    def leave_dirty(self, parameters: Iterable[nn.Parameter]) -> None:
        """Remembers these as left with gradients that no round has carried."""
        self._dirty = [weakref.ref(parameter) for parameter in parameters if parameter.grad is not None]


def plan_of_first_rank(
    specs: Sequence[Spec],
    order: Sequence[int],
    gradients: Sequence[Tensor | None],
    transport: Transport,
    options: Options,
    by_rows: bool,
) -> Plan:
    """The plan by rank 0's `order`, and, if `by_rows`, by the tables of which it has few rows; a collective."""
    may = by_rows and transport.reduce_rows is not None
    few = [index for index in order if may and _has_few_rows(specs[index], gradients[index], transport.size)]
    order, few = _of_first_rank([order, few], len(specs), transport, specs[0].device)
    order = delay(order, specs, options.delayed, options.delayed_until)
    return make_plan(specs, order, options.bucket_caps(transport.usual_caps), few)


def _has_few_rows(spec: Spec, gradient: Tensor | None, ranks: int) -> bool:
    """Whether it would have paid in this round to send single rows. One that is all zeros says nothing."""
    if gradient is None or not may_travel(spec):
        return False
    rows = touched_rows(gradient, ranks)
    return rows is not None and len(rows) > 0


def _of_first_rank(
    lists: Sequence[Sequence[int]], longest: int, transport: Transport, device: torch.device
) -> list[list[int]]:
    """Rank 0's lists of numbers, in one message."""
    rows = [[len(one), *one] + [0] * (longest - len(one)) for one in lists]
    message = torch.tensor(rows, device=device)
    transport.broadcast([message], source=0)
    return [row[1 : 1 + row[0]] for row in message.tolist()]


def make_buckets(
    plans: Sequence[BucketPlan],
    specs: Sequence[Spec],
    transport: Transport,
    extra: int = 0,
    by_shares: bool = False,
    shards: ShardSums | None = None,
) -> list[Bucket]:
    """The buckets of a plan, of each kind; the last one with `extra` elements more in its tail."""
    tails = [len(plan.places) + 1 for plan in plans]
    tails[-1] += extra
    requests = [
        Request(plan.numel + tail, plan.dtype, plan.device, reserve=not plan.by_rows)
        for plan, tail in zip(plans, tails, strict=True)
    ]
    if shards is not None:
        terms = shards.order.most
        made = transport.allocate([request for request in requests for _ in range(terms)])
        of_bucket = [made[at : at + terms] for at in range(0, len(made), terms)]
        return [ShardedBucket(plan, specs, one[0], one[1:], shards) for plan, one in zip(plans, of_bucket, strict=True)]
    buffers = transport.allocate_reused(requests) if by_shares else transport.allocate(requests)
    usual = ShareBucket if by_shares else Bucket
    return [
        (RowBucket if plan.by_rows else usual)(plan, specs, buffer) for plan, buffer in zip(plans, buffers, strict=True)
    ]
