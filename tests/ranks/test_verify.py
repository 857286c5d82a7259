"""Replicas are compared while they train, and at once by `gradsync.verify`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from operator import le
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import gradsync
from gradsync.errors import InvalidOptionError, ReplicaDivergedError, RoundMismatchError
from gradsync.replica import engine_of
from tests.ranks.replicas import NAMES, Alarm, Training, another_learning_rate, data_replaced, flip, train, until_alarm
from tests.ranks.small import FRONTS, TRANSPORTS, batch, build, make
from tests.support.ranks import Ranks, on_ranks

# --- what drives replicas apart ------------------------------------------------------------------------


def another_weight_decay(training: Training) -> None:
    if training.odd:
        training.optimizer.param_groups[0]["weight_decay"] = 0.01
    training.optimizer.step()


def a_checkpoint(training: Training) -> None:
    training.optimizer.step()
    if training.odd:
        training.module.load_state_dict({name: t * 0.9 for name, t in training.module.state_dict().items()})


def data_changed(training: Training) -> None:
    training.optimizer.step()
    if training.odd:
        training.parameter().data[3] += 1e-6


def a_gradient_changed(training: Training) -> None:
    gradient = training.parameter().grad
    if training.odd:
        assert gradient is not None
        gradient.mul_(2)
    training.optimizer.step()


def a_gradient_dropped(training: Training) -> None:
    if training.odd:
        training.parameter().grad = None
    training.optimizer.step()


def noise(training: Training) -> None:
    training.optimizer.step()
    generator = torch.Generator().manual_seed(training.rank)
    with torch.no_grad():
        for parameter in training.module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=1e-4)


def by_hand_inside_no_sync(training: Training) -> None:
    training.optimizer.step()
    training.optimizer.zero_grad()
    with training.replica.no_sync():
        training.replica(batch(training.rank, 50)).square().mean().backward()
        with torch.no_grad():
            for parameter in training.module.parameters():
                if parameter.grad is not None:
                    parameter.sub_(0.1 * parameter.grad)
    training.optimizer.zero_grad()


ALL = (
    another_learning_rate,
    another_weight_decay,
    a_checkpoint,
    noise,
    by_hand_inside_no_sync,
)
ONE = (data_replaced, data_changed, a_gradient_changed, a_gradient_dropped)  # of '2.bias' only


def told(front: str, transport: str, change: Callable[[Training], None]) -> list[Alarm | None]:
    """Several trainings, one after the other: an alarm leaves nothing behind that disturbs the next one."""
    return [until_alarm(train(front, transport=transport, verify=verify), 9, 2, change) for verify in ("every", "auto")]


@FRONTS
@TRANSPORTS
@pytest.mark.parametrize("change", [*ALL, *ONE])
def test_what_drives_replicas_apart(ranks: Ranks, front: str, transport: str, change: Any) -> None:
    for found in ranks(told, 2, front, transport, change):
        for one, latest in zip(found, (3, 4), strict=True):
            assert one is not None
            assert one.round <= latest  # a small model is seen in every round
            assert one.ranks == [0, 1]
            assert sorted(one.parameters) == (sorted(NAMES) if change in ALL else ["2.bias"])
            assert "rank" in one.text
            assert f"'{one.parameters[0]}'" in one.text
            assert_tells(one, 2, one.round)


def assert_tells(one: Alarm, first: int, last: int) -> None:
    """Between which rounds it began."""
    tail = one.text.partition("round")[2]
    numbers = [int(word.strip(".,:;()")) for word in tail.split() if word.strip(".,:;()").isdigit()]
    assert numbers[:2] == [first, last], one.text


@FRONTS
@TRANSPORTS
@on_ranks(2)
def test_never(front: str, transport: str) -> None:
    for change in (another_learning_rate, data_replaced):
        assert until_alarm(train(front, transport=transport, verify="never"), 9, 2, change) is None


def in_which_rounds(front: str, transport: str) -> list[list[int]]:
    """For a change in some of the first rounds, the round with the alarm: by default, and with "every"."""
    found = []
    choices: list[dict[str, Any]] = [{}, {"verify": "every"}]
    for options in choices:
        alarms = [
            until_alarm(train(front, transport=transport, **options), 18, at, data_replaced)
            for at in (0, 1, 2, 3, 4, 8)
        ]
        found.append([one.round for one in alarms if one is not None])
    return found


@FRONTS
@TRANSPORTS
def test_rounds_that_are_powers_of_two(ranks: Ranks, front: str, transport: str) -> None:
    for default, every in ranks(in_which_rounds, 2, front, transport):
        assert all(map(le, default, [1, 2, 4, 4, 8, 16]))
        assert every == [1, 2, 3, 4, 5, 9]


@FRONTS
@TRANSPORTS
@pytest.mark.parametrize("verify", ["auto", "never"])
@on_ranks(2)
def test_a_step_skipped(front: str, transport: str, verify: str) -> None:
    """A torch optimizer's step is missed in the next round, whatever the values."""
    training = train(front, transport=transport, verify=verify)
    for step in range(4):
        training.optimizer.zero_grad()
        backward = training.replica(batch(training.rank, step)).square().mean().backward
        if step == 3:
            with pytest.raises(RoundMismatchError, match=r"rank 1: in round 3 .*without an optimizer's step"):
                backward()
            return
        backward()
        if step != 2 or not training.odd:
            training.optimizer.step()


