"""Replicas are compared while they train, and at once by `gradsync.verify`."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from operator import le
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer

import gradsync
from gradsync.ddp_private import _MixedPrecision
from gradsync.errors import InvalidOptionError, ReplicaDivergedError, RoundMismatchError
from gradsync.replica import engine_of
from tests.ranks.small import FRONTS, TRANSPORTS, batch, build, make, same_everywhere
from tests.support.ranks import Ranks

NAMES = [name for name, _ in build().named_parameters()]


@dataclass
class Training:
    """One replica and its optimizer; `odd` on the rank that is about to do something else than the others."""

    replica: Any
    module: nn.Module
    optimizer: Any
    odd: bool = False
    rank: int = field(default_factory=dist.get_rank)

    def backward(self, step: int) -> None:
        self.optimizer.zero_grad()
        self.replica(batch(self.rank, step)).square().mean().backward()

    def parameter(self, name: str = "2.bias") -> nn.Parameter:
        return self.module.get_parameter(name)


def train(front: str, module: nn.Module | None = None, odd: int = 1, **options: Any) -> Training:
    module = build() if module is None else module
    replica = make(front, module, **options)
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
    return Training(replica, module, optimizer, dist.get_rank() == odd)


@dataclass(frozen=True)
class Alarm:
    """What a rank was told, and in which round."""

    round: int
    ranks: list[int]
    parameters: list[str]
    text: str


def alarm(error: ReplicaDivergedError, step: int) -> Alarm:
    return Alarm(step, sorted(error.ranks), list(error.parameters), str(error))


def until_alarm(training: Training, rounds: int, at: int, change: Callable[[Training], None] | None) -> Alarm | None:
    """Trains; in round `at`, what happens after backward is left to `change`. Its first alarm, if any."""
    for step in range(rounds):
        try:
            training.backward(step)
        except ReplicaDivergedError as error:
            return alarm(error, step)
        if step == at and change is not None:
            change(training)
        else:
            training.optimizer.step()
    return None


# --- what drives replicas apart ------------------------------------------------------------------------


def another_learning_rate(training: Training) -> None:
    if training.odd:
        training.optimizer.param_groups[0]["lr"] *= 1.01
    training.optimizer.step()


def another_weight_decay(training: Training) -> None:
    if training.odd:
        training.optimizer.param_groups[0]["weight_decay"] = 0.01
    training.optimizer.step()


def a_checkpoint(training: Training) -> None:
    training.optimizer.step()
    if training.odd:
        training.module.load_state_dict({name: t * 0.9 for name, t in training.module.state_dict().items()})


def data_replaced(training: Training) -> None:
    training.optimizer.step()
    if training.odd:
        training.parameter().data = training.parameter().data + 1


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


def never(front: str, transport: str) -> None:
    for change in (another_learning_rate, data_replaced):
        assert until_alarm(train(front, transport=transport, verify="never"), 9, 2, change) is None


@FRONTS
@TRANSPORTS
def test_never(ranks: Ranks, front: str, transport: str) -> None:
    ranks(never, 2, front, transport)


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


def a_step_skipped(front: str, transport: str, verify: str) -> None:
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


@FRONTS
@TRANSPORTS
@pytest.mark.parametrize("verify", ["auto", "never"])
def test_a_step_skipped(ranks: Ranks, front: str, transport: str, verify: str) -> None:
    ranks(a_step_skipped, 2, front, transport, verify)


def initialised_anew(front: str, transport: str) -> Alarm | None:
    training = train(front, transport=transport)
    torch.manual_seed(dist.get_rank())
    training.module.get_submodule("2").reset_parameters()  # type: ignore[operator]
    return until_alarm(training, 3, -1, None)


@FRONTS
@TRANSPORTS
def test_a_module_that_was_initialised_anew(ranks: Ranks, front: str, transport: str) -> None:
    for found in ranks(initialised_anew, 2, front, transport):
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


def flip(tensor: Tensor, element: int, bit: int) -> None:
    """Changes one bit of one element, in memory as it is."""
    size = tensor.element_size()
    start = (element % tensor.numel()) * size
    flat = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    flat[start + bit // 8 % size] ^= 1 << bit % 8


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


def compared(front: str, transport: str) -> None:
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


@FRONTS
@TRANSPORTS
def test_parameters_of_every_kind(ranks: Ranks, front: str, transport: str) -> None:
    ranks(compared, 2, front, transport)


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


def single_bits() -> None:
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


def test_a_single_bit_anywhere(ranks: Ranks) -> None:
    ranks(single_bits, 2)


def large_bits(transport: str) -> None:
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


@TRANSPORTS
def test_a_single_bit_of_many(ranks: Ranks, transport: str) -> None:
    ranks(large_bits, 2, transport)


# --- at once, and complete -----------------------------------------------------------------------------


def with_norm() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))


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


def verified(front: str, transport: str) -> None:
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
@TRANSPORTS
def test_verify(ranks: Ranks, front: str, transport: str) -> None:
    ranks(verified, 2, front, transport)


def verified_by_three(front: str) -> None:
    training = adam(front, "auto")
    if dist.get_rank() == 1:
        change_first_moment(training)
    with pytest.raises(ReplicaDivergedError, match=r"rank 1.*exp_avg of '3\.weight'") as raised:
        gradsync.verify(training.replica, training.optimizer)
    assert raised.value.ranks == [1]


@FRONTS
def test_verify_on_three_ranks(ranks: Ranks, front: str) -> None:
    ranks(verified_by_three, 3, front)


def other_optimizers(front: str) -> None:
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


@FRONTS
def test_verify_with_optimizers_of_all_sorts(ranks: Ranks, front: str) -> None:
    ranks(other_optimizers, 2, front)


def verified_alone() -> None:
    for front in ("replicate", "DistributedDataParallel"):
        training = train(front, verify="every")
        assert until_alarm(training, 3, -1, None) is None
        gradsync.verify(training.replica, training.optimizer)


def test_a_world_of_one(ranks: Ranks) -> None:
    ranks(verified_alone, 1)


def mended(front: str, transport: str) -> None:
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


@FRONTS
@TRANSPORTS
def test_going_on_after_an_alarm(ranks: Ranks, front: str, transport: str) -> None:
    ranks(mended, 2, front, transport)


# --- options -------------------------------------------------------------------------------------------


def chosen(front: str) -> None:
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


@FRONTS
def test_the_option_and_the_environment(ranks: Ranks, front: str) -> None:
    ranks(chosen, 2, front)


# --- no false alarms -----------------------------------------------------------------------------------


def long(front: str, transport: str) -> None:
    module = with_norm()
    replica = make(front, module, transport=transport)
    training = Training(replica, module, torch.optim.AdamW(module.parameters(), lr=0.01))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(training.optimizer, 150)
    for step in range(150):
        training.backward(step)
        training.optimizer.step()
        schedule.step()
    gradsync.verify(replica, training.optimizer)
    same_everywhere(module)


@FRONTS
@TRANSPORTS
def test_a_long_training(ranks: Ranks, front: str, transport: str) -> None:
    ranks(long, 2, front, transport)


def quiet(front: str, rounds: Callable[[str, dict[str, Any]], None]) -> None:
    for transport in ("shared_memory", "process_group"):
        for verify in ("auto", "every"):
            try:
                rounds(front, {"transport": transport, "verify": verify})
            except Exception as error:
                error.add_note(f"{transport}, {verify}") if hasattr(error, "add_note") else None
                raise


def steps(replica: Any, module: nn.Module, optimizer: Any, number: int = 6, first: int = 0) -> None:
    for step in range(first, first + number):
        optimizer.zero_grad()
        replica(batch(dist.get_rank(), step).to(next(module.parameters()).dtype)).float().square().mean().backward()
        optimizer.step()


def buffers_apart(front: str, options: dict[str, Any]) -> None:
    for mode in ("round", "average", "evaluation", "never"):
        module = with_norm()
        replica = make(front, module, buffers=mode, **options)
        steps(replica, module, torch.optim.AdamW(module.parameters()))


def joined(front: str, options: dict[str, Any]) -> None:
    """A rank that has run out does not step: it is behind until the context ends."""
    module = with_norm()
    replica = make(front, module, **options)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    contexts: list[Callable[[], Any]] = [
        lambda: Join([replica]),
        lambda: Join([replica], divide_by_initial_world_size=False),
        lambda: replica.join() if front != "replicate" else Join([replica]),
    ]
    for number, context in enumerate(contexts):
        with context():
            steps(replica, module, optimizer, 3 + 6 * ((dist.get_rank() + number) % 2))
        same_everywhere(module)
    steps(replica, module, optimizer, 4)
    gradsync.verify(replica)


def uneven(front: str, options: dict[str, Any]) -> None:
    module = build()
    replica = make(front, module, **options)
    optimizer = torch.optim.AdamW(module.parameters())
    for number in range(2):
        loader = [batch(dist.get_rank(), step) for step in range(3 + 4 * ((dist.get_rank() + number) % 2))]
        for x in gradsync.uneven(loader, replica):
            optimizer.zero_grad()
            replica(x).square().mean().backward()
            optimizer.step()
    steps(replica, module, optimizer, 4)
    gradsync.verify(replica, optimizer)


def sharded(front: str, options: dict[str, Any]) -> None:
    for in_backward in (False, True):
        module = build()
        replica = make(front, module, **options)
        optimizer: Any = ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, lr=0.01)
        if in_backward:
            gradsync.overlap_optimizer(replica, optimizer)
        for step in range(6):
            module.zero_grad()
            replica(batch(dist.get_rank(), step)).square().mean().backward()
            if not in_backward:
                optimizer.step()
        gradsync.verify(replica)


def in_backward(front: str, options: dict[str, Any]) -> None:
    for free in (False, True):
        module = build()
        replica = make(front, module, **options)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        gradsync.overlap_optimizer(replica, optimizer, clip_value=0.5, free_gradients=free)
        for step in range(6):
            module.zero_grad()
            with replica.no_sync() if step % 2 else nullcontext():
                replica(batch(dist.get_rank(), step)).square().mean().backward()
            replica(batch(dist.get_rank(), step + 50)).square().mean().backward()
        gradsync.verify(replica, optimizer)


def low_precision(front: str, options: dict[str, Any]) -> None:
    module = build().bfloat16()
    replica = make(front, module, **options)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    steps(replica, module, optimizer)
    gradsync.verify(replica, optimizer)


def mixed_precision(front: str, options: dict[str, Any]) -> None:
    policies: list[dict[str, Any]]
    if front == "replicate":
        policy = gradsync.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        policies = [{"mp_policy": policy}, {"mp_policy": policy, "mesh": init_device_mesh("cpu", (2,))}]
    else:
        policies = [{"mixed_precision": _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}]
    for policy_options in policies:
        module = build()
        replica = make(front, module, **policy_options, **options)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        for step in range(6):
            optimizer.zero_grad()
            replica(batch(dist.get_rank(), step)).float().square().mean().backward()
            optimizer.step()
        gradsync.verify(replica, optimizer)


def post_local(front: str, options: dict[str, Any]) -> None:
    """Between two averages each rank is where its own data have brought it."""
    module = build()
    replica = make(front, module, **options)
    alone, _ = dist.new_subgroups(group_size=1)
    replica.register_comm_hook(PostLocalSGDState(None, alone, start_localSGD_iter=2), post_localSGD_hook)
    averager = PeriodicModelAverager(period=3, warmup_steps=2)
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(module.parameters(), lr=0.1), averager)
    steps(replica, module, optimizer, 10)


def local_steps(front: str, options: dict[str, Any]) -> None:
    """Local SGD on purpose: from then on the replicas may differ, until somebody asks."""
    module = build()
    replica = make(front, module, **options)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    steps(replica, module, optimizer, 3)
    with gradsync.allow_unsynchronized_steps():
        for step in range(3):
            optimizer.zero_grad()
            with replica.no_sync():
                replica(batch(dist.get_rank(), step)).square().mean().backward()
            optimizer.step()
    steps(replica, module, optimizer, 8)
    with pytest.raises(ReplicaDivergedError):
        gradsync.verify(replica)


def ignored(front: str, options: dict[str, Any]) -> None:
    """Parameters that were left out are each rank's own."""
    module = build()
    own = nn.Parameter(torch.full((3,), float(dist.get_rank())))
    module.register_parameter("own", own)
    if front == "replicate":
        replica = make(front, module, ignored_params=[own], **options)
    else:
        module._ddp_params_and_buffers_to_ignore = ["own"]  # type: ignore[assignment]
        replica = make(front, module, **options)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(6):
        optimizer.zero_grad()
        (replica(batch(dist.get_rank(), step)).square().mean() + own.square().sum()).backward()
        optimizer.step()
    gradsync.verify(replica)


