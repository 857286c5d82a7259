"""Lightning Fabric: `setup`, `no_backward_sync`, `clip_gradients`, `save` and `load`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.frameworks.both import check_engine, needs, rows, run, small
from tests.support.ranks import Ranks

pytestmark = [needs("lightning"), pytest.mark.filterwarnings("ignore")]


def prepared(strategy: Any) -> tuple[Any, Any, Any, Any]:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    assert fabric.world_size == 2
    plain = small()
    model, optimizer = fabric.setup(plain, torch.optim.AdamW(plain.parameters(), lr=0.02))
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(*rows(96)), batch_size=4))
    check_engine(model._forward_module)
    return fabric, model, optimizer, loader


def epoch(fabric: Any, model: Any, optimizer: Any, loader: Any) -> list[float]:
    losses = []
    for index, (x, target) in enumerate(loader):
        accumulating = index % 2 == 0
        with fabric.no_backward_sync(model, enabled=accumulating):
            loss = nn.functional.mse_loss(model(x), target)
            fabric.backward(loss / 2)
        if not accumulating:
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train(folder: Path, strategy: Callable[[], Any] = lambda: "ddp") -> list[float]:
    fabric, model, optimizer, loader = prepared(strategy())
    losses = epoch(fabric, model, optimizer, loader)
    fabric.save(folder / "checkpoint.pt", {"model": model, "optimizer": optimizer})
    losses += epoch(fabric, model, optimizer, loader)
    fabric, model, optimizer, loader = prepared(strategy())
    fabric.load(folder / "checkpoint.pt", {"model": model, "optimizer": optimizer})
    assert epoch(fabric, model, optimizer, loader) == pytest.approx(losses[12:], abs=1e-6)
    return losses


def test_losses(ranks: Ranks, tmp_path: Path) -> None:
    run(ranks, train, tmp_path)
