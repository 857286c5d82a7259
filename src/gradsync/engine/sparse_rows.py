"""Rows of sparse gradients that somebody knows beforehand.

A sparse gradient has rows that only its own rank knows, so the ranks exchange indices and values, padded to the
longest. Whoever knows the rows of all ranks together (the ids of a global batch, say) can spare them that: each
rank puts its rows into one dense block, which is summed like a bucket. That block is as good as the knowledge,
so the ranks compare what they know before they trust it, with one small exchange.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradsync import arguments
from gradsync.engine.managed_parameters import HasGrad
from gradsync.engine.plan import Spec
from gradsync.engine.shard_sums import ShardSums
from gradsync.errors import InvalidOptionError, WrongTypeError
from gradsync.transport import summation
from gradsync.transport.base import Transport


class KnownRows(NamedTuple):
    """Which rows of one parameter any rank will have a gradient for, in ascending order."""

    ids: Tensor
    digest: int

    @classmethod
    def of(cls, ids: Tensor) -> KnownRows:
        unique = torch.unique(ids.detach().reshape(-1).long())
        digest = hashlib.blake2b(unique.cpu().numpy().tobytes(), digest_size=7).digest()
        return cls(unique, int.from_bytes(digest, "big") + 1)  # 0 is for those who know nothing

    def reduce(self, transport: Transport, gradient: Tensor, scale: float) -> Tensor:
        """The sum over the ranks of `scale * gradient`; its rows are these, also those that nobody used."""
        gradient = gradient.coalesce()
        indices, values = gradient.indices()[0], gradient.values()
        ids = self.ids.to(indices.device)
        block = values.new_zeros(len(ids), *values.shape[1:])
        if scale:  # a rank that counts for nothing may have other rows, and NaN in them
            block[torch.searchsorted(ids, indices)] = values
        if block.numel():
            transport.reduce(block.view(-1), scale).wait()
        return torch.sparse_coo_tensor(ids[None], block, gradient.shape, check_invariants=False, is_coalesced=True)


def check_rows(rows: Mapping[str, Tensor], specs: Mapping[str, Spec]) -> dict[str, KnownRows]:
    """What the user says, checked: names of sparse parameters, and numbers of rows that they have."""
    cure = "set_sparse_rows() takes {'name': rows}, with the numbers of rows as a tensor of integers."
    if not isinstance(rows, Mapping):
        raise WrongTypeError(f"rows must be a dictionary, but is {arguments.shown(rows)}. {cure}")
    known = {}
    for name, ids in rows.items():
        spec = specs.get(name)
        if spec is None or not spec.sparse:
            sparse = [repr(each.name) for each in specs.values() if each.sparse]
            raise InvalidOptionError(
                f"'{name}' is no managed parameter with a sparse gradient. There are: {', '.join(sparse) or 'none'}. "
                "Names are those of the replicated module, without the wrapper's prefix 'module.'."
            )
        arguments.instance(f"the rows of '{name}'", ids, Tensor, cure)
        if ids.is_complex() or ids.dtype is torch.bool or not torch.equal(ids, ids.long().to(ids.dtype)):
            raise WrongTypeError(f"the rows of '{name}' must be whole numbers, but are {ids.dtype}. {cure}")
        made = KnownRows.of(ids)
        if len(made.ids) and not 0 <= int(made.ids[0]) <= int(made.ids[-1]) < spec.shape[0]:
            raise InvalidOptionError(
                f"'{name}' has rows 0 to {spec.shape[0] - 1}, but the rows given go from {int(made.ids[0])} to "
                f"{int(made.ids[-1])}."
            )
        known[name] = made
    return known


def known_to_all(
    transport: Transport, name: str, gradient: Tensor, known: KnownRows | None, brings: bool
) -> KnownRows | None:
    """What all ranks know of one parameter's rows; None if not all of them do. All ranks call this together.

    `brings`: whether this rank has a gradient that counts. One without, for want of data, need not know either.
    """
    strange: list[int] = []
    if known is not None and brings:
        indices = gradient.coalesce().indices()[0]
        strange = indices[~torch.isin(indices, known.ids.to(indices.device))].tolist()
    rows = transport.gather([int(brings), len(strange), known.digest if known else 0])
    if any(number for _, number, _ in rows):
        here = f" Here: {', '.join(map(str, strange[:5]))}{', ...' * (len(strange) > 5)}." if strange else ""
        others = ", ".join(str(rank) for rank, (_, number, _) in enumerate(rows) if number)
        raise InvalidOptionError(
            f"rank {transport.rank}: the gradient of '{name}' has rows on rank {others} that are not among the "
            f"{len(known.ids) if known else 0} given to set_sparse_rows().{here} Give the rows that any rank uses in "
            "this step, on all ranks alike, before backward."
        )
    if len({digest for brings, _, digest in rows if brings and digest}) > 1:
        raise InvalidOptionError(
            f"rank {transport.rank}: set_sparse_rows() was given different rows for '{name}' on different ranks. Give "
            "the rows that any rank uses in this step, on all ranks alike."
        )
    return known if len({digest for _, _, digest in rows}) == 1 else None


def reduce_sparse(
    name: str, gradient: Tensor, factor: float, known: KnownRows | None, some_know: bool, transport: Transport
) -> Tensor:
    """The sum over the ranks of a gradient that travels by itself: its indices and values, or the rows all know."""
    if gradient.layout is not torch.sparse_coo:
        gradient = gradient.to_sparse(1)
    if some_know:
        brings = factor > 0 and gradient._nnz() > 0
        rows = known_to_all(transport, name, gradient, known, brings)
        if rows is not None:
            return rows.reduce(transport, gradient, factor)
    return transport.reduce_sparse(gradient, factor).result()


def reduce_shards(
    index: int, leaf: Tensor, holders: Sequence[HasGrad], shards: ShardSums, factor: float, transport: Transport
) -> None:
    """The same for gradients that are added up in the order of a tree over shards; the sum is in `.grad` then."""
    others = [gradients[0] for gradients in shards.complete([index], holders)]
    terms = [_as_sparse(one, leaf) for one in (holders[index].grad, *others)]
    counts = transport.gather([one._nnz() for one in terms] + [0] * (shards.order.most - len(terms)))
    longest = max(map(max, counts))
    indices = terms[0].indices().new_zeros(shards.order.most, terms[0].sparse_dim(), longest)
    values = terms[0].values().new_zeros(shards.order.most, longest, *terms[0].values().shape[1:])
    for at, term in enumerate(terms):
        indices[at, :, : term._nnz()], values[at, : term._nnz()] = term.indices(), term.values()
    of_all = zip(counts, transport.gather_tensors(indices), transport.gather_tensors(values), strict=True)
    received = [
        torch.sparse_coo_tensor(
            ids.view_as(indices)[at, :, : nnz[at]],
            rows.view_as(values)[at, : nnz[at]],
            leaf.shape,
            check_invariants=False,
            is_coalesced=True,
        )
        for count, (nnz, ids, rows) in zip(shards.order.counts, of_all, strict=True)
        for at in range(count)
    ]
    total = summation.sum_sparse_in_order(received, shards.order)
    holders[index].grad = (total * (shards.late_factor(total.dtype) * factor)).coalesce()


def _as_sparse(gradient: Tensor | None, leaf: Tensor) -> Tensor:
    if gradient is None:
        rows, ids = leaf.new_zeros(0, *leaf.shape[1:]).detach(), leaf.new_zeros(1, 0, dtype=torch.int64)
        return torch.sparse_coo_tensor(ids, rows, leaf.shape, check_invariants=False, is_coalesced=True)
    return (gradient if gradient.layout is torch.sparse_coo else gradient.to_sparse(1)).coalesce()