def changed_everywhere(front: str, options: dict[str, Any]) -> None:
    """What all ranks do alike: freeze, load, convert, replace, accumulate, skip."""
    module = build()
    replica = make(front, module, **options)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    steps(replica, module, optimizer, 2)
    module.get_parameter("0.weight").requires_grad_(False)
    steps(replica, module, optimizer, 3)
    module.get_parameter("0.weight").requires_grad_(True)
    module.load_state_dict(build().state_dict())
    steps(replica, module, optimizer, 2)
    module.load_state_dict({name: t.clone() for name, t in module.state_dict().items()}, assign=True)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    steps(replica, module, optimizer, 2)
    module.double()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    steps(replica, module, optimizer, 3)
    for number in range(8):
        with replica.no_sync() if number % 4 else nullcontext():
            replica(batch(dist.get_rank(), number).double()).square().mean().backward()
    replica.synchronize_gradients()
    optimizer.step()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(float("nan"))
    steps(replica, module, optimizer, 2)


def a_copy_beside(front: str, options: dict[str, Any]) -> None:
    """An average that rank 0 alone keeps, and one that all keep."""
    module = build()
    replica = make(front, module, **options)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    averages = [copy.deepcopy(replica)] if dist.get_rank() == 0 else []
    for step in range(6):
        steps(replica, module, optimizer, 1, step)
        for average in averages:
            with torch.no_grad():
                for mine, current in zip(average.parameters(), module.parameters(), strict=True):
                    mine.lerp_(current, 0.1)
    gradsync.verify(replica)


