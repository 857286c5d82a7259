"""`gradsync chaos` from the outside."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gradsync.cli import kernel
from gradsync.cli.app import app
from gradsync.cli.chaos import hosts
from tests.support.patience import wait_until

COMMAND = [sys.executable, "-m", "gradsync.cli", "chaos"]
KILL = "kill rank=1 phase=backward transport=process_group ranks=2 step=1 bucket=3"
RAISE = "raise rank=1 phase=loading transport=shared_memory ranks=2 step=1"


def run(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], env={**os.environ, **more}, capture_output=True, text=True, check=False
    )


def test_one_fault_and_what_became_of_it(tmp_path: Path) -> None:
    file = tmp_path / "seen.jsonl"
    done = run("--fault", KILL, "--json", str(file))
    assert (done.returncode, done.stderr) == (0, ""), done
    assert re.search(r"kill +backward +1 +0 +1 +0 ", done.stdout), done.stdout
    assert "1 fault: 0 went on, 1 named, 0 bad" in done.stdout
    (seen,) = map(json.loads, file.read_text().splitlines())
    assert (seen["line"], seen["verdict"]) == (KILL, "named")
    assert seen["seconds"] > 0


def test_a_broken_promise_is_shown_and_can_be_had_again() -> None:
    """Without a watch nobody hears why a rank has ended."""
    done = run("--fault", RAISE, GRADSYNC_WATCH="0")
    assert done.returncode == 1
    assert f"BAD  {RAISE}" in done.stdout
    assert "does not say 'raised ValueError: the data of this rank is bad'" in done.stdout
    assert f"again:  gradsync chaos --fault '{RAISE}'" in done.stdout
    assert "0 named, 1 bad" in done.stdout


def descendants(pid: int) -> set[int]:
    found = kernel.children(pid)
    return found.union(*map(descendants, found))


def test_an_interrupt_leaves_nothing_behind(tmp_path: Path) -> None:
    slow = "slow rank=1 phase=loading transport=shared_memory ranks=3 step=1 seconds=500"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([*COMMAND, "--fault", slow], stdout=subprocess.PIPE, text=True, env=environment) as process:
        # A worker, a process with the store, and three ranks.
        assert wait_until(lambda: len(descendants(process.pid)) == 5, 60)
        there = descendants(process.pid)
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate()
    assert process.returncode == 130
    assert "0 faults: 0 went on" in said
    assert "Stopped; all ranks have ended." in said
    assert "Traceback" not in said
    assert wait_until(lambda: not any(map(kernel.is_running, there)), 2)
    assert not list(tmp_path.iterdir())


def test_where_there_can_be_no_hosts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It says so, and a plan goes on without."""
    monkeypatch.setenv("PATH", str(tmp_path))
    done = run("--faults", "1", "--ranks", "2", "--transport", "process_group")
    assert done.returncode == 0, done
    assert "No faults between hosts" in done.stdout
    assert "there is no `ip`: install iproute2" in done.stdout
    alone = run("--fault", "cut rank=0 ranks=2 hosts=2 phase=loading transport=process_group")
    assert alone.returncode == 1
    assert "0 faults" in alone.stdout


def test_hosts_are_gone_when_they_are_no_longer_needed() -> None:
    try:
        with hosts.make_hosts(1) as made:
            assert (Path("/run/netns") / made[0].namespace).exists()
    except hosts.NotAllowed as reason:
        pytest.skip(f"no network namespaces can be made here: {reason}")
    assert not (Path("/run/netns") / made[0].namespace).exists()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--ranks", "4:2"], "'4:2' is no range such as 2:4"),
        (["--ranks", "1:2"], "no range"),
        (["--ranks", "many"], "no range"),
        (["--transport", "pigeons"], "'pigeons' is none of shared_memory"),
        (["--minutes", "-1"], "--minutes"),
        (["--faults", "0"], "--faults"),
        (["--fault", "explode"], "kind can't be 'explode'"),
        (["--fault", "kill rank=5 ranks=2 phase=forward transport=shared_memory"], "there is no rank 5 of 2"),
        (["--json", "/proc/nowhere/seen.jsonl"], "can't write /proc/nowhere/seen.jsonl: No such file"),
    ],
)
def test_bad_values_are_refused_at_once(arguments: list[str], complaint: str) -> None:
    result = CliRunner().invoke(app, ["chaos", *arguments])
    assert result.exit_code == 2
    assert complaint in re.sub(r"[\s│]+", " ", result.output)
