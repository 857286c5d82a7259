"""Under which names replicated modules' parameters and buffers are known, and which of them are ignored.

The names are the modules' own. Of several modules that are replicated together, a name begins with the module's number:
`0.weight`, `1.weight`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TypeVar

from torch import Tensor, nn


def named_parameters(modules: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """One that several modules share comes once for each."""
    for prefix, module in _prefixed(modules):
        for name, parameter in module.named_parameters():
            yield prefix + name, parameter


def named_buffers(modules: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    for prefix, module in _prefixed(modules):
        for name, buffer in module.named_buffers():
            yield prefix + name, buffer


def _prefixed(modules: Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    return [(f"{number}." if len(modules) > 1 else "", module) for number, module in enumerate(modules)]


T = TypeVar("T", bound=Tensor)


class IgnoredTensors:
    """Parameters and buffers that are ignored: by name, as the same object under another name, and inside submodules of
    which everything was ignored from the start, which may be pruned or parametrized like any other.
    """

    def __init__(self, modules: Sequence[nn.Module], names: Collection[str]) -> None:
        self._names = names
        self._ones: list[Tensor] = []
        self._submodules: list[nn.Module] = []
        if names:
            self._ones += [parameter for name, parameter in named_parameters(modules) if name in names]
        ones = set(map(id, self._ones))
        for module in modules if names else ():
            for submodule in module.modules():
                inside = set(map(id, submodule.parameters()))
                if inside and inside <= ones:
                    self._submodules.append(submodule)

    def without(self, named: Iterable[tuple[str, T]]) -> list[tuple[str, T]]:
        """Those that are not ignored."""
        out = set(map(id, self._ones))
        for submodule in self._submodules:
            out.update(map(id, submodule.parameters()))
            out.update(map(id, submodule.buffers()))
        return [(name, one) for name, one in named if name not in self._names and id(one) not in out]