def initialized_anew(front: str, transport: str) -> Alarm | None:
    training = train(front, transport=transport)
    torch.manual_seed(dist.get_rank())
    training.module.get_submodule("2").reset_parameters()  # type: ignore[operator]
    return until_alarm(training, 3, -1, None)


@FRONTS
@TRANSPORTS
def test_a_module_that_was_initialized_anew(ranks: Ranks, front: str, transport: str) -> None:
    for found in ranks(initialized_anew, 2, front, transport):
        assert found is not None
        assert found.round == 0
        assert sorted(found.parameters) == ["2.bias", "2.weight"]


def trusted() -> Alarm | None:
    """Nothing was broadcast, and the ranks hold different values."""
    module = build()
    with torch.no_grad():
        module.get_parameter("4.bias").add_(dist.get_rank())
    return until_alarm(train("replicate", module, init_sync="none"), 3, -1, None)


def test_replicas_that_begin_apart(ranks: Ranks) -> None:
    for found in ranks(trusted, 2):
        assert found is not None
        assert (found.round, found.parameters) == (0, ["4.bias"])


def frozen(front: str, transport: str) -> list[Alarm | None]:
    found = []
    for verify in ("every", "auto"):
        module = build()
        module.get_parameter("0.weight").requires_grad_(False)
        training = train(front, module, transport=transport, verify=verify)

        def change(training: Training) -> None:
            training.optimizer.step()
            if training.odd:
                training.parameter("0.weight")[1, 2] += 1e-3

        found.append(until_alarm(training, 9, 2, change))
    return found


@FRONTS
@TRANSPORTS
def test_frozen_parameters(ranks: Ranks, front: str, transport: str) -> None:
    for every, auto in ranks(frozen, 2, front, transport):
        assert every is not None
        assert auto is not None
        assert (every.round, every.parameters) == (3, ["0.weight"])
        assert auto.round <= 4
        assert auto.parameters == ["0.weight"]


def of_three(front: str, transport: str, odd: int) -> Alarm | None:
    training = train(front, odd=odd, transport=transport, verify="every")
    return until_alarm(training, 5, 1, data_replaced)


@FRONTS
@TRANSPORTS
@pytest.mark.parametrize("odd", [0, 2])
def test_the_majority_says_who_is_off(ranks: Ranks, front: str, transport: str, odd: int) -> None:
    for found in ranks(of_three, 3, front, transport, odd):
        assert found is not None
        assert (found.round, found.ranks, found.parameters) == (2, [odd], ["2.bias"])
        assert f"rank {odd}" in found.text


