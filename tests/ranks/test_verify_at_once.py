"""`gradsync.verify`: at once, and complete."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradsync
from gradsync.errors import ReplicaDivergedError
from tests.ranks.replicas import Training, another_learning_rate, flip, train, until_alarm, with_norm
from tests.ranks.small import FRONTS, TRANSPORTS, build, make, same_everywhere
from tests.support.ranks import on_ranks


def adam(front: str, transport: str, **options: Any) -> Training:
    module = with_norm()
    replica = make(front, module, transport=transport, **options)
    groups = [{"params": [*module[0].parameters()]}, {"params": [*module[1].parameters(), *module[3].parameters()]}]
    training = Training(replica, module, torch.optim.AdamW(groups, lr=0.01), dist.get_rank() == 1)
    assert until_alarm(training, 3, -1, None) is None
    return training


def state_of(training: Training, name: str = "3.weight") -> dict[str, Any]:
    state: dict[str, Any] = training.optimizer.state[training.parameter(name)]
    return state


def change_parameter(training: Training) -> None:
    flip(training.parameter("3.weight"), 5, 0)


def change_buffer(training: Training) -> None:
    flip(training.module.get_buffer("1.running_var"), 5, 0)


def change_count(training: Training) -> None:
    training.module.get_buffer("1.num_batches_tracked").add_(1)


def change_first_moment(training: Training) -> None:
    flip(state_of(training)["exp_avg"], 5, 0)


def change_second_moment(training: Training) -> None:
    flip(state_of(training)["exp_avg_sq"], 5, 0)


def change_step(training: Training) -> None:
    state_of(training)["step"].add_(1)


def drop_entry(training: Training) -> None:
    del state_of(training)["exp_avg"]


def drop_state(training: Training) -> None:
    del training.optimizer.state[training.parameter("3.weight")]


def change_lr(training: Training) -> None:
    training.optimizer.param_groups[1]["lr"] = 0.02


def change_decay(training: Training) -> None:
    training.optimizer.param_groups[1]["weight_decay"] = 0.5


def change_betas(training: Training) -> None:
    training.optimizer.param_groups[1]["betas"] = (0.8, 0.999)


DIFFERENCES: list[tuple[Callable[[Training], None], str]] = [
    (change_parameter, r"'3\.weight'"),
    (change_buffer, r"'1\.running_var'"),
    (change_count, r"'1\.num_batches_tracked'"),
    (change_first_moment, r"exp_avg of '3\.weight'"),
    (change_second_moment, r"exp_avg_sq of '3\.weight'"),
    (change_step, r"step of '3\.weight'"),
    (drop_entry, r"exp_avg of '3\.weight'"),
    (drop_state, r"'3\.weight'"),
    (change_lr, r"\blr\b"),
    (change_decay, r"weight_decay"),
    (change_betas, r"betas"),
]


@FRONTS
@TRANSPORTS
@on_ranks(2)
def test_verify(front: str, transport: str) -> None:
    for change, names in DIFFERENCES:
        training = adam(front, transport, verify="never")
        gradsync.verify(training.replica)
        gradsync.verify(training.replica, training.optimizer)
        gradsync.verify(training.replica, optimizer=training.optimizer)
        if training.odd:
            change(training)
        of_module = change in (change_parameter, change_buffer, change_count)
        for optimizer in (training.optimizer, None):
            if of_module or optimizer is not None:
                with pytest.raises(ReplicaDivergedError, match=names) as raised:
                    gradsync.verify(training.replica, optimizer)
                assert sorted(raised.value.ranks) == [0, 1]
            else:
                gradsync.verify(training.replica)


@FRONTS
@on_ranks(3)
def test_verify_on_three_ranks(front: str) -> None:
    training = adam(front, "auto")
    if dist.get_rank() == 1:
        change_first_moment(training)
    with pytest.raises(ReplicaDivergedError, match=r"rank 1.*exp_avg of '3\.weight'") as raised:
        gradsync.verify(training.replica, training.optimizer)
    assert raised.value.ranks == [1]


@FRONTS
@on_ranks(2)
def test_verify_with_optimizers_of_all_sorts(front: str) -> None:
    """States of every shape: numbers, lists, none at all, and parameters that were never stepped."""
    kinds: list[Callable[..., Any]] = [
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.LBFGS(p, lr=0.1),
        lambda p: torch.optim.Adagrad(p, lr=0.1),
        lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1)),
        lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    ]
    for kind in kinds:
        module = build()
        module.register_parameter("unused", nn.Parameter(torch.ones(2)))
        replica = make(front, module)
        training = Training(replica, module, kind(module.parameters()))
        for step in range(2):

            def closure(training: Training = training, step: int = step) -> Tensor:
                training.backward(step)
                return torch.zeros(())

            training.optimizer.step(closure)
            gradsync.verify(replica, training.optimizer)


@on_ranks(1)
def test_a_world_of_one() -> None:
    for front in ("replicate", "DistributedDataParallel"):
        training = train(front, verify="every")
        assert until_alarm(training, 3, -1, None) is None
        gradsync.verify(training.replica, training.optimizer)


@FRONTS
@TRANSPORTS
@on_ranks(2)
def test_going_on_after_an_alarm(front: str, transport: str) -> None:
    """After an alarm the ranks can be brought together again, and training goes on."""
    training = train(front, transport=transport, verify="every")
    found = until_alarm(training, 5, 2, another_learning_rate)
    assert found is not None
    training.optimizer.param_groups[0]["lr"] = 0.1
    for parameter in training.module.parameters():
        dist.broadcast(parameter.data, 0)
    gradsync.verify(training.replica, training.optimizer)
    assert until_alarm(training, 4, -1, None) is None
    same_everywhere(training.module)
