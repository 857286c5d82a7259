"""Replicas under torch's RPC: references (RRef) as inputs and outputs, training under distributed autograd."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import autograd, rpc

from gradsync.errors import UnsuitableModuleError
from tests.ranks.small import FRONTS, batch, build, make, mean_gradients, same_everywhere
from tests.support.ranks import Ranks

dist_autograd: Any = autograd

# torch's own, from its RPC over a process group
pytestmark = pytest.mark.filterwarnings("ignore:You are using a Backend:UserWarning")


@dataclass
class Result:
    value: Any


class Referring(nn.Module):
    """Takes a reference and returns one, as such or inside something."""

    def __init__(self, wrap: Callable[[Any], Any]) -> None:
        super().__init__()
        self.body = build()
        self.unused = nn.Linear(2, 2)
        self.wrap = wrap

    def forward(self, reference: Any) -> Any:
        return self.wrap(self.body(reference.to_here()))


def value_of(output: Any) -> Tensor:
    """What is inside."""
    if isinstance(output, Result):
        return value_of(output.value)
    if isinstance(output, dict):
        return value_of(output["x"])
    if isinstance(output, (list, tuple)):
        return value_of(output[0])
    return output if isinstance(output, Tensor) else output.local_value()


def a_tensor(x: Tensor) -> Any:
    return x


def a_reference(x: Tensor) -> Any:
    return rpc.RRef(x)


def references_inside(x: Tensor) -> Any:
    return {"x": [Result(rpc.RRef(x))], "more": "text"}


def sent_away(x: Tensor) -> Any:
    return rpc.remote(f"worker{1 - dist.get_rank()}", torch.mul, args=(x, 2.0))


def connected(path: str, body: Callable[..., None], *args: Any) -> None:
    """Runs `body` on a worker of a real RPC group."""
    rank = dist.get_rank()
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{path}/rpc", rpc_timeout=10, _transports=["uv"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=dist.get_world_size(), rpc_backend_options=options)
    try:
        body(*args)
    except BaseException:
        rpc.shutdown(graceful=False)
        raise
    # References that an exception's traceback keeps alive are let go first, and the workers wait for each other's
    # messages: torch crashes (SIGSEGV) if one arrives at a worker that is shutting down.
    gc.collect()
    dist.barrier()
    rpc.shutdown()


def remote_input(rank: int, step: int) -> Any:
    """This rank's batch, which is on the other worker."""
    return rpc.remote(f"worker{1 - rank}", batch, args=(rank, step))


def trained(front: str, wrap: Callable[[Any], Any], distributed: bool) -> None:
    module = Referring(wrap)
    replica = make(front, module)
    rank = dist.get_rank()
    for step in range(3):
        expected = mean_gradients(module.body, step)
        module.zero_grad()
        reference = remote_input(rank, step) if step else rpc.RRef(batch(rank, step))
        if distributed:
            with dist_autograd.context() as context:
                dist_autograd.backward(context, [value_of(replica(reference)).square().mean()])
                in_context = dist_autograd.get_gradients(context)
                found = [in_context[p] for p in module.body.parameters()]
                assert all(p not in in_context for p in module.unused.parameters())
                assert all(p.grad is None for p in module.parameters())
        else:
            value_of(replica(reference)).square().mean().backward()
            found = [p.grad for p in module.body.parameters() if p.grad is not None]
        for gradient, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(gradient, wanted)
        with torch.no_grad():
            for parameter, gradient in zip(module.body.parameters(), found, strict=True):
                parameter.sub_(0.1 * gradient)
        same_everywhere(module)


@FRONTS
@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.parametrize("wrap", [a_tensor, a_reference, references_inside])
def test_references_in_and_out(
    ranks: Ranks, tmp_path: Path, front: str, wrap: Callable[[Any], Any], distributed: bool
) -> None:
    if wrap is not a_tensor and not distributed:
        wrap = a_tensor  # `to_here()` of a reference cuts the graph outside of a context
    ranks(connected, 2, str(tmp_path), trained, front, wrap, distributed)


def refused(front: str) -> None:
    replica = make(front, Referring(sent_away))
    with (
        dist_autograd.context(),
        pytest.raises(UnsuitableModuleError, match=r"remote reference \(RRef\).*would not be synchronized.*Return the"),
    ):
        replica(rpc.RRef(batch(0)))
    with torch.no_grad():
        replica(rpc.RRef(batch(0)))  # nothing to synchronize


@FRONTS
def test_outputs_that_were_sent_away(ranks: Ranks, tmp_path: Path, front: str) -> None:
    ranks(connected, 2, str(tmp_path), refused, front)
