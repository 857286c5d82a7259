"""What of a module is ignored, also after it was changed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TypeVar

from torch import Tensor, nn

T = TypeVar("T", bound=Tensor)


class LeftOut:
    """Parameters and buffers that are ignored: by name, as the same object under another name, and inside submodules of
    which everything was ignored from the start, which may be pruned or parametrized like any other.
    """

    def __init__(self, modules: Sequence[nn.Module], names: Collection[str]) -> None:
        self._names = names
        self._ones: list[Tensor] = []
        self._submodules: list[nn.Module] = []
        for number, module in enumerate(modules if names else ()):
            prefix = f"{number}." if len(modules) > 1 else ""
            self._ones += [p for name, p in module.named_parameters() if prefix + name in names]
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
