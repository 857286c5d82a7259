"""Which parameter's gradient has NaN or Inf, and which rank it came from; looked for on request.

The sum of a gradient with NaN or Inf has one, so the reduced gradients, which are the same on all ranks, tell whether
to ask: only then do the ranks tell each other what they had brought.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradsync import _torch, log
from gradsync.errors import NonFiniteGradientError
from gradsync.transport.base import Transport

_SHOWN = 5
_log = log.logger()


class _Checked:
    """Some gradients, by name: whether each is finite. That is read at the end only: on a GPU, reading waits."""

    def __init__(self) -> None:
        self._is_finite: dict[str, Tensor] = {}

    def add(self, name: str, gradient: Tensor) -> None:
        values = _torch.local(gradient.detach())
        if values.layout is not torch.strided:
            values = values.coalesce().values()
        found, before = torch.isfinite(values).all(), self._is_finite.get(name)
        self._is_finite[name] = found if before is None else found & before

    def failed(self) -> list[str]:
        return [name for name, is_finite in self._is_finite.items() if not is_finite]


class NonFiniteCheck:
    """Of one round."""

    def __init__(self) -> None:
        self.brought = _Checked()
        """By this rank."""
        self.reduced = _Checked()

    def find(self, number: int, transport: Transport, alike: bool) -> NonFiniteGradientError | None:
        """All ranks together. `alike`: all have the same reduced gradients; with a communication hook, or where each
        has its share of them, they may differ.
        """
        reduced = self.reduced.failed()
        if not alike:
            of_all = [text.split("\n") for text in transport.gather_text("\n".join(reduced))]
            reduced = list(dict.fromkeys(name for names in of_all for name in names if name))
        if not reduced:
            return None
        brought = [text.split("\n") for text in transport.gather_text("\n".join(self.brought.failed()))]
        sources = {name: [rank for rank, names in enumerate(brought) if name in names] for name in reduced}
        ranks = sorted({rank for rank, names in enumerate(brought) if any(names)})
        shown = "; ".join(f"'{name}', {_from(sources[name])}" for name in reduced[:_SHOWN])
        more = f"; and {len(reduced) - _SHOWN} more" if len(reduced) > _SHOWN else ""
        return NonFiniteGradientError(
            f"rank {transport.rank}: NaN or Inf in gradients of round {number}, in the order in which they arrived: "
            f"{shown}{more}. The first one is nearest to where it began. Look at those ranks' batches and losses; "
            "torch.autograd.detect_anomaly() names the operation. The gradients were delivered: call zero_grad() and "
            "leave the step out, on all ranks, to go on.",
            ranks,
            reduced,
        )


def warn(error: NonFiniteGradientError, rank: int) -> None:
    """In the log of rank 0, and of those from which they came."""
    if rank == 0 or rank in error.ranks:
        _log.warning("%s", error)


def _from(ranks: Sequence[int]) -> str:
    if not ranks:
        return "which no rank had: the sum is too large for its dtype"
    return f"from rank {', '.join(map(str, ranks))}"
