"""What the doctor makes of facts, odd ones too: each finding with its cure. No ranks."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradsync.cli.doctor import consultation, host_checks, job_checks, machine
from gradsync.cli.doctor.diagnosis import diagnose
from gradsync.cli.doctor.facts import CONNECTED, DONE, MET, STARTED, Attempt, Facts, Job, Speed, amount
from gradsync.cli.doctor.finding import Finding, Level, fine, warning
from gradsync.cli.doctor.host_checks import HostView
from gradsync.cli.doctor.trial import compare

GIB = 2**30
GOOD = Facts(
    torch="2.13.0+cpu",
    python="3.11.7",
    gradsync="0.1.0",
    cores=(0, 1),
    memory=16 * GIB,
    memory_free=12 * GIB,
    shm=8 * GIB,
    shm_free=8 * GIB,
    open_files=20_000,
    locked_memory=8 * 2**20,
    address="10.0.0.1",
    interfaces=("lo", "eth0"),
)
FAST = Attempt(
    unshared="",
    shared_speed=Speed(ranks=(0, 1), bytes_per_second=9e9),
    group_speed=Speed(ranks=(0, 1), bytes_per_second=1e9),
    transport="shared_memory",
    reason="all ranks share a host",
    descriptors=23,
)


def view(size: int = 2, several: bool = False, launched: bool = True, **facts: Any) -> HostView:
    ranks = [replace(GOOD, rank=rank, **facts) for rank in range(size)]
    return HostView(ranks[0], ranks, [FAST] * size, several, launched)


def job(size: int = 2, hosts: int = 1, attempt: Attempt = FAST, launched: bool = True, **facts: Any) -> Job:
    """Ranks spread evenly, in order."""
    of = [
        replace(
            GOOD, rank=rank, host=f"host{rank * hosts // size}", location=f"boot{rank * hosts // size}/net", **facts
        )
        for rank in range(size)
    ]
    attempts = dict.fromkeys(range(size), attempt)
    return Job(size=size, limit=60, is_launched=launched, meeting="a:1", facts=dict(enumerate(of)), attempts=attempts)


OMP = {"OMP_NUM_THREADS": "2"}
HOST_CASES: list[tuple[Any, HostView, str, str, str]] = [
    # check, host, level, in the text, in the cure
    (host_checks.threads, view(), "ok", "2 threads (1 of each of 2 ranks) on 2 cores", ""),
    (host_checks.threads, view(threads=2), "warning", "slow each other down", "OMP_NUM_THREADS=1"),
    (host_checks.threads, view(3), "warning", "3 ranks on 2 cores: they take turns", "at most 2 ranks"),
    (host_checks.threads, view(cores=tuple(range(16))), "warning", "most cores are idle", "OMP_NUM_THREADS=8"),
    (host_checks.threads, view(cores=tuple(range(16)), gpus=("1 x A100",)), "ok", "on 16 cores", ""),
    (host_checks.threads, view(cores=tuple(range(16)), quota=2.0), "ok", "on 2 cores", ""),
    (host_checks.threads, view(cores=tuple(range(16)), quota=0.5, size=1), "ok", "1 thread (1 rank) on 1 core", ""),
    (host_checks.threads, view(launched=False), "ok", "torchrun gives each rank 1 thread: right", ""),
    (host_checks.threads, view(launched=False, cores=tuple(range(8))), "warning", "2 of 8 cores", "NUM_THREADS=4"),
    (host_checks.threads, view(1, launched=False, threads=2), "ok", "2 threads (1 rank) on 2 cores", ""),
    (host_checks.threads, view(launched=False, variables=OMP, threads=2), "warning", "slow each", "NUM_THREADS=1"),
    (host_checks.load, view(load=1.5), "ok", "1.5 on 2 cores", ""),
    (host_checks.load, view(load=9), "warning", "busy (load 9.0 on 2 cores)", "ask again"),
    (host_checks.memory, view(), "ok", "12 GiB free of the host's 16 GiB, for 403 million parameters a rank", ""),
    (host_checks.memory, view(memory_free=GIB // 2), "warning", "512 MiB free", "more memory"),
    (host_checks.memory, view(memory_free=2**26), "wrong", "less than 64 MiB a rank", "--memory"),
    (host_checks.memory, view(memory_free=0), "wrong", "0 bytes free", "more memory"),
    (
        host_checks.memory,
        view(container_memory=GIB, container_free=GIB // 4),
        "warning",
        "256 MiB free of the container's limit of 1 GiB",
        "--memory",
    ),
    (host_checks.memory, view(container_memory=64 * GIB, container_free=60 * GIB), "ok", "the host's 16 GiB", ""),
    (host_checks.shm, view(), "ok", "8 GiB free of 8 GiB; gradsync uses none", ""),
    (host_checks.shm, view(shm=2**26, shm_free=2**26), "warning", "64 MiB free of 64 MiB", "--shm-size=1g"),
    (host_checks.shm, view(shm=None, shm_free=None), "warning", "not there", "--shm-size"),
    (host_checks.overcommit, view(), "ok", "is 0", ""),
    (host_checks.overcommit, view(overcommit=2, commit_left=64 * GIB), "ok", "64 GiB left", ""),
    (host_checks.overcommit, view(overcommit=2, commit_left=GIB), "warning", "will fail", "vm.overcommit_memory=0"),
    (host_checks.open_files, view(), "ok", "at most 20,000 a process; a rank has 23 open", ""),
    (host_checks.open_files, view(open_files=None), "ok", "any number", ""),
    (host_checks.open_files, view(open_files=256), "warning", "at most 256", "ulimit -n 65536"),
    (host_checks.open_files, view(open_files=40), "wrong", "at most 40", "ulimit -n 65536"),
    (host_checks.locked_memory, view(), "ok", "at most 8 MiB; gradsync locks none", ""),
    (host_checks.locked_memory, view(locked_memory=None, has_rdma=True), "ok", "no limit", ""),
    (host_checks.locked_memory, view(has_rdma=True), "warning", "RDMA", "ulimit -l unlimited"),
    (host_checks.interface, view(), "ok", "one host", ""),
    (host_checks.interface, view(several=True), "ok", "here is 10.0.0.1", ""),
    (host_checks.interface, view(several=True, address=""), "warning", "no address", "GLOO_SOCKET_IFNAME=eth0"),
    (host_checks.interface, view(several=True, address="127.0.1.1"), "warning", "127.0.1.1", "IFNAME=eth0"),
    (host_checks.interface, view(several=True, address="::1", interfaces=("lo",)), "warning", "::1", "IFNAME=eth0"),
    (
        host_checks.interface,
        view(several=True, address="", variables={"GLOO_SOCKET_IFNAME": "eth0,eth1"}),
        "ok",
        "GLOO_SOCKET_IFNAME=eth0",
        "",
    ),
    (
        host_checks.interface,
        view(variables={"GLOO_SOCKET_IFNAME": "ib0"}),
        "wrong",
        "GLOO_SOCKET_IFNAME=ib0, and this host has no such interface, only lo, eth0",
        "unset GLOO_SOCKET_IFNAME",
    ),
]


def changed(one: Job, rank: int, **facts: Any) -> Job:
    return replace(one, facts={**one.facts, rank: replace(one.facts[rank], **facts)})


def tried(one: Job, rank: int, **attempt: Any) -> Job:
    return replace(one, attempts={**one.attempts, rank: replace(one.attempts[rank], **attempt)})


def without(one: Job, *ranks: int) -> Job:
    there = {rank: facts for rank, facts in one.facts.items() if rank not in ranks}
    return replace(one, facts=there, attempts={})


def slow(**speeds: float) -> Attempt:
    made: dict[str, Any] = {name: Speed(ranks=(0, 1), bytes_per_second=rate) for name, rate in speeds.items()}
    return replace(FAST, **made)


ASKS = {"GRADSYNC_TRANSPORT": "shared_memory"}
EARLY = Attempt(stage=CONNECTED, error="RuntimeError: lost")
JOB_CASES: list[tuple[Any, Job, str, str, str]] = [
    (job_checks.launcher, job(), "ok", "2 ranks that meet at a:1", ""),
    (job_checks.launcher, job(launched=False), "ok", "none: 2 ranks of the doctor's own", ""),
    (
        job_checks.launcher,
        replace(job(), launcher_problem="RANK set. Start it"),
        "wrong",
        "RANK set",
        "start it",
    ),
    (job_checks.ranks, job(4, 2), "ok", "4 ranks on 2 hosts: host0 has 0, 1; host1 has 2, 3", ""),
    (job_checks.ranks, without(job(4), 1, 3), "wrong", "2 ranks (1, 3) of 4 did not come within 60 s", "a way to a:1"),
    (job_checks.ranks, job(3, 2), "warning", "not equally many", "equally many ranks on all hosts"),
    (job_checks.ranks, job(2, 2), "ok", "2 ranks on 2 hosts", ""),
    (
        job_checks.ranks,
        changed(job(), 1, location="boot0/other"),
        "warning",
        "host0 (of rank 0) has 0; host0 (of rank 1) has 1. Some are on one machine, but in network namespaces",
        "--network=host",
    ),
    (job_checks.versions, job(), "ok", "torch 2.13.0+cpu, Python 3.11.7, gradsync 0.1.0", ""),
    (job_checks.versions, changed(job(), 1, torch="2.14"), "wrong", "torch everywhere: 2.13.0+cpu on rank 0", "same"),
    (job_checks.versions, changed(job(), 1, gradsync="0.2"), "wrong", "not the same gradsync", "same version"),
    (job_checks.versions, changed(job(), 1, python="3.12"), "warning", "not the same Python", "pickles"),
    (job_checks.versions, job(torch="2.9.1"), "wrong", "too old", "torch>=2.13"),
    (job_checks.versions, job(torch="weird"), "wrong", "too old", "torch>=2.13"),
    (job_checks.backends, job(), "ok", "gloo; no GPU", ""),
    (job_checks.backends, job(backends=("mpi",)), "wrong", "has mpi, not gloo", "usual wheels"),
    (job_checks.backends, job(backends=()), "wrong", "no torch.distributed", "usual wheels"),
    (job_checks.backends, job(gpus=("2 x A100",)), "warning", "no nccl", "CUDA"),
    (job_checks.backends, job(gpus=("2 x A100",), backends=("gloo", "nccl")), "ok", "(tried here: gloo)", ""),
    (job_checks.variables, job(), "ok", "no GRADSYNC_... is set", ""),
    (job_checks.variables, job(variables=ASKS), "ok", "GRADSYNC_TRANSPORT=shared_memory", ""),
    (
        job_checks.variables,
        changed(job(), 1, variables=ASKS),
        "wrong",
        "not set on rank 0, shared_memory on rank 1",
        "alike everywhere",
    ),
    (
        job_checks.variables,
        job(variables={"GRADSYNC_TRANSPORT": "pigeons"}),
        "wrong",
        "=pigeons is no transport",
        "one of auto, shared_memory",
    ),
    (job_checks.connection, job(), "ok", "2 ranks met", ""),
    (job_checks.connection, without(job(), 1), "untried", "not all ranks have come", ""),
    (
        job_checks.connection,
        tried(job(attempt=EARLY), 1, stage=MET, error="", end="was ended by SIGKILL"),
        "wrong",
        "rank 1 was ended by SIGKILL after it reached the store",
        "dmesg",
    ),
    (
        job_checks.connection,
        tried(job(2, 2, attempt=EARLY), 1, stage=MET, error="", end=""),
        "wrong",
        "rank 1 on host1 reached the store, and then said nothing for 60 s",
        "stopped",
    ),
    (
        job_checks.connection,
        job(attempt=Attempt(stage=STARTED, error="no route")),
        "wrong",
        "rank 0 loaded torch, but then: no route",
        "reach a:1",
    ),
    (
        job_checks.connection,
        job(attempt=Attempt(stage=MET, error="refused")),
        "wrong",
        "rank 0 reached the store, but then: refused",
        "GLOO_SOCKET_IFNAME",
    ),
    (
        job_checks.connection,
        job(2, 2, attempt=Attempt(stage=MET)),
        "wrong",
        "could not connect to each other by gloo for 60 s",
        "GLOO_SOCKET_IFNAME",
    ),
    (job_checks.handshake, job(), "ok", "tried: 2 ranks share it", ""),
    (job_checks.handshake, job(2, 2, attempt=replace(FAST, unshared=None)), "ok", "no host has two ranks", ""),
    (job_checks.handshake, job(attempt=Attempt(stage=MET, error="x")), "untried", "did not get so far", ""),
    (
        job_checks.handshake,
        tried(job(), 1, unshared="another user"),
        "warning",
        "1 rank (1) can't share memory with the ranks of their host: another user",
        "through the process group",
    ),
    (
        job_checks.handshake,
        tried(job(variables=ASKS), 1, unshared="another user"),
        "wrong",
        "GRADSYNC_TRANSPORT asks for it",
        "unset GRADSYNC_TRANSPORT",
    ),
    (job_checks.bandwidth, job(), "ok", "9 GB/s in shared memory (2 ranks), 1 GB/s over gloo (2 ranks)", ""),
    (job_checks.bandwidth, job(1, attempt=Attempt()), "ok", "one rank", ""),
    (job_checks.bandwidth, without(job(), 1), "untried", "so far", ""),
    (job_checks.bandwidth, job(4, 2, slow(group_speed=1.2e7)), "warning", "12 MB/s over gloo", "GLOO_SOCKET_IFNAME"),
    (job_checks.bandwidth, job(attempt=slow(shared_speed=5e8)), "warning", "should be the faster", "process_group"),
    (job_checks.clocks, job(), "ok", "one host", ""),
    (job_checks.clocks, job(2, 2), "untried", "so far", ""),
    (job_checks.clocks, tried(job(2, 2), 1, skew=0.002, skew_error=0.001), "ok", "at most 3 ms apart", ""),
    (job_checks.clocks, tried(job(2, 2), 1, skew=-3.0), "warning", "host1 is 3.0 s behind rank 0's", "NTP"),
    (job_checks.clocks, tried(job(2, 2), 1, skew=90.0), "warning", "90.0 s ahead of", "NTP"),
    (job_checks.transport, job(), "ok", "shared_memory, since all ranks share a host", ""),
    (job_checks.transport, without(job(), 1), "untried", "so far", ""),
]


@pytest.mark.parametrize(("check", "given", "level", "text", "cure"), [*HOST_CASES, *JOB_CASES])
def test_each_finding_and_its_cure(check: Any, given: Any, level: str, text: str, cure: str) -> None:
    found: Finding = check(given)
    assert (found.level.value, bool(found.cure)) == (level, bool(cure)), found
    assert text in found.text
    assert cure in found.cure


def test_every_check_is_tried_here_at_every_level_but_those_it_can_not_have() -> None:
    cases = {case[0] for case in (*HOST_CASES, *JOB_CASES)}
    assert cases == {*host_checks.CHECKS, *job_checks.BEFORE, *job_checks.AFTER}


def test_a_problem_without_a_cure_can_not_be_said() -> None:
    with pytest.raises(ValueError, match="has a cure"):
        Finding("x", Level.WRONG, "broken")
    with pytest.raises(ValueError, match="has a cure"):
        Finding("x", Level.FINE, "fine", "do this")


def test_all_is_well() -> None:
    found = diagnose(job(4, 2, replace(FAST, skew=0.0)))
    assert (found.is_well, found.verdict()) == (True, "all fine")
    assert [one.subject for one in found.findings].count("memory") == 1


def test_warnings_are_no_problems_and_hosts_are_named_where_they_differ() -> None:
    one = changed(changed(job(4, 2, replace(FAST, skew=0.0)), 2, open_files=100), 3, open_files=100)
    found = diagnose(one)
    assert (found.is_well, found.verdict()) == (True, "1 warning")
    (warned,) = found.of(Level.WARNING)
    assert warned.text.startswith("host1: at most 100 a process")
    broken = diagnose(changed(one, 2, open_files=30))
    assert (broken.is_well, broken.verdict()) == (False, "1 problem")
    assert not json.loads(json.dumps(broken.to_dict()))["ok"]


def test_what_is_fine_on_all_hosts_is_said_once() -> None:
    found = diagnose(changed(job(2, 2, replace(FAST, skew=0.0)), 1, memory_free=13 * GIB))
    (memory,) = (one for one in found.findings if one.subject == "memory")
    assert memory.text.startswith("host0, much as the others: 12 GiB free")


def test_a_lonely_rank_of_a_job_is_enough_for_a_report() -> None:
    found = diagnose(without(job(8, 2), *range(1, 8)))
    assert found.verdict() == "1 problem"
    assert {one.subject for one in found.of(Level.UNTRIED)} == {"connection", "bandwidth", "transport"}


def test_facts_travel() -> None:
    odd = replace(GOOD, gpus=("1 x A",), quota=0.5, container_memory=None, variables={"A": "ü"})
    assert Facts.from_json(odd.to_json()) == odd
    assert Attempt.from_json(FAST.to_json()) == FAST
    assert Attempt.from_json(Attempt(stage=DONE).to_json()) == Attempt()


def test_the_clock_of_the_quickest_answer_counts() -> None:
    """Asked, answered, and the time there."""
    skew, error = compare([(10.0, 12.0, 5.0), (20.0, 20.2, 15.0), (30.0, 33.0, 20.0)])
    assert math.isclose(skew, 5.1)
    assert math.isclose(error, 0.1)


def test_amounts() -> None:
    assert [amount(n) for n in (0, 5, 2**20, 3.5 * GIB, 2**42)] == ["0 bytes", "5 bytes", "1 MiB", "3.5 GiB", "4 TiB"]


# --- reading a machine -------------------------------------------------------------------------------------


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


V2 = {
    "proc/self/cgroup": "0::/job/step\n",
    "sys/fs/cgroup/job/memory.max": "1000\n",
    "sys/fs/cgroup/job/memory.current": "900\n",
    "sys/fs/cgroup/job/memory.stat": "anon 1\ninactive_file 30\nactive_file 20\n",
    "sys/fs/cgroup/job/step/memory.max": "max\n",
    "sys/fs/cgroup/job/step/memory.current": "10\n",
    "sys/fs/cgroup/job/step/cpu.max": "150000 100000\n",
    "sys/fs/cgroup/job/cpu.max": "max 100000\n",
}
V1 = {
    "proc/self/cgroup": "5:cpu,cpuacct:/a\n4:memory:/docker/xyz\n1:name=systemd:/b\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "5000\n",  # in the container its own group is at the top
    "sys/fs/cgroup/memory/memory.usage_in_bytes": "1000\n",
    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "50000\n",
    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
}
NO_LIMIT = {
    "proc/self/cgroup": "4:memory:/\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": "1000\n",
}


@pytest.mark.parametrize(
    ("files", "memory", "quota"),
    [(V2, (1000, 150), 1.5), (V1, (5000, 4000), 0.5), (NO_LIMIT, None, None), ({}, None, None)],
)
def test_limits_of_containers(
    tmp_path: Path, files: dict[str, str], memory: tuple[int, int] | None, quota: float | None
) -> None:
    root = write(tmp_path, files)
    assert machine.container_memory(root) == memory
    assert machine.cpu_quota(root) == quota


def test_a_machine_without_proc_is_still_looked_at(tmp_path: Path) -> None:
    found = machine.look(3, tmp_path, {"GRADSYNC_X": "1", "HOME": "/"})
    assert (found.rank, found.shm, found.memory, found.overcommit) == (3, None, 0, 0)
    assert found.variables == {"GRADSYNC_X": "1"}


def test_this_machine() -> None:
    found = machine.look(0)
    assert 0 < found.memory_free <= found.memory
    assert "gloo" in found.backends
    assert "lo" in found.interfaces


# --- who has started this process --------------------------------------------------------------------------

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("environment", "rank", "problem"),
    [
        ({}, None, ""),
        (TORCHRUN, 1, ""),
        ({**TORCHRUN, "WORLD_SIZE": "two"}, None, "must be numbers"),
        ({"RANK": "1"}, None, "RANK set, but not WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, None, "MASTER_ADDR, MASTER_PORT not set"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, 1, ""),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, None, ""),
    ],
)
def test_launchers(environment: dict[str, str], rank: int | None, problem: str) -> None:
    world, said = consultation.launched(environment)
    assert (None if world is None else world.rank) == rank
    assert problem in said
    assert bool(problem) is bool(said)


def test_words_for_findings() -> None:
    assert fine("a", "b").to_dict() == {"subject": "a", "level": "ok", "text": "b", "cure": ""}
    assert warning("a", "b", "c").to_dict()["cure"] == "c"
