"""What torch.compile makes of a replica: how many graphs, how often, and whether their buckets overlap."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo import config
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh

import gradsync
from gradsync.errors import UnsynchronizedStepError
from tests.ranks.small import FRONTS, assert_gradients, full, gradients_of, make, same_everywhere
from tests.support.ranks import on_ranks

BACKEND = "aot_eager"  # needs no C++ compiler
WIDTH = 256  # of which a layer's gradients are a quarter of torch's first bucket


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


class Deep(nn.Module):
    """3 MiB of gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(12))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def sequential() -> nn.Sequential:
    return nn.Sequential(*Deep().blocks)


def before(front: str, module: nn.Module, **options: Any) -> Any:
    compiled: Any = torch.compile(module, backend=BACKEND, **options)
    return make(front, compiled, bucket_cap_mb=1)


def after(front: str, module: nn.Module, **options: Any) -> Any:
    return torch.compile(make(front, module, bucket_cap_mb=1), backend=BACKEND, **options)


def in_place_before(front: str, module: nn.Module, **options: Any) -> Any:
    module.compile(backend=BACKEND, **options)
    return make(front, module, bucket_cap_mb=1)


def in_place_after(front: str, module: nn.Module, **options: Any) -> Any:
    replica = make(front, module, bucket_cap_mb=1)
    replica.compile(backend=BACKEND, **options)
    return replica


WAYS = {"before": before, "after": after, "in place before": in_place_before, "in place after": in_place_after}


def inputs(step: int, rows: int) -> list[Tensor]:
    """Of each rank."""
    size = dist.get_world_size()
    return [torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(8 * step + r)) for r in range(size)]


def train(replica: Any, module: nn.Module, oracle: nn.Module, rows: list[int]) -> list[int]:
    """Steps with so many rows; how many graphs there were after each of them."""
    graphs = []
    for step, many in enumerate(rows):
        batches = inputs(step, many)
        module.zero_grad()
        oracle.zero_grad()
        replica(batches[dist.get_rank()]).square().mean().backward()
        for x in batches:
            (oracle(x).square().mean() / len(batches)).backward()
        assert_gradients(module, gradients_of(oracle))
        graphs.append(counters["stats"]["unique_graphs"])
    return graphs


@pytest.mark.filterwarnings("ignore")  # dynamo's own
@FRONTS
@on_ranks(2, limit=100)
def test_one_graph_whose_buckets_overlap(front: str) -> None:
    """Also as a `fullgraph`: nothing of ours breaks it off, and nothing is compiled anew but for another shape."""
    for way, make_compiled in WAYS.items():
        for made in (Deep, sequential):
            if made is sequential and way.startswith("in place"):
                continue  # torch makes no graph of a container's own `__call__`
            torch._dynamo.reset()
            counters.clear()
            module = made()
            oracle = copy.deepcopy(module)
            inlined = (made, way, front) == (sequential, "after", "replicate")  # torch has a frame around it
            replica = make_compiled(front, module, fullgraph=not inlined)
            graphs = train(replica, module, oracle, [4, 4, 5, 5, 6])
            assert graphs == [1, 1, 2, 2, 2], f"{way}, {made.__name__}: {graphs}"
            assert inlined or not counters["graph_break"]
            told = gradsync.statistics(replica)
            assert 0 < told.overlapped_buckets < told.buckets, f"{way}, {made.__name__}"


@pytest.mark.filterwarnings("ignore")  # dynamo's own
@FRONTS
@on_ranks(2, limit=100)
def test_sizes_that_are_said_to_change(front: str) -> None:
    for marked in (False, True):
        torch._dynamo.reset()
        counters.clear()
        module = Deep()
        oracle = copy.deepcopy(module)
        replica = after(front, module, dynamic=None if marked else True)
        graphs = []
        for step in range(4):
            batches = inputs(step, 4 + step)
            x = batches[dist.get_rank()]
            if marked:
                torch._dynamo.mark_dynamic(x, 0)
            module.zero_grad()
            oracle.zero_grad()
            replica(x).square().mean().backward()
            for each in batches:
                (oracle(each).square().mean() / 2).backward()
            assert_gradients(module, gradients_of(oracle))
            graphs.append(counters["stats"]["unique_graphs"])
        assert graphs == [1] * 4


@pytest.mark.filterwarnings("ignore")  # dynamo's own
@FRONTS
@on_ranks(2, limit=100)
def test_blocks_of_a_model(front: str) -> None:
    module = Deep()
    oracle = copy.deepcopy(module)
    for block in module.blocks:
        block.compile(backend=BACKEND, fullgraph=True)
    replica = make(front, module, bucket_cap_mb=1)
    graphs = train(replica, module, oracle, [4] * 4)
    assert len(set(graphs)) == 1
    told = gradsync.statistics(replica)
    assert 0 < told.overlapped_buckets < told.buckets


