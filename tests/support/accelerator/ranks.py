"""Ranks with the stand-in for an accelerator, over its collectives."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec

import pytest
import torch
import torch.distributed as dist

from tests.support import accelerator
from tests.support.accelerator.build import compiler
from tests.support.rank_process import GROUP_TIMEOUT
from tests.support.ranks import on_ranks

P = ParamSpec("P")
needs_compiler = pytest.mark.skipif(compiler() is None, reason="the stand-in for an accelerator needs a C++ compiler")


def on_accelerator(
    world_size: int, *, backend: str = accelerator.NAME, apart: bool = True
) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """As `on_ranks`; a race in the order of what was queued fails the test.

    `apart`: each rank uses the device of its own number, as people do.
    """

    def make_test(body: Callable[P, None]) -> Callable[P, None]:
        @functools.wraps(body)
        def on_rank(*args: P.args, **kwargs: P.kwargs) -> None:
            accelerator.install()
            dist.init_process_group(backend, timeout=GROUP_TIMEOUT)
            if apart:
                torch.accelerator.set_device_index(dist.get_rank() % 2)
            body(*args, **kwargs)
            torch.accelerator.synchronize()
            found = accelerator.races()
            assert not found, found[0]
            dist.destroy_process_group()

        return needs_compiler(on_ranks(world_size, backend=None)(on_rank))

    return make_test
