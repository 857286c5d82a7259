"""One bucket on its way: gradients taken from the parameters, and given back when they are reduced.

While a bucket is under way its parameters' `.grad` is None: nothing can write into memory that is being reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradsync.engine.bucket import Bucket, fill
from gradsync.engine.managed_parameters import HasGrad
from gradsync.engine.reduce_config import Scaling
from gradsync.errors import SecondOrderError
from gradsync.transport.base import Done, Work

NOT_SENT = Done()  # the work of a bucket that was left out


class Taken(NamedTuple):
    """What this rank brings to a bucket, by the positions in it."""

    gradients: list[Tensor | None]
    used: list[bool]  # by this rank
    held: list[Tensor | None]  # what `.grad` was, where it may be needed again
    unused: Set[int] = frozenset()  # where `held` lies in the bucket, and is copied back if no rank used it
    user_owned: Set[int] = frozenset()  # where `held` is a tensor of the user's, to be filled

    @classmethod
    def nothing(cls, bucket: Bucket) -> Taken:
        return cls(bucket.none_held, [False] * len(bucket.indices), bucket.none_held)


class InFlight(NamedTuple):
    """A launched bucket. Keeps its memory alive until the work is done."""

    number: int  # of its bucket
    bucket: Bucket
    work: Work
    taken: Taken
    saved: Tensor | None = None  # what the bucket has to hold again afterwards
    second_order: bool = False  # somebody may want to differentiate the result

    @property
    def is_sent(self) -> bool:
        """Else nothing travels, and nothing is to be delivered."""
        return self.work is not NOT_SENT

    @property
    def is_plain(self) -> bool:
        """Whether all it delivers are views of the bucket."""
        delivers_views = self.saved is None and not self.taken.user_owned and not self.second_order
        return delivers_views and self.bucket.result(self.work) is None


def take_gradients(
    bucket: Bucket, holders: Sequence[HasGrad], dirty: Set[int], user_owned: Set[int], lets_go: bool
) -> Taken:
    """Takes the gradients of a bucket from its parameters.

    A dirty parameter brings its gradient. A clean one brings the `.grad` it has, which an earlier round left and which
    is the same on all ranks, or zeros. `lets_go`: a gradient that was used is not needed again.
    """
    owned = {at for at, index in enumerate(bucket.indices) if index in user_owned} if user_owned else user_owned
    gradients: list[Tensor | None] = []
    for index in bucket.indices:  # one pass: parameters are rarely in the cache
        holder = holders[index]
        gradients.append(holder.grad)
        holder.grad = None
    if dirty >= bucket.members and all(gradient is not None for gradient in gradients):  # the usual case
        used, unused = bucket.all_used, frozenset[int]()
        held = bucket.none_held if lets_go else gradients
    else:
        used = [g is not None and index in dirty for g, index in zip(gradients, bucket.indices, strict=True)]
        held = [None if is_used and lets_go else g for is_used, g in zip(used, gradients, strict=True)]
        # If nobody uses it, it stays what it is, to the bit, also where it is now: a mean of equals may round.
        unused = frozenset(at for at, view in enumerate(bucket.views) if not used[at] and gradients[at] is view)
        held = [one.clone() if at in unused and one is not None else one for at, one in enumerate(held)]
    if owned:
        held = [gradients[at] if at in owned else one for at, one in enumerate(held)]
    return Taken(gradients, used, held, unused, owned)


def deliver(
    flight: InFlight,
    holders: Sequence[HasGrad],
    scaling: Scaling,
    as_view: bool,
    see_reduced: Callable[[Tensor], None] | None = None,
) -> list[bool]:
    """Gives every parameter of a bucket that has been reduced its gradient; tells who was used by anybody.

    `see_reduced` looks at the bucket's gradients before that.
    """
    bucket, (_, used, all_held, unused, user_owned) = flight.bucket, flight.taken
    result = bucket.result(flight.work)
    if not scaling.hooked:
        divide(bucket, bucket.data if result is None else result, scaling)
    if see_reduced is not None:
        see_reduced(bucket.data)
    as_view, brought = as_view and flight.saved is None, used
    if all(used) and scaling.weight > 0:
        if as_view and result is None and not user_owned and not flight.second_order:  # the usual case
            for index, view in zip(bucket.indices, bucket.views, strict=True):
                holders[index].grad = view
            return used
    else:
        used = bucket.read_usage()
    mine = [holders[index] for index in bucket.indices]
    targets, sources, keepers = [], [], []
    for at, (holder, view, held, is_used) in enumerate(zip(mine, bucket.views, all_held, used, strict=True)):
        if not is_used and brought[at]:  # by a rank of weight 0 only, which drops it
            holder.grad = None
        elif not is_used:  # nobody used it: as it was, and None stays None
            holder.grad = view.copy_(held) if at in unused and held is not None else held
        elif at in user_owned and held is not None:  # what the user has given has to hold the result
            targets.append(held.detach() if held.requires_grad else held)
            sources.append(view if result is None else result)
            keepers.append(holder)
        elif result is not None:
            holder.grad = result
        elif as_view:
            holder.grad = view
        else:
            target = torch.empty_like(view) if held is None or held is view else held
            targets.append(target.detach() if target.requires_grad else target)
            sources.append(view)
            keepers.append(holder)
    fill(targets, sources)
    for holder, gradient in zip(keepers, targets, strict=True):
        holder.grad = gradient
    if flight.saved is not None:
        bucket.data.copy_(flight.saved)
    if flight.second_order:
        for holder, is_used in zip(mine, used, strict=True):
            if is_used and (reduced := holder.grad) is not None:
                holder.grad = refuse_second_order(reduced)
    return used


def divide(bucket: Bucket, data: Tensor, scaling: Scaling) -> None:
    """Makes a weighted sum a mean. With equal weights it is one already."""
    if scaling.is_weighted_mean and bucket.plan.device.type != "cpu":
        # On the device, without asking: reading the weight would make the host wait for the reduction.
        data.div_(bucket.weight.clamp_min(torch.finfo(bucket.plan.dtype).tiny))
        return
    weight = total_weight(bucket, scaling)
    if weight <= 0:
        data.zero_()
    elif weight != 1:
        data.div_(weight)


def total_weight(bucket: Bucket, scaling: Scaling) -> float:
    """The ranks' factors added up: 1, and not nearly 1, if they only differ from it by rounding."""
    if not scaling.is_weighted_mean:
        return 1.0
    weight = bucket.read_weight()
    rounding = (scaling.shards or scaling.ranks) * torch.finfo(bucket.plan.dtype).eps
    return 1.0 if abs(weight - 1) <= rounding else weight


class _Synchronized(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, gradient: Tensor) -> Tensor:
        return gradient.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise second_order_error()


def second_order_error() -> SecondOrderError:
    return SecondOrderError(
        "a loss on `.grad` after backward(create_graph=True): what is in `.grad` is the mean over all ranks, which "
        "this rank can't differentiate. Take the gradients that the loss needs with torch.autograd.grad(loss, "
        "parameters, create_graph=True), which leaves them local; the backward of the whole loss is synchronized."
    )


def refuse_second_order(gradient: Tensor) -> Tensor:
    """The same values; a backward through them raises."""
    with torch.enable_grad():
        anchor = torch.empty((), device=gradient.device, requires_grad=True)
        return _Synchronized.apply(anchor, gradient)  # type: ignore[no-any-return, no-untyped-call]
