"""Steps on gradients that were never synchronized, and on parameters that nobody synchronizes."""

from __future__ import annotations

import contextlib
import copy
import io
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

import gradsync
from gradsync.errors import UnsynchronizedStepError
from tests.ranks.small import FRONTS, TRANSPORTS, assert_gradients, backward, batch, build, make, same_everywhere
from tests.support.ranks import Ranks, on_ranks

Optimizer = torch.optim.Optimizer


def loss_of(module: Callable[..., Any], part: int, step: int = 0) -> Tensor:
    loss: Tensor = module(batch(part, step).double()).square().mean()
    return loss


def pair(front: str, transport: str, **options: Any) -> tuple[Any, nn.Module, nn.Module]:
    """A replica, its module, and one process's module."""
    module = build().double()
    alone = copy.deepcopy(module)
    return make(front, module, transport=transport, **options), module, alone


def values(module: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in module.parameters()]


def close(found: Tensor | None, wanted: Tensor | None, where: str) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12, msg=lambda text: f"{where}: {text}")


def assert_close(found: nn.Module, wanted: nn.Module) -> None:
    for (name, one), other in zip(found.named_parameters(), wanted.parameters(), strict=True):
        close(one, other, name)
    same_everywhere(found)


@contextlib.contextmanager
def noted(text: str) -> Iterator[None]:
    """Says which of several cases in one body failed."""
    try:
        yield
    except BaseException as error:
        error.add_note(text) if hasattr(error, "add_note") else None
        raise


def one_process_step(module: nn.Module, optimizer: Optimizer, step: int = 0) -> None:
    optimizer.zero_grad()
    for part in range(2):
        (loss_of(module, part, step) / 2).backward()
    optimizer.step()


# --- closures ------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=4, max_eval=8, history_size=3),
    "lbfgs, strong wolfe": lambda parameters: torch.optim.LBFGS(parameters, max_iter=3, line_search_fn="strong_wolfe"),
}
CLOSURES = pytest.mark.parametrize("keyword", [False, True], ids=["positional", "keyword"])
KINDS = pytest.mark.parametrize("kind", OPTIMIZERS)


def take_step(optimizer: Optimizer, closure: Callable[[], Tensor], keyword: bool) -> Any:
    return optimizer.step(closure=closure) if keyword else optimizer.step(closure)  # type: ignore[arg-type]


def local_closure(front: str, transport: str, kind: str, keyword: bool) -> None:
    replica, module, _ = pair(front, transport)
    optimizer = OPTIMIZERS[kind](module.parameters())
    before = values(module)
    calls = 0

    def closure() -> Tensor:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = loss_of(replica, dist.get_rank())
        with replica.no_sync():
            loss.backward()
        return loss

    with pytest.raises(UnsynchronizedStepError, match=rf"rank {dist.get_rank()}: (SGD|AdamW|LBFGS).*'0.weight'"):
        take_step(optimizer, closure, keyword)
    assert calls == 1
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    with gradsync.allow_unsynchronized_steps():
        take_step(optimizer, closure, keyword)
    assert not torch.equal(before[0], next(module.parameters()))


@FRONTS
@TRANSPORTS
@on_ranks(2)
def test_a_closure_that_does_not_synchronize(front: str, transport: str) -> None:
    for kind in OPTIMIZERS:
        for keyword in (False, True):
            with noted(f"{kind}, keyword={keyword}"):
                local_closure(front, transport, kind, keyword)


@FRONTS
@TRANSPORTS
@CLOSURES
@on_ranks(2)
def test_accumulation_that_ends_in_a_closure(front: str, transport: str, keyword: bool) -> None:
    """The last backward is inside the closure; what came before it was left for that one."""
    replica, module, alone = pair(front, transport)
    optimizer, expected = OPTIMIZERS["sgd"](module.parameters()), OPTIMIZERS["sgd"](alone.parameters())
    schedules = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in (optimizer, expected)]
    losses: list[Tensor] = []
    for step in range(4):
        optimizer.zero_grad()
        with replica.no_sync():
            loss_of(replica, dist.get_rank(), step).backward()

        def closure(step: int = step) -> Tensor:
            loss = loss_of(replica, dist.get_rank(), step + 50)
            loss.backward()
            losses.append(loss.detach())
            return losses[-1]

        returned = take_step(optimizer, closure, keyword)
        assert returned is losses[-1]
        expected.zero_grad()
        for part in range(2):
            ((loss_of(alone, part, step) + loss_of(alone, part, step + 50)) / 2).backward()
        expected.step()
        for schedule in schedules:
            schedule.step()
        assert_close(module, alone)


