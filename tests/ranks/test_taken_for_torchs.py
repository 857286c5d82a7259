"""Code that asks whether a model is torch's wrapper, to unwrap it for example, takes ours for one."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import gradsync
from tests.support.ranks import on_ranks

OURS, TORCHS = gradsync.DistributedDataParallel, nn.parallel.DistributedDataParallel


def model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def step(wrapper: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    wrapper(torch.randn(5, 3)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_subclass_of_torchs() -> None:
    assert issubclass(OURS, TORCHS)
    assert not issubclass(gradsync.ReplicateModule, TORCHS)
    assert not issubclass(nn.Linear, TORCHS)


@on_ranks(2)
def test_state_dicts_have_no_prefix() -> None:
    wrapper = OURS(model(0))
    assert isinstance(wrapper, TORCHS)
    assert isinstance(copy.deepcopy(wrapper), TORCHS)
    assert list(get_model_state_dict(wrapper)) == list(model(0).state_dict())
    inside = nn.ModuleDict({"a": wrapper})
    assert list(get_model_state_dict(inside)) == [f"a.{name}" for name in model(0).state_dict()]


@pytest.mark.filterwarnings("ignore")  # of torch's checkpointing
@pytest.mark.parametrize(
    ("saver", "loader"),
    [("ours", "ours"), ("ours", "torch's"), ("torch's", "ours"), ("ours", "plain"), ("replicate", "ours")],
)
@on_ranks(2, limit=60)
def test_checkpoints_fit_both(tmp_path: Path, saver: str, loader: str) -> None:
    """A checkpoint of one class is loaded into the other one, which then trains as the first would."""
    makers: dict[str, Any] = {"ours": OURS, "torch's": TORCHS, "replicate": gradsync.replicate, "plain": lambda m: m}
    first = makers[saver](model(0))
    optimizer = torch.optim.AdamW(first.parameters(), lr=0.1)
    torch.manual_seed(7)  # alike on all ranks: a plain module trains the same
    for _ in range(3):
        step(first, optimizer)
    weights, state = get_state_dict(first, optimizer)
    state_dict_saver.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path)
    second = makers[loader](model(1))
    other = torch.optim.AdamW(second.parameters(), lr=0.1)
    step(second, other)  # there is a state to load into
    weights, state = get_state_dict(second, other)
    state_dict_loader.load({"model": weights, "optimizer": state}, checkpoint_id=tmp_path)
    set_state_dict(second, other, model_state_dict=weights, optim_state_dict=state)
    for one, its in ((first, optimizer), (second, other)):
        torch.manual_seed(8)
        step(one, its)
    for found, wanted in zip(second.parameters(), first.parameters(), strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.filterwarnings("ignore")  # of torch's pipelining
@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@on_ranks(4, limit=60)
def test_a_stage_of_a_pipeline(schedule: str, transport: str) -> None:
    """Two stages of two replicas each: rank 0 and 1 have the first stage, 2 and 3 the second."""
    rank = dist.get_rank()
    stage, replica = divmod(rank, 2)
    pipes = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    columns = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    torch.manual_seed(0)
    whole = nn.ModuleList([nn.Linear(3, 4), nn.Linear(4, 2)])
    oracle = copy.deepcopy(whole)
    options: dict[str, Any] = {"process_group": columns[stage], "transport": transport}
    wrapper = OURS(whole[stage], **options)
    rows = [torch.randn(4, 3) for _ in range(2)]
    targets = [torch.randn(4, 2) for _ in range(2)]
    part = PipelineStage(wrapper, stage, 2, torch.device("cpu"), group=pipes[replica])
    kind = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[schedule]
    loss = nn.MSELoss()
    runner: Any = kind(part, n_microbatches=2, loss_fn=loss)
    for _ in range(3):
        wrapper.zero_grad()
        oracle.zero_grad()
        if stage == 0:
            runner.step(rows[replica])
        else:
            runner.step(target=targets[replica])
        for x, target in zip(rows, targets, strict=True):
            (loss(oracle[1](oracle[0](x)), target) / 2).backward()
        for found, wanted in zip(whole[stage].parameters(), oracle[stage].parameters(), strict=True):
            assert isinstance(found.grad, Tensor)
            torch.testing.assert_close(found.grad, wanted.grad)
    # micro-batches accumulate: only the last one's backward is a round
    assert gradsync.statistics(wrapper).rounds == 3