@pytest.mark.filterwarnings("ignore")  # dynamo's own
@FRONTS
@on_ranks(2, limit=100)
def test_graphs_are_whole_where_nothing_overlaps(front: str) -> None:
    """Without gradients, outside of replicas, and where torch's own setting says so."""
    module = Deep()
    oracle = copy.deepcopy(module)
    whole: list[int] = []

    def backend(graph: Any, example: Any) -> Any:
        whole.append(sum(p.requires_grad for p in example if isinstance(p, Tensor)))
        return graph.forward

    replica = torch.compile(make(front, module), backend=backend)
    with torch.no_grad():
        replica(inputs(0, 4)[0])
    assert whole == [24]
    with config.patch(optimize_ddp=False):
        train(replica, module, oracle, [4])
    assert whole == [24, 24]
    torch._dynamo.reset()
    torch.compile(oracle, backend=backend)(inputs(0, 4)[0])
    assert whole == [24, 24, 24]
    torch._dynamo.reset()
    train(replica, module, oracle, [4])
    assert len(whole) > 4  # split


class Features(nn.Module):
    """A tied weight, batch normalization, dropout, a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.last.weight = self.first.weight
        self.others = nn.ModuleList(Block() for _ in range(8))
        self.norm, self.dropout = nn.BatchNorm1d(WIDTH), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(self.norm(self.first(x)))
        for block in self.others:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        return self.last(torch.relu(self.middle(x)))


@pytest.mark.filterwarnings("ignore")  # dynamo's own
@FRONTS
@on_ranks(2, limit=100)
def test_what_models_have(front: str) -> None:
    module = Features()
    plain = copy.deepcopy(module)
    replicas = [after(front, module), make(front, plain, bucket_cap_mb=1)]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (module, plain)]
    for step in range(3):
        x = inputs(step, 8)[dist.get_rank()]
        for replica, optimizer in zip(replicas, optimizers, strict=True):
            replica(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(module.state_dict(), plain.state_dict())
    same_everywhere(module)


@pytest.mark.filterwarnings("ignore")  # dynamo's own
@pytest.mark.parametrize("when", ["before", "after"])
@on_ranks(2, limit=100)
def test_parameters_that_compute_in_another_form(when: str) -> None:
    """Over a mesh, in low precision; with a step that accumulates."""
    mesh = init_device_mesh("cpu", (2,))
    policy = gradsync.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for options in ({"mesh": mesh}, {"mp_policy": policy}):
        torch._dynamo.reset()
        counters.clear()
        module, plain = Deep(), Deep()
        compiled: Any = torch.compile(module, backend=BACKEND) if when == "before" else module
        replica: Any = make("replicate", compiled, **options)
        if when == "after":
            replica = torch.compile(replica, backend=BACKEND)
        other = make("replicate", plain, **options)
        for step in range(3):
            x = inputs(step, 4)[dist.get_rank()]
            for one in (replica, other):
                with one.no_sync() if step == 1 else contextlib.nullcontext():
                    one(x).float().square().mean().backward()
        assert counters["stats"]["unique_graphs"] == 1
        assert_gradients(module, [full(parameter.grad) for parameter in plain.parameters()])
        assert gradsync.statistics(replica).overlapped_buckets > 0


@pytest.mark.filterwarnings("ignore")  # dynamo's own
@pytest.mark.parametrize("in_backward", [False, True])
@on_ranks(2, limit=100)
def test_one_model_a_host(in_backward: bool) -> None:
    """Parameters that have moved to common memory are those of the graph."""
    module, plain = Deep(), Deep()
    model, other = make("replicate", module, share_parameters=True), make("replicate", plain)
    replica = torch.compile(model, backend=BACKEND)
    optimizers: list[Any] = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (module, plain)]
    if in_backward:
        gradsync.overlap_optimizer(model, optimizers[0])
    else:
        gradsync.share_optimizer(optimizers[0])
    graphs = []
    for step, rows in enumerate([4, 4, 5, 5, 6]):
        for one in (replica, other):
            one(inputs(step, rows)[dist.get_rank()]).square().mean().backward()
        for optimizer in optimizers[in_backward:]:
            optimizer.step()
            optimizer.zero_grad()
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == [1, 1, 2, 2, 2]
    torch.testing.assert_close(list(module.parameters()), list(plain.parameters()))


# --- optimizers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shares", [False, True])
@on_ranks(2, limit=100)
def test_compiled_optimizers(shares: bool) -> None:
    """Compiled once, right, and refused where a plain step is. One that is shared is left as it is."""
    module, plain = Block(), Block()
    plain.load_state_dict(module.state_dict())
    replica, other = make("replicate", module, share_parameters=shares), make("replicate", plain)
    compiled, optimizer = torch.optim.AdamW(module.parameters()), torch.optim.AdamW(plain.parameters())
    if shares:
        gradsync.share_optimizer(compiled)
    step = torch.compile(compiled.step, backend=BACKEND)
    for number in range(4):
        x = inputs(number, 4)[dist.get_rank()]
        replica(x).square().mean().backward()
        other(x).square().mean().backward()
        step()
        optimizer.step()
        compiled.zero_grad()
        optimizer.zero_grad()
        assert counters["stats"]["unique_graphs"] == (not shares)
    torch.testing.assert_close(list(module.parameters()), list(plain.parameters()))
    same_everywhere(module)
    with replica.no_sync():
        replica(x).square().mean().backward()
    kept = [parameter.clone() for parameter in module.parameters()]
    with pytest.raises(UnsynchronizedStepError):
        step()
    torch.testing.assert_close(list(module.parameters()), kept, rtol=0, atol=0)
