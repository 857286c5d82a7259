"""A replica over a mesh inside another one: its parameters compute as long as a forward around it runs."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint

import gradsync
from tests.support.ranks import on_ranks


class Tied(nn.Module):
    """The embedding's weight is used once by the embedding, replicated by itself, and again by the parent."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.body = nn.Linear(4, 4)
        self.inner = inner
        self.fails = False
        self.reentrant: bool | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        if self.reentrant is None:
            hidden = self.hide(tokens)
        else:
            anchor = torch.zeros(1, requires_grad=True)  # a reentrant checkpoint wants an input with a gradient
            hidden = checkpoint(lambda _: self.hide(tokens), anchor, use_reentrant=self.reentrant)
        if self.fails:
            raise ValueError("on purpose")
        logits = hidden @ self.embed.weight.T
        return logits if self.inner is None else logits + self.inner(tokens)

    def hide(self, tokens: Tensor) -> Tensor:
        return torch.tanh(self.body(self.embed(tokens)))

    def score(self, tokens: Tensor) -> Tensor:
        return self.hide(tokens) @ self.embed.weight.T


class Tower(nn.Module):
    """One more level."""

    def __init__(self, tied: nn.Module) -> None:
        super().__init__()
        self.tied = tied
        self.scale = nn.Parameter(torch.tensor([0.5]))

    def forward(self, tokens: Tensor) -> Tensor:
        tied: Any = self.tied
        return self.scale * tied(tokens) @ tied.embed.weight @ tied.body.weight


def tokens(part: int) -> Tensor:
    return torch.randint(0, 6, (5,), generator=torch.Generator().manual_seed(part))


def is_registered(module: nn.Module) -> bool:
    return all(isinstance(parameter, DTensor) for parameter in module.parameters())


def nest(deep: bool, policy: Any = None) -> tuple[Any, Any, Callable[[nn.Module], Any]]:
    """A nested replica, a plain copy of it, and what finds the inner part with the tied embedding."""
    torch.manual_seed(0)
    model: Any = Tower(Tied()) if deep else Tied()
    plain = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (2,))
    tied = model.tied if deep else model
    parts = [tied.embed, tied, model] if deep else [tied.embed, model]
    for part in parts:
        gradsync.replicate(part, mesh=mesh, mp_policy=policy)
    return model, plain, lambda module: module.tied if deep else module


def check_step(model: Any, plain: Any) -> None:
    """One step is that of one process on the whole batch, and afterwards all parameters are registered."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = torch.optim.SGD(plain.parameters(), lr=0.1)
    optimizer.zero_grad()
    expected.zero_grad()
    model(tokens(dist.get_rank())).square().mean().backward()
    (sum(plain(tokens(part)).square().mean() for part in range(2)) / 2).backward()
    assert is_registered(model)
    for (name, found), wanted in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert found.grad is not None, name
        torch.testing.assert_close(found.grad.full_tensor(), wanted.grad, msg=name)
    optimizer.step()
    expected.step()


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@on_ranks(2)
def test_without_gradients(mode: Callable[[], AbstractContextManager[Any]], deep: bool) -> None:
    model, plain, inner = nest(deep)
    for _ in range(2):
        with mode():
            found, wanted = model(tokens(0)), plain(tokens(0))
        torch.testing.assert_close(found, wanted)
        assert is_registered(model)
        with mode():  # a child by itself, outside of its parent
            inner(model).embed(tokens(0))
        assert is_registered(model)
        check_step(model, plain)


@pytest.mark.parametrize("deep", [False, True])
@on_ranks(2)
def test_inside_vmap(deep: bool) -> None:
    model, plain, _ = nest(deep)
    batch = torch.stack([tokens(0), tokens(1)])
    torch.testing.assert_close(torch.vmap(model)(batch), torch.vmap(plain)(batch))
    assert is_registered(model)
    check_step(model, plain)


@pytest.mark.parametrize("grad", [False, True])
@on_ranks(2)
def test_a_forward_that_raises(grad: bool) -> None:
    """A forward that raises, after the child's forward, leaves all parameters registered."""
    model, plain, _ = nest(deep=True)
    for _ in range(2):
        model.tied.fails = True
        with torch.set_grad_enabled(grad), pytest.raises(ValueError, match="on purpose"):
            model(tokens(0))
        assert is_registered(model)
        model.tied.fails = False
        check_step(model, plain)


