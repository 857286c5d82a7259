"""Lightning's Trainer: automatic and manual optimization, accumulation, clipping, resuming from a checkpoint."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.frameworks.both import check_engine, needs, rows, run, small
from tests.support.ranks import Ranks

pytestmark = [needs("lightning"), pytest.mark.filterwarnings("ignore")]


def module(automatic: bool) -> Any:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = small()
            self.losses: list[float] = []
            self.automatic_optimization = automatic

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.02)

        def training_step(self, batch: Any, index: int) -> Tensor:
            check_engine(self.trainer.strategy.model)
            loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
            self.losses.append(loss.item())
            if not automatic:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                self.clip_gradients(optimizer, 0.5, "norm")
                optimizer.step()
            return loss

    return Module()


def fit(
    automatic: bool, folder: Path, epochs: int, checkpoint: str | None = None, strategy: Any = "ddp"
) -> tuple[Any, list[float]]:
    import lightning

    for_automatic = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5} if automatic else {}
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=epochs,
        default_root_dir=folder,
        enable_checkpointing=False,
        **for_automatic,
        **quiet,
    )
    fitted = module(automatic)
    trainer.fit(fitted, DataLoader(TensorDataset(*rows(96)), batch_size=4), ckpt_path=checkpoint, weights_only=False)
    return trainer, fitted.losses


def train(automatic: bool, folder: Path, strategy: Callable[[], Any] = lambda: "ddp") -> list[float]:
    checkpoint = str(folder / "checkpoint.ckpt")
    trainer, _ = fit(automatic, folder, 1, strategy=strategy())
    trainer.save_checkpoint(checkpoint)
    _, losses = fit(automatic, folder, 2, strategy=strategy())
    _, rest = fit(automatic, folder, 2, checkpoint, strategy=strategy())
    assert len(losses) == 24
    assert rest == pytest.approx(losses[12:], abs=1e-6)
    return losses


@pytest.mark.parametrize("automatic", [True, False], ids=["automatic", "manual"])
def test_losses(ranks: Ranks, tmp_path: Path, automatic: bool) -> None:
    run(ranks, functools.partial(train, automatic), tmp_path)


def static_graph() -> Any:
    from lightning.pytorch.strategies import DDPStrategy

    return DDPStrategy(static_graph=True)


def test_losses_of_a_static_graph(ranks: Ranks, tmp_path: Path) -> None:
    """With manual optimization Lightning calls torch's reducer after the first backward."""
    run(ranks, functools.partial(train, False, strategy=static_graph), tmp_path)
