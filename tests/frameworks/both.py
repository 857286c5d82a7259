"""The same training on torch's engine and on ours, in the same processes."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradsync
from gradsync import dropin
from tests.support.ranks import Ranks

LIMIT = 180.0  # most of it is the frameworks' own import
TOLERANCE = 1e-6
Train = Callable[[Path], list[float]]
"""Trains in a folder of its own; returns the losses of this rank, step by step. Calls `check_engine`."""
_checked: set[str] = set()


def needs(package: str) -> pytest.MarkDecorator:
    """Skips a module's tests where the framework is not installed."""
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed: pip install -e '.[frameworks]'")


def body(train: Train, folder: Path, replaced: bool) -> None:
    """On each rank: torch's first, then ours; `replaced`: with all names of the framework's bound before."""
    rank = os.environ["RANK"]
    os.environ |= {"LOCAL_RANK": rank, "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "none"}  # as torchrun does
    os.chdir(folder)
    found = {}
    for engine in ("torch", "gradsync"):
        if engine == "gradsync" and replaced:
            dropin.install()
        torch.manual_seed(0)
        _checked.clear()
        found[engine] = train(folder / engine)
        assert _checked == {engine}, f"meant for {engine}, it trained on {_checked}"
    assert len(found["torch"]) >= 4
    assert len(set(found["torch"])) == len(found["torch"]), "it does not train"
    apart = max(abs(ours - torchs) for ours, torchs in zip(found["gradsync"], found["torch"], strict=True))
    assert apart <= TOLERANCE, f"losses are {apart:.1e} apart: {found}"
    dropin.uninstall()
    dist.destroy_process_group()


def run(ranks: Ranks, train: Train, folder: Path) -> None:
    ranks(body, 2, train, folder, True, limit=LIMIT, backend=None)


def run_native(ranks: Ranks, train: Train, folder: Path) -> None:
    """Nothing of torch's is replaced: for an engine called "gradsync", the folder's name, `train` asks for ours."""
    ranks(body, 2, train, folder, False, limit=LIMIT, backend=None)


def check_engine(model: nn.Module) -> None:
    """Notes which engine is under the wrapper that the framework has made."""
    assert isinstance(model, nn.parallel.DistributedDataParallel)
    _checked.add("gradsync" if isinstance(model, gradsync.DistributedDataParallel) else "torch")


def small() -> nn.Sequential:
    """With buffers that must be kept in step."""
    torch.manual_seed(int(os.environ["RANK"]))  # the wrapper makes them equal
    return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))


def rows(count: int) -> tuple[Tensor, Tensor]:
    """The same on all ranks: whoever loads them gives each rank its part."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(count, 4, generator=generator)
    return x, x.sin().sum(1, keepdim=True)
