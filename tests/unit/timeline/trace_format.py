"""What viewers ask of a trace in Chrome's trace event format, as far as we use it."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import Any

Slices = dict[tuple[int, int], list[dict[str, Any]]]


def check(trace: dict[str, Any]) -> Slices:
    """Raises if something is wrong; gives the slices by process and thread, in order."""
    assert trace["displayTimeUnit"] in ("ms", "ns")
    slices: Slices = defaultdict(list)
    named = set()
    arrows: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        lane = event["pid"], event["tid"]
        if event["ph"] == "M":
            assert event["name"].startswith(("process_", "thread_"))
            named |= {lane} if event["name"] == "thread_name" else set()
        elif event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            slices[lane].append(event)
        else:
            assert event["ph"] in "sf"
            arrows[event["id"]].append(event)
    assert set(slices) == named
    for lane, events in slices.items():
        events.sort(key=lambda event: (event["ts"], -event["dur"]))
        _check_nesting(lane, events)
    for ends in arrows.values():
        _check_arrow(ends, slices)
    return slices


def _check_nesting(lane: tuple[int, int], events: list[dict[str, Any]]) -> None:
    stack: list[float] = []
    for event in events:
        while stack and stack[-1] <= event["ts"] + 1e-3:
            stack.pop()
        end = event["ts"] + event["dur"]
        assert not stack or end <= stack[-1] + 2e-3, f"{event} in lane {lane} overlaps, and does not nest"
        stack.append(end)


def _check_arrow(ends: list[dict[str, Any]], slices: Slices) -> None:
    """From inside a slice to inside another one, later."""
    assert [end["ph"] for end in ends] == ["s", "f"]
    assert ends[1]["bp"] == "e"
    for before, after in pairwise(ends):
        assert before["ts"] <= after["ts"] + 1e-3
    for end in ends:
        around = [
            one for one in slices[end["pid"], end["tid"]] if one["ts"] <= end["ts"] <= one["ts"] + one["dur"] + 1e-3
        ]
        assert around, f"{end} begins or ends in no slice"