# --- beyond the first rounds ---------------------------------------------------------------------------


def many() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [layer for _ in range(24) for layer in (nn.Linear(16, 16), nn.Tanh())]
    return nn.Sequential(nn.Linear(4, 16), *layers)


def one_large() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 20_000), nn.Tanh(), nn.Linear(20_000, 2))


LATE = {"first": (many, "0.weight"), "last": (many, "47.bias"), "large": (one_large, "2.weight")}


def late(front: str, transport: str, which: str) -> Alarm | None:
    make_module, name = LATE[which]
    training = train(front, make_module(), transport=transport, bucket_cap_mb=0.01)
    training.optimizer.param_groups[0]["lr"] = 1e-4

    def change(training: Training) -> None:
        training.optimizer.step()
        if training.odd:
            flip(training.parameter(name), -1, 0)

    assert until_alarm(training, 66, -1, None) is None  # by then the ranks have chosen how often to look
    comparison = engine_of(training.replica).reducer.comparison
    assert comparison is not None
    assert comparison.period <= 1000
    return until_alarm(training, comparison.period + 4, 2, change)


@TRANSPORTS
@pytest.mark.parametrize("which", LATE)
def test_a_change_in_a_late_round(ranks: Ranks, transport: str, which: str) -> None:
    for found in ranks(late, 2, "replicate", transport, which):
        assert found is not None
        assert found.parameters == [LATE[which][1]]


def test_a_change_in_a_late_round_of_the_wrapper(ranks: Ranks) -> None:
    for found in ranks(late, 2, "DistributedDataParallel", "shared_memory", "last"):
        assert found is not None
        assert found.parameters == ["47.bias"]


# --- every kind of parameter ---------------------------------------------------------------------------


KINDS: dict[str, Callable[[], Tensor]] = {
    "fp64": lambda: torch.linspace(-1, 1, 7, dtype=torch.float64),
    "fp32": lambda: torch.linspace(-1, 1, 15).view(3, 5),
    "fp16": lambda: torch.linspace(-1, 1, 9).half(),
    "bf16": lambda: torch.linspace(-1, 1, 11).bfloat16(),
    "scalar": lambda: torch.tensor(0.5),
    "channels_last": lambda: torch.linspace(-1, 1, 48).view(2, 2, 3, 4).contiguous(memory_format=torch.channels_last),
    "transposed": lambda: torch.linspace(-1, 1, 6).view(2, 3).t(),
    "complex": lambda: torch.complex(torch.linspace(-1, 1, 5), torch.linspace(1, -1, 5)),
    "nan": lambda: torch.full((3,), float("nan")),
    "minus zero": lambda: torch.full((3,), -0.0),
    "one": lambda: torch.ones(1),
    "empty": lambda: torch.empty(0, 3),
}


