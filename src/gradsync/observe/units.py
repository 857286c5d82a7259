"""Seconds, bytes and rates as people write them: three digits, and the unit that suits them."""

from __future__ import annotations

from collections.abc import Sequence

_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_BYTES = ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B"))
_RATES = ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"), (1.0, "B/s"))


def seconds(value: float) -> str:
    return _in_units(value, _SECONDS)


def moments(values: Sequence[float]) -> list[str]:
    """To be compared: all in the unit of the latest."""
    unit, name = _unit(max(values, default=0.0), _SECONDS)
    digits = _digits(max(values, default=0.0) / unit)
    return [f"{value / unit:.{digits}f} {name}" for value in values]


def size(nbytes: int) -> str:
    return f"{nbytes} B" if nbytes < 2**10 else _in_units(nbytes, _BYTES)


def rate(bytes_per_second: float) -> str:
    return _in_units(bytes_per_second, _RATES)


def share(part: float, whole: float) -> str:
    """Of a whole, in percent."""
    percent = 100 * part / whole if whole else 0.0
    return "0 %" if not percent else f"{percent:.1f} %" if percent < 9.95 else f"{percent:.0f} %"


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _in_units(value: float, units: Sequence[tuple[float, str]]) -> str:
    if not value:
        return "0"
    unit, name = _unit(value, units)
    return f"{value / unit:.{_digits(value / unit)}f} {name}"


def _unit(value: float, units: Sequence[tuple[float, str]]) -> tuple[float, str]:
    # 0.9995 of a unit would be written as 1000 of the one below.
    return next((one for one in units if abs(value) >= 0.9995 * one[0]), units[-1])


def _digits(number: float) -> int:
    return 2 if abs(number) < 9.995 else 1 if abs(number) < 99.95 else 0
