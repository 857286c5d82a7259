"""What happens to one bucket: gradients collected, handed to the transport, and given back reduced.

The reducer decides when; everything here is the same whenever it happens. While a bucket is under
way its parameters' `.grad` is None: nothing can write into memory that is being reduced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from gradsync import _torch
from gradsync.engine import sparse_rows
from gradsync.engine.bucket import Bucket, fill, make_buckets
from gradsync.engine.plan import BucketPlan
from gradsync.engine.roster import HasGrad, Managed
from gradsync.engine.second_order import refuse_second_order
from gradsync.engine.sparse_rows import KnownRows
from gradsync.engine.touched_rows import NO_ROWS, touched_rows
from gradsync.hooks import comm_hook
from gradsync.hooks.comm_hook import GradBucket, Hook
from gradsync.options import Options
from gradsync.transport.base import Done, RowWork, Transport, Work
from gradsync.transport.label import Label

_FINE = 2**20  # a weight of one, as an integer


_NOT_SENT = Done()  # the work of a bucket that was left out


class InFlight(NamedTuple):
    """A launched bucket. Keeps its memory alive until the work is done."""

    bucket: Bucket
    work: Work
    used: list[bool]  # by this rank
    held: list[Tensor | None]  # what `.grad` was, where it may be needed again
    rows: RowWork | None = None  # the work, if single rows may travel
    unused: Set[int] = frozenset()  # positions at which `held` is what was in the bucket, and may have to return there
    own: Set[int] = frozenset()  # positions at which `held` is a tensor of the user's, to be filled
    saved: Tensor | None = None  # what the bucket has to hold again afterwards
    second_order: bool = False  # somebody may want to differentiate the result

    @property
    def is_sent(self) -> bool:
        """Else nothing travels, and nothing is to be delivered."""
        return self.work is not _NOT_SENT

    @property
    def is_plain(self) -> bool:
        """Whether all it delivers are views of the bucket."""
        return self.result is None and self.saved is None and not self.own and not self.second_order

    @property
    def result(self) -> Tensor | None:
        """After the work: the gradient itself, if it was summed where it is, row by row."""
        return None if self.rows is None else self.rows.result


class Delivery:
    """Carries buckets of one list of parameters there and back."""

    def __init__(self, managed: Sequence[Managed], transport: Transport, options: Options) -> None:
        self.usual_weight = 1.0
        self.weight = 1.0
        """This rank's share in the mean, for the round under way or the next one."""
        self.slots: list[HasGrad] = [one.slot for one in managed]
        self._computing = [one.computing for one in managed]
        self._specs = [one.spec for one in managed]
        self._transport = transport
        self._mean = options.reduce == "mean"
        self.divisor: float | None = None
        """Set: a gradient is the sum over the ranks divided by this, whatever their weights."""
        self.present = 1.0
        """The share of ranks that bring what all have in common; in a `Join` context those without data don't."""
        self.hook: tuple[Hook, object] | None = None
        """A communication hook and its state, which reduce the buckets instead of the transport."""
        self._latest_hook: Work | None = None
        self.after_reduce: Callable[[Tensor], None] | None = None
        """Called with each bucket's reduced gradients, flat, before they are delivered."""
        self._as_view = options.gradient_as_bucket_view
        self.weight_unit = 1.0  # the ranks' mean weight in the latest round

    # --- there -----------------------------------------------------------------------------------

    def launch(
        self,
        bucket: Bucket,
        number: int,
        last: bool,
        dirty: Set[int],
        label: Label,
        extra: Sequence[bool] = (),
        own: Set[int] = frozenset(),
        saved: Tensor | None = None,
        second_order: bool = False,
    ) -> InFlight:
        """Collects the gradients of a bucket and hands it to the transport.

        A dirty parameter brings its gradient. A clean one brings the `.grad` it has, which an
        earlier round left and which is the same on all ranks, or zeros.
        """
        own = {at for at, index in enumerate(bucket.indices) if index in own} if own else own
        slots = self._slots_of(bucket)
        unused: Set[int] = frozenset()
        gradients: list[Tensor | None] = []
        for slot in slots:  # one pass: parameters are rarely in the cache
            gradients.append(slot.grad)
            slot.grad = None
        # A gradient that the view replaces is let go at once: memory for one set is enough.
        # One of no weight is let go too: if nobody else has one, there was none.
        lets_go = self._as_view or not self.weight
        if dirty >= bucket.members and all(gradient is not None for gradient in gradients):  # the usual case
            used = bucket.all_used
            held = bucket.none_held if lets_go else gradients
        else:
            used = [g is not None and index in dirty for g, index in zip(gradients, bucket.indices, strict=True)]
            held = [None if is_used and lets_go else g for is_used, g in zip(used, gradients, strict=True)]
            # If nobody uses it, it stays what it is, to the bit, also where it is now: a mean of equals may round.
            unused = {at for at, view in enumerate(bucket.views) if not used[at] and gradients[at] is view}
            held = [one.clone() if at in unused and one is not None else one for at, one in enumerate(held)]
        if own:
            held = [gradients[at] if at in own else one for at, one in enumerate(held)]
        bucket.write_tail(used, extra)
        if bucket.plan.by_rows:
            rows = self._launch_rows(bucket, gradients[0], used[0], label)
            return InFlight(bucket, rows, used, held, rows, unused, own, saved, second_order)
        bucket.fill(gradients)
        if self.gain != 1:  # as in `share_out`
            every = zip(bucket.views, gradients, used, strict=True)
            shared = [view for view, gradient, is_used in every if gradient is not None and not is_used]
            if shared:
                torch._foreach_div_(shared, self.gain)
        work = self._start(bucket, number, last, label)
        return InFlight(bucket, work, used, held, None, unused, own, saved, second_order)

    def launch_nothing(self, bucket: Bucket, number: int, last: bool, label: Label) -> InFlight:
        """Sends a bucket in which there is nothing, so that the ranks stay in step; `.grad` stays as it is."""
        nobody = [False] * len(bucket.indices)
        bucket.tail.zero_()
        if bucket.plan.by_rows:
            rows = self._launch_rows(bucket, None, False, label)
            return InFlight(bucket, rows, nobody, bucket.none_held, rows)
        bucket.data.zero_()
        return InFlight(bucket, self._start(bucket, number, last, label, tolerant=True), nobody, bucket.none_held)

    def leave_out(self, bucket: Bucket) -> InFlight:
        """Stands for a bucket that all ranks know nobody to have filled; `.grad` stays as it is."""
        return InFlight(bucket, _NOT_SENT, [False] * len(bucket.indices), bucket.none_held)

    def _start(self, bucket: Bucket, number: int, last: bool, label: Label, tolerant: bool = False) -> Work:
        if self.hook is not None:
            return self._launch_hook(bucket, number, last, label, tolerant)
        return self._transport.reduce(bucket.buffer, self._scale(), label)

    def _launch_rows(self, bucket: Bucket, gradient: Tensor | None, used: bool, label: Label) -> RowWork:
        """The same for a bucket of which single rows may travel. The gradient itself may become the result."""
        assert self._transport.reduce_rows is not None
        scale = self._scale()
        rows: Tensor | None = None
        if gradient is None or not scale:
            gradient = torch.zeros_like(bucket.views[0])
            rows = NO_ROWS if self.after_reduce is None else None
        elif not used:  # nobody may have used it, and then it stays as it is
            gradient = gradient / self.gain  # as in `share_out`
        elif self.after_reduce is None and gradient.dtype == bucket.plan.dtype:  # who looks wants to see the whole
            rows = touched_rows(gradient, self._transport.size)
            if rows is not None and not _torch.is_alone(gradient):
                gradient = gradient.clone()  # autograd may still need the memory, or it is the bucket's
        if rows is None:
            dense = gradient if gradient.layout is torch.strided else gradient.to_dense()
            gradient = dense.to(bucket.plan.dtype).contiguous()
        return self._transport.reduce_rows(bucket.buffer, gradient, rows, scale, label)

    @torch.no_grad()
    def bring(self, bucket: Bucket, index: int) -> None:
        """Brings one gradient to its place before its bucket is complete. Later arrivals add to it there."""
        slot, view = self.slots[index], bucket.views[bucket.indices.index(index)]
        gradient = slot.grad
        if gradient is not None and gradient is not view and gradient.layout is torch.strided:
            view.copy_(gradient)
            slot.grad = view

    def _slots_of(self, bucket: Bucket) -> list[HasGrad]:
        slots = self.slots
        return [slots[index] for index in bucket.indices]

    def _launch_hook(self, bucket: Bucket, number: int, last: bool, label: Label, tolerant: bool) -> Work:
        """`tolerant`: the bucket is worth nothing, and so is what a hook says that has failed already."""
        assert self.hook is not None
        hook, state = self.hook
        if self._latest_hook is not None and bucket.plan.device.type == "cpu":
            # A hook may start further collectives when its first one is done, from whatever thread that is. Two
            # such hooks at a time would start them in different orders on different ranks.
            with contextlib.suppress(*[Exception] if tolerant else []):
                self._latest_hook.wait()
        parameters = [self._computing[place.index] for place in bucket.plan.places]
        seen = GradBucket(bucket.data, bucket.views, parameters, number, last)
        tail = self._transport.reduce(bucket.tail, self._scale(), label)
        try:
            self._latest_hook = comm_hook.launch(hook, state, seen, tail, self._transport.rank, self._transport.limit)
        except Exception:
            if not tolerant:
                raise
            return tail
        return self._latest_hook

    @property
    def gain(self) -> float:
        """How often something that all ranks have in common is in the result: once in a mean."""
        if self.hook is not None:
            return self.present
        if self.divisor is not None:
            return self.present * self._transport.size / self.divisor
        return self.present * (1.0 if self._mean else float(self._transport.size))

    def share_out(self, index: int) -> None:
        """Before a sum grows by another backward: each rank keeps its share of what all have in common.

        `.grad` holds an earlier round's sum, the same everywhere. The next round adds up all ranks'
        `.grad`, so each of N may bring only 1/N of it. (A mean needs no such care.)
        """
        gradient = self.slots[index].grad
        if gradient is not None:
            with torch.no_grad():
                gradient.div_(self.gain)

    def _scale(self) -> float:
        if self.divisor is not None:
            return 1 / self.divisor
        return self.weight / (self.weight_unit * self._transport.size) if self._mean else 1.0

    # --- and back --------------------------------------------------------------------------------

    def deliver(self, flight: InFlight) -> list[bool]:
        """Gives every parameter of a bucket that has been reduced its gradient; tells who was used by anybody."""
        bucket, result = flight.bucket, flight.result
        if self.hook is None:
            self._divide(bucket, bucket.data if result is None else result)
        if self.after_reduce is not None:
            self.after_reduce(bucket.data)
        slots = self._slots_of(bucket)
        as_view = self._as_view and flight.saved is None
        if all(flight.used) and self.weight > 0:
            used = flight.used
            if as_view and result is None and not flight.own and not flight.second_order:  # the usual case
                for slot, view in zip(slots, bucket.views, strict=True):
                    slot.grad = view
                return used
        else:
            used = bucket.read_usage()
        targets, sources, keepers = [], [], []
        for at, (slot, view, held, is_used) in enumerate(zip(slots, bucket.views, flight.held, used, strict=True)):
            if not is_used:  # nobody used it: as it was, and None stays None
                slot.grad = view.copy_(held) if at in flight.unused and held is not None else held
            elif at in flight.own and held is not None:  # what the user has given has to hold the result
                targets.append(held.detach() if held.requires_grad else held)
                sources.append(view if result is None else result)
                keepers.append(slot)
            elif result is not None:
                slot.grad = result
            elif as_view:
                slot.grad = view
            else:
                target = torch.empty_like(view) if held is None or held is view else held
                targets.append(target.detach() if target.requires_grad else target)
                sources.append(view)
                keepers.append(slot)
        fill(targets, sources)
        for slot, gradient in zip(keepers, targets, strict=True):
            slot.grad = gradient
        if flight.saved is not None:
            bucket.data.copy_(flight.saved)
        if flight.second_order:
            for slot, is_used in zip(slots, used, strict=True):
                if is_used and (reduced := slot.grad) is not None:
                    slot.grad = refuse_second_order(reduced)
        return used

    def total_weight(self, bucket: Bucket) -> float:
        """The ranks' scales added up: 1, and not nearly 1, if they only differ from it by rounding."""
        if not self._mean or self.divisor is not None:
            return 1.0
        weight = bucket.read_weight()
        rounding = self._transport.size * torch.finfo(bucket.plan.dtype).eps
        return 1.0 if abs(weight - 1) <= rounding else weight

    def weight_as_integer(self) -> int:
        return round(self.weight * _FINE)

    def measure_weights(self, weights: Sequence[int]) -> None:
        """Before the first reduction: weights such as numbers of tokens would overflow a float16 bucket."""
        mean = sum(weights) / len(weights) / _FINE
        if self._mean and mean > 0:
            self.weight_unit = mean

    def end_round(self, total_weight: float) -> None:
        """The next round's weights are measured in units of this one's mean, so that they are near 1."""
        if total_weight > 0:
            self.weight_unit *= total_weight

    def settle_hook(self) -> None:
        """Waits for what a hook has under way, whatever it says: that is told where it is delivered."""
        if self._latest_hook is not None:
            with contextlib.suppress(Exception):
                self._latest_hook.wait()
        self.forget_hook()

    def forget_hook(self) -> None:
        """Nothing of a hook is under way."""
        self._latest_hook = None

    def forget_round(self) -> None:
        """The round is over, well or not."""
        self.forget_hook()
        self.weight = self.usual_weight

    def _divide(self, bucket: Bucket, data: Tensor) -> None:
        """Makes a weighted sum a mean. With equal weights it is one already."""
        if self._mean and self.divisor is None and bucket.plan.device.type != "cpu":
            # On the device, without asking: reading the weight would make the host wait for the reduction.
            data.div_(bucket.weight.clamp_min(torch.finfo(bucket.plan.dtype).tiny))
            return
        weight = self.total_weight(bucket)
        if weight <= 0:
            data.zero_()
        elif weight != 1:
            data.div_(weight)

    # --- what does not go the usual way ----------------------------------------------------------

    def carry_sparse(self, index: int, total_weight: float, known: KnownRows | None, some_know: bool) -> None:
        """A sparse gradient travels by itself: its indices and values, no bucket; or the rows that all ranks know."""
        slot = self.slots[index]
        gradient = slot.grad
        if gradient is None:
            gradient = torch.zeros_like(self._computing[index]).to_sparse(1)
        elif gradient.layout is not torch.sparse_coo:
            gradient = gradient.to_sparse(1)
        scale = self._scale() / total_weight if total_weight > 0 else 0.0
        name = self._specs[index].name
        brings = scale > 0 and gradient._nnz() > 0
        if some_know and (rows := sparse_rows.agree(self._transport, name, gradient, known, brings)) is not None:
            slot.grad = rows.reduce(self._transport, gradient, scale)
            return
        slot.grad = self._transport.reduce_sparse(gradient, scale).result()

    def carry_late(self, plans: Sequence[BucketPlan], late: Mapping[int, Tensor], label: Label) -> None:
        """A second pass for gradients that arrived after their bucket had left; adds them to the result."""
        plans = [replace(plan, by_rows=False) for plan in plans]
        for plan, bucket in zip(plans, make_buckets(plans, self._specs, self._transport), strict=True):
            bucket.data.zero_()
            used = [place.index in late for place in plan.places]
            fill(
                [view for view, is_used in zip(bucket.views, used, strict=True) if is_used],
                [late[place.index] for place in plan.places if place.index in late],
            )
            bucket.write_tail(used)
            self._transport.reduce(bucket.buffer, self._scale(), label).wait()
            self._divide(bucket, bucket.data)
            for place, view, is_used in zip(plan.places, bucket.views, bucket.read_usage(), strict=True):
                slot = self.slots[place.index]
                if is_used and (gradient := slot.grad) is not None:
                    gradient.add_(view)
                elif is_used:
                    slot.grad = view.clone()
