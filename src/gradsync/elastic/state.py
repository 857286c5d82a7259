"""All that a rank needs to go on where another one is: taken apart into tensors and the rest, sent, and put in place.

It goes from memory to memory, as gradients do, in pieces. Behind it all ranks compare digests of what they have then.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradsync import _torch
from gradsync.errors import ElasticError, InvalidOptionError
from gradsync.guard.fingerprint import crc32_at
from gradsync.transport.base import Transport
from gradsync.transport.tensor_bytes import bytes_of, pack

PIECE = 16 * 1024 * 1024  # bytes at a time


class Stateful(Protocol):
    """An optimizer, a schedule, a scaler, a second model that is averaged."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> Any: ...


class _Tensor(NamedTuple):
    """Stands where a tensor was."""

    number: int


class State:
    """Of a model, and of everything that is trained with it."""

    def __init__(self, modules: Sequence[nn.Module], others: Mapping[str, Stateful]) -> None:
        """`others`: by a name for each, in an order that is the same on all ranks."""
        self._modules, self._others = list(modules), dict(others)

    @property
    def kinds(self) -> str:
        """What it is the state of, in words that all ranks must have in common."""
        shapes = [
            f"{name} {tuple(one.shape)} {one.dtype}"
            for module in self._modules
            for name, one in _tensors_of(module).items()
        ]
        return "\n".join([*shapes, *(f"{name}: {type(one).__name__}" for name, one in self._others.items())])

    def check(self, rank: int) -> None:
        """Raises if one of them has a state that can't be copied."""
        for name, one in self._others.items():
            try:
                pickle.dumps(_take_apart(one.state_dict(), []))
            except Exception as error:
                raise InvalidOptionError(
                    f"rank {rank}: the state of {name} ({type(one).__name__}) can't be copied to ranks that come "
                    f"later: {error}. Its state_dict() may have tensors, and what pickle takes."
                ) from None

    # --- on the way ----------------------------------------------------------------------------------

    def send(self, transport: Transport, source: int, takes: bool) -> dict[str, Any] | None:
        """All ranks together: that of `source` goes to those who take it, and to `load` it. The others look on."""
        is_source = transport.rank == source
        tensors: list[Tensor] = []
        head = b""
        if is_source:
            rest = _take_apart(self.all(), tensors)
            head = pickle.dumps((rest, [(tuple(one.shape), one.dtype, one.device.type) for one in tensors]))
        (length,) = transport.gather([len(head)])[source]
        sent = torch.frombuffer(bytearray(head or length), dtype=torch.uint8)
        transport.broadcast([sent], source)
        rest, kinds = pickle.loads(pack(sent))
        if not is_source:
            tensors = [
                torch.empty(shape, dtype=dtype, device=device if takes else "meta") for shape, dtype, device in kinds
            ]
        for pieces in _batches(tensors):
            if not is_source and not takes:
                pieces = [torch.empty_like(one, device=sent.device) for one in pieces]
            transport.broadcast(pieces, source)
        return _put_together(rest, tensors) if takes and not is_source else None

    def compare(self, transport: Transport, source: int) -> None:
        """All ranks together: raises where something else is than at `source`."""
        found = [row[0] for row in transport.gather([self._digest()])]
        if found[transport.rank] != found[source]:
            raise ElasticError(
                f"rank {transport.rank}: what rank {source} has sent is not what is here, now that it was loaded. An "
                "object that was given to gradsync.Elastic does not load all that it saves, or changes it."
            )

    # --- in place ------------------------------------------------------------------------------------

    def all(self) -> dict[str, Any]:
        """Tensors in it are those that are trained, no copies."""
        others = {name: one.state_dict() for name, one in self._others.items()}
        return {"modules": [_tensors_of(module) for module in self._modules], "others": others}

    @torch.no_grad()
    def load(self, state: Mapping[str, Any], rank: int) -> None:
        for module, found in zip(self._modules, state["modules"], strict=True):
            here = _tensors_of(module)
            if here.keys() != found.keys():
                odd = sorted(here.keys() ^ found.keys())[:3]
                raise ElasticError(
                    f"rank {rank}: {type(module).__name__} has other parameters or buffers than the state that is to "
                    f"be loaded: {', '.join(odd)}. Build the same model on all ranks."
                )
            for name, tensor in here.items():
                tensor.copy_(found[name])
        for name, one in self._others.items():
            if name in state["others"]:
                _load(one, state["others"][name])

    def _digest(self) -> int:
        """Of all tensors, as they lie there."""
        tensors: list[Tensor] = []
        _take_apart(self.all(), tensors)
        found = 0
        for piece in (one for pieces in _batches(tensors) for one in pieces):
            on_host = piece.to("cpu")
            found = crc32_at(on_host.data_ptr(), on_host.nbytes, found)
        return found

    # --- before a step, should it not happen ---------------------------------------------------------

    def small(self) -> dict[str, Any]:
        """A copy of all but tensors of modules and optimizers: learning rates, and what a schedule keeps."""
        found: dict[str, Any] = {}
        for name, one in self._others.items():
            if isinstance(one, Optimizer):
                found[name] = [_copy({k: v for k, v in g.items() if k != "params"}) for g in one.param_groups]
            elif not isinstance(one, nn.Module):
                found[name] = _copy(one.state_dict())
        return found

    @torch.no_grad()
    def put_back(self, small: Mapping[str, Any]) -> None:
        for name, state in small.items():
            one = self._others[name]
            if isinstance(one, Optimizer):
                for group, before in zip(one.param_groups, state, strict=False):
                    for key, value in before.items():
                        if isinstance(value, Tensor):
                            group[key].copy_(value)
                        else:
                            group[key] = value
            else:
                _load(one, state)


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, those too that a checkpoint leaves out."""
    named = (*module.named_parameters(), *module.named_buffers())
    return {name: _torch.local(tensor).detach() for name, tensor in named}


def _load(one: Stateful, state: Any) -> None:
    if isinstance(one, torch.amp.GradScaler) and state:
        with contextlib.suppress(AssertionError):  # it has scaled nothing yet
            one.update(float(state["scale"]))  # and forgets which optimizers it has unscaled
    one.load_state_dict(state)


def _copy(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def _take_apart(value: Any, tensors: list[Tensor]) -> Any:
    """A nested value with a mark for each tensor, which is added to the list."""
    if isinstance(value, Tensor) and value.layout is torch.strided:
        tensors.append(value.detach())
        return _Tensor(len(tensors) - 1)
    if isinstance(value, Mapping):
        return {key: _take_apart(one, tensors) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_take_apart(one, tensors) for one in value)
    return value


def _put_together(value: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(value, _Tensor):
        return tensors[value.number]
    if isinstance(value, Mapping):
        return {key: _put_together(one, tensors) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_put_together(one, tensors) for one in value)
    return value


def _batches(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Their bytes, so many at a time; of one that is not contiguous, those of a copy."""
    batch: list[Tensor] = []
    for tensor in tensors:
        for piece in bytes_of(tensor).split(PIECE) if tensor.numel() else ():
            if batch and sum(map(len, batch)) + len(piece) > PIECE:
                yield batch
                batch = []
            batch.append(piece)
    if batch:
        yield batch
