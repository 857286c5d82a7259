"""One model a host: parameters lie once, and each rank steps its share. Results are those of the plain optimizer."""

from __future__ import annotations

import copy
import io
import os
import signal
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn, optim
from torch.optim import Optimizer

import gradsync
from gradsync.errors import (
    InvalidOptionError,
    NotSupportedError,
    ParametersChangedError,
    ReplicaDivergedError,
    ReplicaLostError,
    UnfinishedRoundError,
    UnsynchronizedStepError,
)
from tests.faults.test_named import end_as_python_does
from tests.ranks.memory import be_on_host, mapped
from tests.ranks.small import FRONTS, make, same_everywhere
from tests.support.ranks import Ranks, on_ranks

Make = Callable[[Any], Optimizer]
WIDTH = 37
# Exactly as unshared, but for fused kernels, which round the last elements of a tensor (those that do not fill a vector
# register) differently: there the last bit of single elements may differ, and the steps that follow go on from it.
FUSED = {"rtol": 1e-5, "atol": 1e-7}
ELEMENTWISE: dict[str, Make] = {
    "SGD": partial(optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "plain SGD": partial(optim.SGD, lr=0.1),
    "SGD foreach": partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "SGD fused": partial(optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "Adam": partial(optim.Adam, lr=0.01, amsgrad=True),
    "Adam fused": partial(optim.Adam, lr=0.01, fused=True),
    "AdamW": partial(optim.AdamW, lr=0.01),
    "AdamW foreach": partial(optim.AdamW, lr=0.01, foreach=True),
    "AdamW fused": partial(optim.AdamW, lr=0.01, fused=True),
    "RMSprop": partial(optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "Adagrad": partial(optim.Adagrad, lr=0.01),
    "Adadelta": partial(optim.Adadelta, lr=0.1),
    "NAdam": partial(optim.NAdam, lr=0.01),
    "RAdam": partial(optim.RAdam, lr=0.01),
    "Adamax": partial(optim.Adamax, lr=0.01),
    "ASGD": partial(optim.ASGD, lr=0.01),
    "Rprop": partial(optim.Rprop, lr=0.01),
}
WHOLE: dict[str, Make] = {"Adafactor": partial(optim.Adafactor, lr=0.01)}


class TrustRatio(Optimizer):
    """Like LAMB: each step depends on the norm of a whole parameter. Keeps numbers beside tensors."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                state["mean"] = 0.9 * state.get("mean", torch.zeros_like(parameter)) + parameter.grad
                ratio = (parameter.norm() + 1) / (state["mean"].norm() + 1)
                parameter.sub_(state["mean"], alpha=group["lr"] * float(ratio) / state["count"])


WHOLE["TrustRatio"] = TrustRatio
EVERY = ELEMENTWISE | WHOLE


def build(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, 50), nn.Tanh(), nn.Linear(50, 51), nn.Tanh(), nn.Linear(51, 3))


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def backward(model: nn.Module, step: int) -> None:
    model(batch(step, dist.get_rank())).square().mean().backward()


def train(model: nn.Module, optimizer: Optimizer, steps: Iterable[int]) -> None:
    for step in steps:
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()


def both(make_optimizer: Make, front: str = "replicate", **options: Any) -> list[tuple[Any, Optimizer]]:
    """With shared parameters, and without."""
    made = []
    for shares in (True, False):
        model = make(front, build(), share_parameters=shares, bucket_cap_mb=0.005, **options)
        optimizer = make_optimizer(model.parameters())
        made.append((model, gradsync.share_optimizer(optimizer) if shares else optimizer))
    return made


def assert_same(mine: tuple[Any, Optimizer], plain: tuple[Any, Optimizer], fused: bool = False) -> None:
    tolerance = FUSED if fused else {"rtol": 0, "atol": 0}
    for one, other in zip(mine[0].parameters(), plain[0].parameters(), strict=True):
        torch.testing.assert_close(one, other, **tolerance)
    found, expected = mine[1].state_dict(), plain[1].state_dict()
    assert found["param_groups"] == expected["param_groups"]
    torch.testing.assert_close(found["state"], expected["state"], **tolerance)


def are_shared(model: nn.Module) -> bool:
    """Whether what one rank writes is seen by the next one."""
    parameter = next(model.parameters()).data
    before = parameter.view(-1)[0].item()
    dist.barrier()
    if dist.get_rank() == 0:
        parameter.view(-1)[0] = 7.0
    dist.barrier()
    seen = parameter.view(-1)[0].item() == 7.0
    dist.barrier()
    if dist.get_rank() == 0:
        parameter.view(-1)[0] = before
    dist.barrier()
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, seen)
    return all(everybody)


# --- the same results --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY)
@on_ranks(2)
def test_every_optimizer_comes_to_the_same(name: str) -> None:
    shared, plain = both(EVERY[name])
    for model, optimizer in (shared, plain):
        train(model, optimizer, range(5))
    assert are_shared(shared[0])
    assert_same(shared, plain, "fused" in name)


@FRONTS
@pytest.mark.parametrize("transport", ["shared_memory", "hierarchical", "process_group"])
@pytest.mark.parametrize("name", ["AdamW", "TrustRatio"])
@on_ranks(3)
def test_three_ranks_on_one_host_or_two_or_three(front: str, transport: str, name: str) -> None:
    if transport == "hierarchical":
        be_on_host(dist.get_rank() // 2)
    shared, plain = both(EVERY[name], front, transport=transport)
    for model, optimizer in (shared, plain):
        train(model, optimizer, range(4))
    assert_same(shared, plain)
    same_everywhere(shared[0])


class Branches(nn.Module):
    """Of which a step uses some; what is left out has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(nn.Linear(WIDTH, 7) for _ in range(4))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor, used: frozenset[int]) -> Tensor:
        return self.scale * sum((self.parts[number](x) for number in sorted(used)), torch.zeros(()))


@on_ranks(2)
def test_parameters_without_gradients_are_not_stepped() -> None:
    @settings(max_examples=12, deadline=None, derandomize=True)
    @given(
        st.lists(st.frozensets(st.integers(0, 3), min_size=1), min_size=2, max_size=5),
        st.sampled_from(["SGD", "AdamW", "NAdam", "Adafactor"]),
        st.booleans(),
    )
    def check(steps: list[frozenset[int]], name: str, groups: bool) -> None:
        made: list[tuple[Any, Optimizer]] = []
        for shares in (True, False):
            model = gradsync.replicate(Branches(), share_parameters=shares, bucket_cap_mb=0.002)
            given_to: Any = model.parameters()
            if groups:
                given_to = [
                    {"params": [p for p in model.parameters() if p.dim() > 1]},
                    {"params": [p for p in model.parameters() if p.dim() <= 1], "lr": 0.003},
                ]
            optimizer = EVERY[name](given_to)
            made.append((model, gradsync.share_optimizer(optimizer) if shares else optimizer))
        for step, used in enumerate(steps):
            for model, optimizer in made:
                model(batch(step, dist.get_rank()), used).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert_same(made[0], made[1])

    check()


@on_ranks(2)
def test_a_usual_loop() -> None:
    """Accumulation, clipping, a scaler, a schedule, a closure, gradients that are replaced."""
    shared, plain = both(ELEMENTWISE["AdamW"])
    for model, optimizer in (shared, plain):
        schedule = optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        scaler = torch.amp.GradScaler("cpu")
        for step in range(6):
            with model.no_sync():
                backward(model, step + 100)
            scaler.scale(model(batch(step, dist.get_rank())).square().mean()).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            if step == 3:
                for parameter in model.parameters():
                    parameter.grad = parameter.grad * 2
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)

        def closure(model: Any = model, optimizer: Optimizer = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(batch(9, dist.get_rank())).square().mean()
            loss.backward()
            return loss

        assert optimizer.step(closure) is not None  # type: ignore[arg-type]
        optimizer.zero_grad()
    assert_same(shared, plain)


# --- saving and loading -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["AdamW", "NAdam", "Adafactor", "TrustRatio"])
@on_ranks(2)
def test_a_checkpoint_goes_both_ways(name: str) -> None:
    shared, plain = both(EVERY[name])
    for model, optimizer in (shared, plain):
        train(model, optimizer, range(3))
    file = io.BytesIO()
    if dist.get_rank() == 0:  # alone
        torch.save({"model": shared[0].state_dict(), "optimizer": shared[1].state_dict()}, file)
    sent = [file.getvalue()]
    dist.broadcast_object_list(sent)
    assert dist.get_rank() != 0 or len(sent[0]) < 2 * 3 * sum(p.nbytes for p in plain[0].parameters())

    def load(model: nn.Module, optimizer: Optimizer) -> None:
        saved = torch.load(io.BytesIO(sent[0]))  # each time: torch's optimizers go on with the tensors they are given
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])

    train(*shared, range(3, 6))
    train(*plain, range(3, 6))
    for model, optimizer in both(EVERY[name]):
        load(model, optimizer)
        train(model, optimizer, range(3, 6))
        assert_same((model, optimizer), plain)
    # Into one that has trained already.
    train(*shared, range(20, 22))
    load(*shared)
    train(*shared, range(3, 6))
    assert_same(shared, plain)


