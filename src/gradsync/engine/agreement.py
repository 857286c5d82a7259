"""After the first round: all ranks take rank 0's word for the order of arrival, and so come to the same plan."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradsync.engine.plan import Plan, Spec, delay, make_plan
from gradsync.engine.touched_rows import may_travel, touched_rows
from gradsync.options import Options
from gradsync.transport.base import Transport


def agree_on_plan(
    specs: Sequence[Spec],
    order: Sequence[int],
    gradients: Sequence[Tensor | None],
    transport: Transport,
    options: Options,
    by_rows: bool,
) -> Plan:
    """The plan by rank 0's `order`, and, if rows may travel, by what it has few rows of; a collective."""
    may = by_rows and transport.reduce_rows is not None
    few = [index for index in order if may and _has_few_rows(specs[index], gradients[index], transport.size)]
    order, few = _of_first_rank([order, few], len(specs), transport, specs[0].device)
    order = delay(order, specs, options.delayed, options.delayed_until)
    return make_plan(specs, order, options.bucket_caps(transport.usual_caps), few)


def _has_few_rows(spec: Spec, gradient: Tensor | None, ranks: int) -> bool:
    """Whether it would have paid in this round to send single rows. One that is all zeros says nothing."""
    if gradient is None or not may_travel(spec):
        return False
    rows = touched_rows(gradient, ranks)
    return rows is not None and len(rows) > 0


def _of_first_rank(
    lists: Sequence[Sequence[int]], longest: int, transport: Transport, device: torch.device
) -> list[list[int]]:
    """Rank 0's lists of numbers, in one message."""
    rows = [[len(one), *one] + [0] * (longest - len(one)) for one in lists]
    message = torch.tensor(rows, device=device)
    transport.broadcast([message], source=0)
    return [row[1 : 1 + row[0]] for row in message.tolist()]
