"""`reshard()` shows the registered parameters, `unshard()` those that compute; a backward works after either."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate as torchs
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import gradsync
from tests.ranks.small import batch, build
from tests.support.ranks import on_ranks


def forms(module: nn.Module) -> str:
    return "".join("R" if isinstance(parameter, DTensor) else "c" for parameter in module.parameters())


def sequence(api: Any) -> list[str]:
    """Which forms a nested replica shows: the child's two parameters, then the parent's."""
    module: Any = build()
    mesh = init_device_mesh("cpu", (2,))
    api(module[0], mesh=mesh)
    api(module, mesh=mesh)
    shown = [forms(module)]

    def note(_: object = None) -> None:
        shown.append(forms(module))

    loss = module(batch(dist.get_rank())).sum()
    note(module.reshard())
    note(module[0].reshard())
    note(loss.backward())
    note(module.unshard())
    note(module[0].unshard())
    note(module.reshard())
    note(module[0].reshard())
    handle = module.unshard(async_op=True)
    note()
    note(handle.wait())
    note(module.reshard())
    note(module(batch(0)).sum().backward())
    module.set_reshard_after_backward(False)
    note(module(batch(0)).sum().backward())
    module.set_reshard_after_backward(True, recurse=False)
    note(module(batch(0)).sum().backward())
    module.set_reshard_after_backward(True)
    note(module(batch(0)).sum().backward())
    return shown


@on_ranks(2)
def test_which_parameters_are_shown() -> None:
    found, wanted = sequence(gradsync.replicate), sequence(torchs)
    assert found == wanted
    assert wanted[1:4] == ["ccRRRR", "RRRRRR", "RRRRRR"]


@pytest.mark.parametrize("policy", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
@on_ranks(2)
def test_an_optimizer_built_after_reshard(recompute: bool, policy: bool) -> None:
    """After a forward and `reshard()`: it has the registered parameters, and the backward is a round like any other."""
    module: Any = build()
    plain = copy.deepcopy(module)
    if policy:
        gradsync.replicate(module, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float64))
    else:
        gradsync.replicate(module, mesh=init_device_mesh("cpu", (2,)))

    def run(x: Tensor) -> Tensor:
        return checkpoint(module, x, use_reentrant=False) if recompute else module(x)

    output = run(batch(dist.get_rank()))
    module.reshard()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    expected = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        output.square().mean().backward()
        (sum(plain(batch(part)).square().mean() for part in range(2)) / 2).backward()
        optimizer.step()
        expected.step()
        optimizer.zero_grad()
        expected.zero_grad()
        output = run(batch(dist.get_rank()))
        module.reshard()
    for found, wanted in zip(module.parameters(), plain.parameters(), strict=True):
        found = found.full_tensor() if isinstance(found, DTensor) else found
        torch.testing.assert_close(found, wanted)
    gradsync.verify(module, optimizer)


@on_ranks(2)
def test_an_optimizer_built_between_forward_and_backward() -> None:
    """Between forward and backward, without `reshard()`: it would never move anything, and says so."""
    module: Any = gradsync.replicate(build(), mesh=init_device_mesh("cpu", (2,)))
    loss = module(batch(0)).sum()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    loss.backward()
    with pytest.raises(gradsync.errors.UnsynchronizedStepError, match=r"'0.weight'.*reshard\(\)"):
        optimizer.step()
