"""Lists on the command line, `a,b` or given several times, and what is said when a word in one is wrong."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import typer


def words_of(lines: Iterable[str]) -> list[str]:
    """Without repetitions, in the order given."""
    words = (word.strip() for line in lines for word in line.split(","))
    return list(dict.fromkeys(word for word in words if word))


def read_names(lines: Iterable[str], allowed: Sequence[str], hint: str) -> list[str]:
    """Those of `allowed` that are named, in the order of `allowed`; none named means all."""
    words = words_of(lines)
    unknown = [word for word in words if word not in allowed]
    if unknown:
        raise typer.BadParameter(f"{', '.join(unknown)}: not one of {', '.join(allowed)}", param_hint=hint)
    return [name for name in allowed if name in words or not words]


def read_numbers(lines: Iterable[str], hint: str, *, least: int = 1, multiple_of: int = 1) -> list[int]:
    """Sorted."""
    words = words_of(lines)
    try:
        numbers = sorted({int(word.replace("_", "")) for word in words})
    except ValueError:
        numbers = []
    if not numbers or any(number < least or number % multiple_of for number in numbers):
        kind = "numbers" if multiple_of == 1 else f"multiples of {multiple_of}"
        raise typer.BadParameter(f"{','.join(words)!r} is not a list of {kind} from {least}", param_hint=hint)
    return numbers
