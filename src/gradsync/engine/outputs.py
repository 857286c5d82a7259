"""Finds the tensors in whatever a forward returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from torch import Tensor

from gradsync import _torch


def tensors_in(value: object) -> Iterator[Tensor]:
    """Tensors in nested lists, tuples, sets, mappings, dataclasses and local remote references."""
    value = _torch.local_value(value)
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None))
