"""The check that fails a test for what it leaves behind."""

import os
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.leaks import find_leaks, resources_in_use
from tests.support.ranks import Ranks


def leave_a_file() -> Path:
    litter = Path(tempfile.gettempdir(), "litter")
    litter.touch()
    return litter


def test_the_check_names_a_thread_a_variable_and_a_process(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    before = resources_in_use(ranks)
    monkeypatch.setenv("GRADSYNC_TEST_LEAK", "1")
    leave = threading.Event()
    thread = threading.Thread(target=leave.wait, name="straggler")
    thread.start()
    process = subprocess.Popen(["sleep", "60"])
    try:
        leaks = find_leaks(before, ranks, patience=0)
    finally:
        leave.set()
        thread.join()
        process.kill()
        process.wait()
    assert leaks.pop(0).startswith(f"processes: {process.pid} (")
    assert leaks == [
        f"threads: straggler ({thread.ident})",
        "variables: GRADSYNC_TEST_LEAK=1",
    ]


def test_the_check_names_a_process_group(ranks: Ranks, tmp_path: Path) -> None:
    before = resources_in_use(ranks)
    dist.init_process_group("gloo", init_method=(tmp_path / "store").as_uri(), rank=0, world_size=1)
    try:
        assert find_leaks(before, ranks, patience=0) == ["groups: default process group"]
    finally:
        dist.destroy_process_group()


def test_the_check_names_files_and_shared_memory(ranks: Ranks) -> None:
    before = resources_in_use(ranks)
    segment = Path(f"/dev/shm/gradsync_{os.getpid()}_test")
    segment.touch()
    try:
        (litter,) = ranks(leave_a_file, 1)
        leaks = find_leaks(before, ranks, patience=0)
        litter.unlink()
    finally:
        segment.unlink()
    assert leaks == [f"files: {litter}", f"shared memory: {segment}"]


def test_a_thread_that_is_just_ending_is_no_leak(ranks: Ranks) -> None:
    before = resources_in_use(ranks)
    threading.Thread(target=time.sleep, args=(0.1,)).start()
    assert find_leaks(before, ranks) == []
