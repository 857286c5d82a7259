"""The code in docs/ that needs a framework runs, and leaves replicas equal."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.docs.test_recipes import NEEDS, blocks, body
from tests.frameworks.both import LIMIT, needs
from tests.support.ranks import Ranks

FOUND = [(match[1], *block) for block in blocks() if (match := NEEDS.match(block[1]))]


def as_torchrun_starts_it(code: str, folder: Path) -> None:
    os.environ |= {"LOCAL_RANK": os.environ["RANK"], "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "none"}
    body(code, folder)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("code", [pytest.param(code, id=name, marks=needs(package)) for package, name, code in FOUND])
def test_it_runs(ranks: Ranks, code: str, tmp_path: Path) -> None:
    ranks(as_torchrun_starts_it, 2, code, tmp_path, limit=LIMIT, backend=None)


def test_there_are_some() -> None:
    assert {package for package, *_ in FOUND} == {"accelerate", "lightning"}
