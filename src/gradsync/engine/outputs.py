"""Finds the tensors in whatever a forward returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor

from gradsync import _torch
from gradsync.errors import UnsuitableModuleError


def check_local(value: object) -> None:
    """Refuses outputs that went to another process: their backward would come back past our hooks, unnoticed."""
    for part in _parts(value):
        if _torch.is_remote(part):
            raise UnsuitableModuleError(
                "forward returned a remote reference (RRef) to a value in another process, and its backward would not "
                "be synchronized. Return the tensor, or RRef(tensor) made in this process, and send it on afterwards."
            )


def tensors_in(value: object) -> Iterator[Tensor]:
    """Tensors in nested lists, tuples, sets, mappings, dataclasses and references (RRef) to values of this process."""
    return (part for part in _parts(value) if isinstance(part, Tensor))


def _parts(value: object) -> Iterator[object]:
    """What a nested value consists of in the end."""
    value = _torch.local_value(value)
    items: Iterable[object]
    if isinstance(value, Mapping):
        items = value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        items = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    else:
        yield value
        return
    for item in items:
        yield from _parts(item)
