"""What a real profiler of torch's shows of a step, in the trace that it exports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

import gradsync
from tests.ranks.small import FRONTS, backward, make
from tests.support.ranks import on_ranks

LAYERS = 3


class Range(NamedTuple):
    name: str
    thread: int
    start: float
    end: float

    def is_in(self, other: Range) -> bool:
        return self.thread == other.thread and other.start <= self.start and self.end <= other.end


def model_of(front: str, **options: Any) -> Any:
    layers = [nn.Linear(4, 8), *(nn.Linear(8, 8) for _ in range(LAYERS - 2)), nn.BatchNorm1d(8), nn.Linear(8, 2)]
    return make(front, nn.Sequential(*layers), **options)


def trace(body: Any, folder: Path) -> list[Range]:
    path = folder / f"{dist.get_rank()}.json"
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        body()
    profiler.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    spans = [one for one in events if one.get("ph") == "X"]
    return [Range(one["name"], one["tid"], one["ts"], one["ts"] + one["dur"]) for one in spans]


def ours(ranges: list[Range]) -> list[Range]:
    return sorted((one for one in ranges if one.name.startswith("gradsync.")), key=lambda one: one.start)


@FRONTS
@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
@on_ranks(2)
def test_the_ranges_of_a_step(front: str, transport: str, tmp_path: Path) -> None:
    model = model_of(front, transport=transport)
    for step in range(2):
        backward(model, step)
        model.zero_grad()
    found = trace(lambda: backward(model, 2), tmp_path)
    ranges = ours(found)
    buckets = range(gradsync.statistics(model).buckets)
    assert len(buckets) > 2
    wanted = [f"gradsync.{phase} bucket {one}" for phase in ("launch", "wait", "deliver") for one in buckets]
    once = [*wanted, "gradsync.forward", "gradsync.end of round", "gradsync.buffers"]
    assert sorted(one.name for one in ranges) == sorted(once)
    by_name = {one.name: one for one in ranges}
    end = by_name["gradsync.end of round"]
    for one in ranges:  # each is inside another, or beside it
        assert all(
            one.is_in(other) or other.is_in(one) or one.end <= other.start or other.end <= one.start
            for other in ranges
            if one.thread == other.thread
        )
        inside = one.name.split()[0] in ("gradsync.wait", "gradsync.deliver", "gradsync.buffers")
        assert one.is_in(end) == (inside or one is end)
    # The module's own operations are in forward; autograd's nodes have ranges of its own, with launches inside.
    linear = [one for one in found if one.name == "aten::linear"]
    assert len(linear) == LAYERS
    assert all(one.is_in(by_name["gradsync.forward"]) for one in linear)
    nodes = [one for one in found if one.name.startswith("autograd::engine::evaluate_function")]
    assert any(by_name["gradsync.launch bucket 0"].is_in(node) for node in nodes)
    assert not any(end.is_in(node) for node in nodes)


@on_ranks(2)
def test_the_first_round_makes_its_plan(tmp_path: Path) -> None:
    model = model_of("replicate")
    names = [one.name for one in ours(trace(lambda: backward(model), tmp_path))]
    assert names[:2] == ["gradsync.forward", "gradsync.plan"]
    assert names.count("gradsync.plan") == 1


@on_ranks(2)
def test_ranges_end_where_a_forward_raises(tmp_path: Path) -> None:
    model = model_of("replicate")
    backward(model)

    def body() -> None:
        with pytest.raises(RuntimeError, match="shapes"):
            model(torch.ones(2, 5))
        torch.ones(3).sin()
        model(torch.ones(2, 4))

    found = trace(body, tmp_path)
    forwards = [one for one in found if one.name == "gradsync.forward"]
    assert len(forwards) == 2
    (outside,) = [one for one in found if one.name == "aten::sin"]
    assert not any(outside.is_in(one) for one in forwards)


@on_ranks(2)
def test_a_profiler_that_begins_or_ends_in_the_middle() -> None:
    """Of forward or backward: nothing is left open, and training goes on."""
    model = model_of("replicate")
    profiler = profile(activities=[ProfilerActivity.CPU])
    started: list[bool] = []

    def toggle(*_: object) -> None:
        if not started:
            profiler.start()
            started.append(True)

    handle = model[1].register_forward_hook(toggle)
    backward(model)
    handle.remove()
    hook = model[1].weight.register_hook(lambda _: profiler.stop())
    backward(model, 1)
    hook.remove()
    backward(model, 2)
    names = {one.key for one in profiler.key_averages()}
    assert "gradsync.launch bucket 0" in names
    assert gradsync.statistics(model).rounds == 3
