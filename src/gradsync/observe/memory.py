"""What a replica's buckets take, and what its process has taken at most."""

from __future__ import annotations

import resource
from dataclasses import dataclass

from gradsync.events import Layout


@dataclass(frozen=True)
class Memory:
    """In bytes, of this rank."""

    buckets: int
    """Of all buckets, with what travels beside gradients."""
    shared: int
    """What of that other ranks of the host see, and reduce in place."""
    gradients_in_buckets: bool
    """`.grad` lies in the buckets; else each gradient has memory of its own besides."""
    process_peak: int
    """The most that this process ever had in memory, whatever for; pages that ranks share count in each of them."""


def measure(layout: Layout) -> Memory:
    return Memory(
        buckets=sum(one.allocated for one in layout.buckets),
        shared=sum(one.allocated for one in layout.buckets if one.is_shared),
        gradients_in_buckets=layout.gradients_are_views,
        process_peak=1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    )
