"""Digests of a module's values: equal digests mean bitwise equal replicas."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor, nn

from gradsync import _torch

_WORD = 8  # bytes
# A checksum adds up words in so many columns. Not a power of two: rows of a matrix begin in different columns.
_COLUMNS = 61


def fingerprint(module: nn.Module) -> str:
    """Hex digest over names, shapes, dtypes and all bytes of the parameters and buffers of `module`.

    Local, without communication: compare the results of several ranks, or of two runs.
    """
    whole = hashlib.sha256()
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        whole.update(f"{name} {digest(tensor)}\n".encode())
    return whole.hexdigest()


def digest(tensor: Tensor) -> str:
    """Hex digest over shape, dtype and all bytes of this rank's tensor."""
    values = _torch.local(tensor).detach().cpu().contiguous()
    found = hashlib.sha256(f"{list(values.shape)} {values.dtype}\n".encode())
    if values.nbytes:
        found.update(ctypes.string_at(values.data_ptr(), values.nbytes))
    return found.hexdigest()


@torch.no_grad()
def checksum(pieces: Sequence[Tensor]) -> Tensor | None:
    """A number that almost certainly differs if any bit of the pieces, flat tensors of one device, does.

    Not cryptographic, but at the speed of memory, on any device and without waiting for it: a sum of words, each
    column of them weighted by another odd number. None: there is nothing to look at.
    """
    words = [_words(piece) for piece in pieces if piece.numel()]
    if not words:
        return None
    flat = words[0] if len(words) == 1 else torch.cat(words)
    weights = _weights(flat.device)
    whole = len(flat) // _COLUMNS * _COLUMNS
    rest = (flat[whole:] * weights[: len(flat) - whole]).sum()
    if not whole:
        return rest
    return (flat[:whole].view(-1, _COLUMNS).sum(0) * weights).sum() + rest


def in_memory_order(tensor: Tensor) -> Tensor:
    """The elements of this rank's tensor as they lie in memory, flat; a copy if there are gaps between them."""
    values = _torch.local(tensor).detach()
    if not values.is_contiguous():
        order = sorted(range(values.dim()), key=values.stride, reverse=True)
        values = values.permute(order)
    values = values.reshape(-1)
    return torch.view_as_real(values).view(-1) if values.is_complex() else values


def _words(flat: Tensor) -> Tensor:
    """The bytes as words, filled up with zeros."""
    size = flat.element_size()
    if flat.nbytes % _WORD == 0 and flat.storage_offset() * size % _WORD == 0:
        return flat.view(torch.int64)
    padded = torch.zeros(-(-flat.nbytes // _WORD) * _WORD, dtype=torch.uint8, device=flat.device)
    padded[: flat.nbytes].copy_(flat.clone().view(torch.uint8))
    return padded.view(torch.int64)


@lru_cache(maxsize=8)
def _weights(device: torch.device) -> Tensor:
    odd = [(0x9E3779B97F4A7C15 * (number + 1) | 1) & (2**64 - 1) for number in range(_COLUMNS)]
    with torch.inference_mode(False):
        return torch.tensor([one - 2**64 if one >= 2**63 else one for one in odd], device=device)
