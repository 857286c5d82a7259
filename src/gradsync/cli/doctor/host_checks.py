"""Pure: what there is to say of one host, given the facts of its ranks. One function a finding."""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from gradsync.cli.display import count
from gradsync.cli.doctor.facts import Attempt, Facts, amount
from gradsync.cli.doctor.finding import Finding, fine, warning, wrong

MIB = 2**20
# Of a parameter in float32: itself, its gradient (in the bucket), and AdamW's two means.
BYTES_PER_PARAMETER = 16
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


class HostView(NamedTuple):
    """A host as the checks see it."""

    facts: Facts
    """Of its first rank; limits are the same for all of them, as a rule."""
    ranks: Sequence[Facts]
    attempts: Sequence[Attempt]
    several_hosts: bool = False
    is_launched: bool = False
    is_complete: bool = True
    """All ranks of the job have come."""

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def cores(self) -> float:
        """That all its ranks together may use: the same for all, or some for each."""
        own = len({core for one in self.ranks for core in one.cores})
        return min(own, self.facts.quota or math.inf)


def threads(host: HostView) -> Finding:
    subject, cores, size = "threads", max(1, int(host.cores)), host.size
    told = host.facts.variables.get("OMP_NUM_THREADS", "")
    best = max(1, cores // size)
    if not told and not host.is_launched and size > 1:
        if best == 1:
            return fine(
                subject, f"torchrun gives each rank 1 thread: right for {count(size, 'rank')} on {_cores(cores)}"
            )
        text = f"OMP_NUM_THREADS is not set: torchrun gives each rank 1 thread, and {size} of {cores} cores are used"
        return warning(subject, text, f"export OMP_NUM_THREADS={best}")
    used = sum(one.threads for one in host.ranks)
    each = f"{used // size} of each of {count(size, 'rank')}" if size > 1 else "1 rank"
    said = f"{count(used, 'thread')} ({each}) on {_cores(cores)}"
    if used > cores and used > size:
        return warning(subject, f"{said}: they slow each other down", f"export OMP_NUM_THREADS={best}")
    if size > cores:
        text = f"{count(size, 'rank')} on {_cores(cores)}: they take turns"
        return warning(subject, text, f"start at most {count(cores, 'rank')} on this host, or give it more cores")
    if 2 * used <= cores and not host.facts.gpus and host.is_complete:
        return warning(subject, f"{said}: most cores are idle", f"export OMP_NUM_THREADS={best}")
    return fine(subject, said)


def _cores(number: int) -> str:
    return count(number, "core")


def load(host: HostView) -> Finding:
    subject, busy, cores = "load", host.facts.load, max(1.0, host.cores)
    if busy > cores + 1:
        text = f"other processes keep this host busy (load {busy:.1f} on {cores:g} cores): all figures here are too low"
        return warning(subject, text, "wait until they have ended, or stop them, and ask again")
    return fine(subject, f"{busy:.1f} on {cores:g} cores")


def open_files(host: HostView) -> Finding:
    subject, most = "open files", host.facts.open_files
    used = max((one.descriptors for one in host.attempts), default=0) or 64
    if most is None or most - used >= 256:
        return fine(
            subject, f"at most {'any number' if most is None else f'{most:,}'} a process; a rank has {used} open"
        )
    text = f"at most {most:,} a process, and a rank has {used} open before it loads any data"
    cure = "ulimit -n 65536 (in a container: --ulimit nofile=65536; in a systemd unit: LimitNOFILE=65536)"
    return (wrong if most - used < 32 else warning)(subject, text, cure)


def locked_memory(host: HostView) -> Finding:
    subject, most = "locked memory", host.facts.locked_memory
    said = "no limit" if most is None else f"at most {amount(most)}"
    if host.facts.has_rdma and most is not None and most < 64 * MIB:
        text = f"{said}, and this host has RDMA devices, whose drivers lock what they send"
        return warning(subject, text, "ulimit -l unlimited (in a container: --ulimit memlock=-1)")
    return fine(subject, said if host.facts.has_rdma else f"{said}; gradsync locks none")


def memory(host: HostView) -> Finding:
    """Of the host, and of the container if that has less."""
    subject, facts = "memory", host.facts
    free, whole, whose = facts.memory_free, facts.memory, "the host's"
    if facts.container_memory is not None and (facts.container_free or 0) < free:
        free, whole, whose = facts.container_free or 0, facts.container_memory, "the container's limit of"
    a_rank = free / host.size
    of_what = f"{amount(free)} free of {whose} {amount(whole)}"
    enough = f"for {_parameters(a_rank / BYTES_PER_PARAMETER)} parameters a rank (float32, AdamW)"
    cure = "stop what else runs there, or give it more memory (in a container: --memory); or start fewer ranks"
    if a_rank < 64 * MIB:
        return wrong(subject, f"{of_what}: less than 64 MiB a rank", cure)
    if a_rank < 512 * MIB:
        return warning(subject, f"{of_what}, {enough}", cure)
    return fine(subject, f"{of_what}, {enough}")


def _parameters(number: float) -> str:
    for unit, size in (("billion", 1e9), ("million", 1e6)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:,.0f}"


def shm(host: HostView) -> Finding:
    """Which gradsync does not use, but torch's data loader does."""
    subject, whole, free = "/dev/shm", host.facts.shm, host.facts.shm_free or 0
    cure = "in a container: --shm-size=1g, or --ipc=host; or mount -o remount,size=1g /dev/shm"
    if whole is None:
        return warning(subject, "not there: workers of torch's data loader can't hand over batches", cure)
    said = f"{amount(free)} free of {amount(whole)}"
    if free < 200 * MIB:
        return warning(subject, f"{said}: little for workers of torch's data loader; gradsync uses none", cure)
    return fine(subject, f"{said}; gradsync uses none")


def overcommit(host: HostView) -> Finding:
    subject, facts = "overcommit", host.facts
    if facts.overcommit != 2:
        return fine(subject, f"vm.overcommit_memory is {facts.overcommit}")
    left = (
        f"the kernel promises no more than it has (vm.overcommit_memory is 2), and has {amount(facts.commit_left)} left"
    )
    if facts.commit_left / host.size < 2_000 * MIB:
        text = f"{left}: forks of large processes, as data loaders make them, will fail"
        return warning(subject, text, "sysctl vm.overcommit_memory=0, or a larger vm.overcommit_ratio")
    return fine(subject, left)


def interface(host: HostView) -> Finding:
    """Through which other hosts reach this one."""
    subject, facts = "network", host.facts
    named = {name: facts.variables[name].split(",")[0].strip() for name in INTERFACES if facts.variables.get(name)}
    for name, one in named.items():
        if name == INTERFACES[0] and one not in facts.interfaces:  # NCCL takes beginnings of names, and more
            text = f"{name}={one}, and this host has no such interface, only {', '.join(facts.interfaces)}"
            return wrong(subject, text, f"unset {name}, or set it to one of these")
    if not host.several_hosts:
        return fine(subject, "one host: nothing crosses it")
    if INTERFACES[0] in named:
        return fine(subject, f"{INTERFACES[0]}={named[INTERFACES[0]]}")
    others = [one for one in facts.interfaces if one != "lo"]
    cure = f"export {INTERFACES[0]}={others[0] if others else 'eth0'} on every host, or correct /etc/hosts"
    if not facts.address:
        return warning(subject, f"the name {facts.host} has no address, so gloo uses the one that only it knows", cure)
    if ipaddress.ip_address(facts.address).is_loopback:
        return warning(
            subject, f"the name {facts.host} stands for {facts.address}, which other hosts can't reach", cure
        )
    return fine(subject, f"{facts.host} is {facts.address}")


CHECKS: tuple[Callable[[HostView], Finding], ...] = (
    threads,
    load,
    memory,
    shm,
    overcommit,
    open_files,
    locked_memory,
    interface,
)