@FRONTS
@TRANSPORTS
@KINDS
@on_ranks(2)
def test_accumulation_inside_a_closure(front: str, transport: str, kind: str) -> None:
    """A closure that is called several times, and each time accumulates first. It begins with a dirty gradient."""
    replica, module, alone = pair(front, transport)
    optimizer, expected = OPTIMIZERS[kind](module.parameters()), OPTIMIZERS[kind](alone.parameters())
    calls = 0
    for step in range(2):
        with replica.no_sync():
            loss_of(replica, dist.get_rank(), step).backward()

        def closure(step: int = step) -> Tensor:
            nonlocal calls
            calls += 1
            optimizer.zero_grad()
            losses = [loss_of(replica, dist.get_rank(), number) for number in (step, step + 50)]
            with replica.no_sync():
                losses[0].backward()
            losses[1].backward()
            both = (losses[0] + losses[1]).detach()  # a line search decides by it: the mean over the ranks
            dist.all_reduce(both)
            return both / 2

        def in_one_process(step: int = step) -> Tensor:
            expected.zero_grad()
            both = sum((loss_of(alone, r, n) / 2 for r in range(2) for n in (step, step + 50)), torch.zeros(()))
            both.backward()
            return both.detach()

        take_step(optimizer, closure, keyword=kind != "sgd")
        expected.step(in_one_process)  # type: ignore[arg-type]
        assert_close(module, alone)
    assert calls == 2 if "lbfgs" not in kind else calls > 4


@FRONTS
@on_ranks(2)
def test_a_closure_that_raises(front: str) -> None:
    replica, module, alone = pair(front, "auto")
    optimizer, expected = OPTIMIZERS["sgd"](module.parameters()), OPTIMIZERS["sgd"](alone.parameters())

    def closure() -> Tensor:
        raise KeyError("on purpose")

    with pytest.raises(KeyError, match="on purpose"):
        optimizer.step(closure)  # type: ignore[arg-type]
    loss_of(replica, dist.get_rank()).backward()
    optimizer.step()
    one_process_step(alone, expected)
    assert_close(module, alone)


# --- gradients by hand ---------------------------------------------------------------------------------


def by_autograd_grad(module: nn.Module, part: int) -> list[Tensor]:
    return list(torch.autograd.grad(loss_of(module, part, 7), list(module.parameters())))


def by_func_grad(module: nn.Module, part: int) -> list[Tensor]:
    plain = build().double()

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return loss_of(lambda x: functional_call(plain, parameters, (x,)), part, 7)

    gradients = torch.func.grad(loss)({name: p.detach() for name, p in module.named_parameters()})
    return [gradients[name] for name, _ in module.named_parameters()]


def by_hand(module: nn.Module, part: int) -> list[Tensor]:
    return [p.detach().sin() * (part + 1) for p in module.parameters()]


WAYS = [by_autograd_grad, by_func_grad, by_hand]
CURES = (
    r"(?s)synchronize_gradients\(\).*allow_unsynchronized_steps|allow_unsynchronized_steps.*synchronize_gradients\(\)"
)


def assign(module: nn.Module, gradients: list[Tensor]) -> None:
    for parameter, gradient in zip(module.parameters(), gradients, strict=True):
        parameter.grad = gradient


def mean_of(module: nn.Module, way: Callable[[nn.Module, int], list[Tensor]]) -> list[Tensor]:
    return [(a + b) / 2 for a, b in zip(way(module, 0), way(module, 1), strict=True)]


