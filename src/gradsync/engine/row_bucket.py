"""A bucket of one large table, of whose gradient only the rows travel that are not zero.

An embedding's gradient has one for each word of the batch. They are found by looking, not by knowing where gradients
come from: whatever was added to the gradient on the way, and by whom, what is zero needs not travel. Everything that
is different for such a bucket is here: what is sent, and that the sum may be in the gradient itself instead of in the
bucket.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradsync import _torch
from gradsync.engine.bucket import Bucket
from gradsync.engine.plan import Spec
from gradsync.engine.reduce_config import Scaling
from gradsync.transport.base import RowWork, Transport, Work
from gradsync.transport.label import Label

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


class RowBucket(Bucket):
    """The bucket of a table."""

    def send(
        self,
        gradients: list[Tensor | None],
        used: Sequence[bool],
        scaling: Scaling,
        transport: Transport,
        label: Label,
        all_of_it: bool,
    ) -> RowWork:
        """The gradient itself may become the result."""
        assert transport.reduce_rows is not None
        gradient, factor = gradients[0], scaling.factor
        rows: Tensor | None = None
        if gradient is None or not factor:
            gradient = torch.zeros_like(self.views[0])
            rows = None if all_of_it else NO_ROWS
        elif not used[0]:  # nobody may have used it, and then it stays as it is
            gradient = gradient / scaling.multiplicity  # as in `Bucket.split_unused`
        elif not all_of_it and gradient.dtype == self.plan.dtype:
            rows = touched_rows(gradient, transport.size)
            if rows is not None and not _torch.is_alone(gradient):
                gradient = gradient.clone()  # autograd may still need the memory, or it is the bucket's
        if rows is None:
            dense = gradient if gradient.layout is torch.strided else gradient.to_dense()
            gradient = dense.to(self.plan.dtype).contiguous()
        return transport.reduce_rows(self.buffer, gradient, rows, factor, label)

    def send_nothing(self, scaling: Scaling, transport: Transport, label: Label) -> Work:
        self.tail.zero_()
        return self.send([None], [False], scaling, transport, label, all_of_it=False)

    def result(self, work: Work) -> Tensor | None:
        """The gradient that was given, if it was summed where it is, row by row."""
        found: Tensor | None = getattr(work, "result", None)
        return found
