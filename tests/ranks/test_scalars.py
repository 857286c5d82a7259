"""`gradsync.observe.log_to`: scalars for writers of three kinds, and for those that fail."""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gradsync
from gradsync.errors import GradsyncError
from gradsync.observe import log_to
from gradsync.observe.statistics import _listeners as nobody
from tests.ranks.small import backward, build, make
from tests.support.ranks import on_ranks

SECONDS = ("step", "forward", "backward", "optimizer", "communication", "exposed", "finishing", "waited", "outside")
NAMES = {
    *(f"gradsync/seconds/{one}" for one in SECONDS),
    *(f"gradsync/bytes/{one}" for one in ("sent", "crossed", "per_second")),
    *("gradsync/overlap", "gradsync/overlapped_buckets"),
}


class Written:
    """What has come, by step."""

    def __init__(self) -> None:
        self.at: dict[int, dict[str, float]] = {}


class TensorBoards(Written):
    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.at.setdefault(global_step, {})[tag] = scalar_value


class Wandbs(Written):
    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        assert step is not None
        self.at[step] = data


class Lightnings(Written):
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        assert step is not None
        self.at[step] = dict(metrics)

    def log(self, name: str, value: float) -> None:
        raise AssertionError("meant for something else")


def train(model: Any, rounds: int = 4) -> None:
    for step in range(rounds):
        backward(model, step)
        model.zero_grad()


def listeners() -> int:
    from gradsync.observe import statistics

    return len(statistics._listeners)


@pytest.mark.parametrize("kind", [TensorBoards, Wandbs, Lightnings])
@on_ranks(2)
def test_writers_of_three_kinds(kind: type[Written]) -> None:
    model, writer = make("replicate", build()), kind()
    with log_to(writer, gradsync.statistics(model)):
        train(model)
    train(model)
    assert list(writer.at) == ([1, 2, 3, 4] if dist.get_rank() == 0 else [])
    for scalars in writer.at.values():
        assert set(scalars) == NAMES
        assert all(isinstance(value, (int, float)) and math.isfinite(value) for value in scalars.values())
        assert scalars["gradsync/seconds/step"] >= scalars["gradsync/seconds/backward"] > 0
        assert scalars["gradsync/bytes/sent"] > 0
    assert listeners() == 0


@on_ranks(2)
def test_options() -> None:
    model, second = make("replicate", build()), make("replicate", build())
    every_rank, by_hand, steps = Wandbs(), Wandbs(), iter(range(100, 200))
    logs = [
        log_to(every_rank, gradsync.statistics(model), every=3, prefix="a/", every_rank=True),
        log_to(by_hand, gradsync.statistics(second), step=lambda: next(steps), every_rank=True),
    ]
    train(model, 7)
    train(second, 2)
    assert list(every_rank.at) == [3, 6]
    assert all(name.startswith("a/") for name in every_rank.at[3])
    assert list(by_hand.at) == [100, 101]
    for log in logs:
        log.close()
        log.close()  # twice is fine
    train(model, 3)
    assert list(every_rank.at) == [3, 6]


@on_ranks(2)
def test_without_statistics_the_first_replica_is_logged() -> None:
    writer = Wandbs()
    with log_to(writer, every_rank=True):  # before there is any, as with a trainer that makes it
        model, other = make("replicate", build()), make("replicate", build())
        train(model, 2)
        train(other, 5)
        assert list(writer.at) == [1, 2]
        gradsync.unreplicate(model)
        del model
        gc.collect()
        train(other, 1)  # of another trainer, say
        assert list(writer.at) == [1, 2, 6]


@on_ranks(2)
def test_what_is_given_and_gone_is_not_replaced() -> None:
    model, other, writer = make("replicate", build()), make("replicate", build()), Wandbs()
    with log_to(writer, gradsync.statistics(model), every_rank=True):
        train(model, 1)
        gradsync.unreplicate(model)
        del model
        gc.collect()
        train(other, 2)
    assert list(writer.at) == [1]


class Fails(Wandbs):
    calls = 0

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        self.calls += 1
        if self.calls == 2:
            raise OSError("disk is full")
        super().log(data, step, commit)


@on_ranks(2)
def test_a_writer_that_raises_is_told_once_and_training_goes_on() -> None:
    records: list[logging.LogRecord] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    logging.getLogger("gradsync").addHandler(Keep(logging.ERROR))
    model, writer, well = make("replicate", build()), Fails(), Wandbs()
    statistics = gradsync.statistics(model)
    with log_to(writer, statistics), log_to(well, statistics):
        train(model, 4)
    assert statistics.rounds == 4
    if dist.get_rank() == 0:
        assert (list(writer.at), writer.calls) == ([1], 2)
        assert list(well.at) == [1, 2, 3, 4]  # another one goes on
        (record,) = records
        assert "rank 0: statistics are not logged any more" in record.getMessage()
        assert record.exc_info is not None
        assert "disk is full" in str(record.exc_info[1])


@on_ranks(2)
def test_what_is_not_known_is_left_out() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    model, writer = make("replicate", build()), Wandbs()
    model.register_comm_hook(None, allreduce_hook)
    with log_to(writer, gradsync.statistics(model), every_rank=True):
        train(model, 1)
    assert set(writer.at[1]) == {name for name in NAMES if "/bytes/" not in name}


class Fabric:
    def log(self, name: str, value: Any, step: int | None = None) -> None: ...


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((None,), "the writer must have add_scalar.*but is None"),
        ((Wandbs,), "the writer must be an object, but is the class Wandbs"),
        ((Fabric(),), "but is a Fabric. Of a framework's trainer, pass its logger"),
        ((Wandbs(), torch.nn.Linear(1, 1)), r"statistics must be a Statistics.*Linear.*gradsync\.statistics\(model\)"),
        ((Wandbs(), None, {"every": 0}), "every must be 1 or more, but is 0"),
        ((Wandbs(), None, {"every": 1.5}), "every must be an integer"),
        ((Wandbs(), None, {"prefix": 3}), "prefix must be a str"),
        ((Wandbs(), None, {"step": 3}), "step must be a function"),
        ((Wandbs(), None, {"every_rank": "x"}), "every_rank must be True or False"),
    ],
)
def test_what_makes_no_sense_is_refused(given: tuple[Any, ...], words: str) -> None:
    *args, options = given if isinstance(given[-1], dict) else (*given, {})
    with pytest.raises(GradsyncError, match=words):
        log_to(*args, **options)
    assert listeners() == len(nobody) == 0
