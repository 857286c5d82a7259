"""Notices when parameters, buffers or submodules of a module are replaced, added or removed.

Looking into the tables of a thousand submodules takes a millisecond, too long for every round. So they are looked
into when there is a reason to: something was registered in any module of the process since (torch tells), the caller
has a doubt, or it has not been done for long, as code may also write into the tables directly.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from operator import methodcaller
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_modules

LOOK_ANYWAY = 64  # at least every so many times
_values_of = methodcaller("values")  # of a dict, or of what a ScriptModule has in its place

_registrations = 0
_watching = False


class ModuleSnapshot:
    """What all submodules have in some of their tables: `_parameters`, `_buffers` or `_modules`."""

    def __init__(self, modules: Iterable[nn.Module], name: str) -> None:
        _watch()
        self._tables: list[dict[str, Any]] = [getattr(sub, name) for module in modules for sub in module.modules()]
        self._held = list(self._values())  # so that nothing new can have the identity of something that was here
        self._identities = list(map(id, self._held))
        self._lengths = list(map(len, self._tables))
        self._filled = [(table, list(map(id, table.values()))) for table in self._tables if table]
        self._seen = _registrations
        self._skipped = 0

    def look_for_changes(self, doubt: bool = False) -> bool:
        """Whether anything else is registered than at first; looks if there is a reason to."""
        self._skipped += 1
        if not doubt and self._seen == _registrations and self._skipped < LOOK_ANYWAY:
            return False
        self._seen, self._skipped = _registrations, 0
        return list(map(id, self._values())) != self._identities or list(map(len, self._tables)) != self._lengths

    def replaced(self) -> bool:
        """Whether something is in the place of something else, looked for where there was something."""
        return any(list(map(id, table.values())) != identities for table, identities in self._filled)

    def _values(self) -> Iterable[Any]:
        return chain.from_iterable(map(_values_of, self._tables))


def _watch() -> None:
    global _watching
    if not _watching:
        _watching = True
        torch_modules.register_module_parameter_registration_hook(_registered)
        torch_modules.register_module_module_registration_hook(_registered)
        torch_modules.register_module_buffer_registration_hook(_registered)


def _registered(*_: object) -> None:
    """Without names for what it is told: dynamo, should it come by, would look into a module that is in the making."""
    global _registrations
    _registrations += 1
