"""PyTorch-Ignite: `idist.auto_model`, accumulation, clipping, its checkpoint and EMA handlers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.frameworks.both import check_engine, needs, rows, run, small
from tests.support.ranks import Ranks

pytestmark = [needs("ignite"), pytest.mark.filterwarnings("ignore")]


def prepared() -> tuple[Any, Any, Any, Any, list[float]]:
    import ignite.distributed as idist
    from ignite.engine import Engine
    from ignite.handlers import EMAHandler

    if idist.backend() is None:
        idist.initialize("gloo")
    assert idist.get_world_size() == 2
    model = idist.auto_model(small())
    check_engine(model)
    optimizer = idist.auto_optim(torch.optim.AdamW(model.parameters(), lr=0.02))
    loader = idist.auto_dataloader(TensorDataset(*rows(96)), batch_size=8, shuffle=False)
    losses: list[float] = []

    def update(engine: Any, batch: Any) -> float:
        loss = nn.functional.mse_loss(model(batch[0]), batch[1])
        (loss / 2).backward()
        if engine.state.iteration % 2 == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        return losses[-1]

    trainer = Engine(update)
    EMAHandler(model, momentum=0.1).attach(trainer)  # copies what the wrapper holds
    return trainer, model, optimizer, loader, losses


def train(folder: Path) -> list[float]:
    from ignite.engine import Events
    from ignite.handlers import Checkpoint, DiskSaver

    trainer, model, optimizer, loader, losses = prepared()
    saver = DiskSaver(str(folder), create_dir=True, require_empty=False)
    checkpoint = Checkpoint({"model": model, "optimizer": optimizer, "trainer": trainer}, saver)
    trainer.add_event_handler(Events.EPOCH_COMPLETED(once=1), checkpoint)
    trainer.run(loader, max_epochs=2)
    assert len(losses) == 24
    saved = torch.load(next(folder.glob("*.pt")), weights_only=False)
    assert not any(name.startswith("module.") for name in saved["model"])  # the wrapper was known for one
    trainer, model, optimizer, loader, rest = prepared()
    Checkpoint.load_objects({"model": model, "optimizer": optimizer, "trainer": trainer}, saved)
    trainer.run(loader, max_epochs=2)
    assert rest == pytest.approx(losses[12:], abs=1e-6)
    return losses


def test_losses(ranks: Ranks, tmp_path: Path) -> None:
    run(ranks, train, tmp_path)
