"""How long `import gradsync` takes for a program that has imported torch."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator

# Bytecode in a folder of our own: an installed package has it, a working copy may be kept from writing it.
_CODE = """\
import json, sys
sys.path[:] = json.loads(sys.argv[1])
import time
import torch
sys.dont_write_bytecode, sys.pycache_prefix = False, sys.argv[2]
began = time.perf_counter()
import gradsync
print(time.perf_counter() - began)
"""


def import_seconds(repetitions: int) -> Iterator[float]:
    """Each in a process of its own: what is imported once stays so."""
    with tempfile.TemporaryDirectory() as folder:
        _import(folder)  # compiles
        for _ in range(repetitions):
            yield _import(folder)


def _import(folder: str) -> float:
    words = [sys.executable, "-c", _CODE, json.dumps(sys.path), folder]
    return float(subprocess.run(words, capture_output=True, check=True, text=True).stdout)
