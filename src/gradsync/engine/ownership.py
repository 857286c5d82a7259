"""Whose memory `.grad` is: ours, delivered by a round, or somebody else's, in which case it must be respected.

Most of the time a gradient is a view of its bucket and nobody looks at it between the optimizer's step and the next
round. But `.grad` belongs to the user, who may

- keep a gradient over rounds: what is kept must not change, so the bucket parts with it before it is filled again;
- give a parameter a `.grad` of their own, a view of a flat tensor for example: that has to hold the result;
- put there what no round has synchronized: an optimizer must not step on it.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping, Sequence, Set
from operator import attrgetter, is_

import torch
from torch import Tensor

from gradsync import _torch
from gradsync.engine.bucket import Bucket
from gradsync.engine.compute_parameter import ComputeParameter
from gradsync.engine.in_flight import InFlight, second_order_error
from gradsync.engine.managed_parameters import HasGrad, Managed

_grad = attrgetter("grad")
# References to a gradient while it is looked at, besides the parameter's: the list's, the loop's and the call's.
_USUAL = 3


class Gradients:
    """What is in `.grad` of a list of parameters, between rounds."""

    def __init__(self, holders: Sequence[HasGrad], as_view: bool) -> None:
        self._holders = list(holders)
        self._compute_parameters = any(isinstance(holder, ComputeParameter) for holder in holders)
        self._as_view = as_view
        self._places: dict[int, tuple[Bucket, int]] = {}
        self._buckets: dict[Bucket, None] = {}
        self._given: dict[int, weakref.ref[Tensor]] = {}  # what was delivered that is not a view of a bucket
        self._user_owned: set[int] = set()  # of those, what the user had put there
        self._differentiable: list[weakref.ref[Tensor]] = []  # delivered by a backward with `create_graph=True`
        self._latest: dict[Bucket, tuple[int, Sequence[bool]]] = {}  # the round that delivered it, and who was used
        self._single: dict[int, int] = {}  # the same for what has no bucket

    def place(self, index: int, bucket: Bucket) -> None:
        """The plan has put a parameter there."""
        self._places[index] = bucket, bucket.indices.index(index)
        self._buckets[bucket] = None

    # --- before a round --------------------------------------------------------------------------

    def check_first_order(self) -> None:
        """Raises if the running backward is one of a loss on gradients that a round has delivered."""
        for given in self._differentiable:
            gradient = given()
            if gradient is not None and gradient.grad_fn is not None and _torch.will_execute(gradient.grad_fn):
                raise second_order_error()

    def before_round(self, buckets: Sequence[Bucket], dirty: Set[int]) -> tuple[set[int], list[int]]:
        """Parameters whose `.grad` is the user's own, and buckets of which somebody else may have a part."""
        for bucket in buckets:
            bucket.renew_views()
        found = self._read()
        own = self._find_own(found, dirty) if any(gradient is not None for gradient in found) else set[int]()
        return own, [number for number, bucket in enumerate(buckets) if not self._let_go(bucket, found)]

    def _read(self) -> list[Tensor | None]:
        if not self._compute_parameters:
            return list(map(_grad, self._holders))
        return [None if isinstance(holder, ComputeParameter) else holder.grad for holder in self._holders]

    def _find_own(self, found: list[Tensor | None], dirty: Set[int]) -> set[int]:
        """What is dirty was made by autograd, unless somebody else has it, or the memory, too."""
        own = set()
        usual = _USUAL + _torch.references_as_grad()
        for index, gradient in enumerate(found):
            if gradient is None or gradient.layout is not torch.strided or self._is_view(index, gradient):
                continue
            if (view := self._same_memory(index, gradient)) is not None:
                self._holders[index].grad = found[index] = view
                continue
            if self._is_given(index, gradient) and index not in self._user_owned:
                continue
            if index not in dirty or sys.getrefcount(gradient) > usual or not _torch.is_alone(gradient):
                own.add(index)
        # Without views the result is copied to what is there anyway.
        return own if self._as_view else set()

    def _let_go(self, bucket: Bucket, found: Sequence[Tensor | None]) -> bool:
        """Makes sure that nobody else has the memory of a bucket; False if somebody may have."""
        for index in bucket.indices if self._compute_parameters else ():
            holder = self._holders[index]
            if isinstance(holder, ComputeParameter) and not holder.release_given():
                return True  # not zeroed: the next round adds to it
        return bucket.let_go(found)

    # --- after it --------------------------------------------------------------------------------

    def delivered(self, flight: InFlight, used: Sequence[bool], number: int) -> None:
        """Round `number` has delivered a bucket."""
        self._latest[flight.bucket] = number, used
        if flight.second_order:
            grads = (self._holders[index].grad for index in flight.bucket.indices)
            self._differentiable = [one for one in self._differentiable if one() is not None]
            self._differentiable += [weakref.ref(one) for one in grads if one is not None and one.grad_fn is not None]
        if self._as_view and flight.is_plain:
            return
        for at, index in enumerate(flight.bucket.indices):
            holder = self._holders[index]
            if used[at] and not isinstance(holder, ComputeParameter) and (gradient := holder.grad) is not None:
                self._given[index] = weakref.ref(gradient)
                self._user_owned.discard(index)
                if at in flight.taken.user_owned:
                    self._user_owned.add(index)

    def gave(self, index: int, number: int) -> None:
        """The same for one that was delivered outside of a bucket: sparse, or late."""
        self._single[index] = number
        holder = self._holders[index]
        if (
            not isinstance(holder, ComputeParameter)
            and (gradient := holder.grad) is not None
            and not self._is_view(index, gradient)
        ):
            self._given[index] = weakref.ref(gradient)

    # --- before a step ---------------------------------------------------------------------------

    def present(self) -> list[int]:
        """Parameters that have a gradient."""
        return [index for index, holder in enumerate(self._holders) if holder.grad is not None]

    def foreign(self, among: Sequence[int]) -> list[int]:
        """Those of them that have a `.grad` which no round has delivered."""
        found = self._read()
        if len(self._places) == len(found) and all(
            all(map(is_, map(found.__getitem__, bucket.indices), bucket.views)) for bucket in self._buckets
        ):
            return []  # the usual case: all of them are views
        return [index for index in among if self._is_foreign(index, found[index])]

    def _is_foreign(self, index: int, gradient: Tensor | None) -> bool:
        holder = self._holders[index]
        if isinstance(holder, ComputeParameter):
            return holder.shows_what_nobody_gave()
        return gradient is not None and not self._is_view(index, gradient) and not self._is_given(index, gradient)

    def unsynchronized(self, among: Sequence[int], since: int) -> list[int]:
        """Foreign gradients, but for zeros and for edits of one that was delivered since round `since`."""
        return [index for index in self.foreign(among) if not self._may_pass(index, since)]

    def _may_pass(self, index: int, since: int) -> bool:
        holder = self._holders[index]
        by_hand = holder.compute.grad if isinstance(holder, ComputeParameter) else None  # while it computes
        if by_hand is not None:
            return not _torch.local(by_hand).count_nonzero()
        gradient = holder.registered.grad if isinstance(holder, ComputeParameter) else holder.grad
        if gradient is None or not _torch.local(gradient).count_nonzero():
            return True
        return self._delivered_since(index, since)

    def accept_edits(self, among: Sequence[int], since: int) -> None:
        """An optimizer may step on what users made of gradients delivered since that round: they count as ours."""
        for index in self.foreign(among):
            holder = self._holders[index]
            if isinstance(holder, ComputeParameter) or (gradient := holder.grad) is None:
                continue
            if self._delivered_since(index, since) and gradient.count_nonzero():
                self._given[index] = weakref.ref(gradient)

    def _delivered_since(self, index: int, number: int) -> bool:
        if self._single.get(index, -1) >= number:
            return True
        bucket, at = self._places.get(index, (None, 0))
        if bucket is None or bucket not in self._latest:
            return False
        latest, used = self._latest[bucket]
        return latest >= number and used[at]

    def inherit(self, before: Gradients, index_of: Mapping[int, int], managed: Sequence[Managed]) -> None:
        """Other buckets, or other parameters: what was delivered to those that stay still is."""
        for index, one in enumerate(managed):
            earlier = index_of.get(id(one.parameter))
            if earlier is None or isinstance(one.holder, ComputeParameter) or (gradient := one.holder.grad) is None:
                continue
            if before._is_view(earlier, gradient) or before._is_given(earlier, gradient):
                self._given[index] = weakref.ref(gradient)

    def _is_view(self, index: int, gradient: Tensor) -> bool:
        bucket, at = self._places.get(index, (None, 0))
        return bucket is not None and bucket.views[at] is gradient

    def _same_memory(self, index: int, gradient: Tensor) -> Tensor | None:
        """The view of the bucket, if this is another tensor over the same memory: `p.grad = p.grad.detach()`."""
        bucket, at = self._places.get(index, (None, 0))
        if bucket is None or gradient.requires_grad or not gradient.numel():
            return None
        view = bucket.views[at]
        same = gradient.data_ptr() == view.data_ptr() and gradient.stride() == view.stride()
        return view if same and gradient.shape == view.shape else None

    def _is_given(self, index: int, gradient: Tensor) -> bool:
        given = self._given.get(index)
        return given is not None and given() is gradient
