"""Where a rank is, in a few lines."""

from __future__ import annotations

import functools

import pytest
import torch

from gradsync.watch import position


def raise_here(*_: object) -> None:
    raise ValueError("on purpose")


def through_libraries(times: int) -> None:
    """Each time over a call inside torch's, and at the end over many of them."""
    if times:
        torch.no_grad()(through_libraries)(times - 1)
    else:
        module: torch.nn.Module = torch.nn.Identity()
        module.register_forward_hook(raise_here)
        for _ in range(4):
            module = torch.nn.Sequential(module)
        module(torch.ones(1))


def recurse(times: int) -> None:
    raise_here() if times == 0 else recurse(times - 1)


def lines_of(call: functools.partial[None]) -> list[str]:
    with pytest.raises(ValueError, match="on purpose") as caught:
        call()
    return [line.rpartition(" in ")[2] for line in position.lines_of(caught.value)]


def test_calls_inside_libraries_make_room_for_the_users_own() -> None:
    lines = lines_of(functools.partial(through_libraries, 2))
    assert len(lines) <= 12
    assert [one for one in lines if one in ("through_libraries", "raise_here")] == [
        *["through_libraries"] * 3,
        "raise_here",
    ]
    assert "..." in lines
    assert lines[0] == "lines_of"
    assert lines[-3:] == ["_call_impl", "inner", "raise_here"], "the innermost ones stay"


def test_a_short_one_is_whole() -> None:
    lines = lines_of(functools.partial(torch.no_grad()(raise_here)))
    assert lines == ["lines_of", "decorate_context", "raise_here"]


def test_of_the_users_own_the_innermost_are_told() -> None:
    assert lines_of(functools.partial(recurse, 50)) == [*["recurse"] * 11, "raise_here"]
