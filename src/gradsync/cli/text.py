"""The demo's data: the sources of Python's own standard library, there wherever Python is."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

# Printable ASCII and the newline; every other byte becomes the last symbol. A fixed alphabet needs no
# pass over the text to be known, so all ranks agree on it without talking.
ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
UNKNOWN = len(ALPHABET)
VOCABULARY = UNKNOWN + 1

# Tests and tables: long, repetitive, and nothing that reads like Python.
SKIPPED = frozenset(
    {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "encodings", "pydoc_data"}
)
WANTED_BYTES = 6_000_000
NEEDED_BYTES = 2_000  # in each part; some windows must fit
HELD_OUT_EVERY = 20  # each 20th file is for validation: unseen files, the same kind of text

_TO_TOKEN = bytes(ALPHABET.index(chr(b)) if chr(b) in ALPHABET else UNKNOWN for b in range(256))


class NoText(Exception):
    """There is not enough to train on."""


@dataclass(frozen=True)
class Files:
    """Which files are read for what; depends only on their names and sizes."""

    training: list[Path]
    validation: list[Path]


@dataclass(frozen=True)
class Text:
    """Two long rows of tokens (uint8)."""

    training: Tensor
    validation: Tensor


def stdlib() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def choose(folder: Path) -> Files:
    """About `WANTED_BYTES` of whole files under `folder`. Raises `NoText`."""
    files = Files([], [])
    size = 0
    for index, path in enumerate(_python_files(folder)):
        if size >= WANTED_BYTES:
            break
        size += path.stat().st_size
        (files.validation if index % HELD_OUT_EVERY == 1 else files.training).append(path)
    if min(_size(files.training), _size(files.validation)) < NEEDED_BYTES:
        raise NoText(
            f"{folder} holds {size:,} bytes of Python sources, too few to train on. If this Python was "
            "installed without the sources of its library, name another folder of .py files with --text."
        )
    return files


def _python_files(folder: Path) -> Iterator[Path]:
    """Prunes as it walks: `site-packages` alone can hold ten thousand files."""
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(set(folders) - SKIPPED)
        paths = (Path(parent, name) for name in sorted(names) if name.endswith(".py"))
        yield from (path for path in paths if path.is_file())  # not a link to nowhere


def _size(files: Sequence[Path]) -> int:
    return sum(path.stat().st_size for path in files)


def load(folder: Path) -> Text:
    files = choose(folder)
    return Text(_read(files.training), _read(files.validation))


def _read(files: Sequence[Path]) -> Tensor:
    return _tokens(b"".join(path.read_bytes() for path in files))


def _tokens(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text.translate(_TO_TOKEN)), dtype=torch.uint8)


def encode(text: str) -> Tensor:
    return _tokens(text.encode("latin-1", "replace")).long()


def decode(tokens: Tensor) -> str:
    return "".join(ALPHABET[t] if t < UNKNOWN else "·" for t in tokens.tolist())


def windows(text: Tensor, starts: Tensor, length: int) -> Tensor:
    """The rows of `length` tokens which begin at `starts`."""
    return text[starts[:, None] + torch.arange(length)].long()


def random_windows(text: Tensor, *, batch: int, length: int, generator: torch.Generator) -> Tensor:
    """A batch drawn at random: ranks with generators of different seeds read different text."""
    return windows(text, torch.randint(len(text) - length, (batch,), generator=generator), length)
