"""Settings of one replicated module: frozen, and validated here once. Engine code never re-checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from gradsync.errors import InvalidOptionError

MIB = 1024 * 1024

Reduce = Literal["mean", "sum"]
Buffers = Literal["round", "never"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a user may choose. The defaults are right for every model; options only trade speed."""

    bucket_cap_mb: float | None = None
    """Size of a bucket in MiB. None: 1 for the first, so that it leaves early, then 25."""
    gradient_as_bucket_view: bool = True
    """`.grad` is a view of its bucket: one copy less, and memory for one set of gradients less."""
    reduce: Reduce = "mean"
    """What a gradient becomes: the mean over the ranks, or the sum."""
    buffers: Buffers = "round"
    """When module buffers are taken over from rank 0: at the end of each round, or never."""
    init_sync: bool = True
    """Whether rank 0's parameters and buffers are broadcast at construction."""

    def __post_init__(self) -> None:
        if self.bucket_cap_mb is not None and not self.bucket_cap_mb > 0:
            raise InvalidOptionError(f"bucket_cap_mb must be greater than 0, but is {self.bucket_cap_mb}")
        _one_of("reduce", self.reduce, get_args(Reduce))
        _one_of("buffers", self.buffers, get_args(Buffers))

    @property
    def bucket_caps(self) -> tuple[int, ...]:
        """Capacities in bytes: of the first bucket, the second, ...; the last one of all others."""
        if self.bucket_cap_mb is None:
            return (MIB, 25 * MIB)
        return (int(self.bucket_cap_mb * MIB),)


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InvalidOptionError(f"{name} must be one of {', '.join(map(repr, allowed))}, but is {value!r}")
