"""torch's pipeline stages and schedules around replicas, also those that split a backward in two."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

import gradsync
from tests.ranks.small import full
from tests.support.ranks import on_ranks

FRONTS = ["mesh", "nested mesh", "replicate", "wrapper"]


def build(seed: int) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4)).double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs, targets = torch.randn(2, 16, 4, dtype=torch.float64, generator=generator)
    return inputs, targets


def error(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def wrap(module: Any, front: str, mesh: DeviceMesh, **options: Any) -> Any:
    if front == "wrapper":
        # Torch's stages look for torch's class.
        nn.parallel.DistributedDataParallel.register(gradsync.DistributedDataParallel)
        return gradsync.DistributedDataParallel(module, process_group=mesh.get_group(), **options)
    if front == "replicate":
        return gradsync.replicate(module, process_group=mesh.get_group(), **options)
    if front == "nested mesh":
        gradsync.replicate(module[2], mesh=mesh, **options)
    return gradsync.replicate(module, mesh=mesh, **options)


def check(replica: Any, plain: Any, step: int) -> None:
    for (name, found), wanted in zip(replica.named_parameters(), plain.parameters(), strict=True):
        assert found.grad is not None, (step, name)
        torch.testing.assert_close(full(found.grad), wanted.grad, msg=f"step {step}: gradient of {name} differs")


# --- by hand -------------------------------------------------------------------------------------------


def halves(replica: Any, inputs: Tensor, target: Tensor) -> tuple[Any, Any]:
    """A forward, and the backward's first half: what gives the gradients of parameters then."""
    x = inputs.clone().requires_grad_()
    loss = error(replica(x), target)
    _, groups = stage_backward_input([loss], None, [x], replica.parameters())
    return x.grad, groups


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
@pytest.mark.parametrize("front", FRONTS)
@on_ranks(2)
def test_halves_by_hand(front: str, transport: str, set_to_none: bool) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    replica, plain = wrap(build(0), front, mesh, transport=transport), build(0)
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.1, momentum=0.9)
    expected = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        inputs, targets = batch(step)
        own = [part.chunk(2)[dist.get_rank()].chunk(2) for part in (inputs, targets)]
        for x, target in zip(*own, strict=True):
            gradient, groups = halves(replica, x, target)
            assert gradient is not None
            stage_backward_weight(replica.parameters(), groups)
        with pytest.raises(gradsync.errors.UnsynchronizedStepError, match=r"weight'.*synchronize_gradients\(\)"):
            optimizer.step()
        replica.synchronize_gradients()
        for x, target in zip(inputs.chunk(4), targets.chunk(4), strict=True):
            (error(plain(x), target) / 2).backward()
        check(replica, plain, step)
        for one in (optimizer, expected):
            one.step()
            one.zero_grad(set_to_none=set_to_none)
    gradsync.verify(replica, optimizer)