@on_ranks(2)
def test_copies_are_plain() -> None:
    (model, optimizer), _ = both(ELEMENTWISE["AdamW"])
    train(model, optimizer, range(2))
    copied, pickled = copy.deepcopy(optimizer), io.BytesIO()
    assert type(copied) is optim.AdamW
    torch.testing.assert_close(copied.state_dict()["state"], optimizer.state_dict()["state"])
    torch.save(model.state_dict(), pickled)
    averaged = optim.swa_utils.AveragedModel(gradsync.unreplicate(copy.deepcopy(model)))
    averaged.update_parameters(model)
    before = [parameter.clone() for parameter in averaged.module.parameters()]
    train(model, optimizer, range(2, 3))
    for kept, now in zip(before, averaged.module.parameters(), strict=True):
        torch.testing.assert_close(kept, now, rtol=0, atol=0)


@on_ranks(2)
def test_memory_is_given_back() -> None:
    before = mapped()
    (model, optimizer), (plain, _) = both(ELEMENTWISE["AdamW"])
    train(model, optimizer, range(2))
    train(plain, optim.SGD(plain.parameters(), lr=0.1), range(1))
    assert mapped() > before
    gradsync.unreplicate(model)
    gradsync.unreplicate(plain)
    assert not are_shared(model)
    del model, optimizer, plain, _
    assert mapped() <= before + 2  # the host's own control words and staging


