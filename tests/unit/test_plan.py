"""The plan is a pure function; hypothesis looks for parameters, orders and caps that break it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradsync.engine.plan import BucketPlan, Place, Plan, Spec, delay, gradient_stride, make_plan

CPU = torch.device("cpu")
dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.complex64])


def spec(
    name: str = "p", shape: tuple[int, ...] = (4,), dtype: torch.dtype = torch.float32, sparse: bool = False
) -> Spec:
    return Spec(name, shape, tuple(torch.empty(shape).stride()), dtype, CPU, sparse)


@st.composite
def models(draw: st.DrawFn) -> tuple[list[Spec], list[int]]:
    count = draw(st.integers(0, 30))
    shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
    specs = [
        spec(f"p{i}", draw(shapes), draw(dtypes), draw(st.sampled_from([False, False, False, True])))
        for i in range(count)
    ]
    order = draw(st.permutations(range(count)))
    return specs, order[: draw(st.integers(0, count))]


@given(model=models(), caps=st.lists(st.integers(1, 500), min_size=1, max_size=3))
def test_every_parameter_has_one_place(model: tuple[list[Spec], list[int]], caps: list[int]) -> None:
    specs, order = model
    plan = make_plan(specs, order, caps)  # checks itself: each parameter once, no gaps
    assert plan.buckets
    for bucket in plan.buckets:
        for place in bucket.places:
            assert specs[place.index].dtype is bucket.dtype
            assert specs[place.index].numel == place.numel
            assert not specs[place.index].sparse


@given(model=models(), caps=st.lists(st.integers(1, 500), min_size=1, max_size=3))
def test_a_bucket_is_closed_once_it_holds_its_cap(model: tuple[list[Spec], list[int]], caps: list[int]) -> None:
    specs, order = model
    for bucket in make_plan(specs, order, caps).buckets:
        without_last = sum(specs[place.index].nbytes for place in bucket.places[:-1])
        assert without_last < max(caps)


@given(model=models())
def test_buckets_leave_in_the_order_in_which_they_fill(model: tuple[list[Spec], list[int]]) -> None:
    specs, order = model
    missing = [i for i in reversed(range(len(specs))) if i not in order]
    arrival = {index: at for at, index in enumerate([*order, *missing])}
    plan = make_plan(specs, order, [64])
    lasts = [max(arrival[place.index] for place in bucket.places) for bucket in plan.buckets if bucket.places]
    assert lasts == sorted(lasts)
    for bucket in plan.buckets:
        inside = [arrival[place.index] for place in bucket.places]
        assert inside == sorted(inside)


def test_caps_count_for_the_first_second_and_all_other_buckets() -> None:
    specs = [spec(f"p{i}", (4,)) for i in range(12)]  # 16 bytes each
    plan = make_plan(specs, range(12), [16, 32, 64])
    assert [len(bucket.places) for bucket in plan.buckets] == [1, 2, 4, 4, 1]


def test_ten_thousand_parameters_are_planned_quickly() -> None:
    specs = [spec(f"p{i}") for i in range(10_000)]
    assert len(make_plan(specs, (), [25 * 2**20]).buckets) == 1


def test_delayed_parameters_follow_their_anchor() -> None:
    specs = [spec(name) for name in "abcde"]
    assert delay([4, 3, 2, 1, 0], specs, ("e", "c"), "b") == [3, 1, 2, 4, 0]
    assert delay([4, 3], specs, (), None) == [4, 3]


def test_a_plan_refuses_itself() -> None:
    bucket = BucketPlan(torch.float32, CPU, (Place(0, 0, 4),))
    with pytest.raises(ValueError, match="gap or overlap"):
        BucketPlan(torch.float32, CPU, (Place(0, 1, 4),))
    with pytest.raises(ValueError, match="each of 2 parameters once"):
        Plan((bucket,), (), 2)


@given(shape=st.lists(st.integers(0, 4), max_size=4), seed=st.integers(0, 1000))
def test_gradients_are_laid_out_as_autograd_does(shape: list[int], seed: int) -> None:
    order = torch.randperm(len(shape), generator=torch.Generator().manual_seed(seed)).tolist()
    dense = torch.empty([shape[i] for i in order]).permute(torch.tensor(order, dtype=torch.int64).argsort().tolist())
    assert list(dense.shape) == shape
    if dense.numel() > 0:
        assert torch.empty_strided(shape, gradient_stride(dense)).stride() == torch.empty_like(dense).stride()
    gaps = torch.empty([2 * size for size in shape])[tuple(slice(None, None, 2) for _ in shape)]
    assert torch.empty_strided(shape, gradient_stride(gaps)).is_contiguous()
