"""What the public functions are given, checked once: each says what was expected, what it got instead, and the cure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor, nn

from gradsync.errors import InvalidOptionError, NotAModuleError, WrongTypeError


def shown(value: object) -> str:
    """A value in a message: short, whatever it is."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    text = repr(value) if value is None or isinstance(value, (str, bool, int, float, bytes, list, tuple)) else ""
    return text if 0 < len(text) <= 60 else f"a {type(value).__name__}"


def flag(name: str, value: object) -> bool:
    """True or False, also as the numbers 1 and 0."""
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    raise WrongTypeError(f"{name} must be True or False, but is {shown(value)}.")


def number(name: str, value: Any) -> float:
    """Something that is one number, also as a tensor. Not a text that looks like one."""
    try:
        if not isinstance(value, (str, bytes)):
            return float(value)
    except (TypeError, ValueError, RuntimeError):
        pass
    raise WrongTypeError(f"{name} must be a number, but is {shown(value)}.")


def size(name: str, value: object) -> None:
    """A finite number above 0."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise WrongTypeError(f"{name} must be a number of MiB, but is {shown(value)}.")
    if not 0 < float(value) < math.inf:
        raise InvalidOptionError(
            f"{name} must be finite and greater than 0, but is {value}. To have all gradients in one bucket, give "
            "more MiB than the parameters take."
        )


def integer(name: str, value: object) -> int:
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    raise WrongTypeError(f"{name} must be an integer, but is {shown(value)}.")


def one_of(name: str, value: object, allowed: Iterable[str]) -> None:
    allowed = list(allowed)
    if not isinstance(value, str) or value not in allowed:
        kind = InvalidOptionError if isinstance(value, str) else WrongTypeError
        raise kind(f"{name} must be one of {', '.join(map(repr, allowed))}, but is {shown(value)}")


def instance(name: str, value: object, kind: type, cure: str) -> None:
    if not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        raise WrongTypeError(f"{name} must be {article} {kind.__name__}, but is {shown(value)}. {cure}")


def items(name: str, value: Any, kind: type | tuple[type, ...], cure: str) -> list[Any]:
    """A list, or anything else that can be iterated over, of `kind`; None: nothing. A text or a tensor is one thing."""
    if value is None:
        return []
    if isinstance(value, (str, bytes, Tensor)) or not isinstance(value, Iterable):
        raise WrongTypeError(f"{name} must be a list, but is {shown(value)}. {cure}")
    found = list(value)
    for place, one in enumerate(found):
        if not isinstance(one, kind):
            raise WrongTypeError(f"{name}[{place}] is {shown(one)}. {cure}")
    return found


def policy(name: str, value: Any, kind: str, fields: Iterable[str], cure: str) -> dict[str, Any]:
    """The settings of one of torch's policies, which is told by what it has: importing its package takes a second."""
    fields = list(fields)
    if isinstance(value, type) or not all(hasattr(value, field) for field in fields):
        raise WrongTypeError(f"{name} must be a {kind}, but is {shown(value)}. {cure}")
    settings = {field: getattr(value, field) for field in fields}
    for field, setting in settings.items():
        if field.endswith("_dtype") and setting is not None and not isinstance(setting, torch.dtype):
            raise WrongTypeError(
                f"{name}.{field} must be a torch.dtype, as torch.bfloat16, or None, but is {shown(setting)}."
            )
    return settings


def module(value: object, who: str, cure: str = "") -> nn.Module:
    if isinstance(value, nn.Module):
        return value
    if isinstance(value, type) and issubclass(value, nn.Module):
        cure = f"Make one of it first: {value.__name__}(...)."
    raise NotAModuleError(f"{who} takes an nn.Module, but was given {shown(value)}. {cure}".rstrip())


def modules(value: Any, who: str) -> list[nn.Module]:
    """One module, or several."""
    if isinstance(value, nn.Module):
        return [value]
    if isinstance(value, (str, bytes, Tensor, type)) or not isinstance(value, Iterable):
        return [module(value, who)]
    found = list(value)
    if not found:
        raise InvalidOptionError(f"{who} was given an empty list of modules")
    for place, one in enumerate(found):
        if not isinstance(one, nn.Module):
            raise NotAModuleError(
                f"{who} takes an nn.Module or a list of nn.Modules, but element [{place}] is {shown(one)}."
            )
    return found
