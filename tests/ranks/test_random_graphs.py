"""Random modules and graph shapes: which layers, how often, behind which checkpoints, on which rank, in which step."""

from __future__ import annotations

from typing import NamedTuple

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.equality import STEPS, Case, Env, check_case
from tests.support.ranks import Ranks

WIDTH = 3


class Use(NamedTuple):
    """One application of a layer."""

    layer: int
    how: str  # "plain", "reentrant" or "checkpoint"


class Shape(NamedTuple):
    """A random program: for each step, rank and backward the layers that are applied."""

    layers: int
    paths: list[list[list[list[Use]]]]  # step, rank, micro-step
    synchronized: list[bool]  # for each micro-step but the last
    set_to_none: bool
    view: bool
    skip: bool
    bucket_cap_mb: float


uses = st.builds(Use, st.integers(0, 3), st.sampled_from(["plain", "plain", "reentrant", "checkpoint"]))


@st.composite
def shapes(draw: st.DrawFn, size: int) -> Shape:
    micro = draw(st.integers(1, 3))
    path = st.lists(uses, min_size=1, max_size=5)
    backwards = st.lists(path, min_size=micro, max_size=micro)
    steps = st.lists(st.lists(backwards, min_size=size, max_size=size), min_size=STEPS, max_size=STEPS)
    return Shape(
        layers=4,
        paths=draw(steps),
        synchronized=draw(st.lists(st.booleans(), min_size=micro - 1, max_size=micro - 1)),
        set_to_none=draw(st.booleans()),
        view=draw(st.booleans()),
        skip=draw(st.booleans()),
        bucket_cap_mb=draw(st.sampled_from([0.00001, 0.0002, 25.0])),
    )


class Paths(nn.Module):
    """Layers that are applied in whatever order it is told."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x: Tensor, path: list[Use]) -> Tensor:
        for use in path:
            layer = self.layers[use.layer]
            if use.how == "plain":
                x = torch.tanh(layer(x))
            else:
                x = checkpoint(layer, x, use_reentrant=use.how == "reentrant")
        return x


def body(shape: Shape) -> None:
    def step(env: Env) -> None:
        backwards = shape.paths[env.step][env.rank]
        for micro, path in enumerate(backwards):
            x = env.x(2, WIDTH).requires_grad_()
            loss = env.front(x, path).square().mean()
            if micro < len(backwards) - 1 and not shape.synchronized[micro]:
                with env.no_sync():
                    env.backward(loss)
            else:
                env.backward(loss)

    options = {
        "bucket_cap_mb": shape.bucket_cap_mb,
        "gradient_as_bucket_view": shape.view,
        "skip_all_reduce_unused_params": shape.skip,
    }
    case = Case("random", lambda: Paths(shape.layers), step, zero=shape.set_to_none, options=options)
    check_case(case)


_settings = settings(
    max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@_settings
@given(shape=shapes(2))
def test_two_ranks(ranks: Ranks, shape: Shape) -> None:
    ranks(body, 2, shape)


@_settings
@given(shape=shapes(3))
def test_three_ranks(ranks: Ranks, shape: Shape) -> None:
    ranks(body, 3, shape)
