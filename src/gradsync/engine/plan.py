"""Which gradient goes into which bucket, where in it, and in which order the buckets leave.

Pure functions from parameter descriptions to a frozen plan that checks itself; no communication.

    bucket 0  | head.weight | head.bias | norm.weight || usage usage usage | weight |
    bucket 1  | layer2.weight           | layer2.bias || usage usage       | weight |
    ...
    last      | embed.weight                          || usage             | weight | late |

Left of `||` lie the gradients, in the order in which they arrive during backward; right of it the
tail, which is reduced along with them and tells every rank who used what (see `bucket.py`).
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

import torch


class Spec(NamedTuple):
    """What the plan has to know of one managed parameter."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    sparse: bool = False  # its gradient is sparse: it travels by itself, not in a bucket

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def is_plain(self) -> bool:
        """At least one dimension, at least one element, and these lie in the order of the indices."""
        expected, plain = 1, bool(self.shape and self.numel)
        for size, step in zip(reversed(self.shape), reversed(self.stride), strict=True):
            plain &= size == 1 or step == expected
            expected *= size
        return plain


@dataclass(frozen=True, slots=True)
class Place:
    """Where one parameter's gradient lies in its bucket, in elements."""

    index: int
    offset: int
    numel: int


@dataclass(frozen=True)
class BucketPlan:
    """One bucket: its places, one after the other without gaps."""

    dtype: torch.dtype
    device: torch.device
    places: tuple[Place, ...]
    by_rows: bool = False  # one gradient alone, of which single rows may travel
    numel: int = field(init=False)

    def __post_init__(self) -> None:
        end = 0
        for place in self.places:
            if place.offset != end:
                raise ValueError(f"gap or overlap in a bucket at element {end}: {place}")
            end += place.numel
        object.__setattr__(self, "numel", end)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Plan:
    """All buckets, in the order in which they are launched, the same on every rank."""

    buckets: tuple[BucketPlan, ...]
    sparse: tuple[int, ...]  # parameters that travel by themselves
    parameters: int

    def __post_init__(self) -> None:
        planned = [place.index for bucket in self.buckets for place in bucket.places] + list(self.sparse)
        if sorted(planned) != list(range(self.parameters)):
            raise ValueError(f"a plan must place each of {self.parameters} parameters once, not {planned}")


def make_plan(specs: Sequence[Spec], order: Sequence[int], caps: Sequence[int], by_rows: Container[int] = ()) -> Plan:
    """Fills buckets in the given order of arrival; a bucket is closed once it holds its cap.

    Parameters missing from `order` never arrived; they come last, in reverse order of
    registration, which is roughly the order of backward. `caps` are the capacities in bytes of the
    first, second, ... bucket, the last one counting for all that follow. Those in `by_rows` have a
    bucket each.
    """
    order = _complete(order, len(specs))
    filling: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    filled: dict[tuple[torch.dtype, torch.device], int] = {}  # bytes
    closed: list[list[int]] = []
    for index in order:
        spec = specs[index]
        if spec.sparse:
            continue
        if index in by_rows:
            closed.append([index])
            continue
        kind = spec.dtype, spec.device
        filling.setdefault(kind, []).append(index)
        filled[kind] = filled.get(kind, 0) + spec.nbytes
        if filled[kind] >= caps[min(len(closed), len(caps) - 1)]:
            closed.append(filling.pop(kind))
            del filled[kind]
    closed.extend(filling.values())

    if not closed:  # the last bucket carries what concerns the whole round, so there is always one
        return Plan((BucketPlan(torch.float32, _device(specs), ()),), _sparse(specs), len(specs))
    # A bucket can leave when its last gradient has arrived, so that decides the order.
    arrival = {index: rank_in_order for rank_in_order, index in enumerate(order)}
    closed.sort(key=lambda bucket: arrival[bucket[-1]])
    return Plan(
        buckets=tuple(_place(bucket, specs, bucket[0] in by_rows) for bucket in closed),
        sparse=_sparse(specs),
        parameters=len(specs),
    )


def _sparse(specs: Sequence[Spec]) -> tuple[int, ...]:
    return tuple(index for index, spec in enumerate(specs) if spec.sparse)


def _device(specs: Sequence[Spec]) -> torch.device:
    return specs[0].device if specs else torch.device("cpu")


def delay(order: Sequence[int], specs: Sequence[Spec], delayed: Sequence[str], until: str | None) -> list[int]:
    """The order with the delayed parameters taken out of their places and put behind `until`."""
    late = [index for index, spec in enumerate(specs) if spec.name in delayed]
    kept = [index for index in _complete(order, len(specs)) if index not in late] if late else list(order)
    anchor = next((at for at, index in enumerate(kept) if specs[index].name == until), len(kept) - 1)
    return [*kept[: anchor + 1], *late, *kept[anchor + 1 :]]


def _complete(order: Sequence[int], count: int) -> list[int]:
    seen = set(order)
    return [*order, *(index for index in reversed(range(count)) if index not in seen)]


def _place(bucket: Sequence[int], specs: Sequence[Spec], by_rows: bool) -> BucketPlan:
    places, offset = [], 0
    for index in bucket:
        places.append(Place(index, offset, specs[index].numel))
        offset += specs[index].numel
    first = specs[bucket[0]]
    return BucketPlan(first.dtype, first.device, tuple(places), by_rows)


def gradient_stride(parameter: torch.Tensor) -> tuple[int, ...]:
    """The layout of a parameter's gradient: the parameter's own where that is dense, else contiguous.

    Autograd follows the same rule, so copying a gradient into its bucket moves memory in a line,
    and optimizers find gradient and parameter laid out alike (channels_last, for example).
    """
    if _is_dense(parameter.shape, parameter.stride()):
        return parameter.stride()
    return tuple(torch.empty(parameter.shape, device="meta").stride())


def _is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the elements fill a block of memory without gap and without overlap."""
    expected = 1
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size != 1):
        if step != expected:
            return False
        expected *= size
    return True