class Lenient(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        inner: Any = self.inner
        with contextlib.suppress(ValueError):
            inner(x)
        return x.double() @ inner.tied.embed.weight[:5].double()


@on_ranks(2)
def test_a_parent_that_catches() -> None:
    """A parent that catches what a child raises goes on with the child's parameters."""
    model, plain, _ = nest(deep=True)
    model.tied.fails = plain.tied.fails = True
    expected = Lenient(plain)
    outer = gradsync.replicate(Lenient(model), mesh=init_device_mesh("cpu", (2,)))
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(outer(tokens(0)), expected(tokens(0)))
    outer(tokens(0)).sum().backward()
    assert is_registered(outer)


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
@on_ranks(2)
def test_recomputed(reentrant: bool, deep: bool) -> None:
    model, plain, inner = nest(deep)
    inner(model).reentrant = inner(plain).reentrant = reentrant
    for _ in range(2):
        check_step(model, plain)
        with torch.no_grad():
            torch.testing.assert_close(model(tokens(0)), plain(tokens(0)))
        assert is_registered(model)


@on_ranks(2)
def test_another_method() -> None:
    model, plain, _ = nest(deep=False)
    gradsync.register_forward_method(model, "score")
    with torch.no_grad():
        torch.testing.assert_close(model.score(tokens(0)), plain.score(tokens(0)))
    assert is_registered(model)
    model.score(tokens(dist.get_rank())).square().mean().backward()
    assert is_registered(model)
    model.zero_grad()
    check_step(model, plain)


@on_ranks(2)
def test_a_child_whose_output_is_not_used() -> None:
    """A child whose output is not used is registered again after the backward all the same."""
    model, _, _ = nest(deep=False)
    model.hide = lambda x: (model.embed(x), model.body(torch.ones(5, 4)))[1]
    model(tokens(0)).sum().backward()
    assert is_registered(model)
    with torch.no_grad():
        model.embed(tokens(0))
    assert is_registered(model)


@on_ranks(2)
def test_in_low_precision() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model, plain, _ = nest(deep=True, policy=policy)
    with torch.no_grad():
        found = model(tokens(0))
        assert found.dtype is torch.bfloat16
        torch.testing.assert_close(found.float(), plain(tokens(0)), atol=0.02, rtol=0.02)
    assert is_registered(model)
    assert all(parameter.dtype is torch.float32 for parameter in model.parameters())


@on_ranks(2)
def test_a_backward_inside_a_forward() -> None:
    """A backward inside the parent's forward, of the child alone, does not end the child's part in that forward."""
    model, plain, _ = nest(deep=False)

    def hide(self: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            self.embed(x).square().sum().backward()
        return torch.tanh(self.body(self.embed(x)))

    model.hide, plain.hide = hide.__get__(model), hide.__get__(plain)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens(0)), plain(tokens(0)))
    assert is_registered(model)


@on_ranks(2)
def test_the_wrapper_after_a_forward_that_raises() -> None:
    """With the wrapper, whose precision has other forms too: a forward that raises leaves the registered ones."""
    torch.manual_seed(0)
    tied = Tied()
    model = gradsync.DistributedDataParallel(tied, mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16))
    tied.fails = True
    with pytest.raises(ValueError, match="on purpose"):
        model(tokens(0))
    assert all(parameter.dtype is torch.float32 for parameter in model.parameters())
    tied.fails = False
    model(tokens(dist.get_rank())).sum().backward()
    assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in model.parameters())
