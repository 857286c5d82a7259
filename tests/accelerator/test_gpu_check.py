"""The script for people with accelerators, on one that we have."""

from __future__ import annotations

import re

import torch.distributed as dist

from tests.examples.test_examples import look_at_gpu_check, trained
from tests.support.accelerator.ranks import on_accelerator


@on_accelerator(2)
def test_the_check_of_accelerators() -> None:
    model, printed = trained("gpu_check", "--steps", "2", "--width", "16", "--layers", "3")
    look_at_gpu_check(model, printed)
    if dist.get_rank() == 0:
        assert "2 ranks on standin" in printed
        assert re.search(r"overlap +\d+% of the communication", printed)
