"""Scripts that know nothing of gradsync train on its engine once `dropin.install()` was called."""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradsync
from gradsync import dropin
from tests.ranks.small import same_everywhere
from tests.support.ranks import Ranks

TRAIN = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for step in range(4):
    torch.manual_seed(10 * step + dist.get_rank())
    loss = model(torch.randn(6, 3)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    losses.append(total.item() / dist.get_world_size())
"""
HEAD = "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\ntorch.manual_seed(dist.get_rank())\n"
MODEL = "torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))"
SHARDED = "torch.distributed._composable.replicate_with_fsdp"
SCRIPTS = {
    "from torch.nn.parallel": f"from torch.nn.parallel import DistributedDataParallel as DDP\nmodel = DDP({MODEL})",
    "by its whole name": f"model = torch.nn.parallel.DistributedDataParallel({MODEL})",
    "from its own file": (
        f"from torch.nn.parallel.distributed import DistributedDataParallel\nmodel = DistributedDataParallel({MODEL})"
    ),
    "derived from it": (
        "from torch.nn.parallel import DistributedDataParallel as DDP\n"
        f"class Mine(DDP):\n    pass\nmodel = Mine({MODEL})\nassert isinstance(model, DDP)"
    ),
    "composable": f"from torch.distributed._composable import replicate\nmodel = replicate({MODEL})",
    "composable, from its own file": (
        f"from torch.distributed._composable.replicate import replicate, DDP\nmodel = replicate({MODEL})\n"
        "assert isinstance(model, DDP)\nassert replicate.state(model) is not None"
    ),
    "sharded": (
        f"from {SHARDED} import replicate, ReplicateModule\ntorch.manual_seed(0)\nmodel = replicate({MODEL})\n"
        "from torch.distributed.tensor import DTensor\nassert isinstance(model, ReplicateModule)\n"
        "assert isinstance(model[0].weight, DTensor)  # as torch's are, without a mesh too"
    ),
}


def engine_of(model: nn.Module) -> str:
    return "gradsync" if isinstance(model, (gradsync.DistributedDataParallel, gradsync.ReplicateModule)) else "torch"


def body(script: str) -> tuple[list[float], str]:
    if os.environ["GRADSYNC_TEST_ENGINE"] == "gradsync":
        dropin.install()
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(HEAD + script + TRAIN, "script", "exec"), namespace)
    model = namespace["model"]
    used = engine_of(model)
    if used == "gradsync":
        assert gradsync.statistics(model).rounds == 4
        same_everywhere(model)
    losses = namespace.pop("losses")
    namespace.clear()  # before the group: torch's class, as the last one to let go of it, hangs now and then (2.13)
    del model
    gc.collect()
    dist.destroy_process_group()
    return losses, used


@pytest.mark.filterwarnings("ignore")  # of torch's own classes
@pytest.mark.parametrize("name", SCRIPTS)
def test_an_unchanged_script(ranks: Ranks, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for engine in ("torch", "gradsync"):
        monkeypatch.setenv("GRADSYNC_TEST_ENGINE", engine)
        for losses, used in ranks(body, 2, SCRIPTS[name], backend=None, limit=60):
            assert used == engine
            found[engine] = losses
    assert found["gradsync"] == pytest.approx(found["torch"], abs=1e-6)


def before_and_after() -> None:
    """A model keeps its engine, and is unwrapped by who asks for the class by the other name."""
    early = nn.parallel.DistributedDataParallel(nn.Linear(3, 2))
    dropin.install()
    ours = nn.parallel.DistributedDataParallel(nn.Linear(3, 2))
    assert (engine_of(early), engine_of(ours)) == ("torch", "gradsync")
    assert isinstance(early, nn.parallel.DistributedDataParallel)
    early(torch.ones(4, 3)).sum().backward()
    dropin.uninstall()
    assert isinstance(ours, nn.parallel.DistributedDataParallel)
    ours(torch.ones(4, 3)).sum().backward()
    same_everywhere(ours)
    assert engine_of(nn.parallel.DistributedDataParallel(nn.Linear(3, 2))) == "torch"


@pytest.mark.filterwarnings("ignore")  # of torch's own classes
def test_models_keep_their_engine(ranks: Ranks) -> None:
    ranks(before_and_after, 2, limit=60)
