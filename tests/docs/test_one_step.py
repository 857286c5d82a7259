"""docs/one_step.md says what a tracer sees."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import gradsync
from tests.support.ranks import Ranks

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "gradsync"
PAGE = (ROOT / "docs" / "one_step.md").read_text()
# Where the page names what a transport does, whichever it is.
PROTOCOLS = {"Transport.reduce": r"transport/.*Transport\.reduce", "Work.wait": r"transport/.*\.wait"}


def trace(transport: str, over_mesh: bool) -> list[str]:
    """The functions of gradsync that one backward calls, as `file:name`, in the order of their first calls."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(6)))
    where: dict[str, Any] = {"mesh": init_device_mesh("cpu", (dist.get_world_size(),))} if over_mesh else {}
    module: Any = gradsync.replicate(layers, bucket_cap_mb=0.008, transport=transport, **where)
    called: dict[str, None] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        file, name = frame.f_code.co_filename, getattr(frame.f_code, "co_qualname", frame.f_code.co_name)
        if event == "call" and file.startswith(str(SOURCE)):
            called.setdefault(f"{Path(file).relative_to(SOURCE)}:{name}")

    for step in range(4):
        module.zero_grad()
        loss = module(torch.randn(4, 32)).sum()
        sys.setprofile(note if step == 3 else None)
        loss.backward()
        sys.setprofile(None)
    return list(called)


def first(called: list[str], name: str) -> int:
    """Where a function of the page is among those called; names of functions in files are written `file.function`."""
    module, _, function = name.rpartition(".")
    pattern = PROTOCOLS.get(name) or rf".*:{name}$|.*{module}\.py:{function}$"
    return next(at for at, one in enumerate(called) if re.match(pattern, one))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="frames know their class since Python 3.11")
@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
def test_the_walk_of_a_gradient(ranks: Ranks, transport: str) -> None:
    walk = re.findall(r"^\| \d+ \| `([\w.]+)` \|", PAGE, re.MULTILINE)
    assert len(walk) > 10
    for called in ranks(trace, 2, transport, False):
        places = [first(called, name) for name in walk]
        assert places == sorted(places), [called[place] for place in places]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="frames know their class since Python 3.11")
def test_registered_parameters_are_put_back_before_the_round_closes(ranks: Ranks) -> None:
    for called in ranks(trace, 2, "auto", True):
        assert first(called, "ComputeParameters.end_backward") < first(called, "Round.launch_rest")


def test_the_picture_names_files_that_exist_and_all_that_take_part(ranks: Ranks) -> None:
    picture = PAGE.split("```")[1]
    named = set(re.findall(r"(\w+\.py)", picture))
    assert named <= {path.name for path in SOURCE.rglob("*.py")}
    for called in ranks(trace, 2, "process_group", False):
        files = {Path(one.split(":")[0]).name for one in called if one.startswith("engine/")}
        assert files - {"plan.py"} <= named, files - named  # a plan is asked for its sizes
