"""Small parts, without ranks."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import gradsync
from gradsync.engine.outputs import tensors_in
from gradsync.errors import InvalidOptionError
from gradsync.observe.statistics import Statistics
from gradsync.options import Options


class Pair(NamedTuple):
    a: Tensor
    b: object


@dataclass
class Record:
    x: Tensor
    y: Any


def test_tensors_are_found_in_whatever_forward_returns() -> None:
    a, b, c, d = (torch.tensor(float(i)) for i in range(4))
    nested = {"k": [a, (b, None)], "r": Record(c, OrderedDict(p=Pair(d, "text"))), "n": 3}
    assert [float(t) for t in tensors_in(nested)] == [0, 1, 2, 3]
    assert list(tensors_in(Record)) == []
    assert list(tensors_in(None)) == []


def test_fingerprints_tell_bits_names_and_buffers_apart() -> None:
    module = nn.BatchNorm1d(3)
    first = gradsync.fingerprint(module)
    assert gradsync.fingerprint(module) == first
    with torch.no_grad():
        module.weight[0] = torch.nextafter(module.weight[0], torch.tensor(2.0))
    second = gradsync.fingerprint(module)
    assert module.running_mean is not None
    module.running_mean[0] = 1e-30
    assert len({first, second, gradsync.fingerprint(module)}) == 3
    assert gradsync.fingerprint(nn.Sequential(nn.Linear(1, 1, bias=False))) != gradsync.fingerprint(
        nn.Linear(1, 1, bias=False)
    )


@pytest.mark.parametrize(
    "options",
    [
        {"reduce": "median"},
        {"buffers": "sometimes"},
        {"bucket_cap_mb": 0},
        {"bucket_cap_mb_list": (1, -1)},
        {"bucket_cap_mb": 1, "bucket_cap_mb_list": (1,)},
    ],
)
def test_options_are_validated(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOptionError):
        Options(**options)


def test_bucket_caps() -> None:
    mib = 2**20
    assert Options().bucket_caps() == (mib, 25 * mib)
    assert Options(bucket_cap_mb=3).bucket_caps() == (3 * mib,)
    assert Options(bucket_cap_mb_list=(1, 2)).bucket_caps() == (mib, 2 * mib)


def test_statistics_begin_at_nothing() -> None:
    assert Statistics() == Statistics(rounds=0, waited_seconds=0.0)
