"""Starting and watching ranks, with ranks that need no torch and start in a tenth of a second."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from gradsync.cli.launch import RankFailed, Ranks, describe_status, interruptible

HEAD = """
import json, os, signal, sys, time
rank = int(os.environ["RANK"])
pipe = os.fdopen(int(os.environ["GRADSYNC_REPORT_FD"]), "w", buffering=1)
def send(event, **fields):
    pipe.write(json.dumps({"event": event, **fields}) + "\\n")
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """A module of ranks with this body, on the import path the ranks are given."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(body: str) -> str:
        (tmp_path / "fake_rank.py").write_text(HEAD + textwrap.dedent(body))
        return "fake_rank"

    return write


def failure(name: str, *, ranks: int) -> RankFailed:
    with Ranks(name, [], ranks=ranks) as running, pytest.raises(RankFailed) as caught:
        list(running.reports())
    return caught.value


def test_reports_arrive_in_order_with_arguments_and_environment(module: Callable[[str], str]) -> None:
    name = module("""
        for index in range(1000):
            send("count", index=index, world=os.environ["WORLD_SIZE"], argument=sys.argv[1])
    """)
    with Ranks(name, ["hello"], ranks=2) as ranks:
        reports = list(ranks.reports())
    for rank in range(2):
        records = [r.record for r in reports if r.rank == rank]
        assert [r["index"] for r in records] == list(range(1000))
        assert {(r["world"], r["argument"]) for r in records} == {("2", "hello")}


def test_what_a_rank_prints_is_no_report_but_its_last_words(module: Callable[[str], str]) -> None:
    failed = failure(module("print('on its way'); sys.exit('no luck')"), ranks=1)
    assert (failed.rank, failed.status) == (0, 1)
    assert str(failed) == "rank 0 ended with exit code 1"
    assert "on its way" in failed.words
    assert "no luck" in failed.words


def test_the_first_to_fail_is_blamed_not_the_first_to_have_ended(module: Callable[[str], str]) -> None:
    failed = failure(
        module("""
            failed = os.path.join(os.path.dirname(__file__), "failed")
            if rank == 1:
                send("failed", at=1.0, error="the cause")
                open(failed, "w").close()
                time.sleep(0.2)
                os._exit(7)
            while not os.path.exists(failed):
                time.sleep(0.01)
            send("failed", at=2.0, error="lost its peer")
            os._exit(1)
        """),
        ranks=2,
    )
    assert (failed.rank, failed.status) == (1, 7)


def test_a_signal_outweighs_the_failure_it_caused(module: Callable[[str], str]) -> None:
    failed = failure(
        module("""
            dying = os.path.join(os.path.dirname(__file__), "dying")
            if rank == 1:
                open(dying, "w").close()
                time.sleep(0.2)
                os.kill(os.getpid(), signal.SIGKILL)
            while not os.path.exists(dying):
                time.sleep(0.01)
            send("failed", at=1.0, error="lost its peer")
            os._exit(1)
        """),
        ranks=2,
    )
    assert str(failed) == "rank 1 was ended by SIGKILL"


def test_a_rank_that_ignores_the_polite_signal_is_stopped(
    module: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradsync.cli.launch.STOP_SECONDS", 0.2)
    name = module("signal.signal(signal.SIGTERM, signal.SIG_IGN); send('here', pid=os.getpid()); time.sleep(60)")
    with Ranks(name, [], ranks=1) as ranks:
        pid = next(ranks.reports()).record["pid"]
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_the_folder_of_the_user_does_not_shadow_modules(
    module: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cwd"
    folder.mkdir()
    (folder / "random.py").write_text("raise SystemExit('the wrong random')")
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.path", [entry for entry in sys.path if entry])
    with Ranks(module("import random; send('fine')"), [], ranks=1) as ranks:
        assert [r.record["event"] for r in ranks.reports()] == ["fine"]


def test_status_in_words() -> None:
    assert describe_status(3) == "ended with exit code 3"
    assert describe_status(-signal.SIGSEGV) == "was ended by SIGSEGV"
    assert describe_status(-40) == "was ended by signal 40"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_interrupts_once(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), interruptible():
        _signal_twice(number)
    assert signal.getsignal(number) is before


def _signal_twice(number: signal.Signals) -> None:
    try:
        os.kill(os.getpid(), number)
    finally:
        os.kill(os.getpid(), number)  # the impatient second Ctrl-C
