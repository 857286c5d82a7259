"""The harness itself: what it returns, what it shows when ranks fail, and that it leaves nothing behind."""

import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradsync.cli import kernel
from tests.support.outcome import End, RankFailure
from tests.support.patience import Stopwatch, seconds_since
from tests.support.ranks import Ranks, on_ranks
from tests.support.stack import read_stack

# Bodies, which run on the ranks.


def sum_of_ranks(scale: float = 1.0) -> torch.Tensor:
    total = torch.tensor([scale * dist.get_rank()])
    dist.all_reduce(total)
    return total


def own_surroundings() -> dict[str, Any]:
    return {
        "rank": os.environ["RANK"],
        "world": os.environ["WORLD_SIZE"],
        "initialized": dist.is_initialized(),
        "threads": torch.get_num_threads(),
        "random": torch.rand(1).item(),
        "chosen": os.environ.get("GRADSYNC_TEST_CHOICE"),
        "tmp": tempfile.gettempdir(),
        "leader": os.getsid(0) == os.getpid(),
    }


def make_own_group() -> int:
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    return int(total.item())


def misbehave(how: str, seconds: float = 60.0) -> str:
    """Rank 1 misbehaves; the others wait for it in an all-reduce."""
    if dist.get_rank() == 1:
        print("about to", how, flush=True)  # noqa: T201
        match how:
            case "raise":
                raise ValueError("one is broken")
            case "assert":
                assert dist.get_rank() == 7
            case "hang":
                time.sleep(seconds)
            case "exit":
                os._exit(3)
            case "sys.exit":
                sys.exit(4)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "leave early":
                return "early"
            case "fail in a thread":
                thread = threading.Thread(target=divmod, args=(1, 0))
                thread.start()
                thread.join()
            case "warn":
                warnings.warn("one is worried", stacklevel=1)
    dist.all_reduce(torch.ones(1))
    return "fine"


def raise_then_others_sleep() -> None:
    if dist.get_rank() == 0:
        raise KeyError("zero is broken")
    time.sleep(60)


def start_grandchildren() -> list[int]:
    """One grandchild in the rank's own process group, one that has got away into its own session."""
    command = ["sleep", "60"]
    near = subprocess.Popen(command)
    far = subprocess.Popen(command, start_new_session=True)
    return [near.pid, far.pid]


def return_something_unpicklable() -> Any:
    return threading.Lock()


def raise_something_unpicklable() -> None:
    class LocalError(Exception):
        pass

    raise LocalError("only known here")


def say_nothing() -> None:
    pass


# Results.


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_results_come_back_in_rank_order(ranks: Ranks, world_size: int) -> None:
    totals = ranks(sum_of_ranks, world_size, scale=10.0)
    assert totals == [torch.tensor([10.0 * sum(range(world_size))])] * world_size
    assert [each["rank"] for each in ranks(own_surroundings, world_size)] == [str(rank) for rank in range(world_size)]


