"""Fixtures for all tests: real ranks, a limit on time, nothing left behind."""

import faulthandler
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.leaks import find_leaks, resources_in_use
from tests.support.patience import crowding
from tests.support.ranks import Ranks, run_ranks
from tests.support.sample import white_fields

TEST_LIMIT = 120.0
_uncaptured_stderr = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """What CI has no time for."""
    parser.addoption("--thorough", action="store_true", help="all combinations of front, transport and number of ranks")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what only a thorough run has."""
    if config.option.thorough:
        return
    left_out: set[pytest.Item] = white_fields(
        (item, item.function, item.callspec.params)
        for item in items
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and "ranks" in item.fixturenames
    )
    left_out.update(item for item in items if item.get_closest_marker("thorough"))
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def pytest_configure(config: pytest.Config) -> None:
    """Keep a way to the terminal: a dump that ends the process would be lost in what pytest captures."""
    capture = config.pluginmanager.getplugin("capturemanager")
    assert capture is not None
    with capture.global_and_fixture_disabled():
        config.stash[_uncaptured_stderr] = os.dup(2)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Close what `pytest_configure` opened."""
    os.close(config.stash[_uncaptured_stderr])


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Where `FAILED_TESTS` names a file, it gets the names of those that failed: CI runs a few of them again, alone."""
    if path := os.environ.get("FAILED_TESTS"):
        failed = [one.nodeid for kind in ("failed", "error") for one in terminalreporter.stats.get(kind, ())]
        Path(path).write_text("".join(f"{name}\n" for name in dict.fromkeys(failed)))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let the fork server import torch while tests without ranks run."""
    if session.config.option.collectonly:
        return
    if any("ranks" in getattr(item, "fixturenames", ()) for item in session.items):
        run_ranks.warm_up()


@pytest.fixture(scope="session")
def ranks() -> Ranks:
    """Runs a function on real ranks: `results = ranks(body, 2, *args)`. See also `on_ranks`."""
    return run_ranks


@pytest.fixture(autouse=True)
def _time_limit(pytestconfig: pytest.Config) -> Iterator[None]:
    """End the session with all stacks if a test hangs in this process; ranks have a limit of their own."""
    limit = TEST_LIMIT * 2 * crowding()  # the ranks' own limits come first, also if it gets busier meanwhile
    faulthandler.dump_traceback_later(limit, exit=True, file=pytestconfig.stash[_uncaptured_stderr])
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    """Fail the test that leaks, not the one that stumbles over it later."""
    before = resources_in_use(run_ranks)
    yield
    leaks = find_leaks(before, run_ranks)
    if leaks:
        pytest.fail("this test left behind:\n  " + "\n  ".join(leaks), pytrace=False)
