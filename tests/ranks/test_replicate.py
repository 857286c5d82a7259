"""The composable front: in place, nested, undone; what it refuses; how it works with torch's other APIs."""

from __future__ import annotations

import copy
import io
import pickle
import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import DataParallelMeshDims, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import gradsync
from gradsync import contract, errors, tensor_parallel
from tests.ranks.small import assert_gradients, backward, batch, mean_gradients
from tests.support.ranks import on_ranks


def build() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()


# --- in place ----------------------------------------------------------------------------------------


@on_ranks(2)
def test_in_place() -> None:
    module = build()
    text = repr(module)
    names = [name for name, _ in module.named_modules()], [name for name, _ in module.named_parameters()]
    order: list[str] = []
    module.register_forward_pre_hook(lambda *_: order.append("before"))
    replica = gradsync.replicate(module)
    module.register_forward_hook(lambda *_: order.append("after"))
    assert replica is module
    assert type(module).__name__ == "Sequential"  # by which serializers go
    assert issubclass(type(module), nn.Sequential)
    assert issubclass(type(module), gradsync.ReplicateModule)
    assert type(module[:2]) is nn.Sequential  # a slice is a plain container again
    assert module[0] is next(iter(module.children()))
    assert repr(module) == text.replace("Sequential", "ReplicateSequential")
    assert names == ([n for n, _ in module.named_modules()], [n for n, _ in module.named_parameters()])
    module(batch(0).double()).sum().backward()
    assert order == ["before", "after"]
    assert list(contract.registry(module)) == ["replicate"]
    assert contract.registry(module[0]) == {} or not contract.registry(module[0])


class Branchy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x).relu()
        return out


def traced(module: nn.Module) -> list[torch.fx.Node]:
    return list(torch.fx.symbolic_trace(nn.Sequential(module)).graph.nodes)


@pytest.mark.filterwarnings("ignore")  # torch's, of exporting
@on_ranks(2)
def test_names_of_classes() -> None:
    """Saved by the name of its class, as frameworks do, a replica is found again under that of its own class."""
    for module in (nn.Linear(2, 2), Branchy()):
        original = type(module)
        exported = str(torch.export.export(copy.deepcopy(module), (torch.ones(1, 2),)).graph_module.code)
        names = [str(node.meta.get("nn_module_stack")) for node in traced(module)]
        gradsync.replicate(module)
        assert type(module) is not original
        for attribute in ("__name__", "__qualname__", "__module__"):
            assert getattr(type(module), attribute) == getattr(original, attribute)
        assert f"Replicate{original.__name__}" in repr(module)
        saved = io.BytesIO()
        torch.save(module, saved)
        saved.seek(0)
        assert type(torch.load(saved, weights_only=False)) is original
        assert type(pickle.loads(pickle.dumps(module))) is original
        assert isinstance(copy.deepcopy(module), gradsync.ReplicateModule)
        assert names == [str(node.meta.get("nn_module_stack")) for node in traced(module)]
        assert exported == torch.export.export(gradsync.unreplicate(module), (torch.ones(1, 2),)).graph_module.code
        assert type(module) is original


@on_ranks(2)
def test_nested() -> None:
    module = build()
    expected = mean_gradients(module)
    gradsync.replicate(module[0], bucket_cap_mb=1, gradient_as_bucket_view=False)
    gradsync.replicate([module[2], module[4]])
    gradsync.replicate(module)  # nothing is left for it, and that is fine
    backward(module)
    assert_gradients(module, expected)
    assert [gradsync.statistics(module[i]).rounds for i in (0, 2, 4)] == [1, 1, 1]
    module.zero_grad()
    module.set_requires_gradient_sync(False)  # recurses
    backward(module)
    assert [gradsync.statistics(module[i]).rounds for i in (0, 2, 4)] == [1, 1, 1]
    module.set_requires_gradient_sync(True)
    for i in (0, 2):
        module[i].synchronize_gradients()  # without another backward
    assert_gradients(module, expected)
    gradsync.unreplicate(module[2])
    assert type(module[4]) is nn.Linear  # of a list, undoing one undoes all


@on_ranks(2)
def test_nested_in_a_list() -> None:
    module = build()
    first, second = nn.Sequential(module[0], nn.ReLU()), nn.Sequential(module[2], nn.ReLU())
    expected = mean_gradients(module)
    gradsync.replicate(first[0])
    gradsync.replicate([first, second, module[4]])  # whose parameters have the module's number in their names
    backward(module)
    assert_gradients(module, expected)


@on_ranks(2)
def test_ignored_modules_and_parameters() -> None:
    module = build()
    gradsync.replicate(module, ignored_modules=[module[0]], ignored_params={module[2].bias})
    backward(module)
    local = torch.autograd.grad(module(batch(dist.get_rank()).double()).square().mean(), list(module.parameters()))
    same = [torch.equal(p.grad, g) for p, g in zip(module.parameters(), local, strict=True)]
    assert same == [True, True, False, True, False, False]


