"""transformers' Trainer: a tiny GPT with random weights, accumulation, clipping, resuming from a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.frameworks.both import check_engine, needs, run
from tests.support.ranks import Ranks

pytestmark = [needs("transformers"), needs("accelerate"), pytest.mark.filterwarnings("ignore")]


def fit(folder: Path, resume: bool) -> list[float]:
    from accelerate.state import AcceleratorState, GradientState
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    AcceleratorState._reset_state()
    GradientState._reset_state()
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        ddp_backend="gloo",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        learning_rate=1e-2,
        max_steps=8,
        save_steps=4,
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=3,
    )
    generator = torch.Generator().manual_seed(11)
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 32, (64, 8), generator=generator)]
    torch.manual_seed(5)
    shape = GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    losses: list[float] = []

    class Recording(Trainer):
        def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            check_engine(model)
            loss = super().training_step(model, *args, **kwargs)
            losses.append(loss.item())
            return loss

    trainer = Recording(model=GPT2LMHeadModel(shape), args=arguments, train_dataset=rows)
    assert arguments.world_size == 2
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-4") if resume else None)
    assert trainer.accelerator.unwrap_model(trainer.model_wrapped) is trainer.model
    return losses


def train(folder: Path) -> list[float]:
    losses = fit(folder, resume=False)
    assert len(losses) == 16
    assert fit(folder, resume=True) == pytest.approx(losses[8:], abs=1e-6)
    return losses


def test_losses(ranks: Ranks, tmp_path: Path) -> None:
    run(ranks, train, tmp_path)
