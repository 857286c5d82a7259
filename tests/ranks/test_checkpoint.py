"""Composable activation checkpointing, with replicas."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import gradsync
from gradsync.checkpoint import CheckpointModule, checkpoint
from gradsync.contract import registry
from tests.ranks.small import assert_gradients, gradients_of
from tests.support.blocks import Block, Sometimes, assert_same_gradients, both, stack, step
from tests.support.ranks import Ranks, on_ranks


@pytest.fixture(scope="module", autouse=True)
def _torch_was_here() -> None:
    """torch's first checkpoint imports dynamo, which sets an environment variable: not a test's doing."""
    torch_checkpoint(torch.sin, torch.ones(1), use_reentrant=False)


Apply = Callable[[Any], Any]
ORDERS: list[tuple[Apply, Apply]] = [(checkpoint, gradsync.replicate), (gradsync.replicate, checkpoint)]


def same_module(first: Callable[[Any], Any], second: Callable[[Any], Any]) -> Apply:
    def apply(module: nn.Sequential) -> Any:
        return second(first(module))

    return apply


def with_parts(module: nn.Sequential, root: Callable[[Any], Any], part: Callable[[Any], Any], parts_first: bool) -> Any:
    order = [module[0], module[1], module] if parts_first else [module, module[0], module[1]]
    for which in order:
        (root if which is module else part)(which)
    return module


def wrapped(module: nn.Sequential) -> Any:
    checkpoint(module[0])
    wrapper = gradsync.DistributedDataParallel(module)
    checkpoint(module[1])
    return wrapper


def everything(module: Any) -> Any:
    for part in (module[0], module[1], module[0].second):
        checkpoint(part)
    return checkpoint(gradsync.replicate(module))


def replicas_inside(module: nn.Sequential) -> Any:
    """Several replicas, each with an engine of its own, in one recomputed forward."""
    for part in module:
        gradsync.replicate(part)
    return checkpoint(module)


def norm_stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(dropout=0.5), Block(), nn.Linear(4, 2))


ARRANGEMENTS: dict[str, Apply] = {
    "checkpoint, then replicate": same_module(checkpoint, gradsync.replicate),
    "replicate, then checkpoint": same_module(gradsync.replicate, checkpoint),
    "parts checkpointed, then replicate": lambda m: with_parts(m, gradsync.replicate, checkpoint, True),
    "replicate, then parts checkpointed": lambda m: with_parts(m, gradsync.replicate, checkpoint, False),
    "replicas inside": replicas_inside,
    "wrapped": wrapped,
    "everything": everything,
}


def batches(step: int) -> list[Tensor]:
    return [torch.randn(3, 4, generator=torch.Generator().manual_seed(step * 8 + r)) for r in range(2)]


@pytest.mark.parametrize("name", ARRANGEMENTS)
@on_ranks(2)
def test_replicas(name: str) -> None:
    """On a rank: three steps are those of one process on all data."""
    oracle, module = both(norm_stack)
    front = ARRANGEMENTS[name](module)
    optimizers = [torch.optim.SGD(which.parameters(), lr=0.1) for which in (oracle, module)]
    rank = dist.get_rank()
    for number in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for r, batch in enumerate(batches(number)):
            torch.manual_seed(r)
            (oracle(batch).square().mean() / 2).backward()
        torch.manual_seed(rank)
        front(batches(number)[rank]).square().mean().backward()
        for (key, found), expected in zip(module.named_parameters(), oracle.parameters(), strict=True):
            torch.testing.assert_close(found.grad, expected.grad, msg=key)
        for optimizer in optimizers:
            optimizer.step()
    assert module[0].forwards >= 6, "it was recomputed in each step"


@pytest.mark.parametrize("name", ["checkpoint, then replicate", "replicate, then checkpoint"])
@on_ranks(2)
def test_buffers_of_replicas(name: str) -> None:
    """On a rank: running statistics are those of a replica that isn't checkpointed."""
    torch.manual_seed(0)
    plain, module = both(lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), Block(), nn.Linear(4, 2)))
    fronts = [gradsync.replicate(plain), ARRANGEMENTS[name](module)]
    for number in range(3):
        for front in fronts:
            front(batches(number)[dist.get_rank()]).square().mean().backward()
    for (key, found), expected in zip(module.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(found, expected), key
    assert_same_gradients(plain, module)
    assert module[3].forwards == 6


@pytest.mark.filterwarnings("ignore")  # DTensor's own
@pytest.mark.parametrize("kind", ["precision", "mesh"])
@on_ranks(2, limit=60)
def test_parameters_in_another_form(kind: str) -> None:
    """On a rank: parameters that compute as something else than they are registered as do so again in backward."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
    options: dict[str, Any] = policy if kind == "precision" else {"mesh": init_device_mesh("cpu", (2,))}
    gradients = []
    for where in ("nowhere", "inside", "around", "after"):
        module: Any = stack()
        if where in ("inside", "around"):
            checkpoint(module if where == "around" else module[0])
        gradsync.replicate(module, **options)
        if where == "after":
            checkpoint(module)
        for number in range(2):
            module(batches(number)[dist.get_rank()]).float().square().mean().backward()
        gradients.append([getattr(p.grad, "_local_tensor", p.grad) for p in module.parameters()])
        assert module[0].forwards == (2 if where == "nowhere" else 4)
    for found in gradients[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found, gradients[0], strict=True))


@on_ranks(2)
def test_hooks_of_a_replica_run_once() -> None:
    for order in ORDERS:
        module = stack()
        calls: list[str] = []
        module.register_forward_hook(lambda *_, calls=calls: calls.append("forward"))
        for api in order:
            api(module)
        step(module, torch.ones(1, 4))
        assert calls == ["forward"]
        assert sorted(registry(module)) == ["checkpoint", "replicate"]


@on_ranks(2)
def test_copied_and_undone() -> None:
    """Each of both can be copied, pickled and undone with the other there."""
    for order in ORDERS:
        module: Any = stack()
        for api in order:
            api(module)
        duplicate = copy.deepcopy(module)
        assert {CheckpointModule, gradsync.ReplicateModule} < set(type(duplicate).__mro__)
        for which in (module, duplicate):
            which(batches(0)[dist.get_rank()]).square().mean().backward()
            assert which[0].forwards == 2
        assert_same_gradients(module, duplicate)
        assert type(pickle.loads(pickle.dumps(module))) is nn.Sequential
        gradsync.unreplicate(module)
        assert repr(module).startswith("CheckpointSequential(")
        assert list(registry(module)) == ["checkpoint"]
        gradients = [p.grad.clone() for p in module.parameters()]
        module.zero_grad()
        module(batches(0)[dist.get_rank()]).square().mean().backward()
        assert module[0].forwards == 4
        assert not any(torch.equal(a, p.grad) for a, p in zip(gradients, module.parameters(), strict=True))


@pytest.mark.filterwarnings("ignore")  # dynamo's own
@on_ranks(2, limit=90)
def test_compiled_replicas() -> None:
    for order in ORDERS:
        torch.compiler.reset()
        oracle, module = both(stack)
        for api in order:
            api(module)
        front = torch.compile(module, backend="aot_eager")
        for batch in batches(0):
            (oracle(batch).square().mean() / 2).backward()
        front(batches(0)[dist.get_rank()]).square().mean().backward()
        assert_gradients(module, gradients_of(oracle))


def failed_and_repeated() -> str:
    """A recomputation that raises on all ranks, then the same step once more."""
    module = gradsync.replicate(checkpoint(Sometimes(2, "raise")))
    x = batches(0)[dist.get_rank()]
    with pytest.raises(KeyError):
        step(module, x)
    module.zero_grad()
    step(module, x)
    return gradsync.fingerprint(nn.ParameterList([p.grad for p in module.parameters()]))


def test_a_failed_recomputation_can_be_repeated(ranks: Ranks) -> None:
    first, second = ranks(failed_and_repeated, 2)
    assert first == second