def assigned_by(way: Callable[[nn.Module, int], list[Tensor]], front: str, transport: str, before: str) -> None:
    replica, module, alone = pair(front, transport)
    optimizer, expected = OPTIMIZERS["sgd"](module.parameters()), OPTIMIZERS["sgd"](alone.parameters())
    for step in range(0 if before == "nothing" else 3):
        optimizer.zero_grad()
        loss_of(replica, dist.get_rank(), step).backward()
        optimizer.step()
        one_process_step(alone, expected, step)
    for _ in range(2):
        if before != "rounds":
            optimizer.zero_grad()
        assign(module, way(module, dist.get_rank()))
        held = values(module)
        with pytest.raises(UnsynchronizedStepError, match=CURES) as raised:
            optimizer.step()
        assert "'0.weight'" in str(raised.value)
        assert all(torch.equal(a, b) for a, b in zip(held, module.parameters(), strict=True))
        replica.synchronize_gradients()
        assign(alone, mean_of(alone, way))
        optimizer.step()
        expected.step()
        assert_close(module, alone)
    optimizer.zero_grad()
    loss_of(replica, dist.get_rank(), 9).backward()
    optimizer.step()
    one_process_step(alone, expected, 9)
    assert_close(module, alone)
    optimizer.zero_grad()
    with gradsync.allow_unsynchronized_steps():
        assign(module, way(module, dist.get_rank()))
        optimizer.step()
    assert not all(torch.equal(a, b) for a, b in zip(module.parameters(), alone.parameters(), strict=True))


@FRONTS
@TRANSPORTS
@pytest.mark.parametrize("before", ["nothing", "rounds, zeroed", "rounds"])
@on_ranks(2)
def test_gradients_by_hand(front: str, transport: str, before: str) -> None:
    for way in WAYS:
        with noted(way.__name__):
            assigned_by(way, front, transport, before)


@FRONTS
@TRANSPORTS
@on_ranks(2)
def test_one_gradient_by_hand_among_others(front: str, transport: str) -> None:
    """One gradient is assigned, of a parameter that no round has reached; the others come from a round."""
    module = build().double()
    module.register_parameter("scale", nn.Parameter(torch.ones(3).double()))
    alone = copy.deepcopy(module)
    replica = make(front, module, transport=transport)
    optimizer, expected = OPTIMIZERS["sgd"](module.parameters()), OPTIMIZERS["sgd"](alone.parameters())
    for step in range(3):
        optimizer.zero_grad()
        loss_of(replica, dist.get_rank(), step).backward()
        module.get_parameter("scale").grad = torch.full((3,), 1.0 + dist.get_rank()).double()
        with pytest.raises(UnsynchronizedStepError, match=r"'scale'"):
            optimizer.step()
        replica.synchronize_gradients()
        optimizer.step()
        expected.zero_grad()
        for part in range(2):
            (loss_of(alone, part, step) / 2).backward()
        alone.get_parameter("scale").grad = torch.full((3,), 1.5).double()
        expected.step()
        assert_close(module, alone)


@FRONTS
@TRANSPORTS
@pytest.mark.parametrize("absent", ["one", "all", "all and the last on both"])
@on_ranks(2)
def test_gradients_by_hand_that_one_rank_lacks(front: str, transport: str, absent: str) -> None:
    """Rank 1 has no gradient for some parameter, or none at all: a zero in the mean. Nobody has one: None."""
    replica, module, _ = pair(front, transport)
    rank = dist.get_rank()
    for _ in range(2):
        module.zero_grad()
        mine, others = by_hand(module, rank), [by_hand(module, part) for part in range(2)]
        names = [name for name, _ in module.named_parameters()]
        left_out = {"one": names[:1], "all": names, "all and the last on both": names}[absent]
        for name, parameter, gradient in zip(names, module.parameters(), mine, strict=True):
            if not (rank == 1 and name in left_out) and not (absent.endswith("both") and name == names[-1]):
                parameter.grad = gradient
        replica.synchronize_gradients()
        for number, (name, parameter) in enumerate(module.named_parameters()):
            if absent.endswith("both") and name == names[-1]:
                assert parameter.grad is None
                continue
            second = torch.zeros_like(parameter) if name in left_out else others[1][number]
            close(parameter.grad, (others[0][number] + second) / 2, name)
        torch.optim.SGD(module.parameters(), lr=0.1).step()
        same_everywhere(module)


