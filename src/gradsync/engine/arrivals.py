"""Which gradients arrived, how often and in which order; and which are dirty.

An arrival is autograd having accumulated into a managed parameter's `.grad`. Hooks are armed from
construction on and never ask how backward was reached: through `forward`, another method, a
submodule or a loss on the parameters themselves.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

from torch import Tensor
from torch.utils.hooks import RemovableHandle


class Arrivals:
    """Counts arrivals for the running round, and remembers what was never synchronised.

    `counts` and `order` belong to one round; `dirty` lives on until a round has carried the
    gradient, through any number of backwards without synchronisation.
    """

    def __init__(self, parameters: Sequence[Tensor], before: Callable[[int], None] | None = None) -> None:
        self.counts = [0] * len(parameters)
        self.order: list[int] = []
        self.dirty: set[int] = set()
        self.listener: Callable[[int], None] | None = None
        """Told of each arrival; None while synchronisation is off."""
        # Hooks hold this object weakly: a parameter may outlive its engine, and then they are removed.
        me = weakref.ref(self)
        handles: list[RemovableHandle]
        handles = [p.register_post_accumulate_grad_hook(_hook(me, i)) for i, p in enumerate(parameters)]
        if before is not None:  # told of each arrival before autograd adds to `.grad`
            handles += [p.register_hook(_before_hook(before, i)) for i, p in enumerate(parameters)]
        self.disarm = weakref.finalize(self, _remove, handles)

    def arrived(self, index: int) -> None:
        self.dirty.add(index)
        if self.listener is not None:
            if self.counts[index] == 0:
                self.order.append(index)
            self.counts[index] += 1
            self.listener(index)

    def forget_round(self) -> None:
        """The round is over. What was dirty still is, until `synchronised`."""
        self.counts = [0] * len(self.counts)
        self.order = []

    def synchronised(self) -> None:
        """The round has carried every gradient."""
        self.dirty = set()


def _hook(arrivals: weakref.ref[Arrivals], index: int) -> Callable[[Tensor], None]:
    def arrived(_: Tensor) -> None:
        alive = arrivals()
        if alive is not None:
            alive.arrived(index)

    return arrived


def _before_hook(before: Callable[[int], None], index: int) -> Callable[[Tensor], None]:
    return lambda _: before(index)


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