# --- what changes --------------------------------------------------------------------------------------------


@on_ranks(2)
def test_groups_added_frozen_and_converted_parameters() -> None:
    made = []
    for shares in (True, False):
        model = gradsync.replicate(build(), share_parameters=shares)
        optimizer: Optimizer = optim.AdamW(model[0].parameters(), lr=0.01)
        made.append((model, gradsync.share_optimizer(optimizer) if shares else optimizer))
    for model, optimizer in made:
        train(model, optimizer, range(2))
        optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.1})
        train(model, optimizer, range(2, 4))
        model[0].requires_grad_(False)
        train(model, optimizer, range(4, 6))
        model[0].requires_grad_(True)
        train(model, optimizer, range(6, 8))
    assert_same(made[0], made[1])
    assert are_shared(made[0][0])
    made[0][0].double()
    with pytest.raises(ParametersChangedError, match="other memory since the latest backward"):
        made[0][1].step()


@on_ranks(2)
def test_another_wrapper_without_sharing_gets_private_parameters() -> None:
    """Else the plain steps that it allows would count once for each rank."""
    module, alone = build(), build()
    first = gradsync.DistributedDataParallel(module, share_parameters=True)
    shared = gradsync.share_optimizer(optim.SGD(module.parameters(), lr=0.1))
    plain = gradsync.DistributedDataParallel(alone)
    unshared = optim.SGD(alone.parameters(), lr=0.1)
    train(first, shared, range(2))
    train(plain, unshared, range(2))
    second = gradsync.DistributedDataParallel(module)
    assert not are_shared(module)
    train(second, optim.SGD(module.parameters(), lr=0.1), range(2, 4))
    train(plain, unshared, range(2, 4))
    train(first, shared, range(4, 6))  # whose turn it is again
    train(plain, unshared, range(4, 6))
    for one, other in zip(module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@on_ranks(2)
def test_frozen_parameters_lie_once_too() -> None:
    model = build()
    model[0].requires_grad_(False)
    gradsync.replicate(model, share_parameters=True)
    optimizer = gradsync.share_optimizer(optim.SGD(model[2].parameters(), lr=0.1))
    train(model, optimizer, range(2))
    assert are_shared(model)


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.EmbeddingBag(50, 8, sparse=True), nn.Linear(8, 2)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.table(words))


