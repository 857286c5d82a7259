"""Communication hooks that go wrong, on every rank or on one: each rank learns of it within the time limit."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gradsync.errors import GradsyncError, HookError
from tests.ranks.small import FRONTS, assert_gradients, backward, build, make, mean_gradients, short_group
from tests.support.patience import seconds_since
from tests.support.ranks import Ranks, on_ranks

LIMIT = 2.0  # seconds that a collective may take


# --- refused at once -------------------------------------------------------------------------------------


@FRONTS
@on_ranks(2)
def test_what_can_not_be_a_hook(front: str) -> None:
    replica = make(front, build())

    def wrong_bucket(state: object, bucket: int) -> torch.futures.Future[Tensor]:
        raise AssertionError

    def wrong_return(state: object, bucket: Any) -> int:
        raise AssertionError

    with pytest.raises(TypeError, match="Communication hook must be callable"):
        replica.register_comm_hook(None, 1)
    with pytest.raises(ValueError, match=r"bucket annotation should be dist\.GradBucket"):
        replica.register_comm_hook(None, wrong_bucket)
    with pytest.raises(ValueError, match="return annotation should be"):
        replica.register_comm_hook(None, wrong_return)


# --- wrong on every rank ---------------------------------------------------------------------------------


class Faulty:
    """A hook that is wrong in one way after the other, and in the end right."""

    def __init__(self) -> None:
        self.fault = "right"

    def __call__(self, state: object, bucket: Any) -> Any:
        data = bucket.buffer()
        if self.fault == "raises":
            raise ZeroDivisionError("in the hook")
        if self.fault == "no future":
            return 3
        if self.fault == "raises later":
            later: Any = torch.futures.Future()
            later.set_result(data)
            return later.then(lambda _: 1 // 0)
        future: Any = torch.futures.Future()
        dist.all_reduce(data)
        data /= dist.get_world_size()
        future.set_result({"size": data[1:], "dtype": data.long(), "nothing": None, "right": data}[self.fault])
        return future


FAULTS = {
    "no future": r"must return a torch\.futures\.Future object, but got int from hook 'Faulty' on rank",
    "raises": "in the hook",
    "raises later": "ZeroDivisionError",
    "size": r"rank \d: communication hook 'Faulty' must bring .* x torch\.float32, but brought \d+ x torch\.float32",
    "dtype": r"rank \d: communication hook 'Faulty' must bring .*, but brought \d+ x torch\.int64",
    "nothing": r"rank \d: communication hook 'Faulty' must bring .*, but brought NoneType",
}


@FRONTS
@pytest.mark.parametrize("fault", FAULTS)
@on_ranks(2)
def test_wrong_on_every_rank(front: str, fault: str) -> None:
    module = build()
    replica = make(front, module)
    hook = Faulty()
    replica.register_comm_hook(None, hook)
    for _ in range(2):  # before there is a plan, and with one
        hook.fault = fault
        began = time.monotonic()
        with pytest.raises(Exception, match=FAULTS[fault]):
            backward(replica)
        assert seconds_since(began) < LIMIT
        hook.fault = "right"  # mended: training goes on
        replica.zero_grad()
        backward(replica)
        assert_gradients(module, mean_gradients(module))


@FRONTS
@on_ranks(2)
def test_a_hook_that_never_completes(front: str) -> None:
    module = build()
    replica = make(front, module, process_group=short_group(LIMIT))
    complete = False

    def hook(state: object, bucket: Any) -> Any:
        if complete:
            dist.all_reduce(bucket.buffer())
            bucket.buffer().div_(2)
        future: Any = torch.futures.Future()
        if complete:
            future.set_result(bucket.buffer())
        return future

    replica.register_comm_hook(None, hook)
    rank = dist.get_rank()
    began = time.monotonic()
    with pytest.raises(HookError, match=rf"rank {rank}: .*hook.* did not complete within {LIMIT:g} s"):
        backward(replica)
    assert time.monotonic() - began >= LIMIT
    assert seconds_since(began) < 2 * LIMIT
    complete = True
    replica.zero_grad()
    backward(replica)
    assert_gradients(module, mean_gradients(module))


# --- wrong on one rank -----------------------------------------------------------------------------------


def wrong_on_one(front: str) -> float:
    """The others wait for that rank's part, and no longer than the limit. Then all go on over a new group."""
    module = build()
    replica = make(front, module, process_group=short_group(LIMIT))
    group = short_group(LIMIT)
    raises = dist.get_rank() == 1

    def hook(state: object, bucket: Any) -> Any:
        if raises:
            raise ZeroDivisionError("in the hook, on one rank")
        work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
        assert work is not None
        return work.get_future().then(lambda future: future.value()[0] / 2)

    replica.register_comm_hook(None, hook)
    began = time.monotonic()
    with pytest.raises(ZeroDivisionError if raises else (GradsyncError, RuntimeError)) as caught:
        backward(replica)
    took = seconds_since(began)
    if not raises:
        text = str(caught.value)
        assert "did not complete within 2 s" in text or re.search(
            r"rank 0 has waited 2 s(.|\n)*\nrank 1 has been ", text
        ), text
    raises = False
    dist.barrier()
    group = short_group(LIMIT)
    replica.change_process_group(short_group(LIMIT))
    replica.zero_grad()
    backward(replica)
    assert_gradients(module, mean_gradients(module))
    return took


@FRONTS
def test_a_hook_that_raises_on_one_rank(ranks: Ranks, front: str) -> None:
    assert max(ranks(wrong_on_one, 2, front)) < 3 * LIMIT
