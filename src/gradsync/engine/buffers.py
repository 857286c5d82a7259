"""Module buffers kept in step: every rank takes over rank 0's at the end of a round.

Not in forward: there a rank that evaluates alone would wait for the others for ever, and several
forwards before one backward would pay several times. After a round all ranks hold the same buffers,
so evaluation, saving and the next forward find them in step.
"""

from __future__ import annotations

from torch import Tensor, nn

from gradsync.transport.base import Transport


class Buffers:
    """The buffers of one replicated module, looked up anew each time: modules replace them freely."""

    def __init__(
        self, module: nn.Module, transport: Transport, ignored: frozenset[str] = frozenset()
    ) -> None:
        self._module = module
        self._transport = transport
        self._ignored = ignored

    def named(self) -> list[tuple[str, Tensor]]:
        return [(name, buffer) for name, buffer in self._module.named_buffers() if name not in self._ignored]

    def take_over(self, source: int = 0) -> None:
        """Overwrites this rank's buffers with those of rank `source`."""
        self._transport.broadcast([buffer for _, buffer in self.named()], source)
