"""`python -m benchmarks records`: a tiny run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path


def test_a_run() -> None:
    words = [sys.executable, "-m", "benchmarks", "records", "--repetitions", "2"]
    done = subprocess.run(words, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True)
    for transport in ("shared_memory", "process_group"):
        told = rf"{transport}, 2 ranks, 2 pairs: with / without: time \d\.\d+ ± \d.*a round of 9 buckets: -?\d+ µs"
        assert re.search(told, done.stdout), done.stdout
