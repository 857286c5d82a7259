"""Each rank needs a device of its own, and to have made it the current one: said when a replica is made."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from gradsync.errors import InvalidOptionError
from tests.accelerator.test_streams import here, train
from tests.ranks.small import FRONTS, build, make
from tests.support import accelerator
from tests.support.accelerator.ranks import on_accelerator


@FRONTS
@on_accelerator(2, apart=False)
def test_all_ranks_on_the_first_device(front: str) -> None:
    module = build().to(torch.accelerator.current_accelerator())
    with pytest.raises(InvalidOptionError, match=r"ranks 0, 1 of one host .* same device, standin:0.*set_device_index"):
        make(front, module)
    torch.accelerator.set_device_index(dist.get_rank())  # the cure
    train(front, build().to(torch.accelerator.current_accelerator()), here, here)


@FRONTS
@on_accelerator(2, apart=False)
def test_a_device_that_is_not_the_current_one(front: str) -> None:
    device = torch.device(accelerator.NAME, 1 - dist.get_rank())
    torch.accelerator.set_device_index(dist.get_rank())
    with pytest.raises(InvalidOptionError, match="but the current device is standin"):
        make(front, build().to(device))


@on_accelerator(2, backend=f"cpu:gloo,{accelerator.NAME}:{accelerator.NAME}", apart=False)
def test_with_gloo_for_small_things_the_current_device_does_not_matter() -> None:
    device = torch.device(accelerator.NAME, 1 - dist.get_rank())
    torch.accelerator.set_device_index(dist.get_rank())
    train("replicate", build().to(device), here, here)


@on_accelerator(2)
def test_inputs_are_moved_to_the_device_that_is_given() -> None:
    module = build().to(torch.accelerator.current_accelerator())
    replica = make("replicate", module, device_id=dist.get_rank())
    assert replica(torch.randn(3, 4)).device == torch.device(accelerator.NAME, dist.get_rank())
    wrapper = make("DistributedDataParallel", build().to(replica[0].weight.device), device_ids=[dist.get_rank()])
    assert wrapper(torch.randn(3, 4)).device == replica[0].weight.device
