"""The parameters of a replica, once a host: all ranks of the host have mapped the same memory.

They move there when the first round has made its plan, and lie as their gradients do in the buckets: what a rank has
reduced of a bucket, its share, is one piece of memory here too, which that rank steps.

    bucket 0, slot of each rank   | head.weight | head.bias | norm.weight || tail |
    common memory                 | head.weight | head.bias | norm.weight | layer2.weight | ... | what is frozen |
                                  '- share of rank 0 -'- share of rank 1 -'

Whatever a rank writes to a parameter, it writes to everybody's. So it is noticed when somebody other than a shared
optimizer has written (`check`); a body inside `one_writer` counts once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gradsync.engine.managed_parameters import ManagedParameters
from gradsync.engine.parameter_group import ParameterGroup
from gradsync.engine.plan import gradient_stride
from gradsync.errors import InvalidOptionError, ParametersChangedError, UnfinishedRoundError
from gradsync.guard import replicas
from gradsync.transport.base import SharedOnce, Transport
from gradsync.transport.shares import LINE, bounds, round_up

_version = attrgetter("_version")


class Extent(NamedTuple):
    """Elements of a bucket that one rank steps: its share."""

    start: int
    stop: int


class SharedParameters:
    """Of one replica."""

    def __init__(self, managed: ManagedParameters, transport: Transport) -> None:
        for entry in managed.entries:
            if entry.parameter.device.type != "cpu":
                raise InvalidOptionError(
                    f"rank {transport.rank}: share_parameters=True is for parameters on the CPU, whose memory ranks of "
                    f"a host can have in common, but '{entry.name}' is on {entry.parameter.device}. Leave it out."
                )
        self._managed = managed
        self.memory: SharedOnce | None = None
        """None before the first round has made a plan."""
        self.steps = 0
        """How many steps of shared optimizers all ranks of the host have ended."""
        self._names: list[str] = []
        self._parameters: list[nn.Parameter] = []
        self._tensors: list[Tensor] = []  # where each of them lies
        self._addresses: list[int] = []
        self._versions: list[int] = []
        self._bases: list[int] = []  # of each bucket, in bytes
        self._is_torn = ""

    # --- where they lie --------------------------------------------------------------------------

    def place(self, group: ParameterGroup) -> None:
        """A plan was made: moves all parameters to common memory, as they lie in the plan. All ranks together."""
        assert group.plan is not None
        transport, entries = group.transport, self._managed.entries
        replicas.compare({entry.name: entry.parameter for entry in entries}, {}, transport)
        offsets: dict[int, int] = {}  # in bytes, by the identities of parameters
        end, bases = 0, []
        for bucket in group.plan.buckets:
            bases.append(end)
            for place in bucket.places:
                offsets[id(group.parameters[place.index])] = end + place.offset * bucket.dtype.itemsize
            end = round_up(end + bucket.nbytes, LINE)
        for entry in entries:
            if id(entry.parameter) not in offsets:
                offsets[id(entry.parameter)] = end
                end = round_up(end + entry.parameter.nbytes, LINE)
        memory = transport.allocate_once(end)
        tensors = [self._tensor(memory, entry.parameter, offsets[id(entry.parameter)]) for entry in entries]
        with torch.no_grad():
            if memory.local_rank == 0 or not memory.is_common:
                for tensor, entry in zip(tensors, entries, strict=True):
                    tensor.copy_(entry.parameter)
            memory.meet("the move of parameters to memory that ranks share")
            self._names = [entry.name for entry in entries]
            self._parameters = [entry.parameter for entry in entries]
            self.memory, self._bases, self._tensors = memory, bases, tensors
            self._show(tensors)
            self._addresses = list(map(Tensor.data_ptr, self._parameters))
        self.accept()

    def _tensor(self, memory: SharedOnce, parameter: nn.Parameter, offset: int) -> Tensor:
        """A place for it, laid out as its gradient."""
        flat = memory.tensor(offset, parameter.numel(), parameter.dtype)
        return flat.as_strided(parameter.shape, gradient_stride(parameter))

    def _show(self, tensors: Sequence[Tensor]) -> None:
        for parameter, tensor in zip(self._parameters, tensors, strict=True):
            parameter.data = tensor

    def share_of(self, group: ParameterGroup, number: int) -> Extent:
        """What this rank steps of a bucket: what it also reduces."""
        assert self.memory is not None
        plan = group.buckets[number].plan
        found = bounds(0, plan.numel, self.memory.local_rank, self.memory.size, plan.dtype.itemsize)
        return Extent(*found)

    def flat(self, number: int, extent: Extent, dtype: torch.dtype) -> Tensor:
        """These elements of a bucket's parameters, as one tensor over their memory."""
        assert self.memory is not None
        offset = self._bases[number] + extent.start * dtype.itemsize
        return self.memory.tensor(offset, extent.stop - extent.start, dtype)

    def spread(self, group: ParameterGroup, number: int) -> None:
        """All ranks have stepped their shares of a bucket's parameters: makes all of them have the whole."""
        assert self.memory is not None
        plan = group.buckets[number].plan
        self.memory.spread(self._bases[number], plan.numel, plan.dtype)

    # --- who writes ------------------------------------------------------------------------------

    def accept(self) -> None:
        """What is in the parameters now was written by those who may."""
        self._is_torn = ""
        self._versions = list(map(_version, self._parameters))

    def tear(self, why: str) -> None:
        """A round came to nothing after shares may have been stepped; says so in the next `check`, until `accept`."""
        self._is_torn = why

    def check(self, rank: int) -> None:
        """Raises if somebody has written to parameters since."""
        if self._is_torn:
            raise UnfinishedRoundError(self._is_torn)
        if not self.is_common:
            return
        if list(map(_version, self._parameters)) == self._versions:
            return
        both = zip(self._names, self._parameters, self._versions, strict=True)
        written = [name for name, parameter, version in both if parameter._version != version]
        self.accept()
        raise ParametersChangedError(
            f"rank {rank}: '{written[0]}'{f' and {len(written) - 1} more' if len(written) > 1 else ''} was written to "
            "outside of a shared optimizer. The ranks of this host have one copy of the parameters "
            "(share_parameters=True), so what each of them did was done several times to the same values. Load the "
            "values again, and write inside `with gradsync.one_writer(model):`, on all ranks."
        )

    def stepped(self) -> None:
        """All ranks of the host have ended a step of a shared optimizer."""
        self.steps += 1
        self.accept()

    def check_place(self, rank: int) -> None:
        """Before a step: raises if parameters have other memory than the shares that would be stepped."""
        if self.has_moved:
            both = zip(self._names, self._parameters, self._addresses, strict=True)
            name = next(name for name, parameter, address in both if parameter.data_ptr() != address)
            raise ParametersChangedError(
                f"rank {rank}: parameters have other memory since the latest backward, '{name}' for example: they were "
                "converted, or given other data. Run a backward before the next step, on all ranks: it moves them to "
                "the memory that the ranks share."
            )

    @property
    def is_common(self) -> bool:
        """Whether what one rank writes is written to everybody's, by now."""
        return self.memory is not None and self.memory.is_common

    @property
    def has_moved(self) -> bool:
        """Whether a parameter has other memory now: it was converted, or given other data."""
        return self.memory is not None and list(map(Tensor.data_ptr, self._parameters)) != self._addresses

    @contextlib.contextmanager
    def one_writer(self, rank: int, restores: bool = False) -> Iterator[None]:
        """What the body does to parameters counts once a host: all ranks but one do it to copies, which are dropped.

        `restores`: it gives whole values to parameters that may be torn.
        """
        memory = self.memory
        if not restores:
            self.check(rank)
        if memory is None or not memory.is_common:  # each rank has its own, and does the same
            yield
            self._is_torn = ""
            return
        writes, torn = memory.local_rank == 0, self._is_torn
        if not writes:
            self._show([tensor.clone() for tensor in self._tensors])
        memory.meet("the beginning of one_writer()")
        try:
            yield
            torn = ""
        finally:
            memory.meet("the end of one_writer()")
            if not writes:
                self._show(self._tensors)
            self.accept()
            self.tear(torn)

    def give_back(self) -> None:
        """Each rank has its own copies again."""
        if self.memory is not None:
            self._show([tensor.clone() for tensor in self._tensors])
            self.memory = None
