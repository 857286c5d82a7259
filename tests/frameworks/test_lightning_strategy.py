"""`GradsyncStrategy` of Lightning's Trainer and of Fabric: nothing of torch's is replaced, and losses are the same."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.frameworks import test_lightning_fabric, test_lightning_trainer
from tests.frameworks.both import LIMIT, needs, run_native
from tests.support.patience import crowding
from tests.support.ranks import Ranks

pytestmark = [needs("lightning"), pytest.mark.filterwarnings("ignore")]


def for_trainer(folder: Path, **options: Any) -> Any:
    from lightning.pytorch.strategies import DDPStrategy

    from gradsync.integrations.lightning import GradsyncStrategy

    return GradsyncStrategy(verify="every", **options) if folder.name == "gradsync" else DDPStrategy(**options)


def train(automatic: bool, static: bool, folder: Path) -> list[float]:
    strategy = functools.partial(for_trainer, folder, static_graph=static)
    return test_lightning_trainer.train(automatic, folder, strategy)


@pytest.mark.parametrize(
    ("automatic", "static"),
    [(True, False), (False, False), (False, True)],  # a static graph that accumulates fails on torch's
    ids=["automatic", "manual", "manual, static graph"],
)
def test_trainer(ranks: Ranks, tmp_path: Path, automatic: bool, static: bool) -> None:
    run_native(ranks, functools.partial(train, automatic, static), tmp_path)


def train_with_fabric(folder: Path) -> list[float]:
    from lightning.fabric.strategies import DDPStrategy

    from gradsync.integrations.fabric import GradsyncStrategy

    ours = functools.partial(GradsyncStrategy, verify="every")
    return test_lightning_fabric.train(folder, ours if folder.name == "gradsync" else DDPStrategy)


def test_fabric(ranks: Ranks, tmp_path: Path) -> None:
    run_native(ranks, train_with_fabric, tmp_path)


# --- communication hooks ----------------------------------------------------------------------------------


def averaged(state: list[int], bucket: Any) -> Any:
    state.append(bucket.index())
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0] / dist.get_world_size())


def halved(hook: Any) -> Any:
    return lambda state, bucket: hook(state, bucket).then(lambda future: future.value() / 2)


def with_a_hook(folder: Path) -> list[float]:
    """Halved gradients are, to AdamW, what they are whole but for epsilon: looked at are the calls."""
    from gradsync.integrations.lightning import GradsyncStrategy

    os.environ |= {"LOCAL_RANK": os.environ["RANK"], "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "none"}
    seen: list[int] = []
    strategy = GradsyncStrategy(ddp_comm_state=seen, ddp_comm_hook=averaged, ddp_comm_wrapper=halved)
    _, losses = test_lightning_trainer.fit(True, folder, 1, strategy=strategy)
    assert len(seen) == 6  # one bucket in each of the rounds: two micro-batches each, twelve in all
    dist.destroy_process_group()
    return losses


def test_communication_hooks_on_the_cpu(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks(with_a_hook, 2, tmp_path, limit=LIMIT, backend=None)
    assert first != second  # each has its own part of the data


# --- ranks that Lightning starts --------------------------------------------------------------------------

SCRIPT = """\
import sys, torch, lightning
from torch.utils.data import DataLoader, TensorDataset
from gradsync.integrations.lightning import GradsyncStrategy

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
    def training_step(self, batch, index):
        with open(f"rank{self.trainer.global_rank}", "w") as file:
            file.write(f"{type(self.trainer.strategy.model).__module__} of {self.trainer.world_size}")
        return self.net(batch[0]).square().mean()

if __name__ == "__main__":
    strategy = GradsyncStrategy(start_method=sys.argv[1])
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, **quiet)
    trainer.fit(Module(), DataLoader(TensorDataset(torch.randn(32, 4)), 4))
"""


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_ranks_that_lightning_starts(tmp_path: Path, method: str) -> None:
    """Spawned ones know nothing of what their parent has replaced; the strategy comes with what they are given."""
    (tmp_path / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "train.py", method],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT * crowding(),
    )
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert (tmp_path / f"rank{rank}").read_text() == "gradsync.ddp of 2"
