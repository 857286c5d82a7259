"""One thing that the doctor has to say."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum


class Level(str, Enum):
    FINE = "ok"
    UNTRIED = "untried"
    """Because of something else that is wrong."""
    WARNING = "warning"
    """Training works, but slower, or less safely, than it could."""
    WRONG = "wrong"
    """Training will not work."""


@dataclass(frozen=True)
class Finding:
    subject: str
    level: Level
    text: str
    cure: str = ""
    """What to do about it."""

    def __post_init__(self) -> None:
        if (self.level in (Level.WARNING, Level.WRONG)) is not bool(self.cure):
            raise ValueError(f"a problem, and nothing else, has a cure: {self}")

    def to_dict(self) -> dict[str, str]:
        return {**asdict(self), "level": self.level.value}


def fine(subject: str, text: str) -> Finding:
    return Finding(subject, Level.FINE, text)


def untried(subject: str, text: str) -> Finding:
    return Finding(subject, Level.UNTRIED, text)


def warning(subject: str, text: str, cure: str) -> Finding:
    return Finding(subject, Level.WARNING, text, cure)


def wrong(subject: str, text: str, cure: str) -> Finding:
    return Finding(subject, Level.WRONG, text, cure)
