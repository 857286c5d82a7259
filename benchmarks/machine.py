"""What the figures were measured with."""

from __future__ import annotations

import platform
from dataclasses import dataclass, field
from pathlib import Path

import torch

from gradsync._version import __version__
from gradsync.cli.launch import cores


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Goes into every result file: a figure without it can't be compared with anything."""

    processor: str = field(default_factory=processor)
    cores: int = field(default_factory=cores)
    gradsync: str = __version__
    torch: str = torch.__version__
    python: str = platform.python_version()

    def __str__(self) -> str:
        return f"{self.processor}, {self.cores} cores; torch {self.torch}, Python {self.python}"