def sparse(front: str, options: dict[str, Any]) -> None:
    module = nn.Sequential(nn.Embedding(50, 4, sparse=True), nn.Linear(4, 2))
    replica = make(front, module, **options)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(6):
        optimizer.zero_grad()
        replica(torch.tensor([step, 7 + dist.get_rank()])).square().mean().backward()
        optimizer.step()
    gradsync.verify(replica, optimizer)


QUIET = [
    buffers_apart,
    joined,
    uneven,
    sharded,
    in_backward,
    low_precision,
    mixed_precision,
    post_local,
    local_steps,
    ignored,
    changed_everywhere,
    a_copy_beside,
    sparse,
]


@FRONTS
@pytest.mark.parametrize("rounds", QUIET)
def test_no_false_alarm(ranks: Ranks, front: str, rounds: Any) -> None:
    ranks(quiet, 2, front, rounds)


def synchronised_inside(front: str) -> Alarm | None:
    """Steps on synchronised gradients inside that context are no local steps: the comparison stays."""
    training = train(front, verify="every")
    with gradsync.allow_unsynchronized_steps():
        assert until_alarm(training, 3, -1, None) is None
    return until_alarm(training, 5, 1, data_replaced)


@FRONTS
def test_synchronised_steps_where_local_ones_are_allowed(ranks: Ranks, front: str) -> None:
    for found in ranks(synchronised_inside, 2, front):
        assert found is not None
        assert found.round == 2