@pytest.mark.parametrize("name", ["plain SGD", "Adagrad"])
@on_ranks(2)
def test_sparse_gradients(name: str) -> None:
    torch.sparse.check_sparse_tensor_invariants.disable()  # or torch warns that it does not check
    made = []
    for shares in (True, False):
        model = gradsync.replicate(Table(), share_parameters=shares)
        optimizer = ELEMENTWISE[name](model.parameters())
        made.append((model, gradsync.share_optimizer(optimizer) if shares else optimizer))
    for model, optimizer in made:
        for step in range(4):
            words = torch.randint(50, (4, 3), generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
            model(words).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same(made[0], made[1])


# --- who may write ---------------------------------------------------------------------------------------------


@FRONTS
@on_ranks(2)
def test_writing_past_the_optimizer_is_refused_and_one_writer_is_the_cure(front: str) -> None:
    (model, optimizer), (plain, unshared) = both(ELEMENTWISE["AdamW"], front)
    for one, its_optimizer in ((model, optimizer), (plain, unshared)):
        train(one, its_optimizer, range(2))
        with gradsync.one_writer(one), torch.no_grad():
            for parameter in one.parameters():
                parameter.mul_(0.5)
        train(one, its_optimizer, range(2, 4))
    assert_same((model, optimizer), (plain, unshared))
    dist.barrier()
    with torch.no_grad():
        next(model.parameters()).mul_(0.99)
    dist.barrier()
    with pytest.raises(ParametersChangedError, match=r"rank \d: '0.weight' was written to outside .*one_writer"):
        backward(model, 5)


@on_ranks(2)
def test_values_that_differ_are_not_shared() -> None:
    model = gradsync.replicate(build(), share_parameters=True, verify="never")
    with torch.no_grad():
        model[0].weight.add_(dist.get_rank())
    with pytest.raises(ReplicaDivergedError, match=r"0\.weight"):
        backward(model, 0)


@on_ranks(2)
def test_bad_input_is_refused() -> None:
    model = gradsync.replicate(build(), share_parameters=True)
    with pytest.raises(NotSupportedError, match="LBFGS can't be shared"):
        gradsync.share_optimizer(optim.LBFGS(model.parameters()))
    with pytest.raises(InvalidOptionError, match="no parameter that lies once a host"):
        gradsync.share_optimizer(optim.SGD(build().parameters(), lr=0.1))
    with pytest.raises(InvalidOptionError, match="needs gradients that lie in their buckets"):
        gradsync.replicate(build(), share_parameters=True, gradient_as_bucket_view=False)


@pytest.mark.parametrize("in_backward", [False, True])
@on_ranks(2)
def test_schedules_that_were_there_before(in_backward: bool) -> None:
    """They put a step of theirs on the optimizer, which calls that of its class then: the plain one."""
    made: list[tuple[Any, Optimizer]] = []
    for shares in (True, False):
        model = gradsync.replicate(build(), share_parameters=shares)
        optimizer = optim.AdamW(model.parameters(), lr=0.1)
        schedule = optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        steps_itself = shares and in_backward
        if steps_itself:
            gradsync.overlap_optimizer(model, optimizer)
        elif shares:
            gradsync.share_optimizer(optimizer)
        late = optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        for step in range(4):
            backward(model, step)
            if not steps_itself:
                optimizer.step()
                optimizer.zero_grad()
            schedule.step()
            late.step()
        made.append((model, optimizer))
    assert_same(made[0], made[1])
    odd = optim.SGD(made[0][0].parameters(), lr=0.1)
    odd.step = lambda closure=None: None  # type: ignore[method-assign]
    with pytest.raises(InvalidOptionError, match=r"somebody has replaced step\(\) of this SGD"):
        gradsync.share_optimizer(odd)


@on_ranks(2)
def test_a_plain_optimizer_is_refused_before_it_counts_twice() -> None:
    model = gradsync.replicate(build(), share_parameters=True)
    backward(model, 0)
    before = [parameter.clone() for parameter in model.parameters()]
    plain = optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UnsynchronizedStepError, match=r"gradsync\.share_optimizer"):
        plain.step()
    torch.testing.assert_close(list(model.parameters()), before, rtol=0, atol=0)
    gradsync.share_optimizer(plain).step()


