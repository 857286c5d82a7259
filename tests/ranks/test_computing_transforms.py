"""Replicas with other computing forms, over a mesh or in low precision, inside the transforms of `torch.func`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.func import functional_call, grad, hessian, jacrev, jvp, vjp, vmap
from torch.nn.parallel.distributed import _MixedPrecision

import gradsync
from tests.ranks.small import batch, build, full
from tests.support.ranks import on_ranks

LOW = torch.bfloat16


def total(module: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: module(x.to(LOW) if module[0].weight.dtype is LOW else x).float().square().sum()


def by_vjp(module: Any, x: Tensor) -> Any:
    made: Any = vjp(total(module), x)
    return made[0], made[1](torch.ones_like(made[0]))


TRANSFORMS: dict[str, Callable[[Any, Tensor], Any]] = {
    "jvp": lambda module, x: jvp(total(module), (x,), (torch.ones_like(x),)),
    "vjp": by_vjp,
    "grad": lambda module, x: grad(total(module))(x),
    "grad of grad": lambda module, x: grad(lambda y: grad(total(module))(y).square().sum())(x),
    "vmap": lambda module, x: vmap(total(module))(x),
    "vmap of grad": lambda module, x: vmap(grad(total(module)))(x),
    "jacrev": lambda module, x: jacrev(total(module))(x),
    "hessian": lambda module, x: hessian(total(module))(x[0]),
}


class Through(nn.Module):
    """A wrapped module looks to `total` like the module itself."""

    def __init__(self, wrapper: Any) -> None:
        super().__init__()
        self.wrapper = wrapper

    def __getitem__(self, index: int) -> Any:
        return self.wrapper.module[index]

    def forward(self, x: Tensor) -> Any:
        return self.wrapper(x)


def made(kind: str) -> tuple[Any, Any]:
    """A replica, and a plain module that computes the same."""
    module = build()
    plain = copy.deepcopy(module)
    policy = MixedPrecisionPolicy(param_dtype=LOW)
    if kind == "wrapper":
        precision = _MixedPrecision(param_dtype=LOW)
        return Through(gradsync.DistributedDataParallel(module, mixed_precision=precision)), plain.to(LOW)
    if kind == "policy":
        return gradsync.replicate(module, mp_policy=policy), plain.to(LOW)
    mesh = init_device_mesh("cpu", (2,))
    if kind == "mesh":
        return gradsync.replicate(module, mesh=mesh), plain
    return gradsync.replicate(module, mesh=mesh, mp_policy=policy), plain.to(LOW)


def check_gradients(model: Any, plain: Any) -> None:
    plain.zero_grad()
    low = next(plain.parameters()).dtype
    losses = [plain(batch(part).to(low)).float().square().mean() for part in range(2)]
    (sum(losses) / 2).backward()
    tolerance = {} if low is torch.float32 else {"atol": 0.02, "rtol": 0.05}
    for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        assert (found.grad is None) is (wanted.grad is None)
        if found.grad is None:
            continue
        torch.testing.assert_close(full(found.grad).float(), wanted.grad.float(), **tolerance)  # type: ignore[arg-type]


KINDS = ["policy", "mesh", "both", "wrapper"]


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_transforms(kind: str) -> None:
    """The results are those of a plain module in the policy's precision, also after a step, and training goes on."""
    model, plain = made(kind)
    before = [type(parameter) for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(3):
        for name, transform in TRANSFORMS.items():
            found, wanted = transform(model, batch(0)), transform(plain, batch(0))
            torch.testing.assert_close(found, wanted, msg=f"{name} differs")
            assert [type(parameter) for parameter in model.parameters()] == before, name
        optimizer.zero_grad()
        model(batch(dist.get_rank())).float().square().mean().backward()
        check_gradients(model, plain)
        optimizer.step()
        with torch.no_grad():
            for mine, registered in zip(plain.parameters(), model.parameters(), strict=True):
                mine.copy_(full(registered))
        freezes = next(model.parameters())
        freezes.requires_grad_(not freezes.requires_grad)
        next(plain.parameters()).requires_grad_(freezes.requires_grad)


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_functional_call(kind: str) -> None:
    """`functional_call` computes with what it is given, in the policy's precision, and leaves the module as it was."""
    model, plain = made(kind)
    registered = list(model.parameters())
    names = [name for name, _ in model.named_parameters()]
    low = next(plain.parameters()).dtype
    others = {name: torch.randn(p.shape) for name, p in model.named_parameters()}
    theirs = {name: other.to(low) for name, other in zip(dict(plain.named_parameters()), others.values(), strict=True)}
    x = batch(0)
    wanted = functional_call(plain, theirs, (x.to(low),))
    found = functional_call(model, others, (x,))
    torch.testing.assert_close(found, wanted)
    assert all(a is b for a, b in zip(model.parameters(), registered, strict=True))

    def loss(given: Any) -> Tensor:
        return functional_call(model, dict(zip(names, given, strict=True)), (x,)).float().square().sum()

    def expected(given: Any) -> Tensor:
        lower = dict(zip(theirs, (one.to(low) for one in given), strict=True))
        return functional_call(plain, lower, (x.to(low),)).float().square().sum()

    values = list(others.values())
    torch.testing.assert_close(grad(loss)(values), grad(expected)(values))
    assert all(a is b for a, b in zip(model.parameters(), registered, strict=True))
    leaves = [value.clone().requires_grad_() for value in values]
    loss(leaves).backward()
    assert all(leaf.grad is not None for leaf in leaves)
    assert all(parameter.grad is None for parameter in model.parameters())
    # And with its own registered parameters, as they are.
    own = functional_call(model, dict(model.named_parameters()), (x,))
    torch.testing.assert_close(own, plain(x.to(low)))
    assert all(a is b for a, b in zip(model.parameters(), registered, strict=True))
    model.zero_grad()
    model(batch(dist.get_rank())).float().square().mean().backward()
    check_gradients(model, plain)
    gradsync.verify(model.wrapper if kind == "wrapper" else model)