def joined_beyond_the_measured_round(front: str, transport: str) -> None:
    """Rank 1 runs out of data before round 64, in which the ranks choose how often to look."""
    training = train(front, transport=transport)
    with Join([training.replica]):
        for step in range(70 if dist.get_rank() == 0 else 60):
            training.backward(step)
            training.optimizer.step()
    same_everywhere(training.module)


@FRONTS
@TRANSPORTS
def test_a_rank_without_data_when_the_ranks_choose(ranks: Ranks, front: str, transport: str) -> None:
    ranks(joined_beyond_the_measured_round, 2, front, transport)


def one_is_not_compared(transport: str) -> None:
    """Rank 2 trained alone on purpose: the others still compare, and it takes part in finding out what differs."""
    training = train("replicate", transport=transport, verify="every")
    training.backward(0)
    training.optimizer.step()
    if training.rank == 2:
        with training.replica.no_sync():
            training.backward(1)
        with gradsync.allow_unsynchronized_steps():
            training.optimizer.step()
        training.optimizer.zero_grad()
    else:
        training.optimizer.step()
    for step in range(2, 70):
        training.backward(step)
        training.optimizer.step()
    if training.odd:
        training.parameter().data[0] += 1
    with pytest.raises(ReplicaDivergedError, match=r"2\.bias"):
        training.backward(70)


@TRANSPORTS
def test_a_rank_that_is_not_compared(ranks: Ranks, transport: str) -> None:
    ranks(one_is_not_compared, 3, transport)
