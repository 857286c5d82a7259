"""Tensors as bytes, and back."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor


def bytes_of(tensor: Tensor) -> Tensor:
    """A flat tensor of bytes, over the same memory if that is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def pack(tensor: Tensor) -> bytes:
    flat = bytes_of(tensor.cpu())
    return ctypes.string_at(flat.data_ptr(), len(flat))


def unpack(data: bytes, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A flat tensor over a copy."""
    if not data:
        return torch.empty(0, dtype=dtype, device=device)
    return torch.frombuffer(bytearray(data), dtype=dtype).to(device)
