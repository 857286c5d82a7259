"""How a bucket travels between ranks. `SymmetricMemory` is of use beyond that."""

from gradsync.transport.symmetric_memory import SymmetricMemory

__all__ = ["SymmetricMemory"]