@pytest.mark.parametrize("first", ["half", "full"])
@pytest.mark.parametrize("front", ["mesh", "replicate", "wrapper"])
@on_ranks(2)
def test_a_full_backward_among_halves(front: str, first: str) -> None:
    """A full backward before or between the halves of another one: what is added by hand after it is noticed."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    replica, plain = wrap(build(0), front, mesh), build(0)
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        plain.zero_grad()
        inputs, targets = batch(step)
        x, target = (part.chunk(2)[dist.get_rank()].chunk(2) for part in (inputs, targets))
        if first == "full":
            error(replica(x[1]), target[1]).backward()
        _, groups = halves(replica, x[0], target[0])
        if first == "half":
            error(replica(x[1]), target[1]).backward()
        stage_backward_weight(replica.parameters(), groups)
        for parameter in replica.parameters():  # as stages scale them
            parameter.grad.div_(2)
        with pytest.raises(gradsync.errors.UnsynchronizedStepError, match=r"synchronize_gradients\(\)"):
            optimizer.step()
        replica.synchronize_gradients()
        for part, wanted in zip(inputs.chunk(4), targets.chunk(4), strict=True):
            (error(plain(part), wanted) / 4).backward()
        check(replica, plain, step)


@pytest.mark.parametrize("after", ["backward", "reshard"])
@on_ranks(2)
def test_parameters_out_of_sight(after: str) -> None:
    """Where the second half would not find the parameters that compute, the first one says so."""
    mesh = init_device_mesh("cpu", (2,))
    replica: Any = gradsync.replicate(build(0), mesh=mesh)
    x = torch.ones(2, 4, dtype=torch.float64, requires_grad=True)
    other, output = replica(x).sum(), replica(x).sum()
    other.backward() if after == "backward" else replica.reshard()
    with pytest.raises(RuntimeError) as raised:
        stage_backward_input([output], None, [x], replica.parameters())
    assert isinstance(raised.value.__cause__, gradsync.errors.UnfinishedRoundError)
    assert "process_group instead of a mesh" in str(raised.value.__cause__)


@on_ranks(2)
def test_halves_in_low_precision() -> None:
    mesh = init_device_mesh("cpu", (2,))
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)
    replica, plain = wrap(build(0), "mesh", mesh, mp_policy=policy), build(0)
    inputs, targets = batch(0)
    x, target = (part.chunk(2)[dist.get_rank()] for part in (inputs, targets))
    _, groups = halves(replica, x, target)
    stage_backward_weight(replica.parameters(), groups)
    replica.synchronize_gradients()
    error(plain(inputs), targets).backward()
    for found, wanted in zip(replica.parameters(), plain.parameters(), strict=True):
        assert found.grad.dtype is torch.float64
        torch.testing.assert_close(full(found.grad), wanted.grad, atol=1e-6, rtol=1e-5)


# --- by torch's schedules --------------------------------------------------------------------------------


SPLITTING = ["ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble"]
SCHEDULES = [*SPLITTING, "Schedule1F1B", "ScheduleInterleaved1F1B"]
MIXING = [("replicate", "ScheduleDualPipeV"), ("wrapper", "ScheduleDualPipeV")]  # full and split backwards


@pytest.mark.parametrize(
    ("front", "schedule"), [*((front, schedule) for front in FRONTS for schedule in SCHEDULES), *MIXING]
)
@on_ranks(4)
def test_schedules(front: str, schedule: str) -> None:
    """2 pipelines of 2 ranks with 2 stages each, next to one process on the whole batch."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    pp, dp = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    kind: Any = getattr(schedules, schedule)
    several = schedule not in ("Schedule1F1B", "ScheduleGPipe")
    is_v = "V" in schedule
    numbers = [pp, 3 - pp if is_v else pp + 2] if several else [pp]
    total = 4 if several else 2
    splits = is_v or "ZeroBubble" in schedule
    replicas = [wrap(build(number), front, mesh["dp"]) for number in numbers]
    stages = [
        PipelineStage(replica, number, total, torch.device("cpu"), group=mesh.get_group("pp"))
        for replica, number in zip(replicas, numbers, strict=True)
    ]
    running = kind(stages if several else stages[0], n_microbatches=4, loss_fn=error)
    plain = nn.Sequential(*(build(number) for number in range(total)))
    optimizers = [torch.optim.SGD(replica.parameters(), lr=0.1, momentum=0.9) for replica in replicas]
    expected = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        inputs, targets = batch(step)
        fed = (inputs.chunk(2)[dp],) if 0 in numbers else ()
        running.step(*fed, **({"target": targets.chunk(2)[dp]} if total - 1 in numbers else {}))
        error(plain(inputs), targets).backward()
        for replica, number, optimizer in zip(replicas, numbers, optimizers, strict=True):
            if splits:
                if number:  # all but the first, whose second half is a full backward
                    with pytest.raises(gradsync.errors.UnsynchronizedStepError, match=r"synchronize_gradients\(\)"):
                        optimizer.step()
                replica.synchronize_gradients()
            check(replica, plain[number], step)
            if front == "wrapper" and not splits:
                assert gradsync.statistics(replica).rounds == step + 1  # only the last micro-batch's
            optimizer.step()
            optimizer.zero_grad()
        expected.step()
        expected.zero_grad()
    for replica, optimizer in zip(replicas, optimizers, strict=True):
        gradsync.verify(replica, optimizer)
