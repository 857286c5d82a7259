"""The stand-in itself: what would be wrong on an accelerator is an error on it."""

from __future__ import annotations

import ctypes
import signal

import pytest
import torch
import torch.distributed as dist

from tests.support import accelerator
from tests.support.accelerator.build import compiler
from tests.support.accelerator.ranks import needs_compiler, on_accelerator
from tests.support.ranks import Ranks

Race = accelerator.Race


def ones() -> torch.Tensor:
    return torch.ones(8, device=torch.accelerator.current_accelerator())


def stream() -> torch.Stream:
    return torch.Stream(torch.accelerator.current_accelerator())


@on_accelerator(1)
def test_two_streams_without_an_event_between_them() -> None:
    tensor = ones()
    with stream(), pytest.raises(Race, match=r"add on stream \d+, reading from what aten::fill_"):
        tensor + 1
    accelerator.reset()


@on_accelerator(1)
def test_events_and_waits_of_the_host_order() -> None:
    aside, main, tensor = stream(), torch.accelerator.current_stream(), ones()
    aside.wait_stream(main)
    with aside:
        twice = tensor * 2
    aside.synchronize()
    assert (twice + tensor).tolist() == [3.0] * 8


@on_accelerator(1)
def test_only_the_bytes_that_both_touch_count() -> None:
    aside, tensor = stream(), ones()
    aside.wait_stream(torch.accelerator.current_stream())
    with aside:
        tensor[4:].mul_(2)
    tensor[:4].mul_(3)
    with pytest.raises(Race):
        tensor[3:5].mul_(2)
    accelerator.reset()


@on_accelerator(1)
def test_memory_that_is_freed_while_another_stream_uses_it() -> None:
    aside = stream()
    for kept in (True, False):
        tensor = ones()
        aside.wait_stream(torch.accelerator.current_stream())
        with aside:
            tensor + 1
        if kept:
            tensor.record_stream(aside)
        del tensor
        assert bool(accelerator.races()) is not kept
    accelerator.reset()


@on_accelerator(2)
def test_a_collective_is_over_for_who_waits() -> None:
    tensor = ones()
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    with pytest.raises(Race, match="what collective on stream"):
        tensor + 1
    accelerator.reset()
    tensor = ones()
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    doubled = work.get_future().then(lambda future: future.value()[0] * 2)  # on a stream of its own
    assert doubled.wait().tolist() == [4.0] * 8
    work.wait()
    assert tensor.tolist() == [2.0] * 8


@on_accelerator(1)
def test_tensors_of_two_devices_do_not_mix() -> None:
    with pytest.raises(RuntimeError, match="same device"):
        ones() + torch.ones(8)
    with pytest.raises(RuntimeError, match="same device"):
        ones() + ones().to(f"{accelerator.NAME}:1")
    with pytest.raises(TypeError, match="numpy"):
        ones().numpy()


def touch() -> None:
    accelerator.install()
    ctypes.string_at(ones().data_ptr(), 1)


@needs_compiler
def test_the_host_may_not_touch_its_memory(ranks: Ranks) -> None:
    assert compiler() is not None
    (outcome,) = ranks.outcomes(touch, 1, backend=None)
    assert outcome.signal == signal.SIGSEGV
