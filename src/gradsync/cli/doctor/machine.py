"""What this process can find out about itself and the host it is on, without another rank."""

from __future__ import annotations

import os
import platform
import resource
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from gradsync._version import __version__
from gradsync.cli.doctor.facts import Facts
from gradsync.transport.handshake import location_or

VARIABLES = ("OMP_NUM_THREADS", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
PREFIX = "GRADSYNC_"
_KIB = 1024
_GIVEN_BACK = ("active_file", "inactive_file")  # what the kernel keeps of files, as long as nobody needs the memory


class Limit(NamedTuple):
    whole: int
    free: int


def look(rank: int, root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> Facts:
    """`root`: where /proc, /sys and /dev are."""
    here = socket.gethostname()
    container = container_memory(root)
    memory = _numbers(root / "proc/meminfo")
    shm = disk(root / "dev/shm")
    return Facts(
        rank=rank,
        host=here,
        location=location_or(f"{here}/rank {rank}"),
        user=os.getuid(),
        gradsync=__version__,
        torch=torch.__version__,
        python=platform.python_version(),
        machine=platform.machine(),
        backends=tuple(backends()),
        gpus=tuple(gpus()),
        cores=tuple(sorted(os.sched_getaffinity(0))),
        quota=cpu_quota(root),
        threads=torch.get_num_threads(),
        variables={name: value for name, value in environment.items() if name in VARIABLES or name.startswith(PREFIX)},
        load=_load(root),
        open_files=_limit(resource.RLIMIT_NOFILE),
        locked_memory=_limit(resource.RLIMIT_MEMLOCK),
        has_rdma=any((root / "sys/class/infiniband").glob("*")),
        memory=_KIB * memory.get("MemTotal", 0),
        memory_free=_KIB * memory.get("MemAvailable", 0),
        container_memory=None if container is None else container.whole,
        container_free=None if container is None else container.free,
        shm=None if shm is None else shm.whole,
        shm_free=None if shm is None else shm.free,
        overcommit=int(_text(root / "proc/sys/vm/overcommit_memory") or 0),
        commit_left=_KIB * max(0, memory.get("CommitLimit", 0) - memory.get("Committed_AS", 0)),
        address=address_of(here),
        interfaces=tuple(name for _, name in socket.if_nameindex()),
    )


def backends() -> Iterator[str]:
    if not dist.is_available():
        return
    for name in ("gloo", "nccl", "mpi", "ucc", "xccl"):
        if dist.is_backend_available(name):
            yield name


def gpus() -> Iterator[str]:
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        for name in dict.fromkeys(names):
            yield f"{names.count(name)} x {name}"


def container_memory(root: Path) -> Limit | None:
    """The tightest limit on this process of a control group, in version 1 or 2; None if there is none."""
    found = []
    for folder, most, used in _groups(root, "memory", ("memory.max", "memory.current"), _V1_MEMORY):
        limit, current = _text(folder / most), _text(folder / used)
        if limit.isdigit() and current.isdigit() and int(limit) < 2**60:  # version 1 says so where there is none
            stat = _numbers(folder / "memory.stat")
            kept = sum(stat.get(name, 0) for name in _GIVEN_BACK)
            found.append(Limit(int(limit), max(0, int(limit) - int(current) + kept)))
    return min(found, key=lambda one: one.free, default=None)


def cpu_quota(root: Path) -> float | None:
    """Cores' worth of time that a control group grants; None if it sets no limit."""
    found = []
    for folder, most, period in _groups(root, "cpu", ("cpu.max", ""), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        words = f"{_text(folder / most)} {_text(folder / period) if period else ''}".split()
        if len(words) == 2 and all(word.isdigit() for word in words):  # else `max`, or -1
            found.append(int(words[0]) / int(words[1]))
    return min(found, default=None)


_V1_MEMORY = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def _groups(
    root: Path, controller: str, second: tuple[str, str], first: tuple[str, str]
) -> Iterator[tuple[Path, str, str]]:
    """The folders of this process's control groups, from its own up, and the files of theirs to read.

    In a container its own is where that of the whole host would be: the path that the kernel tells may not be there.
    """
    base = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, files = base, second
        elif controller in controllers.split(","):
            top, files = next((one for one in (base / controllers, base / controller) if one.is_dir()), base), first
        else:
            continue
        own = top / path.lstrip("/")
        for folder in (own, *own.parents):
            yield folder, *files
            if folder == top:
                break


def disk(folder: Path) -> Limit | None:
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return Limit(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)


def address_of(name: str) -> str:
    """ "" if it has none."""
    try:
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0]).partition("%")[0]
    except OSError:
        return ""


def _limit(which: int) -> int | None:
    soft = resource.getrlimit(which)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _load(root: Path) -> float:
    return float((_text(root / "proc/loadavg") or "0").split()[0])


def _numbers(path: Path) -> dict[str, int]:
    """`Name: 12 kB` or `name 12`, line by line."""
    words = (line.replace(":", " ").split() for line in _text(path).splitlines())
    return {one[0]: int(one[1]) for one in words if len(one) > 1 and one[1].isdigit()}


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
