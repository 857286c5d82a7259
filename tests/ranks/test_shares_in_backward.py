"""One model a host, whose optimizer steps shares as soon as they are reduced: with the plain optimizer's results."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn, optim
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as default
from torch.optim import Optimizer

import gradsync
from gradsync.errors import (
    HookError,
    InvalidOptionError,
    NonFiniteGradientError,
    NotSupportedError,
    ReplicaLostError,
    UnfinishedRoundError,
)
from gradsync.sharing import blocks
from tests.ranks.memory import be_on_host
from tests.ranks.small import FRONTS, make, same_everywhere
from tests.ranks.test_shared_parameters import (
    ELEMENTWISE,
    WIDTH,
    Branches,
    Make,
    TrustRatio,
    are_shared,
    assert_same,
    backward,
    batch,
    build,
)
from tests.support.ranks import Ranks, on_ranks

Trained = tuple[Any, Optimizer]
Made = Sequence[Trained]


def both(make_optimizer: Make, front: str = "replicate", max_norm: float | None = None, **options: Any) -> Made:
    """With shared parameters, stepped in backward, and plain."""
    made: list[Trained] = []
    for shares in (True, False):
        model = make(front, build(), share_parameters=shares, **{"bucket_cap_mb": 0.005, **options})
        optimizer = make_optimizer(model.parameters())
        if shares:
            assert gradsync.overlap_optimizer(model, optimizer, max_norm=max_norm) is optimizer
        made.append((model, optimizer))
    return made


def train(made: Made, steps: range, max_norm: float | None = None, run: Callable[[Any, int], None] = backward) -> None:
    for shares, (model, optimizer) in zip((True, False), made, strict=True):
        for step in steps:
            run(model, step)
            if not shares:
                if max_norm is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
                optimizer.step()
                optimizer.zero_grad()
            else:
                assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("name", ELEMENTWISE)
@on_ranks(2)
def test_every_optimizer_comes_to_the_same(name: str) -> None:
    made = both(ELEMENTWISE[name])
    train(made, range(3))
    assert are_shared(made[0][0])
    # Large shares are stepped block by block, with whatever each optimizer keeps, in backward and after it.
    after = make("replicate", build(), share_parameters=True)
    optimizer = gradsync.share_optimizer(ELEMENTWISE[name](after.parameters()))
    with mock.patch.object(blocks, "BLOCK", 320):
        train(made, range(3, 5))
        for step in range(5):
            backward(after, step)
            optimizer.step()
            optimizer.zero_grad()
    assert_same(made[0], made[1], "fused" in name)
    assert_same((after, optimizer), made[1], "fused" in name)


@FRONTS
@pytest.mark.parametrize("transport", ["shared_memory", "hierarchical", "process_group"])
@on_ranks(3)
def test_three_ranks_on_one_host_or_two_or_three(front: str, transport: str) -> None:
    if transport == "hierarchical":
        be_on_host(dist.get_rank() // 2)
    made = both(ELEMENTWISE["AdamW"], front, transport=transport)
    train(made, range(4))
    assert_same(made[0], made[1])
    clipped = both(ELEMENTWISE["AdamW"], front, 0.01, transport=transport)
    train(clipped, range(4), 0.01)
    for one, other in zip(clipped[0][0].parameters(), clipped[1][0].parameters(), strict=True):
        torch.testing.assert_close(one, other)
    same_everywhere(clipped[0][0])
    # In low precision, of which sums cross in a wider type.
    low = [
        (model.to(torch.bfloat16), optim.SGD(model.parameters(), lr=0.1))
        for model in (make(front, build().bfloat16(), share_parameters=s, transport=transport) for s in (True, False))
    ]
    gradsync.overlap_optimizer(*low[0])

    def run(model: Any, step: int) -> None:
        model(batch(step, dist.get_rank()).bfloat16()).square().mean().backward()

    train(low, range(3), run=run)
    for one, other in zip(low[0][0].parameters(), low[1][0].parameters(), strict=True):
        # Kernels round the last elements of a tensor, which do not fill a vector register, differently: one bit.
        torch.testing.assert_close(one, other, rtol=2**-7, atol=1e-5)
    same_everywhere(low[0][0])


@on_ranks(4)
def test_two_hosts_with_two_ranks_each() -> None:
    """Each rank carries its own share."""
    be_on_host(dist.get_rank() // 2)
    made = both(ELEMENTWISE["AdamW"], transport="hierarchical")
    train(made, range(4))
    assert_same(made[0], made[1])
    same_everywhere(made[0][0])


@on_ranks(2)
def test_the_norm_of_all_gradients_is_limited() -> None:
    for name in ("SGD", "AdamW fused"):
        for max_norm in (0.01, 100.0):
            made = both(ELEMENTWISE[name], max_norm=max_norm)
            train(made, range(3), max_norm)
            for one, other in zip(made[0][0].parameters(), made[1][0].parameters(), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
            backward(made[1][0], 3)
            norm = nn.utils.get_total_norm([parameter.grad for parameter in made[1][0].parameters()])
            backward(made[0][0], 3)
            assert made[0][1].gradient_norm == pytest.approx(norm.item(), rel=1e-4)  # type: ignore[attr-defined]
    # The same without shared parameters.
    plain = [(build(), 0), (build(), 1)]
    models = [gradsync.replicate(model) for model, _ in plain]
    optimizers = [optim.AdamW(model.parameters(), lr=0.01) for model in models]
    gradsync.overlap_optimizer(models[0], optimizers[0], max_norm=0.02)
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            backward(model, step)
            if model is models[1]:
                nn.utils.clip_grad_norm_(model.parameters(), 0.02)
                optimizer.step()
            model.zero_grad()
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(one, other)


@on_ranks(2)
def test_what_ranks_use_differently() -> None:
    """Branches, weights, rounds without synchronization, groups, buckets of any size."""

    @settings(max_examples=15, deadline=None, derandomize=True)
    @given(
        st.lists(
            st.tuples(
                st.tuples(*[st.frozensets(st.integers(0, 3))] * 2),  # what each rank uses
                st.tuples(st.integers(0, 3), st.integers(1, 3)),  # their weights
                st.booleans(),  # accumulated or not
            ),
            min_size=2,
            max_size=5,
        ),
        st.sampled_from(["SGD", "AdamW", "NAdam"]),
        st.sampled_from([0.0005, 0.002, 25]),
        st.booleans(),
    )
    def check(steps: list[Any], name: str, cap: float, clips: bool) -> None:
        rank, made = dist.get_rank(), list[Trained]()
        for shares in (True, False):
            model = gradsync.replicate(Branches(), share_parameters=shares, bucket_cap_mb=cap)
            groups = [
                {"params": [p for p in model.parameters() if p.dim() > 1]},
                {"params": [p for p in model.parameters() if p.dim() <= 1], "lr": 0.003},
            ]
            optimizer = ELEMENTWISE[name](groups)
            if shares:
                gradsync.overlap_optimizer(model, optimizer, clip_value=0.1 if clips else None)
            made.append((model, optimizer))

        def run(model: Any, step: int) -> None:
            used, weights, accumulates = steps[step]
            x = batch(step, rank)
            if accumulates:
                with model.no_sync():
                    model(x + 1, used[1 - rank]).square().mean().backward()
            model.set_round_weight(weights[rank])
            model(x, used[rank]).square().mean().backward()
            if clips and model is made[1][0]:
                nn.utils.clip_grad_value_(model.parameters(), 0.1)

        train(made, range(len(steps)), run=run)
        for one, other in zip(made[0][0].parameters(), made[1][0].parameters(), strict=True):
            # Without an optimizer in backward, a bucket may leave before a gradient that was never there before: that
            # comes in a second pass, so terms are added up in another order.
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
        same_everywhere(made[0][0])

    check()


@on_ranks(2)
def test_schedules_checkpoints_and_changes() -> None:
    made = both(ELEMENTWISE["AdamW"])
    schedules = [optim.lr_scheduler.StepLR(optimizer, 1, 0.5) for _, optimizer in made]
    for step in range(3):
        train(made, range(step, step + 1))
        for schedule in schedules:
            schedule.step()
    saved = made[0][0].state_dict(), made[0][1].state_dict()
    fresh = both(ELEMENTWISE["AdamW"])
    for model, optimizer in fresh:
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
    train(made, range(3, 5))
    train(fresh, range(3, 5))
    assert_same(fresh[0], fresh[1])
    assert_same(fresh[0], made[1])
    for model, _ in made:
        model[0].requires_grad_(False)
    train(made, range(5, 7))
    for model, _ in made:
        model[0].requires_grad_(True)
    train(made, range(7, 9))
    assert_same(made[0], made[1])
    # Set after some rounds, on all ranks.
    later = [gradsync.replicate(build(), share_parameters=shares) for shares in (True, False)]
    optimizers: list[Optimizer] = [optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in later]
    gradsync.share_optimizer(optimizers[0])
    for model, optimizer in zip(later, optimizers, strict=True):
        backward(model, 0)
        optimizer.step()
        optimizer.zero_grad()
    gradsync.overlap_optimizer(later[0], optimizers[0])
    train(list(zip(later, optimizers, strict=True)), range(1, 4))
    assert_same((later[0], optimizers[0]), (later[1], optimizers[1]))


@on_ranks(2)
def test_large_tables_of_which_few_rows_are_used() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.table = nn.Embedding(20000, 32)
            self.head = nn.Linear(32, 3)

        def forward(self, rows: Tensor) -> Tensor:
            out: Tensor = self.head(self.table(rows).mean(1))
            return out

    made = list[Trained]()
    for shares in (True, False):
        model = gradsync.replicate(Table(), share_parameters=shares)
        made.append((model, optim.AdamW(model.parameters(), lr=0.01)))
    gradsync.overlap_optimizer(*made[0])

    def run(model: Any, step: int) -> None:
        rows = torch.randint(20000, (4, 5), generator=torch.Generator().manual_seed(7 * step + dist.get_rank()))
        model(rows).square().mean().backward()

    train(made, range(4), run=run)
    assert_same(made[0], made[1])


@on_ranks(2)
def test_uneven_data_and_rounds_without_any() -> None:
    made = both(ELEMENTWISE["SGD"])
    for shares, (model, optimizer) in zip((True, False), made, strict=True):
        for step in gradsync.uneven(list(range(3 + 2 * dist.get_rank())), model):
            backward(model, step)
            if not shares:
                optimizer.step()
                optimizer.zero_grad()
    assert_same(made[0], made[1])


@on_ranks(2)
def test_bad_input_is_refused() -> None:
    model = gradsync.replicate(build(), share_parameters=True)
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    with pytest.raises(InvalidOptionError, match="free_gradients=False does not go together with share_parameters"):
        gradsync.overlap_optimizer(model, optimizer, free_gradients=False)
    with pytest.raises(InvalidOptionError, match="max_norm must be above 0"):
        gradsync.overlap_optimizer(model, optimizer, max_norm=0)
    with pytest.raises(NotSupportedError, match="TrustRatio can't step shares of buckets"):
        gradsync.overlap_optimizer(model, TrustRatio(model.parameters()))
    gradsync.overlap_optimizer(model, optimizer)
    with pytest.raises(HookError, match="there can be one"):
        gradsync.overlap_optimizer(model, optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(InvalidOptionError, match="communication hook does not go together"):
        model.register_comm_hook(None, default.allreduce_hook)
    backward(model, 0)
    with pytest.raises(HookError, match="a second one"):
        optimizer.step()
    hooked = gradsync.replicate(build(), share_parameters=True)
    part = optim.SGD(hooked[0].parameters(), lr=0.1)
    gradsync.overlap_optimizer(hooked, part)
    with pytest.raises(NotSupportedError, match=r"rank \d: '2.weight' is in no group of the optimizer"):
        backward(hooked, 0)


@on_ranks(2)
def test_a_parameter_that_backward_still_needs_is_noticed() -> None:
    """It was used once more, without a gradient, before: backward needs its value after it may have been stepped."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first = nn.Linear(WIDTH, WIDTH)
            self.second = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.tanh(nn.functional.linear(self.first(x), self.second.weight.detach())))

    model = gradsync.replicate(Twice(), share_parameters=True, bucket_cap_mb=0.0001)
    gradsync.overlap_optimizer(model, optim.SGD(model.parameters(), lr=0.1))
    backward(model, 0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        backward(model, 1)
    with pytest.raises(UnfinishedRoundError, match="are those of two steps; the last whole one was step 1"):
        backward(model, 2)


@on_ranks(2)
def test_nan_is_told() -> None:
    made = both(ELEMENTWISE["SGD"], on_nonfinite="raise")
    backward(made[0][0], 0)
    x = batch(1, dist.get_rank())
    if dist.get_rank() == 1:
        x[0, 0] = float("nan")
    with pytest.raises(NonFiniteGradientError, match="from rank 1") as found:
        made[0][0](x).square().mean().backward()
    assert list(found.value.ranks) == [1]


@FRONTS
@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
@on_ranks(2)
def test_a_checkpoint_makes_a_torn_model_whole(front: str, transport: str) -> None:
    model = make(front, build(), share_parameters=True, bucket_cap_mb=0.0001, transport=transport)
    optimizer = gradsync.overlap_optimizer(model, optim.SGD(model.parameters(), lr=0.1))
    for step in range(2):
        backward(model, step)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    backward(model, 2)
    wanted = [parameter.clone() for parameter in model.parameters()]
    if dist.get_rank() == 1:
        optimizer.param_groups[0]["lr"] = None
    with pytest.raises((TypeError, UnfinishedRoundError)):
        backward(model, 3)
    optimizer.param_groups[0]["lr"] = 0.1
    with pytest.raises(UnfinishedRoundError, match=r"load_state_dict\(\) of replica"), gradsync.one_writer(model):
        pass
    model.load_state_dict(saved)
    backward(model, 2)
    torch.testing.assert_close(list(model.parameters()), wanted, rtol=0, atol=0)


def lose_a_rank(how: str, transport: Any = "shared_memory", at: int = 3) -> str:
    model = gradsync.replicate(build(), share_parameters=True, bucket_cap_mb=0.0001, transport=transport)
    optimizer = gradsync.overlap_optimizer(model, optim.AdamW(model.parameters()))
    for step in range(1, at):
        backward(model, step)
    errors = (ReplicaLostError, UnfinishedRoundError)
    if dist.get_rank() == 1 and how == "killed":  # in the middle of backward
        model[0].weight.register_post_accumulate_grad_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    if dist.get_rank() == 1 and how == "raised":
        optimizer.param_groups[0]["lr"] = None
        errors = (TypeError,)  # type: ignore[assignment]
    with pytest.raises(errors) as caught:
        backward(model, at)
    if how == "raised":
        dist.barrier()  # nobody ends before the others have raised for this, not for its end
    return str(caught.value)


def test_a_round_that_is_torn_is_told(ranks: Ranks) -> None:
    survivor, _ = ranks.outcomes(lose_a_rank, 2, "killed")
    text = str(survivor.result)
    assert "step 3 of a shared optimizer did not come to its end" in text
    assert "the last whole one was step 2" in text


@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
@pytest.mark.parametrize("at", [1, 3])
def test_an_optimizer_that_raises_on_one_rank(at: int, transport: str, ranks: Ranks) -> None:
    """In the first round the others make room for what it would have kept."""
    texts = ranks(lose_a_rank, 3, "raised", transport, at)
    assert "shared optimizer" not in texts[1]
    for text in (texts[0], texts[2]):
        assert f"step {at} of a shared optimizer did not come to its end: the optimizer of rank 1 raised." in text
        assert f"the last whole one was step {at - 1}" in text
