"""`SyncBatchNorm` in a step by shards: each shard is normalized by itself, as ranks have other shards at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from torch import nn

from gradsync import _torch


@contextlib.contextmanager
def normalized_alone(layers: Sequence[nn.SyncBatchNorm]) -> Iterator[None]:
    """Inside, each of them sees one rank."""
    if not layers:
        yield
        return
    groups = [layer.process_group for layer in layers]
    for layer in layers:
        _torch.normalize_over(layer, _torch.group_of_one())
    try:
        yield
    finally:
        for layer, group in zip(layers, groups, strict=True):
            _torch.normalize_over(layer, group)
