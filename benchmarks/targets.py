"""What a figure should be, beside what it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Target:
    """`value` is None where nothing was measured from which it follows: then it is neither met nor missed."""

    name: str
    value: float | None
    limit: float
    at_least: bool = False  # else at most
    unit: str = ""

    @property
    def met(self) -> bool | None:
        if self.value is None:
            return None
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    @property
    def figure(self) -> str:
        return "" if self.value is None else f"{_number(self.value)}{self.unit}"

    @property
    def limit_text(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {_number(self.limit)}{self.unit}"

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "value": self.value, "limit": self.limit, "at_least": self.at_least, "met": self.met}


def _number(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.0f}"
