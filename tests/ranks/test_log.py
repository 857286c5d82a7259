"""The `gradsync` loggers: the rank in every record, quiet, and no handler."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
import threading

import pytest
import torch
import torch.distributed as dist

import gradsync
from gradsync import log
from tests.support.ranks import Ranks, on_ranks

FORMAT = "[%(rank)s] %(name)s: %(message)s"


class Lines(logging.StreamHandler[io.StringIO]):
    """A user's handler, with the rank in its format, as long as it is wanted."""

    def __init__(self) -> None:
        super().__init__(io.StringIO())
        self.setFormatter(logging.Formatter(FORMAT))

    def __enter__(self) -> Lines:
        logging.getLogger().addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger().removeHandler(self)

    @property
    def text(self) -> str:
        return self.stream.getvalue()


def nan_on_rank_1() -> str:
    with Lines() as lines:
        model = gradsync.replicate(torch.nn.Linear(2, 1), on_nonfinite="warn")
        x = torch.full((1, 2), float("nan") if dist.get_rank() == 1 else 1.0)
        model(x).sum().backward()
    return lines.text


def test_what_the_engine_says_has_its_rank(ranks: Ranks) -> None:
    for rank, text in enumerate(ranks(nan_on_rank_1, 2)):
        assert text.startswith(f"[{rank}] gradsync: "), text
        assert "NaN" in text


@on_ranks(2)
def test_the_rank_before_in_and_after_a_group() -> None:
    rank = dist.get_rank()
    below = log.logger("gradsync.below")
    with Lines() as lines:
        below.warning("in")
        thread = threading.Thread(target=below.warning, args=("thread",))
        thread.start()
        thread.join()
        dist.destroy_process_group()
        below.warning("after")
        below.warning("given", extra={"rank": 7})
    assert lines.text.splitlines() == [
        f"[{rank}] gradsync.below: in",
        f"[{rank}] gradsync.below: thread",
        f"[{rank}] gradsync.below: after",
        "[7] gradsync.below: given",
    ]
    assert not below.handlers


ALONE = f"""
import logging, sys
import gradsync
from gradsync import log
if "set up" in sys.argv:
    logging.basicConfig(format={FORMAT!r})
for logger in (log.logger(), log.logger("gradsync.below")):
    assert not logger.handlers and logger.level == logging.NOTSET
    logger.debug("debug")
    logger.info("info")
    logger.warning("warning")
"""


@pytest.mark.parametrize(
    ("environment", "rank"),
    [({}, "-1"), ({"RANK": "3"}, "3"), ({"SLURM_PROCID": "4"}, "4"), ({"RANK": "", "PMI_RANK": "5"}, "5")],
)
def test_before_there_is_a_group(environment: dict[str, str], rank: str) -> None:
    done = _alone("set up", environment)
    assert done.stderr.splitlines() == [f"[{rank}] {name}: warning" for name in ("gradsync", "gradsync.below")]


def test_quiet_but_for_warnings_where_nobody_has_set_up_logging() -> None:
    done = _alone("", {})
    assert (done.stdout, done.stderr) == ("", "warning\nwarning\n")


def _alone(word: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    outside = {name: value for name, value in os.environ.items() if name not in ("RANK", "SLURM_PROCID", "PMI_RANK")}
    words = [sys.executable, "-c", ALONE, word]
    return subprocess.run(words, env={**outside, **environment}, capture_output=True, text=True, check=True)
