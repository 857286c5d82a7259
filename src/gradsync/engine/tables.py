"""Notices when parameters, buffers or submodules of a module are replaced, added or removed.

Asked in every round, of modules with thousands of submodules: it compares identities in a few calls that loop in C.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

from torch import nn


class Tables:
    """What all submodules have in one of their tables: `_parameters`, `_buffers` or `_modules`."""

    def __init__(self, modules: Iterable[nn.Module], name: str) -> None:
        self._tables: list[dict[str, Any]] = [getattr(sub, name) for module in modules for sub in module.modules()]
        self._held = list(self._values())  # so that nothing new can have the identity of something that was here
        self._identities = list(map(id, self._held))
        self._lengths = list(map(len, self._tables))

    def changed(self) -> bool:
        return list(map(id, self._values())) != self._identities or list(map(len, self._tables)) != self._lengths

    def _values(self) -> Iterable[Any]:
        return chain.from_iterable(map(dict.values, self._tables))
