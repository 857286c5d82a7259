"""What the wrapper tells under the keys of torch's logger is true."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradsync import DistributedDataParallel
from tests.support.ranks import Ranks

TIMES = ("forward_compute_time", "backward_compute_time", "backward_comm_time", "backward_compute_comm_overlap_time")


def train(ddp: nn.Module, rounds: int = 3) -> None:
    for _ in range(rounds):
        ddp(torch.ones(1, 3)).sum().backward()


def as_torchs() -> tuple[dict[str, Any], dict[str, Any]]:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    both = DistributedDataParallel(model), TorchDDP(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))
    for ddp in both:
        train(ddp)
    ours, theirs = (ddp._get_ddp_logging_data() for ddp in both)
    return ours, theirs


def test_where_both_tell_what_is_not_measured_it_is_the_same(ranks: Ranks) -> None:
    for ours, theirs in ranks(as_torchs, 2):
        assert set(ours) - set(theirs) <= {"join_uneven_inputs", "static_graph"}  # torch tells of them once they are on
        told = {key for key in set(ours) & set(theirs) if "time" not in key}
        assert len(told) > 20
        assert {key: ours[key] for key in told} == {key: theirs[key] for key in told}


def clock() -> tuple[int, dict[str, Any], int]:
    ddp, before = DistributedDataParallel(nn.Linear(3, 2)), time.time_ns()
    train(ddp, 1)
    return before, ddp._get_ddp_logging_data(), time.time_ns()


def test_moments_are_on_the_clock_of_the_day(ranks: Ranks) -> None:
    for before, data, after in ranks(clock, 2):
        starts = [data[f"{key}_start"] for key in TIMES[:3]]
        ends = [data["backward_compute_time_end"], data["backward_comm_time_end"]]
        slack = 10**7  # between readings of two clocks
        assert before - slack <= starts[0] <= starts[1] <= starts[2]
        assert all(starts[1] <= end <= after + slack for end in ends)
        assert all(data[f"avg_{key}"] == data[key] for key in TIMES)  # of one round


def without_forward() -> list[bool]:
    ddp = DistributedDataParallel(nn.Linear(3, 2))
    told = []
    loss = ddp(torch.ones(1, 3)).sum()
    for keep in (True, False):
        loss.backward(retain_graph=keep)
        told.append("forward_compute_time" in ddp._get_ddp_logging_data())
    ddp.module(torch.ones(1, 3)).sum().backward()  # past the wrapper
    told.append("forward_compute_time" in ddp._get_ddp_logging_data())
    assert "avg_forward_compute_time" in ddp._get_ddp_logging_data()
    return told


def test_a_round_without_a_forward_has_no_time_of_one(ranks: Ranks) -> None:
    assert ranks(without_forward, 2) == [[True, False, False]] * 2


class FirstUsed(nn.Sequential):
    def forward(self, x: torch.Tensor) -> Any:
        return self[0](x)


def reduced(skip: bool) -> tuple[int, bool]:
    model = FirstUsed(*(nn.Linear(3, 2, bias=False) for _ in range(3)))
    ddp = DistributedDataParallel(
        model, bucket_cap_mb=1e-5, find_unused_parameters=True, skip_all_reduce_unused_params=skip
    )
    train(ddp)
    data = ddp._get_ddp_logging_data()
    assert data["rebuilt_bucket_sizes"] == "24, 24, 24"
    return data["num_buckets_reduced"], "has_rebuilt_buckets" in data


@pytest.mark.parametrize(("skip", "buckets"), [(False, 3), (True, 2)])
def test_only_buckets_that_travelled_are_counted(ranks: Ranks, skip: bool, buckets: int) -> None:
    """The last one always does: it tells of the round. Of buckets that torch would not rebuild nothing is said."""
    assert ranks(reduced, 2, skip) == [(buckets, False)] * 2
