"""Operations that only accelerators have, and what does the same on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def convolution(*args: Any) -> Tensor:
    result: Tensor = aten.convolution.default(*args)
    return result


def convolution_backward(gradient: Tensor, x: Tensor, weight: Tensor, *args: Any) -> tuple[Tensor | None, ...]:
    *settings, mask = args
    found: tuple[Tensor | None, ...] = aten.convolution_backward.default(gradient, x, weight, None, *settings, mask)
    return found


def lstm_cell(
    from_input: Tensor, from_hidden: Tensor, cell: Tensor, input_bias: Tensor | None, hidden_bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    biases = [bias for bias in (input_bias, hidden_bias) if bias is not None]
    enter, forget, candidate, leave = sum(biases, from_input + from_hidden).chunk(4, 1)
    gates = [enter.sigmoid(), forget.sigmoid(), candidate.tanh(), leave.sigmoid()]
    now = gates[1] * cell + gates[0] * gates[2]
    return gates[3] * now.tanh(), now, torch.cat(gates, 1)


def lstm_cell_backward(
    of_hidden: Tensor | None, of_cell: Tensor | None, cell: Tensor, now: Tensor, gates: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    enter, forget, candidate, leave = gates.chunk(4, 1)
    of_hidden = torch.zeros_like(now) if of_hidden is None else of_hidden
    squashed = now.tanh()
    inner = of_hidden * leave * (1 - squashed**2) + (0 if of_cell is None else of_cell)
    before = [
        inner * candidate * enter * (1 - enter),
        inner * cell * forget * (1 - forget),
        inner * enter * (1 - candidate**2),
        of_hidden * squashed * leave * (1 - leave),
    ]
    of_gates = torch.cat(before, 1)
    return of_gates, inner * forget, of_gates.sum(0) if has_bias else None


FUNCTIONS: dict[Any, Callable[..., Any]] = {
    aten.convolution_overrideable.default: convolution,
    aten.convolution_backward_overrideable.default: convolution_backward,
    aten._thnn_fused_lstm_cell.default: lstm_cell,
    aten._thnn_fused_lstm_cell_backward_impl.default: lstm_cell_backward,
}


def in_low_precision(op: Any, *args: Any) -> Any:
    """As autocast does on devices that it knows."""
    key = torch._C._parse_dispatch_key("AutocastPrivateUse1")
    assert key is not None
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
        dtype = torch.get_autocast_dtype(torch._C._get_privateuse1_backend_name())
        return op(*(x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in args))
