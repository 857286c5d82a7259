"""`python -m benchmarks hosts`: hosts that are there while it runs, and gone afterwards."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.app import app
from benchmarks.network import Network, NoNetwork


def namespaces() -> set[str]:
    """Those of this process; other tests may have some at the same time."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in listed.splitlines() if line.startswith(f"gradsync-{os.getpid()}-")}


@pytest.fixture
def _allowed() -> None:
    try:
        with Network(1, "1gbit"):
            pass
    except NoNetwork as error:
        pytest.skip(str(error))


@pytest.mark.usefixtures("_allowed")
def test_hosts_are_gone_even_after_an_error() -> None:
    before = namespaces()

    def fail() -> None:
        with Network(2) as network:
            assert set(network.hosts) <= namespaces()
            subprocess.run([*network.inside(0), "ip", "route", "get", network.address(1)], check=True)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert namespaces() == before


@pytest.mark.thorough  # test_style.py has one that is interrupted
@pytest.mark.usefixtures("_allowed")
def test_a_quick_run(tmp_path: Path) -> None:
    file = tmp_path / "hosts.json"
    arguments = ["hosts", "--ranks", "2", "--rates", "1gbit", "--models", "embedding", "--repetitions", "1"]
    done = CliRunner().invoke(app, [*arguments, "--json", str(file)])
    assert done.exit_code == 0, done.output
    (race,) = json.loads(file.read_text())["races"]
    assert race["ranks"] == 4
    assert not race["wrong"]
    assert {"plain", "torch", "hierarchical", "process_group"} <= set(race["repetitions"][0])
    assert not namespaces()


@pytest.mark.usefixtures("_allowed")
def test_a_rate_that_is_none_is_an_error_that_says_so(tmp_path: Path) -> None:
    arguments = ["hosts", "--ranks", "1", "--rates", "fast", "--json", str(tmp_path / "hosts.json")]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 1
    assert "fast" in done.output
    assert not namespaces()
