"""Which gradients arrived, how often and in which order; and which are dirty.

An arrival is autograd having accumulated into a managed parameter's `.grad`. Hooks are armed from
construction on and never ask how backward was reached: through `forward`, another method, a
submodule or a loss on the parameters themselves.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

from torch import Tensor


class Arrivals:
    """Counts arrivals for the running round, and remembers what was never synchronised.

    `counts` and `order` belong to one round; `dirty` lives on until a round has carried the
    gradient, through any number of backwards without synchronisation.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.counts = [0] * len(parameters)
        self.order: list[int] = []
        self.dirty: set[int] = set()
        self.listener: Callable[[int], None] | None = None
        """Told of each arrival; None while synchronisation is off."""
        # Hooks hold this object weakly: a parameter may outlive its engine, and then they are removed.
        me = weakref.ref(self)
        handles = [p.register_post_accumulate_grad_hook(_hook(me, i)) for i, p in enumerate(parameters)]
        self.disarm = weakref.finalize(self, lambda: [handle.remove() for handle in handles])

    def arrived(self, index: int) -> None:
        self.dirty.add(index)
        if self.listener is not None:
            if self.counts[index] == 0:
                self.order.append(index)
            self.counts[index] += 1
            self.listener(index)

    def clear(self) -> None:
        """Forgets the round: everything is synchronised now."""
        self.counts = [0] * len(self.counts)
        self.order = []
        self.dirty = set()


def _hook(arrivals: weakref.ref[Arrivals], index: int) -> Callable[[Tensor], None]:
    def arrived(_: Tensor) -> None:
        alive = arrivals()
        if alive is not None:
            alive.arrived(index)

    return arrived
