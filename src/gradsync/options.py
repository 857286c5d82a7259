"""Settings of one replicated module: frozen, and validated here once. Engine code never re-checks."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from gradsync.arguments import flag, integer, items, one_of, shown, size
from gradsync.errors import InvalidOptionError, WrongTypeError

MIB = 1024 * 1024

Reduce = Literal["mean", "sum"]
Start = Literal["broadcast", "check", "none"]
TransportChoice = Literal["auto", "shared_memory", "hierarchical", "process_group"]
BufferMode = Literal["round", "average", "evaluation", "never"]
Verify = Literal["auto", "every", "never"]
OnDivergence = Literal["raise", "repair"]
OnNonFinite = Literal["ignore", "warn", "raise"]
VERIFY_VARIABLE = "GRADSYNC_VERIFY"


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a user may choose. The defaults are right for every model; options only trade speed."""

    bucket_cap_mb: float | None = None
    """Size of a bucket in MiB. None: what suits the transport. Between processes 1 for the first, so that it leaves
    early, then 25; in shared memory, where starting a reduction costs next to nothing, 1 and then 4."""
    gradient_as_bucket_view: bool = True
    """`.grad` is a view of its bucket: one copy less, and memory for one set of gradients less."""
    reduce: Reduce = "mean"
    """What a gradient becomes: the mean over the ranks, or the sum."""
    buffers: BufferMode = "round"
    """How module buffers are kept in step. "round": all ranks take over those of one rank at the end
    of each round. "average": floating ones become the mean instead. "evaluation": as "round", but
    only before the first forward in eval mode, in which then all ranks must take part. "never"."""
    buffers_from: int = 0
    """The rank whose buffers count."""
    init_sync: Start | bool = "broadcast"
    """At construction: "broadcast" rank 0's parameters and buffers; "check" that all ranks hold the same
    values, and name what differs; or "none": trust, and do not communicate. True: broadcast, False: check."""
    init_sync_buffers: bool = True
    """Whether the buffers are part of that."""
    find_unused_parameters: bool | None = None
    """None: parameters may be used or not, all is right. False: a round that leaves a parameter
    unused is an error, raised by the next forward."""
    static_graph: bool = False
    """A promise that the graph does not change. Nothing needs it; it is kept for those who ask."""
    skip_all_reduce_unused_params: bool = False
    """A bucket that no rank filled in the latest round does not travel. If a rank fills it again, it goes behind the
    others in that round. For models of which large parts stay unused for long."""
    bucket_cap_mb_list: tuple[float, ...] = ()
    """Sizes of the first, second, ... bucket in MiB; the last one counts for all that follow."""
    transport: TransportChoice = "auto"
    """What carries gradients. "shared_memory": memory that the ranks of one host have in common; "hierarchical": that,
    and the process group between hosts; "process_group": its all-reduce. "auto": the fastest that all ranks can use."""
    verify: Verify = "auto"
    """Whether replicas are compared while training. "auto": everything in rounds 0, 1, 2, 4, ..., 64, and parts of it
    as often as takes a quarter of a percent of a step, so that all is seen within 20 to 60 rounds of a usual model;
    "every": everything in each round; "never"."""
    on_divergence: OnDivergence = "raise"
    """If they differ: "raise" on all ranks, or "repair": ranks that differ from most others take over what those have,
    a warning in the log says so, and training goes on. Where there is no majority, all ranks raise."""
    on_nonfinite: OnNonFinite = "ignore"
    """If a gradient has NaN or Inf: "ignore"; "warn" in the log which parameter's, and from which ranks it came; or
    "raise" that on all ranks, at the end of backward. Looking costs one more pass over the gradients, before and after
    the sum."""
    share_parameters: bool = False
    """The parameters of all ranks of a host lie there once, in memory that they have in common, from the first round
    on. With `gradsync.share_optimizer` each rank steps its share of them. For parameters on the CPU."""
    delayed: tuple[str, ...] = ()
    """Parameters that are reduced together, behind `delayed_until`."""
    delayed_until: str | None = None

    def __post_init__(self) -> None:
        flags = ["gradient_as_bucket_view", "init_sync_buffers", "static_graph", "share_parameters"]
        if self.find_unused_parameters is not None:
            flags.append("find_unused_parameters")
        for name in flags:
            object.__setattr__(self, name, flag(name, getattr(self, name)))
        for name in ("bucket_cap_mb_list", "delayed"):
            object.__setattr__(self, name, _tuple(name, getattr(self, name)))
        if self.bucket_cap_mb is not None:
            size("bucket_cap_mb", self.bucket_cap_mb)
        for place, cap in enumerate(self.bucket_cap_mb_list):
            size(f"bucket_cap_mb_list[{place}]", cap)
        if self.bucket_cap_mb is not None and self.bucket_cap_mb_list:
            raise InvalidOptionError("Cannot specify both bucket_cap_mb and bucket_cap_mb_list; choose one.")
        if integer("buffers_from", self.buffers_from) < 0:
            raise InvalidOptionError(f"buffers_from must be a rank, from 0 on, but is {self.buffers_from}.")
        if isinstance(self.init_sync, bool):
            object.__setattr__(self, "init_sync", "broadcast" if self.init_sync else "check")
        if self.share_parameters and not self.gradient_as_bucket_view:
            raise InvalidOptionError(
                "share_parameters=True needs gradients that lie in their buckets: leave out gradient_as_bucket_view."
            )
        one_of("init_sync", self.init_sync, get_args(Start))
        one_of("reduce", self.reduce, get_args(Reduce))
        one_of("buffers", self.buffers, get_args(BufferMode))
        one_of("transport", self.transport, get_args(TransportChoice))
        one_of("verify", self.verify, get_args(Verify))
        one_of("on_divergence", self.on_divergence, get_args(OnDivergence))
        one_of("on_nonfinite", self.on_nonfinite, get_args(OnNonFinite))
        self.verify_mode()
        items("delayed", self.delayed, str, "Give names of parameters.")
        if bool(self.delayed) != (self.delayed_until is not None):
            raise InvalidOptionError("delayed and delayed_until go together: give both, or none of them.")

    def check_names(self, parameters: Collection[str]) -> None:
        """Refuses names that are none of the parameters to be reduced."""
        named = [("delayed", name) for name in self.delayed]
        if self.delayed_until is not None:
            named.append(("delayed_until", self.delayed_until))
        for option, name in named:
            if name not in parameters:
                raise InvalidOptionError(
                    f"{option} names '{name}', but the module has no parameter of that name that is reduced. It has: "
                    f"{', '.join(sorted(parameters)[:5])}{', ...' * (len(parameters) > 5)}."
                )

    def check_ranks(self, ranks: int) -> None:
        """Refuses a rank that the group has not."""
        if self.buffers_from >= ranks:
            raise InvalidOptionError(
                f"buffers_from is {self.buffers_from}, but the process group has ranks 0 to {ranks - 1}."
            )

    def verify_mode(self) -> str:
        """What was asked for, else what the environment says."""
        mode = os.environ.get(VERIFY_VARIABLE) or self.verify if self.verify == "auto" else self.verify
        one_of(f"the variable {VERIFY_VARIABLE}", mode, get_args(Verify))
        return mode

    def bucket_caps(self, usual: tuple[int, ...] = (MIB, 25 * MIB)) -> tuple[int, ...]:
        """Capacities in bytes of the first bucket, the second, ..., the last one of all others; `usual` if not said."""
        if self.bucket_cap_mb_list:
            return tuple(int(cap * MIB) for cap in self.bucket_cap_mb_list)
        if self.bucket_cap_mb is None:
            return usual
        return (int(self.bucket_cap_mb * MIB),)


def _tuple(name: str, value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise WrongTypeError(f"{name} must be a list, but is {shown(value)}.")
    return tuple(value)
