"""Something that all ranks do, or none."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


class Refused(Exception):
    """It failed on at least one rank; says how on the first of them."""


def together(make: Callable[[], T]) -> T:
    """What `make` gives. A contender that can't be had on one rank must not leave the others waiting for it."""
    made: list[T] = []
    reason = ""
    try:
        made.append(make())
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
    reasons: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(reasons, reason)
    if any(reasons):
        raise Refused(next(filter(None, reasons)))
    return made[0]