@FRONTS
@TRANSPORTS
@on_ranks(2)
def test_synchronizing_whatever_there_is(front: str, transport: str) -> None:
    """Rank 0 has them from no_sync, rank 1 by hand; then nobody has any; then all have a round's."""
    replica, module, alone = pair(front, transport)
    if dist.get_rank() == 0:
        with replica.no_sync():
            loss_of(replica, 0, 7).backward()
    else:
        assign(module, by_autograd_grad(module, 1))
    replica.synchronize_gradients()
    assert_gradients(module, mean_of(alone, by_autograd_grad))
    module.zero_grad()
    replica.synchronize_gradients()
    assert all(p.grad is None for p in module.parameters())
    loss_of(replica, dist.get_rank()).backward()
    held = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    replica.synchronize_gradients()
    assert len(held) == 6
    assert all(torch.equal(a, b.grad) for a, b in zip(held, module.parameters(), strict=True) if b.grad is not None)


@FRONTS
@TRANSPORTS
@on_ranks(2)
def test_a_replica_under_a_transform(front: str, transport: str) -> None:
    """The replicated module itself, called with its own parameters under a transform."""
    replica, module, alone = pair(front, transport)

    def local(parameters: dict[str, Tensor]) -> Tensor:
        return loss_of(lambda x: functional_call(replica, parameters, (x,)), dist.get_rank(), 7)

    optimizer, expected = OPTIMIZERS["sgd"](module.parameters()), OPTIMIZERS["sgd"](alone.parameters())
    for _ in range(2):
        found = torch.func.grad(local)({name: p.detach() for name, p in replica.named_parameters()})
        assign(module, list(found.values()))
        with pytest.raises(UnsynchronizedStepError, match=CURES):
            optimizer.step()
        replica.synchronize_gradients()
        optimizer.step()
        assign(alone, mean_of(alone, by_autograd_grad))
        expected.step()
        assert_close(module, alone)
        module.zero_grad()


# --- what may be done to a synchronized gradient -------------------------------------------------------


def gradients(module: nn.Module) -> list[Tensor]:
    return [p.grad for p in module.parameters() if p.grad is not None]


def halved(module: nn.Module, optimizer: Optimizer) -> None:
    for p in module.parameters():
        assert p.grad is not None
        p.grad = p.grad * 0.5
    optimizer.step()


def cloned(module: nn.Module, optimizer: Optimizer) -> None:
    for p in module.parameters():
        assert p.grad is not None
        p.grad = p.grad.clone()
    optimizer.step()


def detached(module: nn.Module, optimizer: Optimizer) -> None:
    for p in module.parameters():
        assert p.grad is not None
        p.grad = p.grad.detach()
    optimizer.step()


def clamped(module: nn.Module, optimizer: Optimizer) -> None:
    for gradient in gradients(module):
        gradient.clamp_(-0.01, 0.01)
    optimizer.step()


def clipped_by_norm(module: nn.Module, optimizer: Optimizer) -> None:
    nn.utils.clip_grad_norm_(module.parameters(), 0.1)
    optimizer.step()


def clipped_by_value(module: nn.Module, optimizer: Optimizer) -> None:
    nn.utils.clip_grad_value_(module.parameters(), 0.01)
    optimizer.step()


def zeroed(module: nn.Module, optimizer: Optimizer) -> None:
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()


def dropped(module: nn.Module, optimizer: Optimizer) -> None:
    module.zero_grad()
    optimizer.step()


def some_dropped(module: nn.Module, optimizer: Optimizer) -> None:
    for p in list(module.parameters())[::2]:
        p.grad = None
    optimizer.step()


def two_optimizers(module: nn.Module, optimizer: Optimizer) -> None:
    optimizer.step()
    torch.optim.SGD(module.parameters(), lr=0.01).step()


def one_step_twice(module: nn.Module, optimizer: Optimizer) -> None:
    optimizer.step()
    optimizer.step()


def unscaled(module: nn.Module, optimizer: Optimizer) -> None:
    torch._foreach_mul_(gradients(module), 1 / 8)
    optimizer.step()