def test_surroundings_of_a_rank(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADSYNC_TEST_CHOICE", "seen")
    zero, one = ranks(own_surroundings, 2)
    for each in (zero, one):
        assert each["world"] == "2"
        assert each["initialized"]
        assert each["threads"] == 1
        assert each["chosen"] == "seen"
        assert each["leader"]
        assert Path(each["tmp"]).is_relative_to(ranks.folder or "")
    assert zero["random"] != one["random"]
    assert zero["random"] == ranks(own_surroundings, 1)[0]["random"]


def test_without_a_group_the_body_can_make_one(ranks: Ranks) -> None:
    assert not ranks(own_surroundings, 2, backend=None)[0]["initialized"]
    assert ranks(make_own_group, 2, backend=None) == [2, 2]


def test_a_large_result_does_not_block(ranks: Ranks) -> None:
    (result,) = ranks(torch.zeros, 1, 10_000_000)
    assert result.shape == (10_000_000,)


# Failures.


def test_the_rank_to_blame_comes_first(ranks: Ranks) -> None:
    with pytest.raises(RankFailure) as failure:
        ranks(misbehave, 3, "raise")
    text = str(failure.value)
    assert text.startswith("3 of 3 ranks failed in tests.unit.test_rank_bench.misbehave")
    cause, *followers = [line for line in text.splitlines() if line.startswith("── rank")]
    assert cause.startswith("── rank 1 raised ValueError: one is broken")
    assert len(followers) == 2
    assert all("lost a peer" in line for line in followers)
    assert 'raise ValueError("one is broken")' in text
    assert "dist.all_reduce(torch.ones(1))" in text
    assert "about to raise" in text
    assert "rank_process.py" not in text


def test_assertions_show_their_values(ranks: Ranks) -> None:
    with pytest.raises(RankFailure, match="assert 1 == 7"):
        ranks(misbehave, 2, "assert")


def test_warnings_are_errors_as_in_pytest(ranks: Ranks) -> None:
    with pytest.raises(RankFailure, match="rank 1 raised UserWarning: one is worried"):
        ranks(misbehave, 2, "warn")


def test_an_error_in_a_thread_is_one_of_its_rank(ranks: Ranks) -> None:
    with pytest.raises(RankFailure, match="rank 1 raised PytestUnhandledThreadExceptionWarning") as failure:
        ranks(misbehave, 2, "fail in a thread")
    assert "ZeroDivisionError" in str(failure.value)


@pytest.mark.filterwarnings("ignore:one is worried")
def test_a_mark_that_allows_a_warning_counts_on_ranks(ranks: Ranks) -> None:
    assert ranks(misbehave, 2, "warn") == ["fine", "fine"]


def test_a_hang_is_named_within_the_limit(ranks: Ranks) -> None:
    began = time.monotonic()
    with pytest.raises(RankFailure) as failure:
        ranks(misbehave, 2, "hang", limit=1.0)
    assert seconds_since(began) < 4.0
    text = str(failure.value)
    assert "rank 0 was stuck" in text
    assert "in misbehave: dist.all_reduce(torch.ones(1))" in text
    assert "rank 1 was stuck" in text
    assert "in misbehave: time.sleep(seconds)" in text
    assert "distributed_c10d.py" in text


def test_ranks_stuck_after_a_failure_are_stopped_long_before_the_limit(ranks: Ranks) -> None:
    began = time.monotonic()
    with pytest.raises(RankFailure) as failure:
        ranks(raise_then_others_sleep, 2, limit=30.0)
    assert seconds_since(began) < 6.0
    text = str(failure.value)
    assert text.index("rank 0 raised KeyError: 'zero is broken'") < text.index("rank 1 was stuck")
    assert "time.sleep(60)" in text


def test_a_rank_that_leaves_early_is_missed_long_before_the_limit(ranks: Ranks) -> None:
    zero, one = ranks.outcomes(misbehave, 2, "leave early", limit=8.0)
    assert zero.lost_peer
    assert one.result == "early"


def test_a_lambda_is_refused_with_the_cure(ranks: Ranks) -> None:
    with pytest.raises(TypeError, match="Use a function at module level"):
        ranks(lambda: None, 1)


def test_a_result_that_cannot_be_pickled_is_explained(ranks: Ranks) -> None:
    with pytest.raises(RankFailure, match=r"result of rank 0 \(lock\) can't be pickled"):
        ranks(return_something_unpicklable, 1)


# Outcomes that a test expects.


@pytest.mark.parametrize(
    ("how", "end", "story"),
    [
        ("raise", End.RAISED, "rank 1 raised ValueError: one is broken"),
        ("exit", End.EXITED, "rank 1 exited with code 3 before its body returned"),
        ("sys.exit", End.EXITED, "rank 1 exited with code 4 before its body returned"),
        ("kill", End.KILLED, "rank 1 was killed by SIGKILL"),
    ],
)
def test_outcomes_tell_how_each_rank_ended(ranks: Ranks, how: str, end: End, story: str) -> None:
    survivor, culprit = ranks.outcomes(misbehave, 2, how)
    assert culprit.end is end
    assert str(culprit) == story
    assert culprit.output == f"about to {how}\n"
    assert survivor.end is End.RAISED
    assert survivor.lost_peer
    assert not culprit.lost_peer


def test_outcomes_carry_the_exception(ranks: Ranks) -> None:
    _, culprit = ranks.outcomes(misbehave, 2, "raise")
    assert isinstance(culprit.exception, ValueError)
    assert culprit.exception.args == ("one is broken",)


def test_an_exception_that_cannot_be_pickled_is_told_in_words(ranks: Ranks) -> None:
    (outcome,) = ranks.outcomes(raise_something_unpicklable, 1)
    assert outcome.exception is None
    assert outcome.error is not None
    assert outcome.error.message == "only known here"
    assert outcome.error.type_name.endswith("LocalError")


def test_outcomes_name_the_stuck_line(ranks: Ranks) -> None:
    zero, one = ranks.outcomes(misbehave, 2, "hang", limit=1.0)
    for outcome, line in ((zero, "dist.all_reduce(torch.ones(1))"), (one, "time.sleep(seconds)")):
        assert outcome.end is End.STUCK
        assert outcome.stack is not None
        assert str(outcome.stack.ours).endswith(f"in misbehave: {line}")
        assert outcome.stack.innermost is not None


def test_a_stopped_rank_has_no_stack(ranks: Ranks) -> None:
    _, one = ranks.outcomes(misbehave, 2, "stop", limit=1.0)
    assert one.end is End.STUCK
    assert "no stack" in str(one)


# Tests that run on the ranks themselves.


@on_ranks("size")
def sign(folder: Path, size: int) -> None:
    assert dist.get_world_size() == size
    (folder / str(dist.get_rank())).touch()


@on_ranks(2, limit=1.0)
def go_wrong(limit: str) -> None:
    misbehave(limit)


@on_ranks(2, backend=None)
def expect_a_group() -> None:
    assert dist.is_initialized()


@pytest.mark.parametrize(("scale", "backend"), [(1.0, "one"), (10.0, "ten")], ids=["one", "ten"])
@pytest.mark.parametrize("limit", [(3,), (4,)], ids=str)
@on_ranks(2)
def test_parameters_reach_the_ranks(limit: tuple[int], scale: float, backend: str) -> None:
    """Even those that are called as options of the decorator are."""
    assert sum_of_ranks(scale) == {"one": 1.0, "ten": 10.0}[backend]
    assert os.environ["PYTEST_CURRENT_TEST"].endswith(f"the_ranks[{limit}-{backend}] (call)")


@pytest.mark.parametrize("size", [1, 3])
def test_the_body_runs_on_every_rank(tmp_path: Path, size: int) -> None:
    sign(tmp_path, size)
    assert sorted(path.name for path in tmp_path.iterdir()) == [str(rank) for rank in range(size)]


def test_a_test_fails_with_any_of_its_ranks() -> None:
    with pytest.raises(RankFailure) as failure:
        go_wrong("assert")
    text = str(failure.value)
    assert text.startswith("2 of 2 ranks failed in tests.unit.test_rank_bench.go_wrong")
    cause = text[: text.index("── rank 0 lost a peer")]
    assert "rank 1 raised AssertionError: assert 1 == 7" in cause
    assert "in go_wrong\n    misbehave(limit)\n" in cause
    assert "support" not in cause


def test_options_of_the_decorator() -> None:
    with pytest.raises(RankFailure, match="rank 1 was stuck"):
        go_wrong("hang")
    with pytest.raises(RankFailure, match="2 of 2 ranks failed"):
        expect_a_group()


def test_a_function_inside_of_another_is_refused() -> None:
    with pytest.raises(TypeError, match=r"<locals>\.body is not at module level"):

        @on_ranks(2)
        def body() -> None: ...


def test_the_fork_server_is_started_ahead_for_them() -> None:
    """`pytest_collection_finish` looks for this fixture."""
    assert pytest.mark.usefixtures("ranks").mark in vars(sign)["pytestmark"]


# Nothing left behind.


def test_a_process_dies_with_its_parent() -> None:
    """A rank asks for this towards the fork server."""
    parent = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    child = (
        "import os, time; from gradsync.cli import kernel; "
        "kernel.die_with(os.getppid()); print(os.getpid(), flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", parent, child]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.kill()
    watch = Stopwatch()
    while kernel.is_running(pid) and watch.seconds < 5:
        time.sleep(0.01)
    assert not kernel.is_running(pid)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Popen's own: still running
@pytest.mark.parametrize("world_size", [1, 2])
def test_grandchildren_end_with_their_rank(ranks: Ranks, world_size: int) -> None:
    for pids in ranks(start_grandchildren, world_size):
        assert not any(map(kernel.is_running, pids))


# The rest.


def test_the_stack_of_the_main_thread_is_found_between_others() -> None:
    dump = (
        'Thread 0x01 (most recent call first):\n  File "/a.py", line 1 in helper\n\n'
        'Current thread 0x02 (most recent call first):\n  File "/b.py", line 2 in inner\n'
        f'  File "{__file__}", line 3 in body\n\n'
        'Thread 0x03 (most recent call first):\n  File "/c.py", line 4 in other\n'
    )
    stack = read_stack(dump)
    assert [frame.function for frame in stack.frames] == ["inner", "body"]
    assert stack.ours is not None
    assert stack.ours.line == 3
    assert read_stack("").innermost is None


def test_a_run_is_quick(ranks: Ranks) -> None:
    """A generous bound for a busy machine; with little else running it measured 0.08 to 0.1 s."""
    ranks(say_nothing, 1)  # the fork server may have to start
    durations = []
    for _ in range(10):
        began = time.monotonic()
        ranks(sum_of_ranks, 2, random.random())
        durations.append(seconds_since(began))
    median = statistics.median(durations)
    sys.stdout.write(f"median of ten runs of 2 ranks: {median:.3f} s\n")
    assert median < 0.6
