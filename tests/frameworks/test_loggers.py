"""Statistics in other people's loggers: TensorBoard's writer, and Lightning's, under its own trainer."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gradsync
from gradsync import dropin
from tests.frameworks.both import LIMIT, needs, rows, small
from tests.ranks.small import backward, build, make
from tests.support.ranks import Ranks

pytestmark = pytest.mark.filterwarnings("ignore")
SCALAR = "gradsync/seconds/exposed"


def in_tensorboard(folder: Path) -> tuple[list[str], list[int]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    folder /= str(dist.get_rank())
    model = make("replicate", build())
    with SummaryWriter(str(folder)) as writer, gradsync.observe.log_to(writer, gradsync.statistics(model), every=2):
        for step in range(4):
            backward(model, step)
    found = EventAccumulator(str(folder)).Reload()
    tags = found.Tags()["scalars"]
    return tags, [one.step for one in found.Scalars(SCALAR)] if tags else []


@needs("tensorboard")
def test_tensorboard(ranks: Ranks, tmp_path: Path) -> None:
    (tags, steps), of_rank_1 = ranks(in_tensorboard, 2, tmp_path, limit=LIMIT)
    assert len(tags) == 14
    assert steps == [2, 4]
    assert of_rank_1 == ([], [])


def under_lightning(folder: Path) -> None:
    import os

    import lightning
    from lightning.pytorch.loggers import CSVLogger

    os.environ |= {"LOCAL_RANK": os.environ["RANK"], "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "none"}
    dropin.install()

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = small()

        def training_step(self, batch: Any, index: int) -> Any:
            return nn.functional.mse_loss(self.layers(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    logger = CSVLogger(str(folder), name="", version="")
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=logger,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    with gradsync.observe.log_to(logger):  # the trainer makes the replica
        trainer.fit(Module(), DataLoader(TensorDataset(*rows(32)), batch_size=4))
    logger.save()
    dropin.uninstall()
    dist.destroy_process_group()


@needs("lightning")
def test_lightnings_logger(ranks: Ranks, tmp_path: Path) -> None:
    ranks(under_lightning, 2, tmp_path, limit=LIMIT, backend=None)
    with (tmp_path / "metrics.csv").open() as file:
        written = [row for row in csv.DictReader(file) if row.get(SCALAR)]
    assert [row["step"] for row in written] == ["1", "2", "3", "4"]
    assert all(float(row["gradsync/seconds/step"]) > 0 for row in written)
