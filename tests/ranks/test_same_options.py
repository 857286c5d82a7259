"""What ranks must say alike: options, divide factors, communication hooks, which parameters are trained.

Ranks that differ all get an error that names the option and who said what, within seconds, not at a time limit.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook

import gradsync
from gradsync.ddp_private import _MixedPrecision
from gradsync.errors import OptionsMismatchError, ParametersChangedError, RoundMismatchError
from tests.ranks.memory import be_on_host
from tests.ranks.small import (
    FRONTS,
    TRANSPORTS,
    assert_gradients,
    backward,
    build,
    make,
    mean_gradients,
    same_everywhere,
)
from tests.support.outcome import End
from tests.support.patience import seconds_since
from tests.support.ranks import Ranks, on_ranks

SOON = 5.0  # seconds: what takes milliseconds, on a busy machine; half of the group's time limit
# Of three ranks that are not all on one host the last one is elsewhere.
WHERE = pytest.mark.parametrize(
    ("transport", "size"), [("shared_memory", 2), ("process_group", 3), ("hierarchical", 3)]
)
Errors = type[Exception] | tuple[type[Exception], ...]


def model() -> nn.Module:
    """With buffers, and the same everywhere, so that nothing but the options differs."""
    return nn.Sequential(build(), nn.BatchNorm1d(2))


def place(transport: str) -> None:
    if transport == "hierarchical":
        be_on_host(dist.get_rank() // 2)


def train(replica: Any, *steps: int) -> None:
    for step in steps:
        replica.zero_grad()
        backward(replica, step)


@contextlib.contextmanager
def refused(error: Errors, *patterns: str) -> Iterator[None]:
    """What is inside raises this, with all of these in its text, and does not wait for a time limit."""
    began = time.monotonic()
    with pytest.raises(error) as caught:
        yield
    assert seconds_since(began) < SOON
    for pattern in patterns:
        assert re.search(pattern, str(caught.value)), (pattern, str(caught.value))


def everybody() -> list[str]:
    return [rf"(?s)rank.*\b{rank}\b" for rank in range(dist.get_world_size())]


# --- options ---------------------------------------------------------------------------------------------


def precision(front: str, dtype: torch.dtype | None) -> dict[str, Any]:
    if front == "replicate":
        return {"mp_policy": gradsync.MixedPrecisionPolicy(reduce_dtype=dtype)}
    return {"mixed_precision": _MixedPrecision(reduce_dtype=dtype)}


def arguments(front: str, option: str, value: Any) -> dict[str, Any]:
    return precision(front, value) if option == "mp_policy" else {option: value}


NAMED = {"mp_policy": "mp_policy|mixed_precision|reduce_dtype", "forward_sync_buffers": "buffers"}


def shown(value: Any) -> str:
    """How a value may be shown: options are kept under the names that gradsync has for what was asked for."""
    if isinstance(value, bool):
        return r"\bTrue\b|broadcast|round" if value else r"\bFalse\b|check|none|never"
    return re.escape(str(value))


def one_says_otherwise(front: str, transport: str, option: str, usual: Any, other: Any) -> None:
    """The last rank. With init_sync="none" on one rank nobody can tell before the first round."""
    place(transport)
    value = other if dist.get_rank() == dist.get_world_size() - 1 else usual
    with refused(OptionsMismatchError, NAMED.get(option, option), *everybody(), shown(usual), shown(other)):
        replica = make(front, model(), transport=transport, **arguments(front, option, value))
        train(replica, 0, 1, 2)


BOTH: list[tuple[str, Any, Any]] = [
    ("reduce", "mean", "sum"),
    ("bucket_cap_mb", 0.0001, 25),
    ("buffers", "round", "average"),
    ("buffers", "evaluation", "round"),
    ("buffers", "never", "round"),
    ("buffers_from", 0, 1),
    ("init_sync", True, False),
    ("init_sync", False, True),
    ("find_unused_parameters", None, False),
    ("find_unused_parameters", False, True),
    ("verify", "auto", "every"),
    ("mp_policy", None, torch.bfloat16),
    ("mp_policy", torch.float64, torch.bfloat16),
]
WRAPPER: list[tuple[str, Any, Any]] = [("forward_sync_buffers", True, False)]
REPLICATE: list[tuple[str, Any, Any]] = [
    ("init_sync", True, "none"),
    ("init_sync", "none", True),
    ("init_sync", False, "none"),
    ("init_sync", "none", False),
    ("init_sync_buffers", True, False),
    ("init_sync_buffers", False, True),
]
SAID = [("replicate", *said) for said in (*BOTH, *REPLICATE)] + [
    ("DistributedDataParallel", *said) for said in (*BOTH, *WRAPPER)
]


@TRANSPORTS
@pytest.mark.parametrize(("front", "option", "usual", "other"), SAID)
def test_an_option_that_differs(ranks: Ranks, transport: str, front: str, option: str, usual: Any, other: Any) -> None:
    ranks(one_says_otherwise, 2, front, transport, option, usual, other)


@FRONTS
@pytest.mark.parametrize("transport", ["shared_memory", "process_group", "hierarchical"])
@pytest.mark.parametrize(("option", "usual", "other"), [BOTH[0], BOTH[1]])
def test_an_option_that_differs_on_one_of_three(
    ranks: Ranks, front: str, transport: str, option: str, usual: Any, other: Any
) -> None:
    ranks(one_says_otherwise, 3, front, transport, option, usual, other)


def ends_with_the_error(front: str, transport: str) -> None:
    place(transport)
    make(front, model(), transport=transport, reduce="sum" if dist.get_rank() == 1 else "mean")


@FRONTS
@WHERE
def test_ranks_that_end_with_the_error_leave_it_to_the_others(
    ranks: Ranks, front: str, transport: str, size: int
) -> None:
    for outcome in ranks.outcomes(ends_with_the_error, size, front, transport):
        assert outcome.end is End.RAISED, outcome
        assert isinstance(outcome.exception, OptionsMismatchError), outcome


@FRONTS
@WHERE
@on_ranks("size")
def test_made_again_with_equal_options(front: str, transport: str, size: int) -> None:
    """The same module; with equal options, all of them given, it is trained as ever."""
    place(transport)
    rank = dist.get_rank()
    module = build()
    for option, values in (("reduce", ("mean", "sum")), ("buffers_from", (0, 1))):
        with refused(OptionsMismatchError, option):
            make(front, module, transport=transport, **{option: values[rank == 1]})
    options = {name: usual for name, usual, _ in BOTH if name not in ("buffers", "mp_policy", "verify")}
    replica = make(front, module, transport=transport, **options)
    for step in range(3):
        train(replica, step)
        assert_gradients(module, mean_gradients(module, step, parts=range(size)))
    same_everywhere(module)


# --- what is set later -----------------------------------------------------------------------------------

HOOKS = {"allreduce_hook": allreduce_hook, "fp16_compress_hook": fp16_compress_hook}


def divides(transport: str, factors: tuple[float | None, ...], before: int) -> None:
    """None: left as it is."""
    place(transport)
    replica: Any = make("replicate", build(), transport=transport)
    train(replica, *range(before))
    factor = factors[dist.get_rank()]
    if factor is not None:
        replica.set_gradient_divide_factor(factor)
    given = [re.escape(f"{one:g}") for one in factors if one is not None]
    with refused(OptionsMismatchError, "divide.factor", *everybody(), *given):
        train(replica, before)


@pytest.mark.parametrize("transport", ["shared_memory", "process_group", "hierarchical"])
@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize("factors", [(None, 3.5), (3.5, 7.25), (3.5, None, None)], ids=str)
def test_divide_factors_that_differ(
    ranks: Ranks, transport: str, factors: tuple[float | None, ...], before: int
) -> None:
    if transport == "hierarchical" and len(factors) < 3:
        factors = (factors[0], *factors)
    ranks(divides, len(factors), transport, factors, before)


def hooked(front: str, transport: str, hooks: tuple[str | None, ...], before: int) -> None:
    place(transport)
    replica = make(front, build(), transport=transport)
    train(replica, *range(before))
    hook = hooks[dist.get_rank()]
    if hook is not None:
        replica.register_comm_hook(None, HOOKS[hook])
    with refused(OptionsMismatchError, *everybody(), *(one for one in hooks if one is not None)):
        train(replica, before)


@FRONTS
@TRANSPORTS
@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize(
    "hooks",
    [(None, "allreduce_hook"), ("fp16_compress_hook", None), ("allreduce_hook", "fp16_compress_hook")],
    ids=["second", "first", "different"],
)
def test_hooks_that_differ(
    ranks: Ranks, front: str, transport: str, hooks: tuple[str | None, ...], before: int
) -> None:
    ranks(hooked, 2, front, transport, hooks, before)


@FRONTS
@pytest.mark.parametrize("transport", ["shared_memory", "process_group", "hierarchical"])
def test_a_hook_on_one_of_three(ranks: Ranks, front: str, transport: str) -> None:
    ranks(hooked, 3, front, transport, (None, None, "allreduce_hook"), 3)


# --- what is trained -------------------------------------------------------------------------------------


def frozen_alone(front: str, transport: str, who: int, layer: int, thawed: bool) -> None:
    """In the middle of training; or frozen on all ranks, and unfrozen on one."""
    place(transport)
    module = build()
    module[layer].requires_grad_(not thawed)
    replica = make(front, module, transport=transport)
    train(replica, 0, 1, 2)
    if dist.get_rank() == who:
        module[layer].requires_grad_(thawed)
    with refused((ParametersChangedError, RoundMismatchError)):
        train(replica, 3)


@FRONTS
@TRANSPORTS
@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize(("layer", "thawed"), [(0, False), (4, False), (2, True)], ids=str)
def test_frozen_on_one_rank(ranks: Ranks, front: str, transport: str, who: int, layer: int, thawed: bool) -> None:
    ranks(frozen_alone, 2, front, transport, who, layer, thawed)


@FRONTS
@pytest.mark.parametrize("transport", ["shared_memory", "process_group", "hierarchical"])
def test_frozen_on_one_of_three(ranks: Ranks, front: str, transport: str) -> None:
    ranks(frozen_alone, 3, front, transport, 2, 2, False)