def scaler(module: nn.Module, optimizer: Optimizer) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.zeros(()))  # the first use makes its tensors
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


def normalized(module: nn.Module, optimizer: Optimizer) -> None:
    """From all gradients together, into new tensors."""
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients(module)])
    flat = flat / flat.norm()
    for p, part in zip(module.parameters(), flat.split([p.numel() for p in module.parameters()]), strict=True):
        p.grad = part.view_as(p)
    optimizer.step()


AFTERWARDS = [
    halved,
    cloned,
    detached,
    clamped,
    clipped_by_norm,
    clipped_by_value,
    zeroed,
    dropped,
    some_dropped,
    two_optimizers,
    one_step_twice,
    unscaled,
    scaler,
    normalized,
]


def changed_by(afterwards: Callable[[nn.Module, Optimizer], None], front: str, transport: str) -> None:
    replica, module, alone = pair(front, transport)
    optimizer, expected = OPTIMIZERS["sgd"](module.parameters()), OPTIMIZERS["sgd"](alone.parameters())
    for step in range(4):
        if step != 2:  # once what is left stays
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            expected.zero_grad(set_to_none=step % 2 == 0)
        loss_of(replica, dist.get_rank(), step).backward()
        for part in range(2):
            (loss_of(alone, part, step) / 2).backward()
        afterwards(module, optimizer)
        afterwards(alone, expected)
        assert_close(module, alone)


@FRONTS
@TRANSPORTS
@on_ranks(2)
def test_a_synchronized_gradient_may_be_changed(front: str, transport: str) -> None:
    for afterwards in AFTERWARDS:
        with noted(afterwards.__name__):
            changed_by(afterwards, front, transport)


# --- parameters that come and go -----------------------------------------------------------------------


def with_an_id_of(seen: set[int], values: Tensor) -> nn.Parameter:
    """A parameter in memory where another one was, if there is any."""
    tried = [nn.Parameter(values.clone())]
    while id(tried[-1]) not in seen and len(tried) < 1000:
        tried.append(nn.Parameter(values.clone()))
    return tried[-1]


@FRONTS
@TRANSPORTS
@pytest.mark.parametrize("way", ["through all", "through the last layer", "without a backward"])
@on_ranks(2)
def test_a_parameter_with_the_id_of_another(front: str, transport: str, way: str) -> None:
    """A parameter's id is that of one that is gone. It had a local gradient, and so has the new one, before any
    round has seen it; the round that has to carry that one may not reach it.
    """
    replica, module, alone = pair(front, transport)
    rank, seen, again = dist.get_rank(), set(), 0
    for step in range(8):
        with replica.no_sync():
            loss_of(replica, rank, step).backward()
        for part in range(2):
            (loss_of(alone, part, step) / 2).backward()
        seen.add(id(module.get_parameter("0.weight")))
        for layer in (module.get_submodule("0"), alone.get_submodule("0")):
            del layer.weight
            layer.weight = with_an_id_of(seen, torch.full((8, 4), 0.1 * step, dtype=torch.float64))
        again += id(module.get_parameter("0.weight")) in seen
        with replica.no_sync():
            loss_of(replica, rank, step + 50).backward()
        for part in range(2):
            (loss_of(alone, part, step + 50) / 2).backward()
        if way == "through all":
            loss_of(replica, rank, step + 99).backward()
            for part in range(2):
                (loss_of(alone, part, step + 99) / 2).backward()
        elif way == "through the last layer":
            module.get_submodule("4")(torch.full((1, 8), 1.0 + rank).double()).sum().backward()
            alone.get_submodule("4")(torch.full((1, 8), 1.5).double()).sum().backward()
        else:
            replica.synchronize_gradients()
        for (name, found), wanted in zip(module.named_parameters(), alone.parameters(), strict=True):
            close(found.grad, wanted.grad, f"gradient of {name} in step {step}, {way}")
        for each in (module, alone):
            torch.optim.SGD(each.parameters(), lr=0.01).step()
            each.zero_grad()
        assert_close(module, alone)
    assert again, "no id was used again: this test shows nothing"


# --- parameters that nobody manages --------------------------------------------------------------------


