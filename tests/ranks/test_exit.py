"""A script that leaves the process group to gradsync ends without a word; gloo's threads do not abort it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch.distributed as dist
from torch import nn

import gradsync
from gradsync import groups
from tests.support.ranks import Ranks


def made_by_us(ours: bool) -> bool:
    """What is registered to run at exit ends the group that we made, and no other."""
    if not ours:
        dist.init_process_group("gloo")
    gradsync.replicate(nn.Linear(2, 2))
    registered = groups.at_exit is not None
    if groups.at_exit is not None:
        groups.at_exit()
    ended = not dist.is_initialized()
    if not ended:
        dist.destroy_process_group()
    return registered and ended


def test_the_group_is_ended_by_who_made_it(ranks: Ranks) -> None:
    assert ranks(made_by_us, 2, True, backend=None) == [True, True]
    assert ranks(made_by_us, 2, False, backend=None) == [False, False]


SCRIPT = """
import torch, gradsync
model = gradsync.replicate(torch.nn.Linear(2, 2))
model(torch.ones(1, 2)).sum().backward()
"""


def test_a_script_ends_quietly(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "abort" not in done.stderr.lower()
    assert "Warning" not in done.stderr