# --- mistakes ----------------------------------------------------------------------------------------


@on_ranks(1)
def test_mistakes() -> None:
    linear = nn.Linear(2, 2)
    for container in (nn.ModuleList([linear]), nn.ModuleDict({"a": linear})):
        with pytest.raises(ValueError, match="replicate does not support containers that do not implement forward"):
            gradsync.replicate(container)
    for wrong in ("cuda:0", 1.5, True):
        with pytest.raises(RuntimeError, match=r"Expected device_id to be int or torch\.device, but got"):
            gradsync.replicate(linear, device_id=wrong)  # type: ignore[arg-type]
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
    with pytest.raises(ValueError, match="replicate expects a 1D DeviceMesh but got"):
        gradsync.replicate(linear, mesh=mesh)
    with pytest.raises(ValueError, match="requires replicate-only dims"):
        gradsync.replicate(linear, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="a"))
    with pytest.raises(ValueError, match="Mesh dim name 'x' not found"):
        gradsync.replicate(linear, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(replicate="x"))
    with pytest.raises(ValueError, match="no option 'colour'"):
        gradsync.replicate(linear, colour="red")
    with pytest.raises(ValueError, match="Choose one"):
        gradsync.replicate(linear, mesh=mesh["a"], process_group=dist.group.WORLD)
    inside: Any = gradsync.replicate(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match=r"'weight' belongs to Sequential.*Replicate inner modules first"):
        gradsync.replicate(inside[0])
    with pytest.raises(ValueError, match="empty list"):
        gradsync.replicate([])
    assert not contract.registry(linear)  # nothing of all this was left behind
    gradsync.replicate(linear, device_id=torch.device("cpu"))
    with pytest.raises(ValueError, match="Expects FSDPModule but got"):
        linear.set_modules_to_forward_prefetch([nn.Linear(1, 1)])  # type: ignore[operator]


@on_ranks(2)
def test_without_a_broadcast_values_are_compared() -> None:
    module = build()
    gradsync.replicate(copy.deepcopy(module), init_sync=False)
    if dist.get_rank() == 1:
        with torch.no_grad():
            module[2].bias[0] += 1e-15
    rank = dist.get_rank()
    with pytest.raises(errors.ReplicaDivergedError, match=rf"rank {rank}: .*different values of '2.bias'\. Seed"):
        gradsync.replicate(module, init_sync=False)
    gradsync.replicate(module)


# --- methods -----------------------------------------------------------------------------------------


@on_ranks(2)
def test_setters() -> None:
    replica = gradsync.replicate(build())
    expected = mean_gradients(build())
    replica.set_gradient_divide_factor(1.0)  # a sum
    backward(replica)
    assert_gradients(replica, [2 * gradient for gradient in expected])
    backward(replica)  # and a sum of two
    assert_gradients(replica, [4 * gradient for gradient in expected])
    replica.zero_grad()
    replica.set_gradient_divide_factor(2.0)
    seen: list[int] = []
    replica.set_all_reduce_hook(lambda flat: seen.append(flat.numel()))
    backward(replica)
    assert_gradients(replica, expected)
    assert sum(seen) == 60
    with pytest.raises(errors.InvalidOptionError, match="divide factor"):
        replica.set_gradient_divide_factor(0)
    # There is nothing to shard; the setters are there.
    handle = replica.unshard(async_op=True)
    assert handle is not None
    handle.wait()
    for name in ("reshard_after_forward", "reshard_after_backward", "unshard_in_backward", "requires_all_reduce"):
        getattr(replica, f"set_{name}")(True)
    replica.reshard()
    replica.set_force_sum_reduction_for_comms(True)
    replica.set_modules_to_backward_prefetch([replica])


@dataclass
class Inputs:
    x: Tensor
    scale: float


class Methods(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, inputs: Inputs) -> dict[str, Any]:
        return {"out": self.linear(inputs.x) * inputs.scale, "dtype": inputs.x.dtype}

    def score(self, x: Tensor) -> Tensor:
        return self.linear(x)


