"""The result of a run in figures: one frozen object, shown as rows and kept as JSON."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

import torch

from gradsync._version import __version__
from gradsync.cli.display import duration
from gradsync.cli.history import History, waiting_share


@dataclass(frozen=True, kw_only=True)
class Summary:
    ranks: int
    parameters: int
    steps: int
    tokens: int
    tokens_per_second: float
    first_loss: float
    last_loss: float  # mean of the last steps: a single one is noise
    validation_loss: float
    waiting_share: float
    seconds: float  # of the whole command, from start to summary
    identical: bool
    fingerprints: list[str]  # by rank
    sample: str
    gradsync: str = __version__
    torch: str = torch.__version__
    python: str = platform.python_version()

    def rows(self) -> list[tuple[str, str]]:
        return [
            ("ranks", f"{self.ranks}"),
            ("parameters", f"{self.parameters:,}"),
            ("steps", f"{self.steps:,}"),
            ("tokens", f"{self.tokens:,}"),
            ("tokens/s", f"{self.tokens_per_second:,.0f}"),
            ("training loss", f"{self.first_loss:.3f} → {self.last_loss:.3f}"),
            ("validation loss", f"{self.validation_loss:.3f}"),
            ("waiting", f"{self.waiting_share:.1%} of the time of a step"),
            ("time", duration(self.seconds)),
        ]

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")


def summarize(history: History, *, parameters: int, fingerprints: list[str], sample: str, seconds: float) -> Summary:
    return Summary(
        ranks=history.ranks,
        parameters=parameters,
        steps=len(history.steps),
        tokens=history.tokens,
        tokens_per_second=history.tokens_per_second(history.steps),
        first_loss=history.steps[0].loss,
        last_loss=fmean(s.loss for s in history.recent),
        validation_loss=history.validations[-1].loss,
        waiting_share=waiting_share(history.steps),
        seconds=seconds,
        identical=len(set(fingerprints)) == 1,
        fingerprints=fingerprints,
        sample=sample,
    )
