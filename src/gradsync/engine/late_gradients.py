"""A second pass for gradients that arrived after their bucket had left.

Reentrant checkpointing may bring a parameter more often than ever before. `.grad` is None while a bucket is under way,
so such a gradient lands in a tensor of its own; the last bucket's tail tells all ranks that some rank has one. Right
without a flag, at no cost when it does not happen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from gradsync.engine.bucket import fill
from gradsync.engine.in_flight import divide
from gradsync.engine.managed_parameters import HasGrad
from gradsync.engine.parameter_group import make_buckets
from gradsync.engine.plan import BucketPlan, Spec
from gradsync.engine.reduce_config import Scaling
from gradsync.transport.base import Transport
from gradsync.transport.label import Label


def carry_late(
    plans: Sequence[BucketPlan],
    specs: Sequence[Spec],
    late: Mapping[int, Tensor],
    holders: Sequence[HasGrad],
    scaling: Scaling,
    transport: Transport,
    label: Label,
) -> list[int]:
    """Adds the mean of what was late to what was delivered, all ranks together; gives the parameters that got some."""
    carried = []
    plans = [replace(plan, by_rows=False) for plan in plans]
    for plan, bucket in zip(plans, make_buckets(plans, specs, transport), strict=True):
        bucket.data.zero_()
        used = [place.index in late for place in plan.places]
        fill(
            [view for view, is_used in zip(bucket.views, used, strict=True) if is_used],
            [late[place.index] for place in plan.places if place.index in late],
        )
        bucket.write_tail(used)
        transport.reduce(bucket.buffer, scaling.factor, label).wait()
        divide(bucket, bucket.data, scaling)
        for place, view, is_used in zip(plan.places, bucket.views, bucket.read_usage(), strict=True):
            holder = holders[place.index]
            if is_used:
                carried.append(place.index)
            if is_used and (gradient := holder.grad) is not None:
                gradient.add_(view)
            elif is_used:
                holder.grad = view.clone()
    return carried
