"""What torch's DistributedDataParallel, with its defaults, allows to be done with `.grad` works with both fronts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from tests.ranks.small import TRANSPORTS, make
from tests.ranks.uses import USES, check_use
from tests.support.ranks import Ranks

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "wrapper": ("DistributedDataParallel", {}),
    "wrapper, copies": ("DistributedDataParallel", {"gradient_as_bucket_view": False}),
    "wrapper, views": ("DistributedDataParallel", {"gradient_as_bucket_view": True}),
    "replicate": ("replicate", {}),
}


def used(names: Sequence[str], variant: str, transport: str, cap: float) -> None:
    front, options = VARIANTS[variant]
    for name in names:
        check_use(name, partial(make, front, transport=transport, bucket_cap_mb=cap, **options))


@TRANSPORTS
@pytest.mark.parametrize("variant", VARIANTS)
def test_uses_of_gradients(ranks: Ranks, variant: str, transport: str) -> None:
    ranks(used, 2, list(USES), variant, transport, 1, limit=60)


@pytest.mark.parametrize("variant", VARIANTS)
def test_uses_of_gradients_in_many_buckets(ranks: Ranks, variant: str) -> None:
    ranks(used, 2, list(USES), variant, "shared_memory", 0.0001, limit=60)
