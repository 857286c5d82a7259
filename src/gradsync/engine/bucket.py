"""A flat buffer in which gradients travel, a view of it for each parameter, and the tail.

The tail is a few elements behind the gradients that are reduced along with them. What a rank
writes there, summed over the ranks, answers for free what would otherwise need another collective:

    usage[i]  1 if this rank has a gradient for the bucket's i-th parameter (it is dirty)
    weight    1; every rank's buffer is scaled by its weight on the way, so the sum is the total weight
    flags     only in the last bucket, see `Round.launch_rest`: what concerns the whole round

All elements of it are scaled along with the data. "Used by somebody" is therefore "greater than zero".
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import attrgetter, is_, le

import torch
from torch import Tensor

from gradsync import _torch
from gradsync.engine.managed_parameters import HasGrad
from gradsync.engine.plan import BucketPlan, Spec
from gradsync.engine.reduce_config import Scaling
from gradsync.transport.base import Transport, Work
from gradsync.transport.label import Label

# References to something in a list while `map` looks at it: two, the list's and the call's.
_OURS = next(map(sys.getrefcount, [object()]))
_data_ptr = Tensor.data_ptr
_requires_grad = attrgetter("requires_grad")
# A gradient of so many bytes is brought into its bucket at once, so that it exists once, not twice.
LARGE = 256 * 1024


class Bucket:
    """The memory of one planned bucket. It knows nothing of rounds."""

    delivers = True
    """Whether gradients may lie in it between rounds."""

    def __init__(self, plan: BucketPlan, specs: Sequence[Spec], buffer: Tensor) -> None:
        self.plan = plan
        self.buffer = buffer
        self.data = self.buffer[: plan.numel]
        self.tail = self.buffer[plan.numel :]
        self._specs = specs
        # What `.grad` becomes must not tell that it lies in a bucket: code may save it, share it, change it in place.
        # Each view has a storage of its own, which a flat tensor over the same memory keeps.
        self._flats = [self._flat(at) for at in range(len(plan.places))]
        self._addresses = [flat.data_ptr() for flat in self._flats]
        self.views = [self._view(at) for at in range(len(plan.places))]
        self.indices = [place.index for place in plan.places]
        self.members = set(self.indices)
        self.all_used = [True] * len(self.indices)
        self.none_held: list[Tensor | None] = [None] * len(self.indices)
        self._runs = list(self._find_runs(specs))
        self._storages = self._list_storages()
        self._references = _torch.count_references(self._storages)

    def _list_storages(self) -> list[int]:
        return [_torch.storage_of(tensor) for tensor in (self.buffer, *self._flats)]

    def renew_views(self) -> None:
        """Before a round: replaces views that the user has pointed elsewhere or modified.

        By `grad.data = ...`, `grad.set_(...)`, `grad.share_memory_()` or `grad.requires_grad_()`, for example.
        """
        addresses = list(map(_data_ptr, self.views))
        if addresses == self._addresses and not any(map(_requires_grad, self.views)):
            return
        for at, view in enumerate(self.views):
            if addresses[at] == self._addresses[at] and not view.requires_grad:
                continue
            if self._flats[at].data_ptr() != self._addresses[at]:  # the whole storage has moved
                self._flats[at] = self._flat(at)
            elif addresses[at] == self._addresses[at]:
                view.data = view.detach().clone()
            self.views[at] = self._view(at)
        self._storages = self._list_storages()

    def let_go(self, gradients: Sequence[Tensor | None]) -> bool:
        """Before a round writes here: gives gradients that somebody has kept memory of their own.

        `gradients`: a list of what `.grad` is now, of all parameters. What still is one is written to: that is what
        adding to it means. Somebody may have another tensor over the same memory, which can't be found: then this is
        False.
        """
        counts = list(map(sys.getrefcount, self.views))
        if max(counts, default=0) > _OURS:
            for at, index in enumerate(self.indices):
                view = self.views[at]
                if counts[at] > _OURS and gradients[index] is not view:
                    view.data = view.detach().clone()
                    self.views[at] = self._view(at)
        references = _torch.count_references(self._storages)
        if all(map(le, references, self._references)):
            return True
        of_views = zip(references[1:], self._references[1:], self.views, self.indices, strict=True)
        return references[0] <= self._references[0] and all(
            found <= usual or gradients[index] is view for found, usual, view, index in of_views
        )

    def _flat(self, at: int) -> Tensor:
        place = self.plan.places[at]
        return _torch.of_its_own(self.data[place.offset : place.offset + place.numel])

    def _view(self, at: int) -> Tensor:
        flat, spec = self._flats[at], self._specs[self.plan.places[at].index]
        # `.data`: a version of its own, so that a graph which uses one gradient need not mind what becomes of others.
        return flat.as_strided(spec.shape, spec.stride, flat.storage_offset()).data

    def _find_runs(self, specs: Sequence[Spec]) -> Iterator[tuple[int, int, Tensor]]:
        """Stretches of places that one call can fill: contiguous ones of at least one dimension, none of them large."""
        alike = [specs[p.index].is_plain and specs[p.index].nbytes < LARGE for p in self.plan.places]
        for fits, run in groupby(range(len(alike)), key=alike.__getitem__):
            ats = list(run)
            first, last = self.plan.places[ats[0]], self.plan.places[ats[-1]]
            if fits and len(ats) > 1:
                stretch = self.data[first.offset : last.offset + last.numel]
                yield ats[0], ats[-1] + 1, stretch.view(1, -1)

    def bring(self, holders: Sequence[HasGrad]) -> None:
        """Before gradients are taken: what is not in `.grad` of these parameters comes there."""

    def fill(self, gradients: list[Tensor | None]) -> None:
        """Brings each gradient to its place, if it is not there already, and zeros where there is none."""
        done = 0
        for start, stop, stretch in self._runs:
            _fill_places(self.views[done:start], gradients[done:start])
            if not self._fill_run(start, stop, stretch, gradients[start:stop]):
                _fill_places(self.views[start:stop], gradients[start:stop])
            done = stop
        _fill_places(self.views[done:], gradients[done:])

    def _fill_run(self, start: int, stop: int, stretch: Tensor, gradients: list[Tensor | None]) -> bool:
        if any(map(is_, self.views[start:stop], gradients)):
            return False  # some are there already, for example when they were accumulated without synchronization
        if any(gradient is None or gradient.layout is not torch.strided for gradient in gradients):
            return False
        return _torch.cat_into(stretch, gradients)  # type: ignore[arg-type]

    def send(
        self,
        gradients: list[Tensor | None],
        used: Sequence[bool],
        scaling: Scaling,
        transport: Transport,
        label: Label,
        all_of_it: bool,
    ) -> Work:
        """Fills the bucket, whose tail is written, and starts the sum over the ranks.

        `all_of_it`: somebody looks at the whole bucket afterwards, which matters to other kinds of buckets.
        """
        self.fill(gradients)
        self.split_unused(gradients, used, scaling)
        return transport.reduce(self.buffer, scaling.factor, label)

    def send_nothing(self, scaling: Scaling, transport: Transport, label: Label) -> Work:
        """Takes part in the sum with zeros."""
        self.buffer.zero_()
        return transport.reduce(self.buffer, scaling.factor, label)

    def result(self, work: Work) -> Tensor | None:
        """After the work: where the sum is, if it is not in the bucket."""
        return None

    def is_free(self, transport: Transport) -> bool:
        """Whether it may be filled. Others have memory of their own, which is free between rounds."""
        return True

    def await_free(self, transport: Transport) -> None:
        """Until it is."""

    def reduced(self, work: Work) -> None:
        """The work is over. What the ranks have said is in the tail."""

    def share(self, work: Work, start: int, stop: int) -> Tensor:
        """After the work: these elements of the sum, which are this rank's share."""
        result = self.result(work)
        return (self.data if result is None else result.view(-1))[start:stop]

    def release(self, work: Work) -> None:
        """This rank has no use for the sum any more."""

    def split_unused(self, gradients: Sequence[Tensor | None], used: Sequence[bool], scaling: Scaling) -> None:
        """Divides what all ranks have in common by their number: N ranks bring it. See `TrainingStep`."""
        if scaling.multiplicity == 1:
            return
        every = zip(self.views, gradients, used, strict=True)
        common = [view for view, gradient, is_used in every if gradient is not None and not is_used]
        if common:
            torch._foreach_div_(common, scaling.multiplicity)

    def write_tail(self, used: Sequence[bool], flags: Sequence[bool] = ()) -> None:
        """Fills the tail with what this rank has to say."""
        if all(used):  # the usual case, without a list of ones
            self.tail.fill_(1)
            if flags:
                _say(self.tail[len(used) + 1 :], flags)
        else:
            _say(self.tail, [*used, True, *flags])

    def read_usage(self) -> list[bool]:
        """For each place, whether any rank had a gradient for it."""
        return [share != 0 for share in self.usage_shares()]

    def usage_shares(self) -> list[float]:
        """For each place, how much weight the ranks that had a gradient for it have together."""
        return self._read_tail(0, len(self.plan.places))

    @property
    def weight(self) -> Tensor:
        """The sum of all ranks' scales, where it is."""
        found = self.tail[len(self.plan.places)]
        return found.real if found.is_complex() else found

    def read_weight(self) -> float:
        """The same as a number; on a GPU this waits for the reduction."""
        return self.weight.item()

    def read_flags(self) -> list[bool]:
        """For each flag, whether any rank set it."""
        return [value != 0 for value in self._read_tail(len(self.plan.places) + 1, len(self.tail))]

    def _read_tail(self, start: int, end: int) -> list[float]:
        found = self.tail[start:end]
        return (found.real if found.is_complex() else found).tolist()


def _say(places: Tensor, flags: Sequence[bool]) -> None:
    """(An accelerator takes over what it is to copy: the host does not wait until it has come to that.)"""
    places.copy_(torch.tensor(flags, dtype=torch.float32, device="cpu"), non_blocking=True)


def _fill_places(views: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    pairs = [(view, gradient) for view, gradient in zip(views, gradients, strict=True) if gradient is not view]
    fill([view for view, gradient in pairs if gradient is not None], [g for _, g in pairs if g is not None])
    if empty := [view for view, gradient in pairs if gradient is None]:
        torch._foreach_zero_(empty)


def fill(views: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Copies gradients into their places: one multi-tensor call for all that are alike."""
    if not views:
        return
    dense = [gradient if gradient.layout is torch.strided else gradient.to_dense() for gradient in gradients]
    torch._foreach_copy_(list(views), dense)
