"""Accelerate: `prepare`, `accumulate`, clipping, `save_state` and `load_state`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.frameworks.both import check_engine, needs, rows, run, small
from tests.support.ranks import Ranks

pytestmark = [needs("accelerate"), pytest.mark.filterwarnings("ignore")]


def prepared() -> tuple[Any, Any, Any, Any]:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state()
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    assert accelerator.num_processes == 2
    plain = small()
    loader = DataLoader(TensorDataset(*rows(96)), batch_size=4)
    model, optimizer, loader = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters(), lr=0.02), loader)
    check_engine(model)
    assert accelerator.unwrap_model(model) is plain
    return accelerator, model, optimizer, loader


def epoch(accelerator: Any, model: Any, optimizer: Any, batches: Any) -> list[float]:
    losses = []
    for x, target in batches:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), target)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train(folder: Path) -> list[float]:
    accelerator, model, optimizer, loader = prepared()
    losses = epoch(accelerator, model, optimizer, loader)
    accelerator.save_state(str(folder))
    losses += epoch(accelerator, model, optimizer, loader)
    # forwards without synchronization, which only the last backward makes up for
    x, target = next(iter(loader))
    with accelerator.no_sync(model):
        early = nn.functional.mse_loss(model(x), target)
        late = nn.functional.mse_loss(model(x * 0.5), target)
        accelerator.backward(early)
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(late)
    losses.append(next(model.parameters()).grad.sum().item())
    accelerator.wait_for_everyone()
    accelerator, model, optimizer, loader = prepared()
    accelerator.load_state(str(folder))
    assert epoch(accelerator, model, optimizer, loader) == pytest.approx(losses[12:24], abs=1e-6)
    return losses


def test_losses(ranks: Ranks, tmp_path: Path) -> None:
    run(ranks, train, tmp_path)