def saved_and_loaded(front: str) -> bytes:
    """Under two ranks, of `replicate`: a plain module that says so. The wrapper comes back as a replica."""
    replica = make(front, build())
    buffer = io.BytesIO()
    torch.save(replica, buffer)
    loaded = torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
    optimizer = torch.optim.SGD(loaded.parameters(), lr=0.1)
    backward(loaded)
    if front == "replicate":
        assert type(loaded) is nn.Sequential
        assert list(loaded.state_dict()) == list(build().state_dict())
        with pytest.warns(UserWarning, match=r"gradsync\.replicate") as caught:
            optimizer.step()
        assert len(caught) == 1
    else:
        optimizer.step()
        same_everywhere(loaded)
    backward(loaded, 1)
    optimizer.step()  # told once

    again = torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
    if front == "replicate":
        gradsync.replicate(again)
    optimizer = torch.optim.SGD(again.parameters(), lr=0.1)
    backward(again)
    optimizer.step()
    same_everywhere(again)
    return buffer.getvalue()


def loaded_by_one(data: bytes) -> None:
    loaded = torch.load(io.BytesIO(data), weights_only=False)
    assert type(loaded) is nn.Sequential
    loaded(batch(0)).square().mean().backward()
    torch.optim.SGD(loaded.parameters(), lr=0.1).step()


def test_a_replica_that_was_saved_and_loaded(ranks: Ranks) -> None:
    data, _ = ranks(saved_and_loaded, 2, "replicate")
    ranks(loaded_by_one, 1, data)
    ranks(loaded_by_one, 1, data, backend=None)


def test_a_wrapper_that_was_saved_and_loaded(ranks: Ranks) -> None:
    ranks(saved_and_loaded, 2, "DistributedDataParallel")


def stray(front: str, alone: bool) -> None:
    module = build()
    replica = make(front, module)
    temperature = nn.Parameter(torch.ones(3, 7))
    optimizer = torch.optim.SGD([*module.parameters(), temperature], lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        ((replica(batch(dist.get_rank(), step)) * temperature.mean()).square().mean()).backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        told = [str(each.message) for each in caught if issubclass(each.category, UserWarning)]
        assert len(told) == (0 if alone or step else 1), told
        if told:
            assert "3, 7" in told[0]
            assert "ignored" in told[0] or "replicate" in told[0]


@FRONTS
def test_a_parameter_outside_the_module(ranks: Ranks, front: str) -> None:
    ranks(stray, 2, front, False)
    ranks(stray, 1, front, True)


@FRONTS
@on_ranks(2)
def test_parameters_that_are_no_strays(front: str) -> None:
    """Nothing to say of frozen ones, of another replica's, of ignored ones, of an optimizer without ours."""
    module, other = build(), nn.Linear(4, 3)
    aside, frozen = nn.Parameter(torch.ones(3, 7)), nn.Parameter(torch.ones(3, 7), requires_grad=False)
    module.register_parameter("aside", aside)
    if front == "replicate":
        replica = make(front, module, ignored_params=[aside], ignored_modules=[module.get_submodule("4")])
    else:
        module._ddp_params_and_buffers_to_ignore = ["aside", "4.weight", "4.bias"]  # type: ignore[assignment]
        replica = make(front, module)
    others = make(front, other)
    optimizer = torch.optim.SGD([*module.parameters(), *other.parameters(), frozen], lr=0.1)
    unrelated = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        loss = replica(batch(dist.get_rank(), step)).square().mean() * aside.mean()
        (loss + others(batch(dist.get_rank(), step)).square().mean()).backward()
        optimizer.step()
        unrelated.step()


@on_ranks(2)
def test_a_parameter_outside_that_is_ignored() -> None:
    """The cure for a parameter that is not in the module and meant to be local."""
    module, temperature = build(), nn.Parameter(torch.ones(3, 7))
    replica = make("replicate", module, ignored_params=[temperature])
    optimizer = torch.optim.SGD([*module.parameters(), temperature], lr=0.1)
    (replica(batch(dist.get_rank())).square().mean() * temperature.mean()).backward()
    optimizer.step()
