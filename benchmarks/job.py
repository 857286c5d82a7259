"""What every rank is told, on its command line."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TypeVar

J = TypeVar("J", bound="Told")


@dataclass(frozen=True, kw_only=True)
class Told:
    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls: type[J], line: str) -> J:
        return cls(**json.loads(line))
