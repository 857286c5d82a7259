"""`gradsync doctor` with real ranks: on this machine, under torchrun, on two hosts; and ranks that don't answer."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from gradsync.cli import kernel
from tests.support.hosts import Host, hosts_or_skip
from tests.support.patience import Stopwatch, crowding, wait_until

DOCTOR = [sys.executable, "-m", "gradsync", "doctor"]
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
PATIENT = ["--limit", "240"]


def start(
    *words: str,
    command: list[str] = DOCTOR,
    before: Callable[[], None] | None = None,
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[str]:
    outside = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
    return subprocess.Popen(
        [*command, *words],
        env={**outside, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=before,
    )


def end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Its exit code and what it said. Nothing of it runs on."""
    try:
        out, err = process.communicate(timeout=100 * crowding())
    finally:
        process.kill()
        process.wait()
    return process.returncode, out, err


def findings(out: str) -> dict[str, tuple[str, str]]:
    """By subject: the level and the text, of plain lines."""
    lines = (re.fullmatch(r"(ok|untried|warning|wrong) +(\S+(?: \S+)?)  ?(.*)", line) for line in out.splitlines())
    return {line[2].strip(): (line[1], line[3].strip()) for line in lines if line}


def a_job(rank: int, size: int, port: int, address: str = "127.0.0.1") -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": address, "MASTER_PORT": str(port)}


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_two_ranks_on_this_machine(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "doctor.json"
    code, out, err = end(start(*PATIENT, "--json", str(file)))
    assert (code, err) == (0, ""), out
    found = findings(out)
    assert len(found) == 18, out
    assert found["ranks"][1].startswith("2 ranks on 1 host: ")
    assert found["shared memory"] == ("ok", "tried: 2 ranks share it with those of their host")
    assert found["transport"] == ("ok", "shared_memory, since all ranks share a host")
    assert re.search(r"[\d.]+ [MG]B/s in shared memory \(2 ranks\), [\d.]+ [MG]B/s over gloo", found["bandwidth"][1])
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", out), "plain lines"
    kept = json.loads(file.read_text())
    assert (kept["ok"], kept["transport"], kept["ranks"]) == (True, "shared_memory", 2)
    assert {one["subject"] for one in kept["findings"]} == found.keys()
    assert kept["attempts"]["1"]["shared_speed"]["bytes_per_second"] > 1e6
    assert kept["attempts"]["1"]["descriptors"] > 3


def test_json_alone_is_all_there_is_on_standard_output() -> None:
    code, out, err = end(start(*PATIENT, "--ranks", "1", "--json"))
    assert code == 0, err
    assert json.loads(out)["transport"] == "process_group"
    assert "trying 1 rank" in err


def test_the_ranks_of_torchrun() -> None:
    """One report, of its ranks."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "gradsync", "doctor"]
    code, out, _ = end(start(*PATIENT, command=torchrun, environment={"OMP_NUM_THREADS": "1"}))
    assert code == 0, out
    assert out.count("2 ranks that meet at") == 1
    assert findings(out)["threads"][1].startswith("2 threads (1 of each of 2 ranks)")
    assert findings(out)["transport"] == ("ok", "shared_memory, since all ranks share a host")


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    with hosts_or_skip(2) as made:
        yield made


def on_host(hosts: list[Host], rank: int) -> list[str]:
    return ["ip", "netns", "exec", hosts[rank // 2].namespace, *DOCTOR]


def test_two_hosts(hosts: list[Host], port: int) -> None:
    more = {"GLOO_SOCKET_IFNAME": hosts[0].interface, "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    ranks = [
        start(*PATIENT, command=on_host(hosts, rank), environment={**a_job(rank, 3, port, hosts[0].address), **more})
        for rank in range(3)
    ]
    (code, out, err), *others = [end(rank) for rank in ranks]
    assert code == 0, (out, err)
    assert [one[:2] for one in others] == [(0, "")] * 2
    found = findings(out)
    assert found["ranks"][0] == "warning"  # namespaces of one machine, not machines
    assert re.search(r"3 ranks on 2 hosts: \S+ \(of rank 0\) has 0, 1; \S+ \(of rank 2\) has 2\.", found["ranks"][1])
    assert found["transport"][1].startswith("hierarchical, since ")
    assert "in shared memory (2 ranks), " in found["bandwidth"][1]
    assert "over gloo (3 ranks)" in found["bandwidth"][1]
    assert re.fullmatch(r"at most \d+ ms apart between 2 hosts", found["clocks"][1])
    assert found["network"] == ("ok", "GLOO_SOCKET_IFNAME=eth0")


def test_hosts_that_reach_the_store_but_not_each_other(hosts: list[Host], port: int) -> None:
    """gloo tells others to connect to an address that is theirs as well."""
    ranks = [
        start(
            *("--limit", str(8 + 2 * crowding())),
            command=on_host(hosts, 2 * rank),
            environment={**a_job(rank, 2, port, hosts[0].address), "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(2)
    ]
    (code, out, _), _ = [end(rank) for rank in ranks]
    assert code == 1
    level, text = findings(out)["connection"]
    assert (level, text.split(" for ")[0]) == (
        "wrong",
        "all ranks reached the store, but could not connect to each other by gloo",
    )
    assert "cure: set GLOO_SOCKET_IFNAME to the interface that leads to the other hosts" in out
    assert findings(out)["transport"][0] == "untried"


def test_a_rank_that_does_not_come(port: int) -> None:
    watch = Stopwatch()
    code, out, _ = end(start("--limit", "2", environment=a_job(0, 2, port)))
    assert code == 1
    assert findings(out)["ranks"] == ("wrong", "1 rank (1) of 2 did not come within 2 s")
    assert f"have their hosts a way to 127.0.0.1:{port}" in out
    assert "1 problem" in out
    assert watch.seconds < 30


def test_a_first_rank_that_does_not_come(port: int) -> None:
    code, out, err = end(start("--limit", "1", environment=a_job(1, 2, port)))
    assert (code, out) == (1, "")
    (line,) = err.splitlines()
    said = f"gradsync doctor: rank 1: can't meet at 127.0.0.1:{port}: Connection refused, for 1 s. Is rank 0 started"
    assert line.startswith(said)


def trial_ranks(process: subprocess.Popen[str]) -> list[int]:
    """Of the doctor's own, as soon as there are two that run a program of theirs.

    Before that a child is a copy of the doctor, which waits for it in the kernel: stopped, it would stop that too.
    """

    def program(pid: int) -> bytes:
        return Path(f"/proc/{pid}/cmdline").read_bytes()

    def ranks() -> list[int]:
        return [pid for pid in kernel.children(process.pid) if program(pid) != program(process.pid)]

    assert wait_until(lambda: len(ranks()) == 2, 60)
    return sorted(ranks())


@pytest.mark.parametrize(
    ("number", "said"), [(signal.SIGSTOP, "and then said nothing for 5 s"), (signal.SIGKILL, "was ended by SIGKILL")]
)
def test_a_rank_that_gets_stuck_or_dies(number: signal.Signals, said: str) -> None:
    """The other waits for it, and is not the one to blame."""
    process = start("--limit", "5")
    ranks = trial_ranks(process)
    os.kill(ranks[1], number)
    code, out, _ = end(process)
    assert code == 1
    level, text = findings(out)["connection"]
    assert (level, text.startswith("rank 1 "), said in text) == ("wrong", True, True), out
    assert wait_until(lambda: not any(map(kernel.is_running, ranks)), 2)


def test_an_interrupt_leaves_nothing_running_and_tells_what_is_known() -> None:
    process = start(*PATIENT)
    ranks = trial_ranks(process)
    process.send_signal(signal.SIGINT)
    code, out, err = end(process)
    assert (code, err) == (130, "")
    assert findings(out)["memory"][1]
    assert findings(out)["connection"] == ("untried", "stopped before")
    assert "Stopped before all was tried; nothing was left running." in out
    assert wait_until(lambda: not any(map(kernel.is_running, ranks)), 2)


def test_a_launcher_that_says_half_and_an_interface_that_is_not_there() -> None:
    code, out, _ = end(start(*PATIENT, "--ranks", "1", environment={"GLOO_SOCKET_IFNAME": "nowhere0", "RANK": "1"}))
    assert code == 1
    assert findings(out)["launcher"] == ("wrong", "RANK set, but not WORLD_SIZE, MASTER_ADDR, MASTER_PORT")
    assert findings(out)["network"][1].startswith("GLOO_SOCKET_IFNAME=nowhere0, and this host has no such interface")
    assert "Unable to find address for: nowhere0" in findings(out)["connection"][1]


def test_too_few_open_files_to_start_a_rank(tmp_path: Path) -> None:
    file = tmp_path / "doctor.json"
    code, out, _ = end(
        start(*PATIENT, "--json", str(file), before=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (18, 18)))
    )
    assert code == 1
    assert findings(out)["open files"][0] == "wrong"
    assert (
        findings(out)["connection"][1] == "rank 0 has come, but then: its process can't be started: Too many open files"
    )
    assert "cure: ulimit -n 65536" in out
    assert json.loads(file.read_text())["ok"] is False


def test_a_number_of_ranks_in_a_job_is_bad_input(port: int) -> None:
    began = time.monotonic()
    code, out, err = end(start("--ranks", "2", environment=a_job(1, 2, port)))
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert "a launcher has started 2 already" in line
    assert time.monotonic() - began < 30 * crowding()
