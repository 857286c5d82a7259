"""A digest of a module's values: equal digests mean bitwise equal replicas."""

from __future__ import annotations

import ctypes
import hashlib

from torch import Tensor, nn

from gradsync import _torch


def fingerprint(module: nn.Module) -> str:
    """Hex digest over names, shapes, dtypes and all bytes of the parameters and buffers of `module`.

    Local, without communication: compare the results of several ranks, or of two runs.
    """
    digest = hashlib.sha256()
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        digest.update(f"{name} {list(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(_memory(tensor))
    return digest.hexdigest()


def _memory(tensor: Tensor) -> bytes:
    values = _torch.local(tensor).detach().cpu().contiguous()
    return ctypes.string_at(values.data_ptr(), values.nbytes) if values.nbytes else b""