@on_ranks(2)
def test_methods_other_than_forward_and_dataclass_inputs() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    replica = gradsync.replicate(Methods(), mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
    gradsync.register_forward_method(replica, "score")
    out = replica(Inputs(torch.ones(1, 4), 2.0))
    assert out["dtype"] is torch.bfloat16  # inside the dataclass too
    out["out"].float().sum().backward()
    score = replica.score(torch.full((1, 4), dist.get_rank() + 1.0))
    assert score.dtype is torch.bfloat16
    replica.zero_grad()
    score.float().sum().backward()
    gradient = next(replica.parameters()).grad
    assert isinstance(gradient, DTensor)
    assert torch.equal(gradient.full_tensor(), torch.full((2, 4), 1.5))
    with pytest.raises(errors.InvalidOptionError, match="no method 'nothing'"):
        gradsync.register_forward_method(replica, "nothing")


@on_ranks(2)
def test_a_pipeline_of_micro_batches() -> None:
    """1F1B as a pipeline stage drives it: forwards run ahead, only the last micro-batch synchronizes."""
    mesh = init_device_mesh("cpu", (2,))
    choices: list[dict[str, Any]] = [{"mesh": mesh}, {}]
    for options in choices:
        replica: Any = gradsync.replicate(build(), **options)
        plain = build()
        count, ahead = 4, 2
        losses: list[Tensor] = []
        for micro in range(count + ahead):
            if micro < count:
                losses.append(replica(batch(dist.get_rank(), micro).double()).square().mean())
            if micro >= ahead:
                last = micro - ahead == count - 1
                replica.set_is_last_backward(last)
                replica.set_requires_gradient_sync(last)
                losses[micro - ahead].backward()
        for part in range(2):
            for micro in range(count):
                (plain(batch(part, micro).double()).square().mean() / 2).backward()
        assert_gradients(replica, [p.grad for p in plain.parameters() if p.grad is not None])
        assert gradsync.statistics(replica).rounds == 1


# --- with torch's other APIs -------------------------------------------------------------------------


@on_ranks(2)
def test_with_fully_shard() -> None:
    module = build()
    expected = mean_gradients(module)
    fully_shard(module[2])
    with pytest.raises(RuntimeError, match="already managed by `fully_shard`"):
        gradsync.replicate(module[2])
    gradsync.replicate(module)
    assert isinstance(module[2].weight, DTensor)
    assert module[2].weight.placements == (Shard(0),)
    assert not isinstance(module[0].weight, DTensor)
    backward(module)
    assert_gradients(module, expected)
    module = build()
    gradsync.replicate(module[0])
    fully_shard(module)  # an ancestor's: leaves replicated submodules alone
    assert isinstance(module[2].weight, DTensor)
    assert not isinstance(module[0].weight, DTensor)
    backward(module)
    assert_gradients(module, expected)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("kind", ["group", "mesh"])
@on_ranks(2)
def test_distributed_checkpoint(kind: str) -> None:
    module = build()
    options: dict[str, Any] = {"mesh": init_device_mesh("cpu", (2,))} if kind == "mesh" else {}
    replica = gradsync.replicate(module, **options)
    optimizer = torch.optim.AdamW(replica.parameters(), lr=0.1)

    def step(part: int) -> None:
        optimizer.zero_grad()
        replica(batch(part).double()).square().mean().backward()
        optimizer.step()

    step(dist.get_rank())
    saved = copy.deepcopy(get_state_dict(replica, optimizer))
    step(dist.get_rank())
    after = gradsync.fingerprint(replica)
    set_state_dict(replica, optimizer, model_state_dict=saved[0], optim_state_dict=saved[1])
    step(dist.get_rank())
    assert gradsync.fingerprint(replica) == after
    assert set(saved[0]) == set(build().state_dict())


@on_ranks(4)
def test_dimensions_of_a_larger_mesh() -> None:
    """Parameters that are DTensors over the whole mesh already, of which some dimensions are replicated."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    module = build()
    expected = mean_gradients(module, parts=range(4))
    distribute_module(module, mesh)
    replica = gradsync.replicate(module, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(replicate=("outer", "inner")))
    backward(replica)
    for parameter in replica.parameters():
        assert isinstance(parameter, DTensor)
        assert parameter.placements == (Replicate(), Replicate())
    assert_gradients(replica, expected)
    sliced = build()
    gradsync.replicate(sliced, mesh=mesh["inner"])
    assert sliced[0].weight.device_mesh.shape == (2,)
    sliced(batch(mesh["inner"].get_local_rank()).double()).square().mean().backward()
    assert_gradients(sliced, mean_gradients(build()))


@on_ranks(2)
def test_localized_by_hand() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    module = build()
    expected = mean_gradients(module, parts=[0])
    parallelize_module(module, mesh, {"0": ColwiseParallel(output_layouts=Replicate())})
    undo = tensor_parallel.pre_dp_module_transform(module)
    names = [name for name, _ in build().named_parameters()]
    assert [name for name, _ in module.named_parameters()] == names
    assert module[0].weight.shape == (2, 4)
    for _ in range(2):
        module.zero_grad()
        module(batch(0).double()).square().mean().backward()
        assert [name for name, _ in module.named_parameters()] == names
        torch.testing.assert_close(module[0].weight.grad, expected[0].chunk(2)[dist.get_rank()])
    undo()
    assert isinstance(module[0].weight, DTensor)
    assert torch.equal(module[0].weight.full_tensor(), build()[0].weight)
    owner, name = tensor_parallel.find_parameter(module, "2.bias")
    assert (owner, name) == (module[2], "bias")
    tensor_parallel.replace_parameters(module, {"2.bias": nn.Parameter(torch.zeros(4, dtype=torch.float64))})
    assert not module[2].bias.any()
    for path in ("9.bias", "2.nothing"):
        with pytest.raises(errors.InvalidOptionError, match=re.escape(path.split(".")[-1]) + "|'9'"):
            tensor_parallel.find_parameter(module, path)
