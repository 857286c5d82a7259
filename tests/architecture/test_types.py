"""What type checkers know of a replica: the methods that it has got, and that it is one of its own class."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import gradsync

ROOT = Path(__file__).parents[2]
SOURCE = Path(gradsync.__file__).parents[1]

PROGRAM = """
from __future__ import annotations

import torch
from torch import Tensor, nn

import gradsync


class Own(nn.Module):
    def encode(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x * scale


def wants_own(model: Own) -> None: ...
def wants_any(model: nn.Module) -> None: ...


model = gradsync.replicate(Own(), bucket_cap_mb=1)
reveal_type(model)  # Replicated[program.Own]
with model.no_sync():
    reveal_type(model(torch.ones(2)))  # Any
reveal_type(model.set_round_weight)  # def (weight: float)
model.set_round_weight(2)
model.set_round_weight("two")  # error: Argument 1 to "set_round_weight"
model.encode(torch.ones(2), scale=2.0)
wants_own(model)
wants_any(model)
reveal_type(gradsync.unreplicate(model))  # program.Own
reveal_type(gradsync.replicate([nn.Linear(2, 2)], process_group=None))  # list[gradsync.replicate.Replicated[
gradsync.replicate(3)  # error: No overload variant
gradsync.replicate(Own(), mesh=3)  # error: No overload variant

inside = Own()
gradsync.replicate(inside)
assert isinstance(inside, gradsync.ReplicateModule)
reveal_type(inside)  # <subclass of "program.Own" and "gradsync.replicate.ReplicateModule">
reveal_type(inside.encode)  # def (x: torch._tensor.Tensor, scale: float =) -> torch._tensor.Tensor
with inside.no_sync():
    wants_own(inside)

wrapper = gradsync.DistributedDataParallel(Own())
with wrapper.no_sync():
    wants_any(wrapper)
"""


def test_a_replica_to_mypy(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    # From the root, with its settings and cache: to look at torch's types anew takes half a minute.
    command = [sys.executable, "-m", "mypy", "--no-error-summary", str(program)]
    environment = {**os.environ, "MYPYPATH": str(SOURCE)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    assert not done.stderr, done.stderr
    told: dict[int, str] = {}
    for line in done.stdout.splitlines():
        if match := re.match(r"\S*program\.py:(\d+): (.*)", line):
            told[int(match[1])] = told.get(int(match[1]), "") + match[2]
    for number, line in enumerate(PROGRAM.splitlines(), start=1):
        code, _, wanted = line.partition("  # ")
        said = told.pop(number, "")
        assert wanted in said if wanted else not said, f"{code}\n  mypy says: {said}"
    assert not told
