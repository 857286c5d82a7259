"""The stand-in is compiled before ranks, which have little time, load it."""

import pytest

from tests.support.accelerator import build


@pytest.fixture(scope="session", autouse=True)
def _compiled() -> None:
    if build.compiler() is not None:
        build.make()
