"""What an elementwise optimizer steps at once: a run of parameters that lie side by side in a bucket and are alike.

A run is one flat tensor to the optimizer, however many parameters are in it, and a rank has only its share of that.
Parameters of a run have come through the same steps, so that one counter of steps does for all of them. When some of
them have no gradient, the run is split for good.

    bucket      | w1 | b1 | w2 | b2 | w3 |         in the optimizer: w in group 0, b in group 1
    runs        | 0  | 1  | 0  | 1  | 0  |         if all are in one group: a single run
    this rank   |       share       |    |         of some runs a part, of others nothing: an empty tensor
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import is_
from typing import Any

import torch
from torch import Tensor

from gradsync.engine.bucket import Bucket
from gradsync.engine.parameter_group import ParameterGroup
from gradsync.engine.shared_parameters import Extent, SharedParameters
from gradsync.sharing.counters import copied, is_like


class Run:
    """Some parameters of one bucket, and this rank's share of their elements."""

    def __init__(
        self, group: int, bucket: Bucket, number: int, first: int, last: int, share: Extent, flat: Tensor
    ) -> None:
        """`group`: of the optimizer; `first` to `last`: their places in the bucket; `share`: this rank's, of the whole
        bucket; `flat`: this rank's share of the values, of this run.
        """
        self.group, self.bucket, self.number, self.first, self.last = group, bucket, number, first, last
        self.extent = extent_of(bucket, first, last, share)
        self._share = share
        self.values = flat

    @property
    def indices(self) -> list[int]:
        return self.bucket.indices[self.first : self.last]

    def take_gradient(self, gradients: Sequence[Tensor | None]) -> None:
        """Gives the flat tensor its part of these, one for each parameter of the run; None only if all of them are."""
        if all(gradient is None for gradient in gradients):
            self.values.grad = None
        elif self.bucket.plan.by_rows:  # one table, whose gradient may be elsewhere
            (gradient,) = gradients
            assert gradient is not None
            dense = gradient.to_dense() if gradient.layout is not torch.strided else gradient
            self.values.grad = in_memory_order(dense, self.bucket.views[self.first])[
                self.extent.start : self.extent.stop
            ]
        else:
            views = self.bucket.views[self.first : self.last]
            if not all(map(is_, gradients, views)):
                for gradient, view in zip(gradients, views, strict=True):
                    if gradient is not None and gradient is not view:  # the user's own
                        view.copy_(gradient)
            self.values.grad = self.bucket.data[self.extent.start : self.extent.stop]

    def let_gradient_go(self) -> None:
        """After a step: who refers to a bucket's memory seems to keep what is in it, and the next round copies that."""
        self.values.grad = None

    def flatten(self, tensors: Sequence[Tensor]) -> Tensor:
        """This rank's share of tensors like the parameters, one for each of them, as one."""
        flat = torch.empty_like(self.values)
        for at, tensor in enumerate(tensors, self.first):
            place = self.bucket.plan.places[at]
            start, stop = max(place.offset, self.extent.start), min(place.offset + place.numel, self.extent.stop)
            if start < stop:
                whole = in_memory_order(tensor, self.bucket.views[at])
                part = whole[start - place.offset : stop - place.offset]
                flat[start - self.extent.start : stop - self.extent.start].copy_(part)
        return flat

    def split(self, keys: Sequence[object], state: Mapping[str, Any]) -> Iterator[tuple[Run, dict[str, Any]]]:
        """Runs of neighbors with the same key, one for each parameter, each with its part of this one's state."""
        first = self.first
        for _, equal in groupby(keys):
            last = first + len(list(equal))
            extent = extent_of(self.bucket, first, last, self._share)
            begin, end = extent.start - self.extent.start, extent.stop - self.extent.start
            part = Run(self.group, self.bucket, self.number, first, last, self._share, self.values[begin:end])
            yield part, {k: v[begin:end] if is_like(k, v) else copied(v) for k, v in state.items()}
            first = last


def extent_of(bucket: Bucket, first: int, last: int, share: Extent) -> Extent:
    """The part of some places of a bucket that is in a share."""
    places = bucket.plan.places
    start = max(places[first].offset, share.start)
    stop = min(places[last - 1].offset + places[last - 1].numel, share.stop)
    if stop <= start:  # an empty one, inside the share's bounds
        start = stop = min(max(start, share.start), share.stop)
    return Extent(start, stop)


def in_memory_order(tensor: Tensor, like: Tensor) -> Tensor:
    """The elements of a tensor in the order in which those of another one lie in memory, flat."""
    if tensor.stride() != like.stride():
        tensor = torch.empty_strided(like.shape, like.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))


def find_runs(group: ParameterGroup, shared: SharedParameters, groups: Mapping[int, int]) -> list[Run]:
    """All runs of the parameters that an optimizer has in these groups, by the parameters' identities."""
    runs = []
    for number, bucket in enumerate(group.buckets):
        share = shared.share_of(group, number)
        of_places = [groups.get(id(group.parameters[index]), -1) for index in bucket.indices]
        first = 0
        for key, equal in groupby(of_places):
            last = first + len(list(equal))
            if key >= 0:
                flat = shared.flat(number, extent_of(bucket, first, last, share), bucket.plan.dtype)
                runs.append(Run(key, bucket, number, first, last, share, flat))
            first = last
    return runs