class Answers(torch.utils.data.Dataset[float]):
    """What a model says, which each look spoils."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> float:
        with torch.no_grad():
            answer = float(self.model(torch.ones(1, WIDTH)).sum())
            next(self.model.parameters()).zero_()
        return answer


@on_ranks(2)
def test_forked_workers_have_their_own() -> None:
    """They see what the parameters are; what they write nobody else sees, and it is no mistake."""
    (model, optimizer), _ = both(ELEMENTWISE["AdamW"])
    train(model, optimizer, range(2))
    before = model[0].weight.clone()
    with torch.no_grad():
        wanted = float(model(torch.ones(1, WIDTH)).sum())
    answers = [float(each) for each in torch.utils.data.DataLoader(Answers(model), num_workers=1)]
    assert answers[0] == pytest.approx(wanted)
    assert answers[1] != pytest.approx(wanted)
    torch.testing.assert_close(model[0].weight, before, rtol=0, atol=0)
    train(model, optimizer, range(2, 3))
    same_everywhere(model)


@on_ranks(2)
def test_pickles_and_copies_of_models_are_private() -> None:
    (model, optimizer), _ = both(ELEMENTWISE["AdamW"])
    train(model, optimizer, range(2))
    before = [parameter.clone() for parameter in model.parameters()]
    file = io.BytesIO()
    torch.save(model, file)
    for other in (torch.load(io.BytesIO(file.getvalue()), weights_only=False), copy.deepcopy(model)):
        torch.testing.assert_close(list(other.parameters()), before, rtol=0, atol=0)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        torch.testing.assert_close(list(model.parameters()), before, rtol=0, atol=0)
    train(model, optimizer, range(2, 4))
    assert are_shared(model)


# --- faults ------------------------------------------------------------------------------------------------------


class Dies(optim.SGD):
    """On rank 1, in a step: killed, or it raises."""

    how, at = "", 3

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count = getattr(self, "count", 0) + 1
        if self.count == self.at and dist.get_rank() == 1:
            if self.how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("no more steps")
        super().step()


def without_a_rate_on_rank_1(parameters: Any) -> Optimizer:
    """Elementwise; its step raises."""
    made = optim.AdamW(parameters)
    if dist.get_rank() == 1:
        made.param_groups[0]["lr"] = None
    return made


def lose_a_rank(how: str, transport: Any = "shared_memory", at: int = 3) -> str:
    Dies.how, Dies.at = how, at
    model = gradsync.replicate(build(), share_parameters=True, transport=transport)
    make_optimizer: Any = without_a_rate_on_rank_1 if how == "raised in runs" else Dies
    optimizer = gradsync.share_optimizer(make_optimizer(model.parameters()))
    errors = (ReplicaLostError, UnfinishedRoundError)
    if dist.get_rank() == 1:
        errors = (ValueError, TypeError)  # type: ignore[assignment]
    with pytest.raises(errors) as caught:
        train(model, optimizer, range(4))
    if how != "killed":
        dist.barrier()  # nobody ends before the others have raised for this, not for its end
    return str(caught.value)


def test_a_step_that_is_torn_is_told(ranks: Ranks) -> None:
    survivor, _ = ranks.outcomes(lose_a_rank, 2, "killed")
    text = str(survivor.result)
    assert "step 3 of a shared optimizer did not come to its end" in text
    assert "the last whole one was step 2" in text


@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
@pytest.mark.parametrize(("how", "at"), [("raised", 1), ("raised", 3), ("raised in runs", 1)])
def test_an_optimizer_that_raises_on_one_rank(how: str, at: int, transport: str, ranks: Ranks) -> None:
    """It raises there what it raises, and at once what has become of the step on all others."""
    texts = ranks(lose_a_rank, 3, how, transport, at)
    assert "shared optimizer" not in texts[1]
    for text in (texts[0], texts[2]):
        assert f"step {at} of a shared optimizer did not come to its end: the optimizer of rank 1 raised." in text
        assert f"the last whole one was step {at - 1}" in text


def torn_on_one_host() -> None:
    """Rank 1 raises, and rank 0, on the same host, for it; that one ends first."""
    be_on_host(dist.get_rank() // 2)
    Dies.how, Dies.at = "raised", 3
    model = gradsync.replicate(build(), share_parameters=True, transport="hierarchical")
    optimizer = gradsync.share_optimizer(Dies(model.parameters()))
    try:
        train(model, optimizer, range(4))
    except (UnfinishedRoundError, ValueError) as error:
        time.sleep(dist.get_rank())
        end_as_python_does(error)


def test_other_hosts_name_the_first_cause(ranks: Ranks) -> None:
    for outcome in ranks.outcomes(torn_on_one_host, 4)[2:]:
        assert isinstance(outcome.exception, ReplicaLostError), outcome
        assert outcome.exception.ranks == [1]
        assert "the optimizer of rank 1 raised" in str(outcome.exception)
