"""Which rows of a dense gradient are not zero: an embedding's gradient has one for each word of the batch.

Found by looking, not by knowing where gradients come from: whatever was added to the gradient on the way, and by
whom, what is zero needs not travel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradsync.engine.plan import Spec

# Smaller ones are summed as quickly as they are looked through.
_LEAST_BYTES, _LEAST_ROW_BYTES = 1024 * 1024, 64
NO_ROWS = torch.empty(0, dtype=torch.int64, device="cpu")
_SAMPLE = 256  # one row of so many tells whether it is worth to look at all


def may_travel(spec: Spec) -> bool:
    """Whether it can pay to send single rows of such a gradient."""
    return (
        spec.device.type == "cpu"
        and spec.dtype in (torch.float32, torch.float64)  # sums in lower precision have a wider type on the way
        and spec.is_plain
        and not spec.sparse
        and len(spec.shape) >= 2
        and spec.nbytes >= max(_LEAST_BYTES, _LEAST_ROW_BYTES * spec.shape[0])
    )


def touched_rows(gradient: Tensor, ranks: int) -> Tensor | None:
    """The numbers of the rows that are not zero; None if there are so many that the whole is summed sooner."""
    if gradient.layout is not torch.strided or gradient.requires_grad or not gradient.is_contiguous():
        return None
    most = len(gradient) // (4 * ranks)  # every rank adds the rows of all
    memory = gradient.view(len(gradient), -1).view(torch.uint8)
    if torch.count_nonzero(memory[::_SAMPLE].amax(1)) > 2 * most // _SAMPLE:
        return None
    found = memory.amax(1).nonzero().view(-1)
    return found if len(found) <= most else None