class Kinds(nn.Module):
    """A parameter of each kind; all but the one with NaN are used."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds = nn.ParameterDict({name: nn.Parameter(make_one()) for name, make_one in KINDS.items()})
        self.bytes = nn.Parameter(torch.arange(5, dtype=torch.uint8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        used = (p.abs().square().sum().float() for name, p in self.kinds.items() if name != "nan")
        return x.mean() * sum(used, torch.zeros(()))


@FRONTS
@TRANSPORTS
@on_ranks(2)
def test_parameters_of_every_kind(front: str, transport: str) -> None:
    training = train(front, Kinds(), transport=transport, verify="every")
    assert until_alarm(training, 3, -1, None) is None
    for name, parameter in training.module.named_parameters():
        if parameter.numel() == 0:
            continue
        for bit in (0, 8 * parameter.element_size() - 1):
            if training.odd:
                flip(parameter, bit - 1, bit)
            with pytest.raises(ReplicaDivergedError) as raised:
                training.backward(3)
            assert list(raised.value.parameters) == [name]
            with pytest.raises(ReplicaDivergedError) as raised:
                gradsync.verify(training.replica)
            assert list(raised.value.parameters) == [name]
            if training.odd:
                flip(parameter, bit - 1, bit)
            gradsync.verify(training.replica)
            training.backward(4)


DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int8,
    torch.bool,
]


@on_ranks(2)
def test_a_single_bit_anywhere() -> None:
    """All ranks draw the same examples: derandomised, and without a search for simpler ones."""

    @settings(max_examples=60, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
    @given(
        dtype=st.sampled_from(DTYPES),
        shape=st.lists(st.integers(1, 9), max_size=3),
        others=st.integers(0, 3),
        element=st.integers(0, 10_000),
        bit=st.integers(0, 127),
        odd=st.integers(0, 1),
    )
    def check(dtype: torch.dtype, shape: Sequence[int], others: int, element: int, bit: int, odd: int) -> None:
        trained = (dtype.is_floating_point and dtype.itemsize > 1) or dtype.is_complex
        module = nn.ParameterList([nn.Parameter(torch.ones(5)) for _ in range(others)])
        module.append(
            nn.Parameter((torch.arange(max(1, torch.Size(shape).numel())) % 2).view(shape).to(dtype), trained)
        )
        holder = nn.Module()
        holder.all = module
        holder.more = nn.Parameter(torch.ones(1))
        replica = gradsync.replicate(holder, bucket_cap_mb=0.0001)
        gradsync.verify(replica)
        if dist.get_rank() == odd:
            flip(module[others], element, 0 if dtype is torch.bool else bit)
        with pytest.raises(ReplicaDivergedError) as raised:
            gradsync.verify(replica)
        assert list(raised.value.parameters) == [f"all.{others}"]
        assert sorted(raised.value.ranks) == [0, 1]

    check()


@TRANSPORTS
@on_ranks(2)
def test_a_single_bit_of_many(transport: str) -> None:
    """In a tensor of several MB: the first, the last, one between; and two changes that a sum would not see."""
    module = nn.Sequential(nn.Linear(1000, 1000))
    replica = make("replicate", module, transport=transport)
    weight = module.get_parameter("0.weight")
    gradsync.verify(replica)
    for element in (0, 123_457, -1):
        if dist.get_rank() == 0:
            flip(weight, element, 3)
        with pytest.raises(ReplicaDivergedError, match=r"'0\.weight'"):
            gradsync.verify(replica)
        if dist.get_rank() == 0:
            flip(weight, element, 3)
    if dist.get_rank() == 0:  # swapped: the same elements in another order
        with torch.no_grad():
            weight[[0, 1]] = weight[[1, 0]]
    with pytest.raises(ReplicaDivergedError, match=r"'0\.weight'"):
        gradsync.verify(replica)


# --- options -------------------------------------------------------------------------------------------


@FRONTS
@on_ranks(2)
def test_the_option_and_the_environment(front: str) -> None:
    with pytest.raises(InvalidOptionError, match=r"verify.*'auto'.*'every'.*'never'.*'sometimes'"):
        make(front, build(), verify="sometimes")
    os.environ["GRADSYNC_VERIFY"] = "often"
    with pytest.raises(InvalidOptionError, match=r"GRADSYNC_VERIFY.*'often'|'often'.*GRADSYNC_VERIFY"):
        make(front, build())
    for value, expected in (("every", 3), ("auto", 3), ("never", None)):
        os.environ["GRADSYNC_VERIFY"] = value
        found = until_alarm(train(front), 9, 2, data_replaced)
        assert (found and found.round) == expected, value
    os.environ["GRADSYNC_VERIFY"] = "never"  # the default only
    found = until_alarm(train(front, verify="every"), 9, 2, data_replaced)
    assert found is not None
    os.environ["GRADSYNC_VERIFY"] = "every"
    assert until_alarm(train(front, verify="never"), 9, 2, data_replaced) is None
