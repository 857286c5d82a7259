"""Pure: what there is to say of all ranks together. One function a finding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from gradsync.cli.display import count
from gradsync.cli.doctor.facts import DONE, MET, STAGES, STARTED, Job, Speed, rank_list
from gradsync.cli.doctor.finding import Finding, fine, untried, warning, wrong

OLDEST_TORCH = (2, 13)
SLOW_NETWORK = 30e6  # bytes a second
MOST_SKEW = 1.0
TRANSPORT = "GRADSYNC_TRANSPORT"
CHOICES = ("auto", "shared_memory", "hierarchical", "process_group")
PREFIX = "GRADSYNC_"
ANOTHER_INTERFACE = "set GLOO_SOCKET_IFNAME to the interface that leads to the other hosts; open firewalls between them"
NOT_SO_FAR = "the ranks did not get so far"


def launcher(job: Job) -> Finding:
    subject = "launcher"
    if job.launcher_problem:
        text, _, cure = job.launcher_problem.partition(". ")
        return wrong(subject, text, cure[:1].lower() + cure[1:] or "start the ranks with torchrun")
    if not job.is_launched:
        return fine(subject, f"none: {count(job.size, 'rank')} of the doctor's own, on this machine")
    return fine(subject, f"{count(job.size, 'rank')} that meet at {job.meeting}")


def ranks(job: Job) -> Finding:
    subject, hosts = "ranks", job.hosts
    if missing := job.missing:
        text = f"{rank_list(missing)} of {job.size} did not come within {job.limit:g} s"
        cure = f"look at their output; have their hosts a way to {job.meeting}, past firewalls?"
        return wrong(subject, text, cure)
    names = "; ".join(f"{job.host_name(here[0])} has {', '.join(map(str, here))}" for here in hosts)
    said = f"{count(job.size, 'rank')} on {count(len(hosts), 'host')}: {names}"
    machines: dict[str, set[str]] = {}
    for one in job.facts.values():
        machines.setdefault(one.location.split("/")[0], set()).add(one.location)
    if any(len(places) > 1 for places in machines.values()):
        text = f"{said}. Some are on one machine, but in network namespaces of their own, and can't share memory"
        return warning(subject, text, "run the ranks of a machine in one container, or with --network=host")
    if len({len(here) for here in hosts}) > 1 and job.size > len(hosts):
        text = f"{said}. The first rank of each host carries everything between hosts, since they have not equally many"
        return warning(subject, text, "start equally many ranks on all hosts")
    return fine(subject, said)


def versions(job: Job) -> Finding:
    subject, facts = "torch", list(job.facts.values())
    for what, cure in (
        ("gradsync", "install the same version on all hosts"),
        ("torch", "install the same version on all hosts"),
    ):
        if len(found := _ranks_by(job, lambda rank, what=what: getattr(job.facts[rank], what))) > 1:  # type: ignore[misc]
            return wrong(subject, f"not the same {what} everywhere: {_listed(found)}", cure)
    one = facts[0]
    said = f"torch {one.torch}, Python {one.python}, gradsync {one.gradsync}"
    if _numbers(one.torch) < OLDEST_TORCH:
        return wrong(subject, f"{said}: torch is too old", f"pip install 'torch>={'.'.join(map(str, OLDEST_TORCH))}'")
    if len(found := _ranks_by(job, lambda rank: job.facts[rank].python)) > 1:
        text = f"not the same Python everywhere: {_listed(found)}"
        return warning(subject, text, "use the same everywhere, if objects are to travel as pickles")
    return fine(subject, said)


def _numbers(version: str) -> tuple[int, ...]:
    first = version.split("+")[0].split(".")[:2]
    return tuple(int(part) if part.isdigit() else 0 for part in first)


def backends(job: Job) -> Finding:
    subject = "backends"
    common = set.intersection(*(set(one.backends) for one in job.facts.values()))
    gpus = sorted({gpu for one in job.facts.values() for gpu in one.gpus})
    if "gloo" not in common:
        text = f"this build of torch has {', '.join(sorted(common)) or 'no torch.distributed'}, not gloo"
        return wrong(subject, text, "install a build of torch with gloo: the usual wheels have it")
    said = f"{', '.join(sorted(common))}; {', '.join(gpus) if gpus else 'no GPU'}"
    if gpus and "nccl" not in common:
        return warning(subject, f"{said}, but no nccl: GPUs would talk through gloo", "install torch's build for CUDA")
    return fine(subject, f"{said} (tried here: gloo)" if gpus else said)


def variables(job: Job) -> Finding:
    """Those of ours must be the same everywhere; where they are not, replicate() raises on all ranks."""
    subject = "variables"
    names = sorted({name for one in job.facts.values() for name in one.variables if name.startswith(PREFIX)})
    for name in names:
        if len(found := _ranks_by(job, lambda rank, name=name: job.facts[rank].variables.get(name, "not set"))) > 1:  # type: ignore[misc]
            return wrong(
                subject, f"{name} is not the same on all ranks: {_listed(found)}", f"set {name} alike everywhere"
            )
    if (asked := _variable(job, TRANSPORT)) and asked not in CHOICES:
        return wrong(subject, f"{TRANSPORT}={asked} is no transport", f"set one of {', '.join(CHOICES)}, or unset it")
    said = ", ".join(f"{name}={_variable(job, name)}" for name in names)
    return fine(subject, said or f"no {PREFIX}... is set")


def connection(job: Job) -> Finding:
    """Whether all ranks have got to the end of what they tried together."""
    subject, attempts = "connection", job.attempts
    if not attempts:
        return untried(subject, "not all ranks have come" if job.missing else "stopped before")
    stuck = {rank: one for rank, one in attempts.items() if one.error or one.end or one.stage != DONE}
    if not stuck:
        return fine(subject, f"{count(job.size, 'rank')} met, connected by gloo, and came to the end")
    if len(job.hosts) > 1 and all(one.stage == MET for one in attempts.values()):
        said = next((f": {one.error}" for one in attempts.values() if one.error), "")
        text = f"all ranks reached the store, but could not connect to each other by gloo for {job.limit:g} s{said}"
        return wrong(subject, text, ANOTHER_INTERFACE)
    killed = [rank for rank, one in stuck.items() if "SIG" in one.end]
    silent = [rank for rank, one in stuck.items() if one.end == "" and not one.error]
    first = min(killed or silent or stuck, key=lambda rank: STAGES.index(stuck[rank].stage))  # the others wait for it
    one = attempts[first]
    if one.end and not one.error:
        text = f"{job.name_of(first)} {one.end} after it {_reached(one.stage)}"
        return wrong(subject, text, "if by SIGKILL, look for `oom` in dmesg: give it more memory; else see its output")
    if not one.error:
        text = f"{job.name_of(first)} {_reached(one.stage)}, and then said nothing for {job.limit:g} s"
        return wrong(
            subject, text, f"is its process stopped, or its host overloaded? If not, --limit {3 * job.limit:g}"
        )
    cure = {
        STARTED: f"can its host reach {job.meeting}? Set MASTER_ADDR to an address of rank 0's host; open firewalls",
        MET: ANOTHER_INTERFACE,
    }.get(one.stage, "see what it says")
    return wrong(subject, f"{job.name_of(first)} {_reached(one.stage)}, but then: {one.error}", cure)


def _reached(stage: str) -> str:
    return "had come to its end" if stage == DONE else stage


def handshake(job: Job) -> Finding:
    """Whether ranks of a host share memory: tried, not supposed."""
    subject = "shared memory"
    tried = {rank: one.unshared for rank, one in job.attempts.items() if one.unshared is not None}
    problems = {rank: why for rank, why in tried.items() if why}
    if problems:
        reasons = "; ".join(dict.fromkeys(problems.values()))
        text = f"{rank_list(sorted(problems))} can't share memory with the ranks of their host: {reasons}"
        cure = "see the reason. Without it training works, through the process group, but slower"
        if _variable(job, TRANSPORT) in ("shared_memory", "hierarchical"):
            return wrong(subject, f"{text}; and {TRANSPORT} asks for it", f"unset {TRANSPORT}, or see the reason")
        return warning(subject, text, cure)
    if tried:
        return fine(subject, f"tried: {count(len(tried), 'rank')} share it with those of their host")
    if all(len(here) < 2 for here in job.hosts):
        return fine(subject, "not tried: no host has two ranks")
    return untried(subject, NOT_SO_FAR)


def bandwidth(job: Job) -> Finding:
    subject = "bandwidth"
    inside = _slowest([one.shared_speed for one in job.attempts.values()])
    group = _slowest([one.group_speed for one in job.attempts.values()])
    said = []
    if inside is not None:
        said.append(f"{_rate(inside)} in shared memory ({count(len(inside.ranks), 'rank')})")
    if group is not None:
        said.append(f"{_rate(group)} over gloo ({count(len(group.ranks), 'rank')})")
    if not said:
        only_one = job.size == 1 and job.attempts
        return fine(subject, "one rank") if only_one else untried(subject, NOT_SO_FAR)
    text = ", ".join(said) + ": a buffer by the time of its all-reduce"
    if group is not None and len(job.hosts) > 1 and group.bytes_per_second < SLOW_NETWORK:
        cure = "have gloo use the fastest network between the hosts: GLOO_SOCKET_IFNAME"
        return warning(subject, f"{text}. That is little between hosts", cure)
    if inside is not None and group is not None and inside.bytes_per_second < group.bytes_per_second:
        cure = "ask again on an idle machine; if it stays so, export GRADSYNC_TRANSPORT=process_group, and tell us"
        return warning(subject, f"{text}. Shared memory should be the faster one", cure)
    return fine(subject, text)


def _rate(speed: Speed) -> str:
    million = speed.bytes_per_second / 1e6
    return f"{million:.3g} MB/s" if million < 1000 else f"{million / 1000:.3g} GB/s"


def _slowest(speeds: Sequence[Speed | None]) -> Speed | None:
    return min((one for one in speeds if one is not None), key=lambda one: one.bytes_per_second, default=None)


def clocks(job: Job) -> Finding:
    subject = "clocks"
    skews = {rank: one for rank, one in job.attempts.items() if one.skew is not None}
    if not skews:
        return fine(subject, "one host") if len(job.hosts) < 2 else untried(subject, NOT_SO_FAR)
    worst = max(skews, key=lambda rank: abs(skews[rank].skew or 0.0))
    skew, error = skews[worst].skew or 0.0, skews[worst].skew_error
    if abs(skew) > MOST_SKEW + error:
        off = f"{abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} rank 0's"
        text = f"that of {job.host_name(worst)} is {off}: logs are hard to compare"
        return warning(subject, text, "synchronize the hosts by NTP: chronyd, or systemd-timesyncd")
    return fine(subject, f"at most {1e3 * (abs(skew) + error):.0f} ms apart between {count(len(job.hosts), 'host')}")


def transport(job: Job) -> Finding:
    """The answer to: what will carry the gradients, and why."""
    subject = "transport"
    chosen = _ranks_by(job, lambda rank: job.attempts[rank].transport if rank in job.attempts else "")
    chosen.pop("", None)
    if not chosen:
        return untried(subject, NOT_SO_FAR)
    name, here = next(iter(chosen.items()))
    return fine(subject, f"{name}, since {job.attempts[here[0]].reason or 'it is the best there is'}")


def _variable(job: Job, name: str) -> str:
    return next((one.variables[name] for one in job.facts.values() if name in one.variables), "")


def _ranks_by(job: Job, value: Callable[[int], str]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for rank in sorted(job.facts):
        found.setdefault(value(rank), []).append(rank)
    return found


def _listed(found: Mapping[str, list[int]]) -> str:
    return ", ".join(f"{value} on rank {', '.join(map(str, ranks))}" for value, ranks in found.items())


BEFORE: tuple[Callable[[Job], Finding], ...] = (launcher, ranks, versions, backends, variables)
AFTER: tuple[Callable[[Job], Finding], ...] = (connection, handshake, bandwidth, clocks, transport)
