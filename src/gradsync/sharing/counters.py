"""What the state of an elementwise optimizer has once a parameter, and what it has for each element."""

from __future__ import annotations

from typing import Any

from torch import Tensor

_COUNTERS = frozenset({"step", "mu_product", "eta", "mu"})


def is_like(key: str, value: object) -> bool:
    """Whether this part of a state has an element for each of the parameter's, not one for all of them."""
    return isinstance(value, Tensor) and key not in _COUNTERS


def copied(value: Any) -> Any:
    """A counter must not belong to two parameters: the optimizer counts it up in place."""
    return value.clone() if isinstance(value, Tensor) else value


def counters(state: dict[str, Any]) -> tuple[object, ...]:
    """What has to be equal for two parameters to be in one run."""
    found = ((key, value) for key, value in sorted(state.items()) if not is_like(key, value))
    names = tuple(sorted(key for key, value in state.items() if is_like(key, value)))
    return names, *((key, value.item() if isinstance(value, Tensor) else value) for key, value in found)
