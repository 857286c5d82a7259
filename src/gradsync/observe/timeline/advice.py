"""What to change, by a few rules. Each is a pure function of the numbers that says something or nothing, and why.

A rule speaks only where the numbers alone justify it: where it may be something else, it says so.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import NamedTuple

from gradsync.observe.timeline.measures import Measures, RankMeans

MIB = 1024 * 1024


class Advice(NamedTuple):
    title: str
    reason: str
    """What was seen."""
    change: str
    """What to do about it."""


Rule = Callable[[Measures], Advice | None]
_LOOK = {
    "data": "Look at its data loader, and at what else it does between steps: logging, checkpoints, evaluation.",
    "forward": "It computes slowly or more than the others: larger batches, other processes on its host, fewer "
    "threads.",
    "backward": "It computes slowly or more than the others: larger batches, other processes on its host, fewer "
    "threads, hooks of its own.",
    "loss": "Look at what it computes between forward and backward.",
    "optimizer": "Look at its optimizer: more parameters than the others', or a slower processor.",
    "other": "Look at what it does between the phases: logging, metrics, copies.",
}


def advise(measures: Measures) -> list[Advice]:
    """All that the rules have to say, what matters most first; never nothing."""
    found = [advice for rule in RULES if (advice := rule(measures)) is not None]
    return found or [nothing_stands_out(measures)]


def straggler(m: Measures) -> Advice | None:
    """One rank is behind most of the waiting."""
    if len(m.by_rank) < 2:
        return None
    slow = max(m.by_rank, key=lambda one: one.caused)
    if slow.caused < 0.5 * sum(one.caused for one in m.by_rank) or slow.caused < 0.03 * m.spent.total:
        return None
    phase, more = _slower_in(slow, [one for one in m.by_rank if one is not slow])
    where = f" It spends {ms(more)} more than the others in {_IN_WORDS[phase]}." if phase else ""
    return Advice(
        f"Rank {slow.rank} on {slow.host} holds the others up",
        f"Each step the others wait {ms(slow.caused)} for it ({slow.caused / m.spent.total:.0%} of the step), "
        f"{slow.caused / sum(one.caused for one in m.by_rank):.0%} of all waiting for ranks.{where}",
        _LOOK.get(phase, "No phase explains it: look at its connection with the others."),
    )


_IN_WORDS = {
    "data": "data and what else comes before forward",
    "forward": "forward",
    "loss": "what lies between forward and backward",
    "backward": "backward",
    "optimizer": "the optimizer",
    "other": "what lies between the phases",
}


def _slower_in(slow: RankMeans, others: list[RankMeans]) -> tuple[str, float]:
    more = {phase: getattr(slow.spent, phase) - median(getattr(one.spent, phase) for one in others) for phase in _LOOK}
    phase = max(more, key=lambda name: more[name])
    return (phase, more[phase]) if more[phase] > slow.caused / 4 else ("", 0.0)


def crowded_host(m: Measures) -> Advice | None:
    """More threads than processors."""
    for one in m.recording.ranks:
        ranks = [other for other in m.recording.ranks if other.machine == one.machine]
        threads, cpus = sum(other.threads for other in ranks), len({cpu for other in ranks for cpu in other.cpus})
        if len(ranks) > 1 and threads > cpus:
            each = max(1, cpus // len(ranks))
            return Advice(
                f"More threads than processors on {one.host}",
                f"{len(ranks)} ranks with {threads} threads of torch in all share {cpus} processors: they take turns, "
                "and each bucket waits for the slowest.",
                f"Set OMP_NUM_THREADS={each} before starting the ranks, or call torch.set_num_threads({each})"
                + (", or start fewer ranks on it." if len(ranks) > cpus else "."),
            )
    return None


def network_inside_a_host(m: Measures) -> Advice | None:
    """Ranks of one host talk to each other as if they were on two."""
    machines = [one.machine for one in m.recording.ranks]
    if m.module is None or m.module.transport != "process_group" or len(set(machines)) == len(machines):
        return None
    if m.module.hook or m.spent.exposed < 0.02 * m.spent.total:
        return None
    return Advice(
        "Ranks of one host don't use its memory",
        "Gradients go through the process group"
        + (f": {m.module.reason}." if m.module.reason else ".")
        + f" {ms(m.spent.transfer)} a step are waits for them.",
        'Leave out transport="process_group".'
        if m.module.reason == "asked for"
        else "Shared memory needs tensors on the CPU of an x86, and ranks that can reach each other's sockets: "
        'transport="shared_memory" raises with what is in the way.',
    )


def all_in_one_bucket(m: Measures) -> Advice | None:
    """Nothing can overlap."""
    if len(m.buckets) != 1 or len(m.by_rank) < 2 or m.spent.transfer + m.spent.deliver < 0.05 * m.spent.total:
        return None
    nbytes = m.buckets[0].contents.nbytes if m.buckets[0].contents else 0
    if nbytes < MIB:
        return None
    cap = nbytes / MIB / 4
    return Advice(
        "One bucket holds all gradients",
        f"It has {size(nbytes)}, and can leave only when backward is over: {ms(m.spent.transfer)} of each step are its "
        "transfer.",
        f"Lower bucket_cap_mb, to {cap:.2g} for example: the first gradients then travel while others are computed.",
    )


def gradients_at_once(m: Measures) -> Advice | None:
    """Several buckets, and all of them are complete at the same time."""
    if len(m.buckets) < 2 or m.spent.exposed < 0.05 * m.spent.total:
        return None
    first, last = m.buckets[0], m.buckets[-1]
    if last.ready - first.ready > 0.05 * first.backward or any(one.overlapped for one in m.buckets):
        return None
    return Advice(
        "All gradients come at once, at the end of backward",
        f"The {len(m.buckets)} buckets are complete within {ms(last.ready - first.ready)} of a backward of "
        f"{ms(first.backward)}: nothing travels while it computes. That is so for what torch.compile made one graph "
        "outside of the replica's forward, and for gradients made by hand.",
        "Call the compiled model through its replica from the first time on, so that its graph is split; or compile "
        "its blocks one by one (block.compile()). Gradients then come part by part.",
    )


def first_bucket_late(m: Measures) -> Advice | None:
    """Travel could begin earlier."""
    if len(m.buckets) < 2 or m.spent.transfer < 0.05 * m.spent.total:
        return None
    first = m.buckets[0]
    share = first.ready / first.backward if first.backward > 0 else 0.0
    if share < 0.5 or not first.overlapped or first.contents is None:
        return None
    return Advice(
        "The first bucket leaves late",
        f"It is complete after {share:.0%} of backward ({size(first.contents.nbytes)}, up to "
        f"'{first.contents.last}'), and {ms(m.spent.transfer)} of each step are waits for transfers.",
        "Lower bucket_cap_mb, or give bucket_cap_mb_list a small first size: [1, 25].",
    )


def many_small_buckets(m: Measures) -> Advice | None:
    """What each costs by itself adds up."""
    sizes = [one.contents.nbytes for one in m.buckets if one.contents is not None]
    if len(sizes) < 16 or median(sizes) > 256 * 1024 or m.spent.exposed < 0.05 * m.spent.total:
        return None
    return Advice(
        f"{len(sizes)} buckets, most of them small",
        f"Half of them have {size(median(sizes))} or less; starting and delivering each costs the same, however "
        f"small, and {ms(m.spent.exposed)} of each step are exposed.",
        "Raise bucket_cap_mb, or leave it out: the default suits the transport.",
    )


def large_last_bucket(m: Measures) -> Advice | None:
    """The last one can never overlap."""
    sizes = [one.contents.nbytes if one.contents else 0 for one in m.buckets]
    if len(sizes) < 2 or m.spent.transfer < 0.05 * m.spent.total:
        return None
    last = m.buckets[-1]
    if sizes[-1] < 0.3 * sum(sizes) or last.awaited < 0.5 * (m.spent.transfer + m.spent.ranks):
        return None
    contents = last.contents
    only = contents is not None and contents.parameters == 1
    return Advice(
        "The last bucket is large",
        f"It has {size(sizes[-1])} of {size(sum(sizes))}, leaves when backward is over, and is waited for "
        f"{ms(last.awaited)} of each step.",
        f"It is one parameter, '{contents.last}': for an embedding, sparse gradients or tied weights that come earlier "
        "make it smaller."
        if contents is not None and only
        else "Lower bucket_cap_mb: less is left for the end.",
    )


def too_much_to_send(m: Measures) -> Advice | None:
    """Even perfect overlap could not hide it."""
    if len(m.by_rank) < 2 or m.spent.backward <= 0 or m.transferring < 1.2 * m.spent.backward:
        return None
    if m.spent.transfer < 0.15 * m.spent.total:
        return None
    return Advice(
        "Gradients take longer to travel than backward takes to compute them",
        f"{ms(m.transferring)} of transfers a step, and {ms(m.spent.backward)} of backward: {ms(m.spent.transfer)} are "
        "left over, whatever overlaps.",
        "Communicate less often (accumulate over several batches with no_sync(), or larger batches), or less: a "
        "communication hook that sends bf16 or 8 bits.",
    )


def slow_data(m: Measures) -> Advice | None:
    """All ranks wait for data."""
    if not m.by_rank or min(one.spent.data / one.spent.total for one in m.by_rank if one.spent.total) < 0.2:
        return None
    return Advice(
        "A good part of the step comes before forward",
        f"{ms(m.spent.data)} of {ms(m.spent.total)} on all ranks: loading data, moving it, logging.",
        "More workers in the data loader, prefetching, less logging: data parallelism has no part in it.",
    )


def second_passes(m: Measures) -> Advice | None:
    if not m.corrected:
        return None
    return Advice(
        "Gradients come after their bucket has left",
        f"{m.corrected} of {len(m.steps)} steps needed a second pass: a parameter got one more gradient than ever "
        "before, as with reentrant checkpointing, or branches that are rarely taken.",
        "Use checkpointing with use_reentrant=False.",
    )


def nothing_stands_out(m: Measures) -> Advice:
    if not m.steps:
        return Advice(
            "Nothing was recorded",
            "No round ended on all ranks inside the block.",
            "Trace a few whole steps on all ranks.",
        )
    hidden = f", and {m.hidden:.0%} of the transfers are hidden behind backward" if m.hidden is not None else ""
    return Advice(
        "Nothing stands out",
        f"{m.exposed_share:.1%} of the step is exposed{hidden}.",
        "No setting of gradsync would change much here.",
    )


RULES: tuple[Rule, ...] = (
    straggler,
    crowded_host,
    network_inside_a_host,
    gradients_at_once,
    all_in_one_bucket,
    first_bucket_late,
    large_last_bucket,
    many_small_buckets,
    too_much_to_send,
    slow_data,
    second_passes,
)


def ms(seconds: float) -> str:
    milliseconds = 1000 * seconds
    if milliseconds >= 10_000:
        return f"{seconds:,.1f} s"
    if milliseconds >= 10:
        return f"{milliseconds:.0f} ms"
    return f"{milliseconds:.2g} ms" if milliseconds >= 0.1 else f"{1000 * milliseconds:.0f} µs"


def size(nbytes: float) -> str:
    for unit, factor in (("GiB", 1024 * MIB), ("MiB", MIB), ("KiB", 1024)):
        if nbytes >= factor:
            return f"{nbytes / factor:.3g} {unit}"
    return f"{nbytes:.0f} B"
