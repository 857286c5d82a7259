"""Replicas that have drifted apart are given what most of them have, on request, and training goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import gradsync
from gradsync.errors import InvalidOptionError, OptionsMismatchError, ReplicaDivergedError
from tests.ranks.replicas import Training, data_replaced, flip, train
from tests.ranks.small import FRONTS, TRANSPORTS, backward, build, make, same_everywhere
from tests.support.ranks import Ranks, on_ranks

REPAIR: dict[str, Any] = {"verify": "every", "on_divergence": "repair"}


class Heard(logging.Handler):
    """What the `gradsync` logger says."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        logging.getLogger("gradsync").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def a_bit(training: Training) -> None:
    training.optimizer.step()
    if training.odd:
        flip(training.parameter("2.weight"), 5, 30)


def everything(training: Training) -> None:
    training.optimizer.step()
    if training.odd:
        with torch.no_grad():
            for parameter in training.module.parameters():
                parameter.add_(1)


def repaired(front: str, transport: str, change: Callable[[Training], None]) -> tuple[list[str], str]:
    heard = Heard()
    training = train(front, transport=transport, **REPAIR)
    for step in range(6):
        training.backward(step)
        if step == 2:
            change(training)
        else:
            training.optimizer.step()
        if step != 2:
            same_everywhere(training.module)
    gradsync.verify(training.replica, training.optimizer)
    assert gradsync.statistics(training.replica).repaired_rounds == 1
    return heard.texts, gradsync.fingerprint(training.module)


@FRONTS
@TRANSPORTS
@pytest.mark.parametrize("change", [a_bit, data_replaced, everything])
def test_the_majority_is_taken_over(ranks: Ranks, front: str, transport: str, change: Any) -> None:
    (first, _), (second, _), (third, _) = ranks(repaired, 3, front, transport, change)
    name = {a_bit: "'2.weight'", data_replaced: "'2.bias'", everything: "'0.weight', '0.bias'"}[change]
    for rank, texts in ((0, first), (1, second)):
        (text,) = texts
        assert text.startswith(f"rank {rank}: the replicas had diverged, and were repaired: on rank 1, {name}")
        assert "between rounds 2 and 3" in text
        assert "on_divergence='raise'" in text
    assert not third  # neither rank 0 nor repaired


def different_parameters() -> tuple[list[str], str]:
    """Two of three ranks are off, each in another parameter: each has a majority of its own."""
    heard = Heard()
    training = train("replicate", **REPAIR)
    training.backward(0)
    training.optimizer.step()
    before = gradsync.fingerprint(training.module)
    if rank := dist.get_rank():
        with torch.no_grad():
            training.parameter(("2.bias", "4.bias")[rank - 1]).add_(1)
    training.backward(1)
    assert gradsync.fingerprint(training.module) == before
    return heard.texts, before


def test_each_parameter_has_its_majority(ranks: Ranks) -> None:
    for texts, _ in ranks(different_parameters, 3):
        assert "on rank 1, 2, '2.bias', '4.bias' are not what most ranks have" in texts[0]


@FRONTS
@TRANSPORTS
@on_ranks(2)
def test_without_a_majority_it_raises(front: str, transport: str) -> None:
    training = train(front, transport=transport, **REPAIR)
    training.backward(0)
    data_replaced(training)
    with pytest.raises(ReplicaDivergedError, match=r"'2\.bias'.*no majority.*load the same checkpoint") as caught:
        training.backward(1)
    assert caught.value.ranks == [0, 1]
    assert all(parameter.grad is None for parameter in training.module.parameters())
    training.parameter().data.zero_()
    training.backward(2)  # the ranks are in step
    training.optimizer.step()
    same_everywhere(training.module)


@FRONTS
@on_ranks(3)
def test_the_round_is_delivered(front: str) -> None:
    """The mean of what the ranks have computed, one of them on values that were off."""
    module, plain = build(), build()
    replica = make(front, module, **REPAIR)
    if dist.get_rank() == 1:
        with torch.no_grad():
            module.get_parameter("2.bias").add_(1)
    own = build()
    own.load_state_dict(module.state_dict())
    backward(own, 0)
    backward(replica, 0)
    for parameter, alone in zip(module.parameters(), own.parameters(), strict=True):
        assert alone.grad is not None
        dist.all_reduce(alone.grad)
        torch.testing.assert_close(parameter.grad, alone.grad / 3)
    for parameter, wanted in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter, wanted)


@on_ranks(3)
def test_with_an_optimizer_in_backward() -> None:
    """Buckets are stepped as they come, earlier on one rank than on another: what is compared comes after that."""
    module = build()
    replica = make("replicate", module, **REPAIR)
    gradsync.overlap_optimizer(replica, torch.optim.SGD(module.parameters(), lr=0.1))
    for step in range(4):
        if step == 2 and dist.get_rank() == 2:
            with torch.no_grad():
                module.get_parameter("0.weight").mul_(2)
        backward(replica, step)
        same_everywhere(module)


@on_ranks(3)
def test_over_a_mesh_and_with_a_policy() -> None:
    mesh = init_device_mesh("cpu", (3,))
    for options in ({"mesh": mesh}, {"mp_policy": gradsync.MixedPrecisionPolicy(param_dtype=torch.bfloat16)}):
        module = build()
        replica = make("replicate", module, **REPAIR, **options)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            backward(replica, step)
            optimizer.step()
            if step == 1 and dist.get_rank() == 0:
                with torch.no_grad():
                    module.get_parameter("0.weight").mul_(2)
        gradsync.verify(replica)


@on_ranks(2)
def test_bad_input() -> None:
    with pytest.raises(InvalidOptionError, match=r"on_divergence must be one of 'raise', 'repair', but is 'ignore'"):
        gradsync.replicate(build(), on_divergence="ignore")
    with pytest.raises(OptionsMismatchError, match="on_divergence"):
        gradsync.replicate(build(), on_divergence=("raise", "repair")[dist.get_rank()])


def out_of_data() -> bool:
    """In a `Join`, ranks without data hold old values on purpose: they are no part of a majority."""
    module = build()
    replica = make("DistributedDataParallel", module, **REPAIR)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with torch.distributed.algorithms.join.Join([replica]):
        for step in range(6 if dist.get_rank() >= 2 else 2):
            optimizer.zero_grad()
            backward(replica, step)
            optimizer.step()
            if step == 3 and dist.get_rank() == 4:
                with torch.no_grad():
                    module.get_parameter("0.weight").mul_(2)
    same_everywhere(module)
    return not torch.equal(
        nn.utils.parameters_to_vector(build().parameters()), nn.utils.parameters_to_vector(module.parameters())
    )


def test_ranks_without_data_are_not_counted(ranks: Ranks) -> None:
    assert all(ranks(out_of_data, 5))
